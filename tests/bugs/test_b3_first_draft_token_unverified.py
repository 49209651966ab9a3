"""B3: the first token of a draft is taken as given, because the row that judges it belongs to the round before.
The token after the last committed one is verified like all others: in the first round, in later ones, in every shape.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import PerfectDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from metasd_langchain.values import RoundRecord
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
PAIR = (MODEL, kit.TOKENIZER)
PROMPTS = (kit.PROMPT, "A", "ABCDEFG", "ABCDEFGH", "0123456789" * 3)
COUNT = 12
SHAPES = ("chain", "tree")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "rejection": {"verify": "rejection"},
    "sampled": {"temperature": 0.9, "seed": 4},
}


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


class FirstWrong(PerfectDrafter):
    """Only the first token of each draft is wrong."""

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        return [self.wrong(truth[0]), *truth[1:budget]]


class OneAhead(PerfectDrafter):
    """Drafts what comes after the next token, as if that were settled."""

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        return list(truth[1 : budget + 1])


class ByTurns(PerfectDrafter):
    """Right, and next time wrong at the first token: a wrong one follows a whole block that was accepted."""

    turn = 0

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        self.turn += 1
        return list(truth[:budget]) if self.turn % 2 else [self.wrong(truth[0]), *truth[1:budget]]


def sampled_or_greedy(mode: str) -> Any:
    """The answer a mode gives without drafts, by prompt."""
    if mode != "sampled":
        return truth
    plain = kit.make(model=PAIR, drafters=["plain"], max_tokens=COUNT, **MODES[mode])
    return {kit.encode(prompt): kit.ids(plain, prompt) for prompt in PROMPTS}.__getitem__


def play(llm: MetaSDLLM, prompt: str = kit.PROMPT) -> tuple[tuple[int, ...], Sequence[RoundRecord]]:
    """Ids and rounds of one answer."""
    steps = list(llm.steps(prompt))
    assert steps[-1].summary is not None
    return tuple(token for step in steps for token in step.tokens), steps[-1].summary.rounds


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_a_draft_that_begins_wrong_is_accepted(mode: str, shape: Any) -> None:
    answers = sampled_or_greedy(mode)
    for n, block in enumerate(kit.BLOCKS):
        for drafter in (kit.hostile(shape, answers), FirstWrong(answers, shape=shape, vocab=kit.VOCAB)):
            prompt = PROMPTS[n]
            ids, records = play(kit.scripted(drafter, block, model=PAIR, max_tokens=COUNT, **MODES[mode]), prompt)
            assert ids == answers(kit.encode(prompt))
            assert [record.accepted for record in records] == [0] * COUNT
            assert all(record.drafted for record in records[:-1])  # the last one has no room


@pytest.mark.parametrize("shape", SHAPES)
def test_a_draft_that_skips_a_token_is_no_better(shape: Any) -> None:
    for n, block in enumerate(kit.BLOCKS):
        llm = kit.scripted(OneAhead(truth, shape=shape, vocab=kit.VOCAB), block, model=PAIR, max_tokens=COUNT)
        answer = truth(kit.encode(PROMPTS[n]))
        ids, records = play(llm, PROMPTS[n])
        assert ids == answer
        repeats = sum(one == other for one, other in itertools.pairwise(answer))
        assert sum(record.accepted for record in records) <= repeats


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_token_after_a_whole_accepted_block_is_verified(shape: Any) -> None:
    for n, block in enumerate(kit.BLOCKS):
        drafter = ByTurns(truth, shape=shape, vocab=kit.VOCAB)
        ids, records = play(kit.scripted(drafter, block, model=PAIR, max_tokens=COUNT), PROMPTS[n])
        assert ids == truth(kit.encode(PROMPTS[n]))
        room = min(block, COUNT - 1)
        assert records[0].accepted == (room if shape == "chain" else (room + 1) // 2)
        assert all(record.accepted == 0 for record in records[1::2])


def test_a_right_first_token_is_accepted_from_the_first_round_on() -> None:
    _, records = play(kit.scripted(kit.perfect("chain", truth), 1, model=PAIR, max_tokens=COUNT))
    assert [record.accepted for record in records] == [1] * (COUNT // 2)
