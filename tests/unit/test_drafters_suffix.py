"""The suffix automaton against brute force, and the drafter over it."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest

from metasd_langchain.automaton import ROOT, SuffixAutomaton, replay
from metasd_langchain.drafters.suffix import SuffixDrafter, create
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.drafter_contract import DRAWS, play
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round


def longest_previous(text: Sequence[int]) -> tuple[int, int]:
    """Length of the longest suffix that occurred before, and the position behind its latest occurrence."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == suffix:
                return length, end
    return 0, 0


def longest_inside(text: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest suffix of `other` that occurs in `text`."""
    for length in range(len(other), 0, -1):
        suffix = other[len(other) - length :]
        if any(text[i : i + length] == suffix for i in range(len(text) - length + 1)):
            return length
    return 0


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
def test_match_is_the_longest_and_latest(letters: int) -> None:
    rng = random.Random(letters)
    for _ in range(60):
        text: list[int] = []
        automaton = SuffixAutomaton()
        for _ in range(rng.randint(1, 40)):
            text.append(rng.randrange(letters))
            automaton.extend(text[-1:])
            expected = longest_previous(text)
            assert (automaton.match_length, automaton.match_start) == expected or expected[0] == 0
            assert automaton.match_length == expected[0]


@pytest.mark.parametrize("letters", [2, 4])
def test_walk_finds_the_longest_suffix_of_another_text(letters: int) -> None:
    rng = random.Random(letters + 10)
    for _ in range(60):
        text, other = ([rng.randrange(letters) for _ in range(rng.randint(0, 30))] for _ in range(2))
        automaton = SuffixAutomaton(text)
        state, length = ROOT, 0
        for i, token in enumerate(other):
            state, length = automaton.walk(state, length, [token])
            assert length == longest_inside(text, other[: i + 1])
            if length:
                start = automaton.start(state)
                assert text[start - length : start] == other[i + 1 - length : i + 1]


def test_repetitive_text_keeps_true_occurrences() -> None:
    """Deeper than the refresh walk: the occurrence may be old, never wrong."""
    text = ([7] * 50 + [8]) * 6
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.extend([token])
        length, start = automaton.match_length, automaton.match_start
        assert start <= i
        assert text[start - length : start] == text[i + 1 - length : i + 1]


def test_by_hand() -> None:
    """b a n a n a: "ana" was there before and ended at position 3, "n" follows."""
    automaton = SuffixAutomaton([1, 0, 2, 0, 2, 0])
    assert (automaton.match_length, automaton.match_start) == (3, 4)
    assert automaton.shorter(automaton.match_state)[1] == 1  # "a"


def test_bytes_are_not_underestimated() -> None:
    rng = random.Random(3)
    automaton = SuffixAutomaton(min(int(rng.paretovariate(0.7)), 3000) for _ in range(4000))
    held = sum(
        sys.getsizeof(getattr(automaton, name)) for name in ("text", "_length", "_link", "_first", "_next", "_latest")
    )
    held += sys.getsizeof(automaton._more)
    held += sum(sys.getsizeof(branches) for branches in automaton._more.values())
    assert held <= automaton.nbytes <= 3 * held


@pytest.mark.parametrize(
    ("text", "start", "budget", "expected"),
    [
        ([1, 2, 3, 1, 2, 3], 3, 8, [1, 2, 3, 1, 2, 3, 1, 2]),  # in a loop
        ([1, 2, 3, 1, 2, 3], 3, 2, [1, 2]),
        ([5, 5], 1, 4, [5, 5, 5, 5]),
        ([9, 1, 2, 3, 1], 2, 8, [2, 3, 1]),  # repeated one token only: no loop yet
        ([1, 2], 2, 3, []),
        ([1, 2], 0, 1, [1]),
    ],
)
def test_replay(text: list[int], start: int, budget: int, expected: list[int]) -> None:
    assert replay(text, start, budget) == expected


def draft(drafter: SuffixDrafter, text: Sequence[int], budget: int = 8, scope: str = "") -> tuple[float, Draft]:
    session = drafter.open(Request(prompt=tuple(text), scope=scope))
    return session.hint(), session.propose(text, budget, DRAWS)


def test_copies_what_followed_the_longest_match() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3]
    assert draft(SuffixDrafter(), text, 3) == (3, Draft.chain([4, 9, 2]))  # "1 2 3", though "2 3" is more recent


def test_drafts_a_loop_to_the_full_budget() -> None:
    hint, guess = draft(SuffixDrafter(), [4, 1, 2, 3, 1, 2, 3, 1, 2], 10)
    assert hint == 5
    assert guess == Draft.chain([3, 1, 2, 3, 1, 2, 3, 1, 2, 3])


def test_min_match() -> None:
    text = [1, 2, 3, 9, 3]
    assert draft(create({}), text)[0] == 1
    assert draft(create({"min_match": 2}), text) == (0, EMPTY_DRAFT)


def test_past_outputs_are_used_within_the_scope() -> None:
    drafter = SuffixDrafter()
    play(drafter, [1, 2], [10, 11, 12, 13, 14], scope="a")
    assert draft(drafter, [30, 10, 11], scope="a") == (2, Draft.chain([12, 13, 14]))  # ends where that output ended
    assert draft(drafter, [30, 10, 11], scope="b") == (0, EMPTY_DRAFT)
    assert draft(drafter, [30, 1], scope="a") == (0, EMPTY_DRAFT)  # the prompt is not an output
    assert draft(drafter, [30, 13, 14], scope="a") == (0, EMPTY_DRAFT)  # nothing follows


def test_own_text_wins_at_equal_length_and_the_longer_match_otherwise() -> None:
    drafter = SuffixDrafter()
    play(drafter, [1], [10, 11, 12, 13])
    assert draft(drafter, [11, 50, 7, 11])[1].tokens[0] == 50
    assert draft(drafter, [11, 50, 7, 10, 11])[1].tokens[0] == 12


def test_outputs_of_generations_that_end_meanwhile_are_found() -> None:
    drafter = SuffixDrafter()
    session = drafter.open(Request(prompt=(3, 10, 11)))
    assert session.hint() == 0
    play(drafter, [1], [10, 11, 12, 13])
    assert session.hint() == 2
    session.observe(Round(committed=(12,)))
    assert session.hint() == 3
    play(drafter, [1], [3, 10, 11, 12, 40])
    assert session.hint() == 4
    assert session.propose([3, 10, 11, 12], 4, DRAWS) == Draft.chain([40])


def test_bound_drops_the_oldest_outputs() -> None:
    rng = random.Random(0)
    drafter = create({"max_bytes": 200_000})
    outputs = [[rng.randrange(5000) for _ in range(60)] for _ in range(60)]
    for i, output in enumerate(outputs):
        play(drafter, [1], output, vocab=5000, scope=str(i % 3))
        assert drafter.nbytes <= 200_000
    assert drafter.nbytes > 100_000
    assert draft(drafter, outputs[-1][:5], scope=str(59 % 3))[0] == 5
    assert draft(drafter, outputs[0][:5], scope="0")[0] < 5


def test_an_output_over_the_bound_is_not_kept() -> None:
    drafter = create({"max_bytes": 2000})
    play(drafter, [1], list(range(30)) * 5)
    assert drafter.nbytes == 0
    assert draft(drafter, [500, 0, 1]) == (0, EMPTY_DRAFT)


def test_forget_frees_the_bytes_of_the_scope_only() -> None:
    drafter = SuffixDrafter()
    for scope in "ab":
        play(drafter, [1], [10, 11, 12], scope=scope)
    before = drafter.nbytes
    drafter.forget("a")
    assert drafter.nbytes == before // 2
    assert draft(drafter, [10], scope="a") == (0, EMPTY_DRAFT)
    assert draft(drafter, [10], scope="b") == (1, Draft.chain([11, 12]))


def test_not_shared() -> None:
    drafter = create({"shared": False})
    play(drafter, [1], [10, 11, 12])
    assert draft(drafter, [10]) == (0, EMPTY_DRAFT)
    assert drafter.nbytes == 0


@pytest.mark.parametrize(
    "options", [{"min_match": 0}, {"min_match": True}, {"shared": 1}, {"max_bytes": -1}, {"max_bytes": 1.5}]
)
def test_bad_options(options: dict[str, object]) -> None:
    with pytest.raises(BadOption, match=next(iter(options))):
        create(options)
