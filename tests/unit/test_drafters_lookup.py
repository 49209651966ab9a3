"""Prompt lookup by hand, and against a plain scan."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from metasd_langchain.drafters.lookup import create
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.drafter_contract import DRAWS
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round


def scan(text: Sequence[int], longest: int, shortest: int) -> tuple[int, int]:
    """Matched length and position behind the latest earlier occurrence."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n < len(text) and text[end - n : end] == text[-n:]:
                return n, end
    return 0, 0


@pytest.mark.parametrize(("longest", "shortest"), [(3, 2), (3, 1), (1, 1), (5, 3)])
def test_agrees_with_a_scan(longest: int, shortest: int) -> None:
    rng = random.Random(longest)
    for _ in range(40):
        text = [rng.randrange(4) for _ in range(rng.randint(1, 12))]
        session = create({"max_ngram": longest, "min_ngram": shortest}).open(Request(prompt=tuple(text)))
        for _ in range(12):
            length, end = scan(text, longest, shortest)
            assert session.hint() == length
            guess = session.propose(text, 4, DRAWS).tokens
            known = tuple(text[end : end + 4]) if length else ()
            assert guess[: len(known)] == known
            committed = tuple(rng.randrange(4) for _ in range(rng.randint(0, 3)))
            session.observe(Round(committed=committed))
            text += committed


def test_longest_first_then_latest() -> None:
    text = [1, 2, 3, 40, 2, 3, 50, 2, 3, 60, 1, 2, 3]
    session = create({}).open(Request(prompt=tuple(text)))
    assert session.hint() == 3
    assert session.propose(text, 1, DRAWS) == Draft.chain([40])
    session = create({"max_ngram": 2}).open(Request(prompt=tuple(text)))
    assert session.propose(text, 2, DRAWS) == Draft.chain([60, 1])


def test_shortest_match() -> None:
    text = [1, 2, 9, 1]
    assert create({"min_ngram": 2}).open(Request(prompt=tuple(text))).propose(text, 4, DRAWS) == EMPTY_DRAFT
    session = create({}).open(Request(prompt=tuple(text)))
    assert session.hint() == 1
    assert session.propose(text, 4, DRAWS) == Draft.chain([2, 9, 1])


def test_loop_to_the_full_budget() -> None:
    text = [8, 1, 2, 1, 2]
    session = create({}).open(Request(prompt=tuple(text)))
    assert session.propose(text, 5, DRAWS) == Draft.chain([1, 2, 1, 2, 1])


@pytest.mark.parametrize("options", [{"max_ngram": 0}, {"min_ngram": 4}, {"min_ngram": "2"}, {"max_ngram": 2.0}])
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(BadOption, match=next(iter(options))):
        create(options)
