"""``metasd tune``: what numbers mean, which prompts are read, what is measured and written; and all of it at once."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from metasd_langchain import MetaSDLLM
from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.cli import app, tune, tune_file, tune_runs
from metasd_langchain.cli.tune_prompts import Prompt, built_in, fitting, read, rendered
from metasd_langchain.cli.tune_report import Measured, relative, show_curve, show_scores
from metasd_langchain.cli.tune_runs import Cost, gap, measure_curve, order, play, sizes, warm_up
from metasd_langchain.cli.tuning import (
    ARMS,
    CHOSEN,
    POOL,
    Kept,
    Run,
    Score,
    Speedup,
    Verdict,
    cheapness,
    propose,
    reason,
    score,
    settle,
    speedup,
    verdict,
)
from metasd_langchain.errors import BadOption, RequestError
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import PLAIN, RoundRecord, Step, Summary

PROMPT = "the rain and the tea and the rain and the"
CHEAP = {1: 1.0, 2: 1.0, 4: 1.05, 8: 1.1, 16: 1.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return str(made)


def metasd(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


# -- what the numbers mean ---------------------------------------------------------------------------------------------


def of(*speeds: float, length: float = 8.0, acceptance: float = 0.5, reading: float = 0.1) -> Score:
    """A candidate so many times faster than plain on each prompt."""
    paces = {prompt: 1.0 / speed for prompt, speed in enumerate(speeds)}
    return Score(paces, 1.0, length, length, acceptance, reading)


def pool_and_arms(pool: Score, **arms: Score) -> dict[str, Score]:
    """Scores; of arms not named, as slow as plain."""
    prompts = len(pool.paces)
    idle = of(*[1.0] * prompts)
    named = {arm: arms.get(arm.replace("@", ""), idle) for arm in ARMS}
    return {PLAIN: idle, **named, POOL: pool}


def test_a_score_is_made_of_medians_by_prompt():
    runs = [
        Run("a", 0, (1, 2), 2.0, 0.5, rounds=2, drafted=4, accepted=1),
        Run("a", 0, (1, 2), 200.0, 0.5, rounds=2, drafted=4, accepted=1),  # somebody else was at work
        Run("a", 0, (1, 2), 2.2, 0.5, rounds=2, drafted=4, accepted=1),
        Run("a", 1, (1, 2, 3, 4), 0.8, 0.5, rounds=2, drafted=8, accepted=2),
    ]
    own = score(runs)["a"]
    assert own.paces == pytest.approx({0: 1.1, 1: 0.2})
    assert own.tokens_per_s == pytest.approx(6 / 3.0)
    assert own.accepted_length == pytest.approx(1 + 5 / 8)
    assert own.ceiling == pytest.approx(math.sqrt(1.5 * 2.0))
    assert own.acceptance == pytest.approx(5 / 20)
    assert own.reading == pytest.approx(2.0 / 205.0)


def test_nothing_drafted_is_no_acceptance():
    assert score([Run(PLAIN, 0, (1,), 1.0)])[PLAIN].acceptance == 0.0


def test_answers_that_differ_from_plains_are_counted_by_prompt():
    runs = [
        Run("a", 0, (1, 2), 1.0),
        Run("a", 1, (1, 9), 1.0),
        Run("a", 1, (1, 9), 1.0),
        Run("a", 2, (1, 2), 1.0),
        Run("a", 2, (1, 8), 1.0),  # once only
        *(Run(PLAIN, prompt, (1, 2), 1.0) for prompt in range(3)),
    ]
    assert score(runs)["a"].different == (1, 2)
    assert score(runs)[PLAIN].different == ()


def test_a_speedup_is_a_geometric_mean_with_the_extremes():
    found = speedup(of(1.0, 4.0, 2.0), of(1.0, 1.0, 1.0))
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 1.0, 4.0))
    assert Speedup(2.13, 1.4, 3.04).on("your prompts", 1) == "2.1x on your prompts [1.4, 3.0]"


def test_plain_alone_is_proposed_when_nothing_is_faster():
    assert propose(pool_and_arms(of(1.02, 1.04), suffix6=of(1.05, 1.03))) == (PLAIN,)


def test_a_speedup_that_accepted_tokens_cannot_account_for_is_noise():
    scores = pool_and_arms(of(1.9, 1.8, length=1.02), suffix6=of(2.0, 2.0, length=1.03))
    assert propose(scores) == (PLAIN,)


@pytest.mark.parametrize("best", [(2.0, 3.0), (2.05, 3.03), (2.9, 2.4)])  # behind, level, ahead on one prompt only
def test_the_pool_stays_unless_an_arm_beats_it_by_more_than_noise(best: tuple[float, float]):
    assert propose(pool_and_arms(of(2.0, 3.0), suffix16=of(*best))) == DEFAULT_ARMS


def test_an_arm_that_beats_the_pool_everywhere_is_kept_alone_with_plain():
    scores = pool_and_arms(of(2.0, 3.0, 2.5), suffix16=of(2.4, 3.7, 3.1), suffix6=of(2.3, 3.7, 3.0))
    assert propose(scores) == ("suffix@16", PLAIN)


def test_further_arms_have_to_win_somewhere_and_there_are_three_at_most():
    scores = pool_and_arms(
        of(1.0, 1.0, 1.0, 1.0),
        suffix16=of(3.0, 2.0, 2.0, 2.0),
        lookup8=of(2.0, 2.4, 2.0, 2.0),
        recycling4=of(2.0, 2.0, 2.6, 2.0),
        recycling_tree6=of(2.0, 2.0, 2.0, 2.3),
        suffix6=of(2.0, 2.0, 2.0, 2.0),
    )
    assert propose(scores) == ("suffix@16", "recycling@4", "lookup@8", PLAIN)
    scores["lookup@8"] = of(2.0, 2.1, 2.0, 2.0)  # not enough to matter
    scores["recycling_tree@6"] = of(2.0, 2.0, 2.0, 2.1)
    assert propose(scores) == ("suffix@16", "recycling@4", PLAIN)


def test_with_a_single_prompt_a_lead_has_to_be_wide():
    assert propose(pool_and_arms(of(2.0), suffix16=of(2.16))) == DEFAULT_ARMS
    assert propose(pool_and_arms(of(2.0), suffix16=of(2.4))) == ("suffix@16", PLAIN)


def fresh(pool: Score, chosen: Score) -> dict[str, Score]:
    return {PLAIN: of(*[1.0] * len(pool.paces)), POOL: pool, CHOSEN: chosen}


def test_what_was_chosen_has_to_win_once_more():
    proposed = ("suffix@16", PLAIN)
    first = pool_and_arms(of(2.0, 2.0), suffix16=of(2.6, 2.6))
    won = settle(proposed, first, fresh(of(2.0, 2.0), of(2.5, 2.5)))
    assert won.drafters == proposed
    assert won.speedup is not None
    assert won.speedup.mean == pytest.approx(2.5)
    lost = settle(proposed, first, fresh(of(2.0, 2.0), of(2.02, 2.04)))
    assert lost.drafters == DEFAULT_ARMS
    assert lost.speedup is not None
    assert lost.speedup.mean == pytest.approx(2.0)


def test_what_gains_nothing_the_second_time_is_plain_in_the_end():
    first = pool_and_arms(of(1.0, 1.0), suffix16=of(1.3, 1.3))
    assert settle(("suffix@16", PLAIN), first, fresh(of(1.0, 1.0), of(1.01, 1.0))) == Kept((PLAIN,))


def test_plain_and_the_pool_need_no_second_measurement():
    assert settle((PLAIN,), pool_and_arms(of(1.0)), None) == Kept((PLAIN,))
    kept = settle(DEFAULT_ARMS, pool_and_arms(of(3.0, 1.5, length=1.9)), None)
    assert kept.drafters == DEFAULT_ARMS
    assert kept.speedup is not None
    assert kept.speedup.mean == pytest.approx(math.sqrt(4.5))
    assert kept.worth == pytest.approx(1.9)
    # an arm was faster than plain, the pool it did not beat is not
    assert settle(DEFAULT_ARMS, pool_and_arms(of(1.03, 1.04), suffix6=of(1.06, 1.06)), None) == Kept((PLAIN,))


def test_the_verdict_is_in_plain_words():
    helps = verdict(Kept(DEFAULT_ARMS, Speedup(2.13, 1.4, 3.0), 2.13), "Why.", "your prompts")
    assert helps == Verdict("helps", "This will help you: 2.1x on your prompts [1.4, 3.0].")
    hardly = verdict(Kept(DEFAULT_ARMS, Speedup(1.1, 0.9, 1.32), 1.1), "Why.", "your prompts")
    assert hardly == Verdict("hardly", "It will hardly help: 1.10x on your prompts [0.90, 1.32]. Why.", "Why.")
    not_at_all = verdict(Kept((PLAIN,)), "Why.", "your prompts")
    assert not_at_all.kind == "not"
    assert not_at_all.words == ("It will not help on these prompts: leave drafting off, speculative=False. Why.")
    unlikely = verdict(Kept(DEFAULT_ARMS, Speedup(1.9, 1.0, 2.8), 1.06), "Why.", "your prompts")
    assert unlikely.kind == "hardly"  # measured on a busy machine


def with_plain(plain: Score, *others: Score) -> dict[str, Score]:
    return {PLAIN: plain, **dict(zip(ARMS, others, strict=False))}


@pytest.mark.parametrize(
    ("scores", "cost", "words"),
    [
        (with_plain(of(1.0, reading=0.8), of(1.0)), CHEAP, "80% of the time goes into reading the prompts"),
        (with_plain(of(1.0), of(1.0, length=1.02), of(0.9, length=1.1)), CHEAP, "nothing to copy in these prompts"),
        (with_plain(of(1.0), of(0.6, length=2.0)), {1: 1.0, 4: 2.2, 8: 3.14, 16: 6.0}, "8 tokens takes 3.1 times"),
        (with_plain(of(1.0), of(0.6, length=2.0)), {1: 1.0, 2: 2.5}, "2 tokens takes 2.5 times"),
        (with_plain(of(1.0), of(1.0, length=1.5, acceptance=0.12)), CHEAP, "12% of the drafted tokens"),
        (with_plain(of(1.0), of(1.0, length=1.5, acceptance=0.6)), CHEAP, "Forwards are so short"),
    ],
)  # fmt: skip
def test_the_reason_names_what_is_in_the_way(scores: dict[str, Score], cost: dict[int, float], words: str):
    assert words in reason(scores, cost)


def test_acceptance_is_that_of_the_best_candidate():
    scores = with_plain(of(1.0), of(0.8, length=1.5, acceptance=0.1), of(1.02, length=1.4, acceptance=0.6))
    assert "Forwards are so short" in reason(scores, CHEAP)


@pytest.mark.parametrize(("cost", "word"), [(1.1, "cheap"), (1.6, "affordable"), (2.4, "dear")])
def test_the_price_of_verifying_in_a_word(cost: float, word: str):
    assert cheapness({1: 1.0, 8: cost, 32: 9.0}) == (
        f"Verifying is {word} here: a forward of 8 tokens takes {cost:.2f} times one of 1."
    )


# -- prompts -----------------------------------------------------------------------------------------------------------


def written(place: Path, name: str, content: bytes | str) -> Path:
    path = place / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_blank_lines_part_prompts_and_other_space_is_kept(tmp_path: Path):
    text = "\ufeff\n  one,\r\n  indented \r\n\r\n \t\r\n\r\ntwo\u2028still two\n\n\n"
    found = read(written(tmp_path, "p.txt", text))
    assert [prompt.text for prompt in found] == ["  one,\n  indented ", "two\u2028still two"]
    assert [prompt.name for prompt in found] == ["prompt 1", "prompt 2"]


def test_json_lines_hold_prompts_turns_or_questions(tmp_path: Path):
    rows = [{"prompt": " as it is\n"}, {"turns": ["first", "second"]}, {"question": "why?"}, {"prompt": "a\u2028b"}]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    found = read(written(tmp_path, "p.JSONL", text))
    assert found == [
        Prompt("line 1", " as it is\n"),
        Prompt("line 3", "Question: first\nAnswer:", "first"),
        Prompt("line 5", "Question: why?\nAnswer:", "why?"),
        Prompt("line 7", "a\u2028b"),
    ]


@pytest.mark.parametrize(
    "line",
    ['{"prompt": ', "[]", "3", "{}", '{"prompt": ""}', '{"prompt": 4}', '{"turns": []}', '{"turns": "x"}',
     '{"turns": [null]}', r'{"prompt": "\ud800"}', "[" * 100_000],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named_by_its_number(line: str, tmp_path: Path):
    path = written(tmp_path, "p.jsonl", f'{{"prompt": "secret"}}\n\n{line}\n')
    with pytest.raises(RequestError, match=r"p\.jsonl, line 3: expected a JSON object") as caught:
        read(path)
    assert caught.value.__cause__ is None  # it would quote the text


@pytest.mark.parametrize(
    ("name", "content"),
    [("none.txt", None), ("p.txt", ""), ("p.txt", " \n\n\t\n"), ("p.jsonl", "\n\n"), ("p.txt", b"\xff\xfe\x00"),
     ("p.json", "{}"), ("p", "text"), (".", None)],
)  # fmt: skip
def test_a_file_without_prompts_is_refused_before_anything_is_loaded(name: str, content: Any, tmp_path: Path):
    if content is not None:
        written(tmp_path, name, content)
    # a missing model would leave with 1, so 2 says that the file was looked at first
    done = metasd("--prompts", str(tmp_path / name), "--model", "./missing", "--output", str(tmp_path / "s.json"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: prompts=")
    assert "Traceback" not in done.stderr


def test_a_malformed_line_leaves_with_2_and_its_number(tmp_path: Path):
    path = written(tmp_path, "p.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n')
    done = metasd("--prompts", str(path), "--model", "./missing", "--output", str(tmp_path / "s.json"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: p.jsonl, line 2: ")


def test_the_demos_kinds_are_built_in():
    found = {prompt.name: prompt for prompt in built_in()}
    assert list(found) == ["rewrite", "answer", "summarise", "extract", "code"]
    assert found["answer"].text.endswith(
        "Question: What did the duty engineer do after the landslip broke the main?\nAnswer:"
    )
    assert found["extract"].text.endswith('JSON:\n{\n  "date":')
    assert all("landslip" in found[name].text for name in ("rewrite", "answer", "summarise", "extract"))
    assert found["code"].text.startswith("class Event:")
    assert not any(template in prompt.text for prompt in found.values() for template in ("{passage", "{question"))


class Words:
    """A target whose tokens are words."""

    def __init__(self, window: int, template: Any = None) -> None:
        self.lm = SimpleNamespace(window=window)
        self.tokenizer = SimpleNamespace(chat_template=template, apply_chat_template=self.apply)

    def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())

    def apply(self, turns: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return self.tokenizer.chat_template.format(turns[0]["content"])


def test_prompts_longer_than_the_window_are_skipped_and_counted():
    prompts = [Prompt("1", "a b c"), Prompt("2", "a b c d"), Prompt("3", "a b c d e"), Prompt("4", "a")]
    found, skipped = fitting(prompts, Words(4), 10)
    assert [prompt.name for prompt, _ in found] == ["1", "4"]  # one token of the window is kept for the answer
    assert skipped == 2
    with pytest.raises(RequestError, match="window of 1 tokens"):
        fitting(prompts, Words(1), 10)


def test_of_many_prompts_the_same_few_are_drawn_from_all_over():
    prompts = [Prompt(str(number), f"p{number}") for number in range(1000)]
    found, skipped = fitting(prompts, Words(9), 24)
    numbers = [int(prompt.name) for prompt, _ in found]
    assert len(set(numbers)) == 24
    assert skipped == 0
    assert min(numbers) < 300
    assert max(numbers) > 700
    assert fitting(prompts, Words(9), 24) == (found, skipped)
    assert [prompt.name for prompt, _ in fitting(prompts[:24], Words(9), 24)[0]] == [str(n) for n in range(24)]


def test_a_question_goes_into_the_models_chat_template():
    asked, plain = Prompt("1", "Question: why?\nAnswer:", "why?"), Prompt("2", "as it is")
    assert rendered(Words(9).tokenizer, asked) == "Question: why?\nAnswer:"
    templated = Words(9, "<user>{}<model>").tokenizer
    assert rendered(templated, asked) == "<user>why?<model>"
    assert rendered(templated, plain) == "as it is"
    with pytest.raises(RequestError, match=r"1: the model's chat template fails \(KeyError\)"):
        rendered(Words(9, "{unknown}").tokenizer, asked)


# -- measuring ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tune_runs.time, "perf_counter", made)
    return made


class TimedLM:
    """A target whose forwards take 10 ms and 1 ms a token; while somebody else is at work, three times as long."""

    window, vocab_size = 4096, 100

    def __init__(self, clock: Clock, busy: frozenset[int] = frozenset()) -> None:
        self.clock, self.busy = clock, busy
        self.widths: list[int] = []
        self.contexts: set[int] = set()

    def score(self, feeds: list[Any]) -> None:
        (feed,) = feeds
        if feed.scored:
            self.widths.append(feed.width)
            self.contexts.add(feed.slot.length)
            self.clock.now += (0.01 + 0.001 * (feed.width - 1)) * (3 if len(self.widths) in self.busy else 1)

    def keep(self, feed: Any) -> None:
        feed.slot.length += feed.width

    def synchronize(self) -> None: ...


def test_the_curve_is_a_median_relative_to_one_token(clock: Clock):
    lm = TimedLM(clock, busy=frozenset({13, 20, 31}))
    ticks: list[str] = []
    curve = measure_curve(lm, 5, 60.0, ticks.append)
    assert list(curve) == [128, 512]
    assert lm.contexts == {128, 512}
    for costs in curve.values():
        assert {width: cost.ms for width, cost in costs.items()} == pytest.approx(
            {width: 10.0 + width - 1 for width in (1, 2, 4, 8, 16, 32)}
        )
        assert {width: cost.relative for width, cost in costs.items()} == pytest.approx(
            {width: 1.0 + 0.1 * (width - 1) for width in (1, 2, 4, 8, 16, 32)}
        )
        assert all(cost.low <= cost.relative <= cost.high for cost in costs.values())
    assert relative(curve)[8] == pytest.approx(1.7)
    assert len(ticks) == 10
    # twice to warm up, then in turn, forwards and backwards
    assert lm.widths[:12] == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32]
    assert lm.widths[12:24] == [1, 2, 4, 8, 16, 32, 32, 16, 8, 4, 2, 1]


def test_a_slow_machine_measures_three_forwards_of_a_width(clock: Clock):
    lm = TimedLM(clock)
    ticks: list[str] = []
    measure_curve(lm, 9, 0.0, ticks.append)
    assert len(lm.widths) == 2 * 6 * (2 + 3)
    assert len(ticks) == 18  # the bar ends full


@pytest.mark.parametrize(
    ("window", "contexts", "widths"),
    [
        (32768, [128, 512], [1, 2, 4, 8, 16, 32]),
        (512, [128, 480], [1, 2, 4, 8, 16, 32]),
        (100, [68], [1, 2, 4, 8, 16, 32]),
        (16, [8], [1, 2, 4, 8]),
        (2, [1], [1]),
    ],
)
def test_context_and_width_fit_the_window(window: int, contexts: list[int], widths: list[int]):
    assert sizes(window) == (contexts, widths)


def test_the_curve_of_a_real_model(folder: str):
    lm = load_target(folder, dtype="float32").lm
    curve = measure_curve(lm, 3, 0.0, lambda _: None)
    assert {context: list(costs) for context, costs in curve.items()} == {c: [1, 2, 4, 8, 16, 32] for c in (128, 512)}
    assert all(cost.ms > 0.0 for costs in curve.values() for cost in costs.values())


class FakeLLM:
    """Answers in so many seconds; `log` holds who did what."""

    def __init__(self, name: str, log: list[tuple[Any, ...]], clock: Clock, seconds: float = 1.0) -> None:
        self.name, self.log, self.clock, self.seconds = name, log, clock, seconds

    def forget(self) -> None:
        self.log.append((self.name, "forget"))

    def steps(self, text: str, *, stop: list[str] | None, max_tokens: int) -> Iterator[Step]:
        self.log.append((self.name, text, stop, max_tokens))
        self.clock.now += self.seconds
        rounds = (RoundRecord(self.name, 4, 2, 3, 0.0, 0.0, 0.0), RoundRecord(PLAIN, 0, 0, 1, 0.0, 0.0, 0.0))
        yield Step((5, 6, 7))
        yield Step((8,), summary=Summary(3, 4, "length", rounds, 0.25, 0.5, self.seconds))


def test_every_answer_is_cold_and_turns_alternate(clock: Clock):
    log: list[tuple[Any, ...]] = []
    llms: Any = {name: FakeLLM(name, log, clock) for name in ("plain", "a", "b")}
    prompts = [(Prompt("one", "one"), "ONE"), (Prompt("two", "two", stop=("\n",), cap=4), "TWO")]
    ticks: list[str] = []
    runs = play(llms, prompts, 64, 2, 1e9, ticks.append)
    asked = [entry for entry in log if len(entry) == 4]
    assert [entry[1] for entry in log[::2]] == ["forget"] * 12
    assert [entry[0] for entry in log[::2]] == [entry[0] for entry in asked]
    assert [entry[:2] for entry in asked[:6]] == [(n, "ONE") for n in ("plain", "a", "b")] + [
        (n, "TWO") for n in ("a", "plain", "b")
    ]
    assert [entry[1:] for entry in asked[:6]] == [("ONE", None, 64)] * 3 + [("TWO", ["\n"], 4)] * 3
    assert runs[0] == Run("plain", 0, (5, 6, 7, 8), 1.0, 0.25, rounds=2, drafted=4, accepted=2)
    assert [(run.candidate, run.prompt) for run in runs] == [
        (name, prompt) for prompt in (0, 1, 0, 1) for name in ("plain", "a", "b")
    ]
    assert [tick.partition(",")[0] for tick in ticks] == ["one", "two", "one", "two"]


def test_out_of_time_no_prompt_is_left_half_measured(clock: Clock):
    log: list[tuple[Any, ...]] = []
    llms: Any = {name: FakeLLM(name, log, clock, seconds=10.0) for name in ("plain", "a")}
    prompts = [(Prompt(str(number), "x"), "x") for number in range(5)]
    runs = play(llms, prompts, 64, 3, 25.0, lambda _: None)
    assert [(run.candidate, run.prompt) for run in runs] == [(n, p) for p in (0, 1) for n in ("plain", "a")]
    assert len(play(llms, prompts, 64, 3, 0.0, lambda _: None)) == 2  # one prompt, whatever it takes


def test_everyone_warms_up_on_the_longest_prompt(clock: Clock):
    log: list[tuple[Any, ...]] = []
    llms: Any = {name: FakeLLM(name, log, clock) for name in ("plain", "a")}
    warm_up(llms, [(Prompt("1", "x"), "x"), (Prompt("2", "long"), "long"), (Prompt("3", "y"), "y")], 64)
    assert [entry for entry in log if len(entry) == 4] == [("plain", "long", None, 16), ("a", "long", None, 16)]


def test_nobody_always_follows_the_same_one():
    names = list("abcdefgh")
    turns = [order(names, turn) for turn in range(16)]
    assert all(sorted(turn) == names for turn in turns)
    assert {turn[0] for turn in turns} == set(names)
    pairs = [pair for turn in turns[:8] for pair in itertools.pairwise(turn)]
    assert all(pair[::-1] in pairs for pair in pairs)


def test_the_gap_is_that_of_the_models_own_logits():
    import torch

    model, tokenizer = tiny_model(), tiny_tokenizer()
    target = load_target((model, tokenizer))
    ids = [*tokenizer(PROMPT)["input_ids"], 20, 21]
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
    found = gap(target, PROMPT, (20, 21, 30, 31), (20, 21, 40))
    assert found == pytest.approx(abs(float(logits[30] - logits[40])), abs=1e-4)
    assert gap(target, PROMPT, (20, 21), (20, 21, 40)) is None  # rounding cannot make an answer longer


def test_every_answer_that_differs_is_looked_at_once():
    target = load_target((tiny_model(), tiny_tokenizer()))
    answers = [(PLAIN, (20, 21)), ("a", (20, 30)), ("b", (20, 30)), ("c", (20, 21, 5)), ("d", (20, 21))]
    runs = [Run(name, 0, ids, 1.0) for name, ids in answers]
    found = tune._gaps(target, [(Prompt("1", PROMPT), PROMPT)], runs)
    assert found == [gap(target, PROMPT, (20, 21), (20, 30)), None]


# -- the screen --------------------------------------------------------------------------------------------------------


def measured(**changes: Any) -> Measured:
    plain, arm, pool = of(1.0, 1.0), of(1.5, 6.0), of(2.0, 4.0)
    whole = {
        "curve": {128: {1: Cost(20.0, 1.0, 1.0, 1.0), 8: Cost(25.0, 1.25, 1.2, 1.3)}},
        "first": {PLAIN: plain, "suffix@16": arm, POOL: pool},
        "proposed": DEFAULT_ARMS,
        "fresh": None,
        "kept": Kept(DEFAULT_ARMS, Speedup(2.83, 2.0, 4.0), 2.83),
        "why_not": "",
        "gaps": [],
        "beyond": 0,
    }
    return Measured(**{**whole, **changes})


def shown(found: Measured) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False, emoji=False, markup=False, record=True)
    show_curve(console, found.curve)
    show_scores(console, found)
    return console.export_text()


def test_the_table_has_the_fastest_first_and_plain_last():
    screen = shown(measured())
    lines = [line.split() for line in screen.splitlines()]
    assert ["128", "20.0", "1.00", "1.25"] in lines
    assert "Verifying is cheap here" in screen
    rows = [line for line in lines if line[-3:] == ["2", "of", "2"]]
    assert [row[0] for row in rows] == ["suffix@16", "default", "plain"]
    assert rows[0][2:5] == ["3.00x", "[1.50,", "6.00]"]
    assert "differ" not in screen


def test_what_was_measured_once_more_has_a_row_beside_its_own_plain():
    again = {PLAIN: of(2.0, 2.0), POOL: of(4.0, 4.0), CHOSEN: of(8.0, 8.0)}
    found = measured(fresh=again, proposed=("suffix@16", PLAIN))
    assert "4.00x" in next(line for line in shown(found).splitlines() if CHOSEN in line)
    assert f"{CHOSEN}: suffix@16 plain, measured once more" in shown(found)
    assert found.in_numbers()[CHOSEN]["drafters"] == ["suffix@16", PLAIN]
    assert found.in_numbers()[CHOSEN]["speedup"]["mean"] == 4.0


def test_answers_that_differ_are_told_and_never_hidden():
    first = measured().first
    other = Score(first[POOL].paces, 1.0, 8.0, 8.0, 0.5, 0.1, different=(1,))
    screen = shown(measured(first={**first, POOL: other}, gaps=[0.0625, 0.125]))
    assert "1 of 2" in screen
    assert "2 answers differ from plain's, largest difference of the logits 0.12" in screen
    assert "please report" not in screen
    assert "1 of them differ by more than rounding: please report this." in shown(measured(gaps=[None], beyond=1))


# -- the file ----------------------------------------------------------------------------------------------------------

SETTINGS = {"drafters": ["plain"], "policy": "hinted_ucb", "reward": "throughput", "memory": "process"}


def test_a_settings_file_is_written_and_overwritten_by_its_own_kind(tmp_path: Path):
    path = tmp_path / "s.json"
    tune_file.save(path, SETTINGS)
    tune_file.save(path, {**SETTINGS, "measured": {"date": "today"}})
    assert json.loads(path.read_text()) == {**SETTINGS, "measured": {"date": "today"}}
    assert list(tmp_path.iterdir()) == [path]
    ordinary = written(tmp_path, "other", "")
    assert path.stat().st_mode == ordinary.stat().st_mode  # not a temporary file's


@pytest.mark.parametrize("content", ["", "[]", "3", "notes", '{"editor.fontSize": 12}', b"\xff\xfe", "[" * 100_000])
def test_a_file_of_another_kind_is_left_alone(content: str | bytes, tmp_path: Path):
    path = written(tmp_path, "s.json", content)
    before = path.read_bytes()
    done = metasd("--model", "./missing", "--output", str(path))  # before the model is looked for
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: output=")
    with pytest.raises(BadOption, match="settings file"):
        tune_file.save(path, SETTINGS)
    assert path.read_bytes() == before


def test_no_folder_no_file(tmp_path: Path):
    for place in (tmp_path / "none" / "s.json", tmp_path, Path(os.devnull)):
        with pytest.raises(BadOption, match="output"):
            tune_file.check(place)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "s.json"
    tune_file.save(path, SETTINGS)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tune_file.os, "fsync", full)
    with pytest.raises(BadOption, match="a file that can be written"):
        tune_file.save(path, {**SETTINGS, "drafters": ["suffix@6"]})
    assert json.loads(path.read_text()) == SETTINGS
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "s.json"
    link.symlink_to(tmp_path / "real" / "s.json")
    tune_file.save(link, SETTINGS)
    assert link.is_symlink()
    assert json.loads((tmp_path / "real" / "s.json").read_text()) == SETTINGS


def test_metasdllm_reads_every_kind_of_file_that_is_written(tmp_path: Path):
    kinds = [Kept((PLAIN,)), Kept(DEFAULT_ARMS, Speedup(2, 1, 3), 2.0), Kept(("suffix@6", "lookup@8", PLAIN))]
    for kept in kinds:
        path = tmp_path / "s.json"
        tune_file.save(path, tune_file.contents(kept, Verdict("helps", "Yes."), {"model": "tiny"}))
        llm = MetaSDLLM(settings=str(path))  # loads nothing
        assert (llm.drafters, llm.policy, llm.reward, llm.memory) == (
            list(kept.drafters), "hinted_ucb", "throughput", "process",
        )  # fmt: skip
        assert json.loads(path.read_text())["measured"]["verdict"] == "helps"


# -- from end to end ---------------------------------------------------------------------------------------------------


def test_wrong_options_show_before_anything_is_measured(tmp_path: Path):
    arguments = ("--model", "./missing", "--output", str(tmp_path / "s.json"))
    for wrong in (("--max-tokens", "0"), ("--dtype", "int8")):
        done = metasd(*arguments, *wrong)
        assert (done.exit_code, done.stdout) == (2, "")
    assert metasd(*arguments).exit_code == 1  # no such model
    assert not list(tmp_path.iterdir())


def test_tune_measures_tells_and_writes_settings_that_change_no_answer(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tune_file.os, "getloadavg", lambda: (99.0, 3.0, 1.0))
    prompts = written(
        tmp_path, "secret.txt", f"{PROMPT}\n\nthe cat sat on the mat and the cat sat on\n\n{'z' * 1100}\n"
    )
    path = tmp_path / "s.json"
    arguments = ("--quick", "--model", folder, "--prompts", str(prompts), "--max-tokens", "12", "--output", str(path))
    done = metasd(*arguments, "--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "1 prompt is skipped: longer than the window of 1024" in done.stderr
    assert "the machine is busy (load 99.0)" in done.stderr
    assert "[2/2] prompt 2, tokens/s: plain " in done.stderr
    for words in ("Verifying is ", "speed-up", "default pool", *ARMS, "2 of 2"):
        assert words in done.stdout
    assert any(words in done.stdout for words in ("This will help you", "It will hardly help", "It will not help"))
    assert "saved s.json: " in done.stdout

    settings = json.loads(path.read_text())
    facts = settings["measured"]
    assert set(settings) == {"drafters", "policy", "reward", "memory", "measured"}
    assert (facts["model"], facts["dtype"], facts["max_tokens"]) == ("tiny", "float32", 12)
    assert facts["prompts"] == {"source": "file", "count": 2}
    assert set(facts["candidates"]) >= {PLAIN, POOL, *ARMS}
    assert all(own["answers_that_differ"] == 0 for own in facts["candidates"].values())  # float32 is exact
    assert facts["answers_beyond_rounding"] == 0
    assert facts["load_average"] == [99.0, 3.0, 1.0]
    assert list(facts["forward_ms"]) == ["128", "512"]
    for secret in ("cat", "rain", "secret", folder, str(tmp_path), os.sep + "tmp"):
        assert secret not in path.read_text()

    tuned = MetaSDLLM(model=folder, dtype="float32", settings=str(path), max_tokens=24)
    assert tuned.drafters == settings["drafters"]
    assert tuned.invoke(PROMPT) == MetaSDLLM(model=folder, dtype="float32", max_tokens=24).invoke(PROMPT)


def test_json_is_what_the_file_holds_and_all_there_is_on_stdout(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tune, "propose", lambda scores: ("suffix@6", PLAIN))  # so that it is measured once more
    monkeypatch.setattr(tune, "_QUICK", replace(tune._QUICK, seconds=0.0))
    prompts = written(tmp_path, "p.jsonl", json.dumps({"turns": [PROMPT]}) + '\n{"prompt": "and then the"}')
    path = tmp_path / "s.json"
    done = metasd(
        "--quick", "--model", folder, "--prompts", str(prompts), "--max-tokens", "4", "--output", str(path), "--json"
    )
    assert done.exit_code == 0, done.output
    settings = json.loads(done.stdout)
    assert settings == json.loads(path.read_text())
    assert settings["measured"]["candidates"][CHOSEN]["drafters"] == ["suffix@6", PLAIN]
    assert settings["drafters"] in (["suffix@6", PLAIN], list(DEFAULT_ARMS), [PLAIN])
    assert "measuring once more with suffix@6 plain" in done.stderr
    assert "out of time after 1 of 2 prompts" in done.stderr
    assert settings["measured"]["prompts"] == {"source": "file", "count": 1}
