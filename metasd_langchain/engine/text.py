"""From token ids to text that is final: no split characters, no leaked prefix of a stop string, nothing swallowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from metasd_langchain.values import Piece

__all__ = ["Detokenizer", "TextStream"]


class Detokenizer:
    """How a tokenizer turns ids into text; one a model.

    Args:
        tokenizer: a transformers tokenizer.
        lock: held while it is used, when callers encode with it at the same time.
    """

    def __init__(self, tokenizer: Any, lock: AbstractContextManager[Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._lock = lock or nullcontext()
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        unknown = tokenizer.unk_token_id
        ids = tokenizer.convert_tokens_to_ids(names)
        # Byte-fallback tokens: a run of them is decoded as a whole, so text inside a run may still change. Special
        # tokens are left out before decoding, so they do not end a run, nor are they context for a leading space.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self.byte_ids = frozenset(i for i in ids if i is not None and i != unknown) | special

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, spaces as they are."""
        with self._lock:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class TextStream:
    """Text of one answer, token by token.

    Joined, everything `push` and `flush` return equals the decoded answer, cut before the first stop string.

    Args:
        decode: ids to text.
        byte_ids: tokens after which text may still change, see Detokenizer.
        stop: strings that end the answer; empty ones are ignored.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], byte_ids: frozenset[int], stop: Sequence[str]) -> None:
        self._decode = decode
        self._byte_ids = byte_ids
        self._stop = tuple(string for string in stop if string)
        self._ids: list[int] = []
        self._from = 0  # decoding restarts here: the last group of tokens already turned into text gives context
        self._done = 0  # tokens before this are turned into text
        self._before = ""  # text of the tokens between the two
        self._held: list[Piece] = []  # final as text, held back as a possible beginning of a stop string
        self.stopped = False

    def push(self, token: int, drafted: bool) -> list[Piece]:
        """Text that became final with a token. Sets `stopped` when the token completed a stop string."""
        self._ids.append(token)
        text = self._decode(self._ids[self._from :])
        incomplete = text.endswith("\ufffd")
        new = text[len(self._before) :]
        if incomplete or token in self._byte_ids:
            if self._stop and self._ends_in_stop(new.rstrip("\ufffd")):
                return self._release(new, drafted)
            return []
        self._advance()
        return self._release(new, drafted)

    def flush(self, drafted: bool = False) -> list[Piece]:
        """The rest, at the end of the answer; a cut character shows as U+FFFD, as in the tokenizer's own decoding."""
        if self.stopped:
            return []
        new = self._decode(self._ids[self._from :])[len(self._before) :]
        self._advance()
        pieces = self._release(new, drafted)
        if not self.stopped:
            pieces += self._held
            self._held = []
        return pieces

    def _advance(self) -> None:
        self._from, self._done = self._done, len(self._ids)
        # Decoded anew, not sliced: some decoders drop a space at the beginning of whatever they are given.
        self._before = self._decode(self._ids[self._from : self._done])

    def _ends_in_stop(self, new: str) -> bool:
        held = "".join(piece.text for piece in self._held) + new
        return any(string in held for string in self._stop)

    def _release(self, new: str, drafted: bool) -> list[Piece]:
        if new:
            self._held.append(Piece(new, drafted))
        if not self._stop:
            ready, self._held = self._held, []
            return ready
        text = "".join(piece.text for piece in self._held)
        found = [at for at in (text.find(string) for string in self._stop) if at >= 0]
        self.stopped = bool(found)
        ready, rest = _split(self._held, min(found) if found else len(text) - self._overlap(text))
        self._held = [] if self.stopped else rest
        return ready

    def _overlap(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest


def _split(pieces: list[Piece], at: int) -> tuple[list[Piece], list[Piece]]:
    """Cut a list of pieces after `at` characters."""
    left: list[Piece] = []
    right: list[Piece] = []
    for piece in pieces:
        head, tail = piece.text[:at], piece.text[at:]
        at = max(0, at - len(piece.text))
        if head:
            left.append(Piece(head, piece.drafted))
        if tail:
            right.append(Piece(tail, piece.drafted))
    return left, right
