"""C16: with a drafter the answers get worse, because what it drafts is not verified.
Twenty small tasks of copying and arithmetic, each with and without drafts: the same answers, to the id, one by one.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

# Tied to its embeddings a random model says one token for ever, and whatever was accepted would be right.
MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 12
TASKS = (
    "Copy: red red red red ->",
    "Copy: one two three one two three ->",
    "Copy: the cat sat on the mat. Copy: the cat sat on the",
    "Copy: abcabcabcabc ->",
    "Copy: 1 2 3 4 5 1 2 3 4 5 1 2",
    "Copy: north, east, south, west; north, east,",
    "Repeat: stone\nstone\nstone\n",
    "Repeat: a-b-c-d a-b-c-d a-b-",
    "Reverse: abc -> cba; Reverse: def ->",
    "Count: 1, 2, 3, 4, 5, 6,",
    "2 + 2 =",
    "17 + 25 = 42; 17 + 26 =",
    "9 * 9 = 81; 9 * 8 =",
    "100 - 1 = 99; 100 - 2 = 98; 100 - 3 =",
    "1 + 1 = 2\n2 + 2 = 4\n4 + 4 = 8\n8 + 8 =",
    "12 / 4 =",
    "7, 14, 21, 28,",
    "Half of 64 is 32, half of 32 is",
    "3 apples and 4 apples are",
    "5 > 3 is true; 3 > 5 is",
)


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT, kit.EOS))


def swapped(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Another task's answer: plausible, fluent and wrong."""
    task = [kit.encode(task) for task in TASKS].index(prompt)
    return truth(kit.encode(TASKS[task - 1]))


def make(drafters: Any, policy: str = "fixed", **options: Any) -> MetaSDLLM:
    return kit.make(model=PAIR, drafters=drafters, policy=policy, max_tokens=COUNT, **options)


ON: dict[str, MetaSDLLM] = {
    **{
        f"{quality.__name__} {shape}@{block}": make([(quality(shape, truth), block)])
        for quality, shape, block in (
            (kit.perfect, "chain", 1),
            (kit.perfect, "tree", 16),
            (kit.half, "chain", 8),
            (kit.half, "tree", 4),
            (kit.hostile, "chain", 2),
            (kit.hostile, "tree", 8),
        )
    },
    "another answer": make([(kit.perfect("chain", swapped), 8)]),
    **{name: make([name]) for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12")},
    "random": make([(kit.perfect("chain", swapped), 8), "suffix@6", "recycling_tree@6", "plain"], "random"),
    "default": make(None, "hinted_ucb"),
}
OFF = make(["plain"])


def drafted(task: str, **options: Any) -> dict[str, tuple[int, ...]]:
    """Ids of the answer by everyone who drafts; they run at the same time."""
    started = {name: llm.steps(task, **options) for name, llm in ON.items()}
    return {name: tuple(token for step in steps for token in step.tokens) for name, steps in started.items()}


@pytest.mark.parametrize("task", TASKS, ids=json.dumps)
def test_the_answer_is_the_one_without_drafts(task: str) -> None:
    want = truth(kit.encode(task))
    assert kit.ids(OFF, task) == want
    assert drafted(task) == dict.fromkeys(ON, want)
    assert ON["default"].invoke(task) == OFF.invoke(task) == kit.decode(want[:-1] if want[-1] == 1 else want)


@pytest.mark.parametrize("task", TASKS[::3], ids=json.dumps)
def test_the_sampled_answer_is_the_one_without_drafts(task: str) -> None:
    hot: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    want = kit.ids(OFF, task, **hot)
    assert drafted(task, **hot) == dict.fromkeys(ON, want)


def test_drafts_were_really_made_and_both_accepted_and_rejected() -> None:
    assert len({truth(kit.encode(task)) for task in TASKS}) == len(TASKS)
    for name in ("perfect chain@1", "half chain@8", "suffix@16", "recycling_tree@12", "another answer", "default"):
        records = [record for task in TASKS[:6] for record in kit.rounds(ON[name], task)]
        guessed, accepted = sum(record.drafted for record in records), sum(record.accepted for record in records)
        assert guessed > 0, name
        if name not in ("perfect chain@1", "default"):
            assert accepted < guessed, name
        if name not in ("another answer", "default"):
            assert accepted > 0, name
