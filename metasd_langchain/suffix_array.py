"""Suffix arrays over token ids: the places of a text in the order of what stands there, searched by bisection.

Tokens are kept as big-endian uint32, so that comparing bytes compares token sequences, which is all a search does: no
array is made, and a text that is mapped from a file is read only where it is looked at.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEPTH", "Buffer", "SuffixArray", "encoded", "suffix_order"]

DEPTH = 32  # tokens by which places are ordered; more would cost time and never be asked for
_WIDTH = 4  # bytes a token


class Buffer(Protocol):
    """Bytes, or a mapped file."""

    def __getitem__(self, place: slice, /) -> bytes: ...


def encoded(tokens: Sequence[int] | NDArray[np.uint32]) -> bytes:
    """Token ids as they are stored and compared."""
    return np.asarray(tokens, dtype=">u4").tobytes()


def suffix_order(tokens: NDArray[np.uint32], depth: int = DEPTH) -> NDArray[np.uint32]:
    """Places of a text, sorted by the `depth` tokens that stand there, equal ones by place.

    Prefix doubling (Manber and Myers 1993) that stops at the depth: five sorts for 32 tokens.

    Args:
        tokens: ``[n]``, n below 2^31.
        depth: a power of two.
    """
    _, ranks = np.unique(tokens, return_inverse=True)
    ranks = ranks.astype(np.int64).reshape(-1)
    order = np.argsort(ranks, kind="stable")
    length = 1
    while length < depth and len(tokens):
        behind = np.zeros_like(ranks)  # 0: the text ends, which sorts first
        behind[:-length] = ranks[length:] + 1
        keys = ranks * (len(tokens) + 1) + behind
        order = np.argsort(keys, kind="stable")
        steps = np.empty(len(tokens), dtype=np.int64)
        steps[0] = 0
        steps[1:] = np.diff(keys[order]) != 0
        ranks[order] = np.cumsum(steps)
        if ranks[order[-1]] == len(tokens) - 1:
            break  # all differ already
        length *= 2
    return order.astype(np.uint32)


class SuffixArray:
    """A text with the order of its places.

    Args:
        buffer: holds the text, `encoded`.
        start: where it begins in the buffer, in bytes.
        order: ``[n]`` from `suffix_order`.
    """

    def __init__(self, buffer: Buffer, start: int, order: NDArray[np.uint32]) -> None:
        self._buffer, self._start, self._order = buffer, start, order

    def __len__(self) -> int:
        """Tokens."""
        return len(self._order)

    def tokens(self, place: int, count: int) -> NDArray[np.uint32]:
        """At most `count` tokens from a place of the text on."""
        place = min(max(place, 0), len(self))
        count = min(count, len(self) - place)
        return np.frombuffer(self._bytes(place, count), dtype=">u4").astype(np.uint32)

    def places(self, pattern: Sequence[int]) -> range:
        """The stretch of the order in which the text goes on with `pattern` (at most DEPTH tokens)."""
        wanted, count = encoded(pattern), len(pattern)

        def at(row: int) -> bytes:
            return self._bytes(self._order.item(row), count)

        rows = range(len(self))
        low = bisect_left(rows, wanted, key=at)
        if low == len(self) or at(low) != wanted:
            return range(low, low)
        return range(low, bisect_right(rows, wanted, lo=low, key=at))

    def longest(self, text: Sequence[int], least: int, most: int) -> tuple[int, range]:
        """The longest suffix of `text` that occurs, of `least` to `most` tokens; (0, empty) when there is none.

        A shorter suffix occurs wherever a longer one does, so its length is found by bisection too.
        """
        best, rows = 0, range(0)
        low, high = least, min(most, len(text), DEPTH)
        while low <= high:
            middle = (low + high) // 2
            found = self.places(text[len(text) - middle :])
            if found:
                best, rows, low = middle, found, middle + 1
            else:
                high = middle - 1
        return best, rows

    def place(self, row: int) -> int:
        """The place in the text of a row of the order."""
        return int(self._order.item(row))

    def _bytes(self, place: int, count: int) -> bytes:
        start = self._start + place * _WIDTH
        return self._buffer[start : min(start + count * _WIDTH, self._start + len(self) * _WIDTH)]
