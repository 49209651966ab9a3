"""When an answer ends: stop ids, stop strings and the cap, decided in one place before anyone learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from metasd_langchain.engine.text import TextStream
from metasd_langchain.values import FinishReason, Piece

__all__ = ["Halt", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a block counts.

    Attributes:
        count: tokens of the block that belong to the answer.
        pieces: text that became final.
        finish: why the answer ended with them, or None.
    """

    count: int
    pieces: tuple[Piece, ...]
    finish: FinishReason | None


class Halt:
    """The halting rules of one answer.

    A stop id is committed and counted but is no text; the token that completes a stop string is committed and counted,
    its text from the stop string on is not; the cap counts both.
    """

    def __init__(self, text: TextStream, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._text = text
        self._stop_ids = stop_ids
        self._left = max_tokens

    @property
    def left(self) -> int:
        """Tokens that may still be committed."""
        return self._left

    def take(self, tokens: Sequence[int], accepted: int) -> Taken:
        """Walk a block of committed tokens, of which the first `accepted` were drafted."""
        pieces: list[Piece] = []
        for place, token in enumerate(tokens):
            self._left -= 1
            drafted = place < accepted
            if token in self._stop_ids:
                return self._end(place + 1, pieces, "stop")
            pieces += self._text.push(token, drafted)
            if self._text.stopped:
                return Taken(place + 1, tuple(pieces), "stop")
            if self._left <= 0:
                return self._end(place + 1, pieces, "length")
        return Taken(len(tokens), tuple(pieces), None)

    def _end(self, count: int, pieces: list[Piece], finish: FinishReason) -> Taken:
        pieces += self._text.flush()
        return Taken(count, tuple(pieces), "stop" if self._text.stopped else finish)

    def flush(self) -> tuple[Piece, ...]:
        """What was held back, when the answer ends from outside."""
        return tuple(self._text.flush())
