"""The scripted drafters do what their names say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from metasd_langchain.drafters import Drafter
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.drafter_contract import DRAWS, play, walk
from metasd_langchain.testing.drafters import (
    Answers,
    HalfDrafter,
    HostileDrafter,
    PerfectDrafter,
    RaisingDrafter,
    Shape,
)
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request

PROMPT = (7, 8)
ANSWER = [1, 2, 3, 4, 5, 6, 0, 9, 1, 2]
ANSWERS: Answers = {PROMPT: ANSWER}

MAKERS: dict[str, Callable[[Shape], Drafter]] = {
    "perfect": lambda shape: PerfectDrafter(ANSWERS, shape=shape, vocab=10),
    "hostile": lambda shape: HostileDrafter(10, ANSWERS, shape=shape),
    "half": lambda shape: HalfDrafter(ANSWERS, 10, shape=shape),
}


def propose(drafter: Drafter, done: int, budget: int) -> Draft:
    session = drafter.open(Request(prompt=PROMPT))
    return session.propose([*PROMPT, *ANSWER[:done]], budget, DRAWS)


@pytest.mark.parametrize(
    ("name", "shape", "accepted"),
    [
        ("perfect", "chain", 4),
        ("perfect", "tree", 2),  # half of the nodes are siblings
        ("half", "chain", 2),
        ("half", "tree", 1),
        ("hostile", "chain", 0),
        ("hostile", "tree", 0),
    ],
)
@pytest.mark.parametrize("done", [0, 3])
def test_how_much_is_accepted_of_four_nodes(name: str, shape: Shape, accepted: int, done: int) -> None:
    draft = propose(MAKERS[name](shape), done, 4)
    assert len(draft) == 4
    assert draft.is_chain == (shape == "chain")
    assert len(walk(draft, ANSWER[done:])) == accepted


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9, 50])
def test_within_budget_to_the_answers_end(name: str, shape: Shape, budget: int) -> None:
    for _, draft in play(MAKERS[name](shape), PROMPT, ANSWER, budget=budget, vocab=10):
        assert len(draft) <= budget
        assert all(0 <= token < 10 for token in draft.tokens)
    assert propose(MAKERS[name](shape), len(ANSWER), 4) == EMPTY_DRAFT


def test_answers_may_be_a_function() -> None:
    drafter = PerfectDrafter(lambda prompt: [*prompt, 5])
    assert drafter.open(Request(prompt=(3, 4))).propose([3, 4], 9, DRAWS) == Draft.chain([3, 4, 5])


def test_an_unknown_prompt_drafts_nothing() -> None:
    session = PerfectDrafter(ANSWERS).open(Request(prompt=(1,)))
    assert session.hint() == 0
    assert session.propose([1], 4, DRAWS) == EMPTY_DRAFT


def test_raises_when_told() -> None:
    session = RaisingDrafter(at=1, times=2, inner=PerfectDrafter(ANSWERS)).open(Request(prompt=PROMPT))
    assert session.propose(PROMPT, 2, DRAWS) == Draft.chain([1, 2])
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            session.propose(PROMPT, 2, DRAWS)
    assert session.propose(PROMPT, 2, DRAWS) == Draft.chain([1, 2])


def test_bad_arguments() -> None:
    with pytest.raises(BadOption, match="shape"):
        PerfectDrafter(ANSWERS, shape="bush")  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="vocab"):
        HostileDrafter(1, ANSWERS)
