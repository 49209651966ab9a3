"""Under a grammar the promises stay: the ids of plain constrained decoding whatever is drafted, and an answer that is
complete within its cap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import llguidance.hf
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from metasd_langchain.assemble import make_pool
from metasd_langchain.bandits.selector import Seat
from metasd_langchain.constraints import Grammar, choice, json_schema, lark, regex
from metasd_langchain.constraints.compiled import compiled
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.errors import CapTooSmall
from metasd_langchain.models.load import Target
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.testing.schemas import random_schema
from metasd_langchain.values import Request, Sampling, Step

VOCAB, EOS = 512, 1
STOPS = frozenset({EOS})
ROOMY = 90  # tokens; the answers below end long before
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "greenish"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Grammar] = {
    "object": json_schema(PERSON),
    "regex": regex(r"[a-f]{2,6}(-[0-9]{1,4})?/é?"),
    "choices": choice(["alpha", "alpine", "the end", "the", "b"]),
    "lark": lark('start: item ("," item){0,3}\nitem: /[a-z]{1,3}/ | "(" start ")"'),
}
SAMPLINGS = {"greedy": Sampling(), "t1": Sampling(1.0, seed=4), "filtered": Sampling(0.8, top_p=0.9, top_k=30, seed=9)}
PROMPTS = ((2, 300, 41), (2, *[40, 41, 42, 43, 44, 45] * 3), (2, 262, 325, 262, 286, 262, 325, 262))


def plain(grammar: Grammar, prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """Plain constrained decoding written again: a new parser at every token, masked logits, no cache; the draw of a
    sampled token alone is ours.
    """
    tokenizer, model = llguidance.hf.from_tokenizer(tiny_tokenizer()), tiny_model()
    draws, answer = Draws(sampling.seed or 0), list[int]()
    while len(answer) < ROOMY:
        parser = LLMatcher(tokenizer, grammar.lark, log_level=0)
        assert parser.consume_tokens(answer)
        if parser.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(parser.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1:]
        logits = logits.masked_fill(torch.from_numpy(bits == 0), -torch.inf)
        if sampling.greedy:
            answer.append(int(logits[0].argmax()))
        else:
            answer.append(TargetRows(logits, sampling).token(0, len(answer), draws))
        if answer[-1] == EOS:
            break
    return tuple(answer)


Truths = dict[tuple[str, str], dict[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def truths() -> Truths:
    return {
        (name, mode): {prompt: plain(grammar, prompt, sampling) for prompt in PROMPTS}
        for name, grammar in GRAMMARS.items()
        for mode, sampling in SAMPLINGS.items()
    }


def ids(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def arms(kind: str, truth: Any) -> list[Any]:
    name, _, shape = kind.partition("-")
    fakes: dict[str, Callable[[Any], Any]] = {
        "perfect": lambda shape: PerfectDrafter(truth, shape=shape, vocab=VOCAB),
        "half": lambda shape: HalfDrafter(truth, VOCAB, shape=shape),
        "hostile": lambda shape: HostileDrafter(VOCAB, truth, shape=shape),
    }
    return [(fakes[name](shape), 6)] if name in fakes else [kind]


KINDS = [
    "perfect-chain", "perfect-tree", "half-chain", "half-tree", "hostile-chain", "hostile-tree",
    "lookup@4", "suffix@16", "recycling@4", "recycling_tree@8", "plain",
]  # fmt: skip


@pytest.mark.parametrize("mode", sorted(SAMPLINGS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_gives_the_ids_of_plain_constrained_decoding(
    engine: Engine, target: Target, truths: Truths, kind: str, mode: str
) -> None:
    for name, grammar in GRAMMARS.items():
        truth = truths[name, mode]
        pool = make_pool(arms(kind, truth), "fixed")
        constraint = compiled(grammar, target)
        requests = [Request(p, SAMPLINGS[mode], ROOMY, STOPS, constraint=constraint) for p in PROMPTS]
        for request in requests:  # a batch of one
            steps = list(engine.generate(request, pool))
            assert ids(steps) == truth[request.prompt]
            assert steps[-1].summary is not None
            assert steps[-1].summary.finish_reason == "stop"
        runs = [engine.generate(request, pool) for request in requests]  # packed with the others
        assert [ids(list(run)) for run in runs] == [truth[prompt] for prompt in PROMPTS]


def test_the_grammars_leave_the_model_something_to_say(truths: Truths) -> None:
    for name in GRAMMARS:
        assert len({answer for mode in SAMPLINGS for answer in truths[name, mode].values()}) >= 3


def test_rejection_mode_is_greedy_too_when_greedy(engine: Engine, target: Target, truths: Truths) -> None:
    for name, grammar in GRAMMARS.items():
        truth = truths[name, "greedy"]
        constraint = compiled(grammar, target)
        for kind in ("half-chain", "hostile-tree", "suffix@8"):
            for prompt in PROMPTS:
                request = Request(prompt, Sampling(), ROOMY, STOPS, verify="rejection", constraint=constraint)
                assert ids(list(engine.generate(request, make_pool(arms(kind, truth), "fixed")))) == truth[prompt]


def test_constrained_and_free_requests_run_side_by_side(engine: Engine, target: Target, truths: Truths) -> None:
    pool = make_pool(["suffix@8", "recycling_tree@6", "plain"], "random")
    free = [Request(prompt, max_tokens=20) for prompt in PROMPTS]
    alone = [ids(list(engine.generate(request, pool))) for request in free]
    constrained = [
        Request(prompt, SAMPLINGS["t1"], ROOMY, STOPS, constraint=compiled(grammar, target))
        for grammar in GRAMMARS.values()
        for prompt in PROMPTS
    ]
    runs = [engine.generate(request, pool) for pair in zip(free, constrained, strict=False) for request in pair]
    runs += [engine.generate(request, pool) for request in constrained[len(free) :]]
    answers = [ids(list(run)) for run in runs]
    assert answers[0 : 2 * len(free) : 2] == alone
    expected = [truths[name, "t1"][prompt] for name in GRAMMARS for prompt in PROMPTS]
    assert answers[1 : 2 * len(free) : 2] + answers[2 * len(free) :] == expected


# -- forced tokens -----------------------------------------------------------------------------------------------------


def test_forced_tokens_save_forwards_and_plain_decoding_drafts_none(engine: Engine, target: Target) -> None:
    constraint = compiled(GRAMMARS["object"], target)
    request = Request(PROMPTS[0], Sampling(), ROOMY, STOPS, constraint=constraint)
    never = HostileDrafter(VOCAB, {})  # knows no answer: drafts nothing
    with_forced = list(engine.generate(request, make_pool([(never, 4)], "fixed")))
    without = list(engine.generate(request, make_pool(["plain"], "fixed")))
    assert ids(with_forced) == ids(without)
    assert all(len(step.tokens) == 1 for step in without)
    assert without[-1].summary is not None
    assert with_forced[-1].summary is not None
    assert not any(record.forced for record in without[-1].summary.rounds)
    rounds = with_forced[-1].summary.rounds
    assert sum(record.forced for record in rounds) >= 12  # {"name": " and "age": at least
    assert len(rounds) < len(without) / 2
    assert all(record.drafted == record.accepted == 0 and record.arm == "plain" for record in rounds)


@pytest.mark.parametrize("kind", ["perfect", "hostile"])
def test_the_bandit_learns_about_the_drafter_not_about_forced_tokens(
    engine: Engine, target: Target, truths: Truths, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[dict[str, Any]] = []
    learn = Seat.learn

    def spy(self: Seat, choice: Any, **counts: Any) -> Any:
        learned.append(counts)
        return learn(self, choice, **counts)

    monkeypatch.setattr(Seat, "learn", spy)
    truth = truths["object", "greedy"]
    request = Request(PROMPTS[0], Sampling(), ROOMY, STOPS, constraint=compiled(GRAMMARS["object"], target))
    steps = list(engine.generate(request, make_pool(arms(f"{kind}-chain", truth), "fixed")))
    assert steps[-1].summary is not None
    rounds = steps[-1].summary.rounds
    assert any(record.forced for record in rounds)
    assert sum(record.committed for record in rounds) == len(ids(steps))
    for counts in learned:
        assert counts["drafted"] <= 6
        assert counts["accepted"] == (counts["drafted"] if kind == "perfect" else 0)
        assert counts["committed"] in (counts["accepted"], counts["accepted"] + 1)


# -- complete within the cap -------------------------------------------------------------------------------------------


def complete(text: str, schema: dict[str, Any]) -> Any:
    value = json.loads(text)
    jsonschema.validate(value, schema)
    return value


POOLS = (["suffix@8"], ["recycling_tree@6"], ["lookup@4", "plain"], ["recycling@4", "suffix@16", "plain"], ["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_random_schemas_give_valid_json_greedy_and_sampled(
    engine: Engine, target: Target, part: int
) -> None:
    answers = 0
    for seed in range(50 * part, 50 * part + 50):
        schema = random_schema(seed)
        constraint = compiled(json_schema(schema), target)
        shortest = constraint.shortest()
        assert shortest is not None
        pool = make_pool(POOLS[seed % len(POOLS)], "random")
        for temperature in (0.0, 1.0):
            prompt = (2, 50, 60 + seed % 100)
            cap = shortest + (seed % 7) * 8  # from no room at all to some
            request = Request(prompt, Sampling(temperature, seed=seed), cap, STOPS, constraint=constraint)
            steps = list(engine.generate(request, pool))
            value = complete("".join(step.text for step in steps), schema)
            assert steps[-1].summary is not None
            if not isinstance(value, (int, float)) or isinstance(value, bool):  # a number alone could go on
                assert steps[-1].summary.finish_reason == "stop"
            assert steps[-1].summary.completion_tokens <= cap
            answers += 1
    assert answers == 100


@pytest.mark.parametrize("kind", ["perfect-chain", "hostile-tree", "suffix@16", "recycling_tree@8"])
@pytest.mark.parametrize("mode", ["greedy", "t1"])
def test_near_the_cap_drafts_change_nothing_either(engine: Engine, target: Target, kind: str, mode: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "string"}}, "b": {"type": "string", "minLength": 3}},
        "required": ["a", "b"],
    }
    constraint = compiled(json_schema(schema), target)
    shortest = constraint.shortest()
    assert shortest is not None
    for cap in range(shortest, shortest + 9, 2):
        for prompt in PROMPTS[:2]:
            request = Request(prompt, SAMPLINGS[mode], cap, STOPS, constraint=constraint)
            truth = ids(list(engine.generate(request, make_pool(["plain"], "fixed"))))
            pool = make_pool(arms(kind, {prompt: truth}), "fixed")
            steps = list(engine.generate(request, pool))
            assert ids(steps) == truth
            complete("".join(step.text for step in steps), schema)


def test_rejection_mode_ends_in_time_too(engine: Engine, target: Target) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
    constraint = compiled(json_schema(schema), target)
    shortest = constraint.shortest()
    assert shortest is not None
    for cap in range(shortest, shortest + 20, 3):
        for temperature in (0.0, 1.0):
            request = Request(
                PROMPTS[0], Sampling(temperature, seed=cap), cap, STOPS, verify="rejection", constraint=constraint
            )
            steps = list(engine.generate(request, make_pool(["suffix@8", "plain"], "random")))
            complete("".join(step.text for step in steps), schema)


def test_a_cap_that_fits_no_answer_is_refused_before_any_forward(engine: Engine, target: Target) -> None:
    constraint = compiled(json_schema(PERSON), target)
    shortest = constraint.shortest()
    assert shortest is not None
    before = engine.rounds
    with pytest.raises(CapTooSmall) as raised:
        engine.generate(
            Request(PROMPTS[0], max_tokens=shortest - 1, constraint=constraint), make_pool(["plain"], "fixed")
        )
    assert engine.rounds == before
    assert str(shortest) in str(raised.value)
    assert str(shortest - 1) in str(raised.value)
    request = Request(PROMPTS[0], max_tokens=shortest, constraint=constraint)
    steps = list(engine.generate(request, make_pool(["plain"], "fixed")))
    complete("".join(step.text for step in steps), PERSON)
