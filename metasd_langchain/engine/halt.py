"""When an answer ends: stop ids, stop strings and the cap, decided in one place before anyone learns."""

from __future__ import annotations

from dataclasses import dataclass

from metasd_langchain.engine.text import TextStream
from metasd_langchain.values import FinishReason, Piece

__all__ = ["Halt", "Taken"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What a round committed.

    Attributes:
        pieces: text that became final.
        finish: why the answer ended with them, or None.
    """

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
        self._pieces: list[Piece] = []
        self._finish: FinishReason | None = None

    @property
    def left(self) -> int:
        """Tokens that may still be committed."""
        return self._left

    def push(self, token: int, drafted: bool) -> bool:
        """Commit a token; True when the answer ends with it."""
        self._left -= 1
        if token in self._stop_ids:
            return self._end("stop")
        self._pieces += self._text.push(token, drafted)
        if self._text.stopped:
            self._finish = "stop"
        elif self._left <= 0:
            return self._end("length")
        return self._finish is not None

    def collect(self) -> Taken:
        """What was committed since the last time."""
        taken = Taken(tuple(self._pieces), self._finish)
        self._pieces = []
        return taken

    def _end(self, finish: FinishReason) -> bool:
        self._pieces += self._text.flush()
        self._finish = "stop" if self._text.stopped else finish
        return True

    def flush(self) -> tuple[Piece, ...]:
        """What was held back, when the answer ends from outside."""
        return tuple(self._text.flush())
