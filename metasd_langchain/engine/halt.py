"""When an answer ends: stop ids, stop strings, its grammar's end and the cap, decided in one place before anyone
learns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    its text from the stop string on is not; the cap counts both. Where a grammar allows nothing more the answer is
    complete, and no stop id is waited for.

    Args:
        text: where tokens become text.
        stop_ids: ids that end the answer.
        max_tokens: the cap.
        complete: told the answer so far; True when nothing can come any more.
    """

    def __init__(
        self,
        text: TextStream,
        stop_ids: frozenset[int],
        max_tokens: int,
        complete: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._text = text
        self._stop_ids = stop_ids
        self._left = max_tokens
        self._complete = complete
        self._answer: list[int] = []  # kept for `complete` only
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
        elif self._is_complete(token):
            return self._end("stop")
        elif self._left <= 0:
            return self._end("length")
        return self._finish is not None

    def _is_complete(self, token: int) -> bool:
        if self._complete is None:
            return False
        self._answer.append(token)
        return self._complete(self._answer)

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
