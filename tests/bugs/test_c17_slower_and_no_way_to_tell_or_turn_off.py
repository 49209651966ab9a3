"""C17: speculation makes answers slower, nothing shows it, and it cannot be switched off.
Useless drafts never cost an extra forward and little width; ``speculative=False`` is the plain path; statistics say so.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.engine import generation, loop
from metasd_langchain.testing.drafters import PerfectDrafter, RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
MODEL.lm_head.weight.data[:260] = 0  # neither EOS nor bytes that are no text
PAIR = (MODEL, kit.TOKENIZER)
COUNT, LONG = 24, 100
SLOPE = 0.034  # share of a one-token forward that each further token costs; measured on the embedded model
HOT: dict[str, Any] = {"temperature": 0.9, "seed": 5}


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


ANSWER = truth(kit.encode(kit.PROMPT))
ASKED = len(kit.encode(kit.PROMPT))


class Asked(PerfectDrafter):
    """Counts how often it is asked for a draft."""

    times = 0

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        self.times += 1
        return super().line(truth, budget)


ASKED_FOR = Asked(truth)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """New tokens of each forward, while a clock counts what they cost on a real model."""
    lm, seen, now = kit.make(model=PAIR)._load().target.lm, [], [0.0]
    score = lm.score

    def scoring(feeds: Any, *args: Any) -> Any:
        seen.append(sum(feed.width for feed in feeds))
        now[0] += 0.03 * (1 + SLOPE * (seen[-1] - 1))
        return score(feeds, *args)

    monkeypatch.setattr(lm, "score", scoring)
    for module in (loop, generation):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return seen


def cost(widths: list[int]) -> float:
    """Of an answer's rounds after the prompt's, in forwards of one token."""
    return sum(1 + SLOPE * (width - 1) for width in widths[1:])


def make(drafters: Any = None, **options: Any) -> MetaSDLLM:
    return kit.make(**{"model": PAIR, "drafters": drafters, "max_tokens": COUNT, **options})


OFF: dict[str, Any] = {
    "default pool": None,
    "real": ["suffix@16", "lookup@8", "recycling@4", "recycling_tree@12"],  # plain not among them
    "scripted": [(ASKED_FOR, 8)],
    "plain": ["plain"],
}


@pytest.mark.parametrize("policy", ["hinted_ucb", "ucb", "fixed", "random"])
@pytest.mark.parametrize("name", OFF)
def test_switched_off_every_round_is_plain_and_one_token_wide(name: str, policy: str, widths: list[int]) -> None:
    llm = make(OFF[name], policy=policy, speculative=False)
    steps = list(llm.steps(kit.PROMPT))
    summary = steps[-1].summary
    assert summary is not None
    assert tuple(token for step in steps for token in step.tokens) == ANSWER
    assert {(record.arm, record.drafted, record.accepted, record.committed) for record in summary.rounds} == {
        ("plain", 0, 0, 1)
    }
    assert {(step.arm, step.accepted) for step in steps} == {("plain", 0)}
    assert widths == [ASKED] + [1] * (COUNT - 1)
    assert ASKED_FOR.times == 0


async def test_switched_off_all_ways_and_modes_answer_as_before(spans: Any) -> None:
    off, on = make(speculative=False), make()
    assert await kit.every_way(off) == await kit.every_way(on)
    assert await kit.every_way(off, **HOT) == await kit.every_way(on, **HOT)
    assert off.batch([kit.PROMPT, "AB"]) == on.batch([kit.PROMPT, "AB"])
    spans.clear()
    heard = kit.Heard()
    off.invoke(kit.PROMPT, {"callbacks": [heard]})
    info = heard.responses[0].generations[0][0].generation_info["metasd"]
    assert (info["rounds"], info["drafted"], info["accepted"]) == (COUNT, 0, 0)
    assert info["arms"] == {"plain": {"rounds": COUNT, "drafted": 0, "accepted": 0}}
    (span,) = spans.get_finished_spans()
    assert span.attributes["metasd.tokens.drafted"] == 0


def test_it_is_on_unless_switched_off_and_the_statistics_tell() -> None:
    assert MetaSDLLM.model_fields["speculative"].default is True
    records = kit.rounds(make([(kit.hostile("chain", truth), 8)]))
    assert sum(record.drafted for record in records) > 0
    assert sum(record.accepted for record in records) == 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("block", kit.BLOCKS)
def test_hostile_drafts_alone_cost_width_and_no_forward(block: int, shape: str, widths: list[int]) -> None:
    assert kit.ids(make([(kit.hostile(shape, truth), block)], policy="fixed")) == ANSWER
    assert len(widths) == COUNT  # one a token, as without drafts
    assert max(widths[1:]) == 1 + block
    if block <= 8:  # a wider one needs a policy that may leave it, see below
        assert cost(widths) < 1.3 * (COUNT - 1)


@pytest.mark.parametrize("block", kit.BLOCKS)
def test_a_drafter_that_fails_is_asked_no_more_and_costs_nothing(block: int, widths: list[int]) -> None:
    assert kit.ids(make([(RaisingDrafter(times=COUNT), block)])) == ANSWER
    assert widths == [ASKED] + [1] * (COUNT - 1)


@functools.cache
def long_answer() -> tuple[int, ...]:
    return kit.ids(make(["plain"], max_tokens=LONG))


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("block", kit.BLOCKS)
def test_the_default_policy_bounds_what_hostile_drafts_cost(block: int, shape: str, widths: list[int]) -> None:
    long = long_answer()
    del widths[:]
    drafter = kit.hostile(shape, lambda prompt: long)
    assert kit.ids(make([(drafter, block), "plain"], max_tokens=LONG)) == long
    assert len(widths) == LONG
    assert cost(widths) < 1.1 * (LONG - 1)
