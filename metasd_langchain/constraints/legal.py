"""The set of tokens that may come next, kept as bits: 32 KB for a quarter of a million tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FEW", "Legal"]

FEW = 64  # so many logits are picked out one by one; more are masked in place


class Legal:
    """Tokens that may come next.

    Args:
        bits: one a token, lowest first, as llguidance gives them; more or fewer than `vocab` are cut or filled up.
        vocab: size of the target's vocabulary.
    """

    __slots__ = ("_bits", "_few", "_vocab")

    def __init__(self, bits: bytes, vocab: int) -> None:
        size = -(-vocab // 64) * 8  # whole words of 64
        held = bytearray(bits[:size].ljust(size, b"\0"))
        if vocab % 8:
            held[vocab // 8] &= (1 << vocab % 8) - 1
        held[-(-vocab // 8) :] = bytes(size - -(-vocab // 8))
        self._bits = held
        self._vocab = vocab
        self._few: NDArray[np.int64] | bool | None = False  # False: not looked up yet

    @classmethod
    def of(cls, tokens: Sequence[int], vocab: int) -> Self:
        """These tokens only."""
        legal = cls(b"", vocab)
        for token in tokens:
            legal._put(token, True)
        return legal

    def changed(self, drop: Sequence[int] = (), add: Sequence[int] = ()) -> Self:
        """A copy without some tokens and with others; those to add win."""
        legal = type(self)(bytes(self._bits), self._vocab)
        for tokens, state in ((drop, False), (add, True)):
            for token in tokens:
                legal._put(token, state)  # noqa: SLF001 - one of us
        return legal

    def _put(self, token: int, state: bool) -> None:
        if not 0 <= token < self._vocab:
            return
        if state:
            self._bits[token // 8] |= 1 << token % 8
        else:
            self._bits[token // 8] &= ~(1 << token % 8)

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self._vocab and bool(self._bits[token // 8] >> token % 8 & 1)

    def __bool__(self) -> bool:
        return any(self._bits)

    @property
    def few(self) -> NDArray[np.int64] | None:
        """The tokens in order when they are at most `FEW`, else None."""
        if isinstance(self._few, bool):
            self._few = self._find_few()
        return self._few

    def _find_few(self) -> NDArray[np.int64] | None:
        words = np.frombuffer(self._bits, dtype="<u8")
        filled = np.flatnonzero(words)
        if len(filled) > FEW:
            return None
        inside = np.unpackbits(words[filled].view(np.uint8), bitorder="little").reshape(-1, 64)
        word, bit = inside.nonzero()
        return filled[word] * 64 + bit if len(word) <= FEW else None

    def masked(self, logits: Tensor) -> Tensor:
        """A row of logits ``[vocab]`` in which every other token has minus infinity; the row itself stays as it is."""
        import torch

        bits = np.frombuffer(self._bits, dtype=np.uint8)
        illegal = np.unpackbits(~bits, bitorder="little", count=self._vocab).view(np.bool_)
        return logits.masked_fill(torch.from_numpy(illegal).to(logits.device), -torch.inf)
