"""Definitions behind the evaluators' figures: prompts, ratios, identity, overhead, order of measuring."""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
import pytest
import torch

from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, arm_table, speedup, throughput
from evaluators.identity import gap, identity
from evaluators.methods import PREFILL_TOKENS, Answer, Limits, Ours
from evaluators.overhead import _feeds, bare_seconds, overhead
from evaluators.prompts import Prompt, encode, find, load, spread
from evaluators.speed import measure
from metasd_langchain import Engine
from metasd_langchain.models.lm import Slot
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import RoundRecord


@pytest.fixture(scope="module")
def engine():
    made = Engine(load_target((tiny_model(), tiny_tokenizer())))
    yield made
    made.close()


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_prompts_are_put_as_the_benchmarks_put_them(tmp_path):
    file = tmp_path / "mixed.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 99, "category": "rag", "turns": ["Find."]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
    ]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert load(file) == [
        Prompt("81", "mt_bench", "Question: Write.\nAnswer:", "Write."),
        Prompt("99", "rag", "Question: Find.\nAnswer:", "Find."),
        Prompt("HumanEval/0", "mixed", "def f():\n"),
    ]
    file.write_text('{"turns": []}\n')
    with pytest.raises(EvaluatorError, match="line 1"):
        load(file)


def test_a_chat_template_is_used_where_there_is_one(engine, monkeypatch):
    asked = Prompt("1", "qa", "Question: hi\nAnswer:", "hi")
    plain = encode(engine, asked)
    assert plain == tuple(engine.target.encode(asked.text))
    monkeypatch.setattr(engine.target.tokenizer, "chat_template", "{{ bos_token }}[{{ messages[0]['content'] }}]")
    assert encode(engine, asked) == tuple(engine.target.encode("[hi]"))
    assert encode(engine, Prompt("2", "code", asked.text)) == plain


def test_a_limit_is_spread_over_the_groups():
    prompts = [Prompt(f"{group}{i}", group, "x") for group, size in (("a", 6), ("b", 1), ("c", 6)) for i in range(size)]
    chosen = spread(prompts, 7, seed=0)
    assert sorted(prompt.name for prompt in chosen) == ["a0", "a2", "a4", "b0", "c0", "c2", "c4"]
    assert [p.name for p in chosen] != sorted(p.name for p in chosen)
    assert chosen == spread(prompts, 7, seed=0) != spread(prompts, 7, seed=1)
    assert len(spread(prompts, None, 0)) == len(spread(prompts, 99, 0)) == 13


def test_a_file_is_found_in_the_data_folder(tmp_path, monkeypatch):
    (tmp_path / "here.jsonl").write_text("{}")
    assert find("here.jsonl", str(tmp_path)) == tmp_path / "here.jsonl"
    monkeypatch.setenv("METASD_DATA", str(tmp_path))
    assert find("here.jsonl", None) == tmp_path / "here.jsonl"


# -- figures -----------------------------------------------------------------------------------------------------------


def cells(method, seconds, tokens=10):
    """One cell a (prompt, repetition): `seconds` is prompt -> group, list of seconds."""
    return [
        Cell(prompt, group, method, repetition, tuple(range(tokens)), value, tokens)
        for prompt, (group, values) in seconds.items()
        for repetition, value in enumerate(values)
    ]


def test_a_speedup_counts_every_task_once():
    base = cells("hf", {0: ("a", [4.0, 4.0, 90.0]), 1: ("a", [1.0, 1.0, 1.0]), 2: ("b", [1.0, 1.0, 1.0])})
    own = cells("x", {0: ("a", [1.0, 1.0, 1.0]), 1: ("a", [1.0, 1.0, 1.0]), 2: ("b", [2.0, 2.0, 0.1])})
    ratio = speedup([*base, *own], "x", "hf", seed=0)
    assert ratio["tasks"] == {"a": pytest.approx(2.0), "b": pytest.approx(0.5)}  # medians: outliers do not count
    assert ratio["geomean"] == pytest.approx(1.0)
    assert ratio["min"] == pytest.approx(0.5)
    assert ratio["low"] < 1.0 < ratio["high"]
    assert speedup(own, "x", "hf", seed=0) is None


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(60):
        seconds = {p: (f"g{p % 3}", np.exp(rng.normal(0, 0.1, 5) + rng.normal(0, 0.2))) for p in range(30)}
        base = cells("hf", {p: (f"g{p % 3}", np.ones(5)) for p in range(30)})
        ratio = speedup([*base, *cells("x", seconds)], "x", "hf", seed=trial)
        covered += ratio["low"] <= 1.0 <= ratio["high"]
    assert covered >= 50  # of 60; 57 expected


def test_throughput_ignores_an_outlier_and_counts_forwards():
    own = cells("x", {0: ("a", [1.0, 1.0, 50.0])})
    assert throughput(own) == (pytest.approx(10.0), pytest.approx(1.0))
    assert throughput([]) == (None, None)


