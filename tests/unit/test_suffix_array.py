"""The order is the sorted order, and a search finds what a search by eye would."""

from __future__ import annotations

import random

import numpy as np
import pytest

from metasd_langchain.suffix_array import DEPTH, SuffixArray, encoded, suffix_order


def array(tokens: list[int], start: int = 0) -> SuffixArray:
    text = np.array(tokens, dtype=np.uint32)
    return SuffixArray(b"x" * start + encoded(text) + b"behind", start, suffix_order(text))


def texts() -> list[list[int]]:
    rng = random.Random(3)
    made = [[rng.randrange(alphabet) for _ in range(size)] for alphabet in (1, 2, 5, 1000) for size in (1, 2, 7, 90)]
    return [*made, [7] * 50, [1, 2, 3] * 30, [2**32 - 1, 5, 2**31, 5]]


@pytest.mark.parametrize("tokens", texts(), ids=lambda tokens: f"{len(tokens)} of {len(set(tokens))}")
def test_places_are_in_the_order_of_what_stands_there(tokens: list[int]) -> None:
    order = suffix_order(np.array(tokens, dtype=np.uint32)).tolist()
    assert order == sorted(range(len(tokens)), key=lambda place: (tokens[place : place + DEPTH], place))


def test_equal_beyond_the_depth_stay_in_the_order_of_the_text() -> None:
    tokens = [4] * (2 * DEPTH)
    assert (
        suffix_order(np.array(tokens, dtype=np.uint32), 8).tolist()[-(DEPTH + 1) :]
        == list(range(2 * DEPTH - 7))[-(DEPTH + 1) :]
    )


def test_no_tokens_have_an_order() -> None:
    assert suffix_order(np.array([], dtype=np.uint32)).tolist() == []


@pytest.mark.parametrize("start", [0, 12])
def test_a_pattern_is_found_wherever_it_stands(start: int) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(4) for _ in range(200)]
    found = array(tokens, start)
    for size in (1, 2, 5, 9):
        for _ in range(30):
            pattern = [rng.randrange(5) for _ in range(size)]
            places = sorted(found.place(row) for row in found.places(pattern))
            assert places == [at for at in range(200) if tokens[at : at + size] == pattern]


def test_the_longest_suffix_is_found() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(3) for _ in range(300)]
    found = array(tokens)
    windows = {size: {tuple(tokens[at : at + size]) for at in range(301 - size)} for size in range(1, 13)}
    for _ in range(100):
        text = [rng.randrange(3) for _ in range(20)]
        length, rows = found.longest(text, 2, 12)
        longest = max((size for size in range(2, 13) if tuple(text[-size:]) in windows[size]), default=0)
        assert length == longest
        assert all(found.tokens(found.place(row), length).tolist() == text[20 - length :] for row in rows)


def test_nothing_matches_below_the_least_length_or_beyond_the_text() -> None:
    found = array([1, 2, 3, 1, 2])
    assert found.longest([9, 1], 2, 16) == (0, range(0))
    assert found.longest([2], 1, 16)[0] == 1
    assert found.longest([], 1, 16) == (0, range(0))
    assert found.tokens(3, 10).tolist() == [1, 2]  # not what lies behind it in the buffer
    assert found.tokens(9, 10).tolist() == []