def test_arm_table():
    rounds = (RoundRecord("suffix@8", 8, 3, 4, 0, 0, 0), RoundRecord("plain", 0, 0, 1, 0, 0, 0))
    told = arm_table([Cell(0, "a", "metasd", 0, (1,), 1.0, 2, rounds)])
    assert told["arms"]["suffix@8"] == {
        "rounds": 1,
        "drafted": 8,
        "accepted": 3,
        "committed": 4,
        "share": 0.5,
        "accepted_per_round": 3.0,
        "acceptance": 0.375,
    }
    assert told["shares"] == {"a": {"suffix@8": 0.5, "plain": 0.5}}


# -- identity ----------------------------------------------------------------------------------------------------------


def test_a_gap_is_the_distance_of_the_two_logits():
    model = tiny_model()
    prompt, one, two = [2, 40, 41], [50, 60, 70], [50, 61, 99]
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, 50]])).logits[0, -1]
    assert gap(model, prompt, one, two) == pytest.approx(float((logits[60] - logits[61]).abs()), abs=1e-5)
    assert gap(model, prompt, one, one[:2]) is None


def test_a_planted_mistake_is_called_wrong():
    model, prompt = tiny_model(), [2, 40, 41]
    with torch.inference_mode():
        order = model(torch.tensor([prompt])).logits[0, -1].argsort(descending=True)
    best, worst = int(order[0]), int(order[-1])
    base = [Cell(0, "a", "hf", 0, (best,), 1.0, 1), Cell(1, "a", "hf", 0, (best,), 1.0, 1)]
    own = [Cell(0, "a", "x", 0, (worst,), 1.0, 1), Cell(1, "a", "x", 0, (best,), 1.0, 1)]
    told = identity([*base, *own], "x", "hf", model, [prompt, prompt])
    assert (told["identical_to_hf"], told["near_ties"], told["wrong"]) == (1, 0, 1)
    assert told["gaps"][0] > told["gap_bound"]


# -- overhead ----------------------------------------------------------------------------------------------------------


def test_the_bare_forwards_are_those_of_the_call(engine, monkeypatch):
    seen = []
    lm = engine.target.lm
    score = lm.score

    def spy(feeds, layers=()):
        seen.append([(feed.slot.length, feed.width, feed.scored) for feed in feeds])
        return score(feeds, layers)

    monkeypatch.setattr(type(lm), "score", lambda _, feeds, layers=(): spy(feeds, layers))
    method = Ours("suffix@16", ["suffix@16"]).bind(engine, Limits(24))
    prompt = tuple(engine.target.encode("the cat and the hat and the cat and"))
    answer = method.answer(prompt, 0)
    call, seen[:] = list(seen), []
    assert bare_seconds(lm, prompt, answer) > 0
    assert seen == call
    assert any(width > 1 for ((_, width, _),) in call[1:])
    assert answer.forwards == len(call)
    assert 0 < answer.forward_s < answer.seconds


def test_a_long_prompt_is_read_in_the_engines_pieces():
    slot = Slot()
    text = list(range(2 * PREFILL_TOKENS + 10))
    told = []
    for feed, path in _feeds(slot, text, len(text) - 3, [RoundRecord("x", 4, 2, 3, 0, 0, 0)]):
        told.append((slot.length, len(feed.pending), len(feed.draft), feed.scored))
        slot.length += len(feed.pending) + len(path)
    assert told == [(0, 1024, 0, 0), (1024, 1024, 0, 0), (2048, 7, 4, 1)]
    assert slot.length == len(text) - 1  # the last token committed stays pending


def test_overhead_is_a_share(engine):
    method = Ours("plain", ["plain"]).bind(engine, Limits(8))
    told = overhead(method, [engine.target.encode("the end")], pairs=2, seed=0)
    assert told["overhead_share"] < 1
    assert 0 < told["outside_forward_share"] < 1
    assert told["overhead_prompts"] == 1


def test_measuring_rotates_the_order_and_resets_before_every_answer():
    class Fake:
        def __init__(self, name):
            self.name = name

        def answer(self, prompt, seed):
            log.append((self.name, "answer", seed))
            return Answer((1, 2), 1.0, 2)

        def reset(self, *, memory):
            log.append((self.name, "reset", memory))

    log = []
    args = argparse.Namespace(repetitions=2, seed=3, stream=False, shared=False)
    prompts = [Prompt(str(i), "g", "x") for i in range(2)]
    found = measure([Fake("one"), Fake("two")], prompts, [(1,), (1,)], args)
    assert [cell.method for cell in found] == ["one", "two", "two", "one", "two", "one", "one", "two"]
    assert [entry[1] for entry in log] == ["reset", "answer"] * 8
    assert all(entry[2] for entry in log[::2])
    seeds = [entry[2] for entry in log[1::2]]
    assert len(set(seeds)) == 4  # one a (prompt, repetition), the same for every method
    assert seeds[::2] == seeds[1::2]
    assert len(measure([Fake("one")], prompts, [(1,), (1,)], args, deadline=-math.inf)) == 1


def test_a_prompt_may_hold_any_line_end_of_unicode_and_turns_must_be_a_list(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\u2028b\u0085c"}\n\n{"turns": ["x"]}\n', encoding="utf-8")
    assert [prompt.text for prompt in load(file)] == ["a\u2028b\u0085c", "Question: x\nAnswer:"]
    file.write_text('{"turns": "x"}\n')
    with pytest.raises(EvaluatorError, match="line 1"):
        load(file)
