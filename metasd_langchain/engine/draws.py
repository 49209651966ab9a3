"""Counter-based randomness: every number is a hash of (seed, completion, position, token), none depends on history.

So the token of a position is fixed before anything is drafted, whichever drafter, tree, batch or chunking is used.
The mixing function is SplitMix64's finaliser (Steele, Lea, Flood 2014), a bijection with full avalanche.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draws"]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(z: int) -> int:
    z = (z + _STEP) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


def _mix_array(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed


class Draws:
    """The randomness of one answer.

    Args:
        seed: any integer.
        completion: which of several answers to one prompt.
    """

    # Streams keep numbers of different use apart; tokens of a position use stream 0.
    SPLIT, TAIL, RESIDUAL, ACCEPT = 1, 2, 3, 4

    def __init__(self, seed: int, completion: int = 0) -> None:
        key = 0
        for part in (seed, seed >> 64, completion):  # nested, so that swapped or equal parts do not cancel
            key = _mix(key ^ _mix(part & _MASK))
        self._key = key

    def _at(self, position: int, stream: int) -> int:
        return _mix(self._key ^ _mix(((position << 8) | stream) & _MASK))

    def uniform(self, position: int, stream: int, trial: int = 0) -> float:
        """A number in (0, 1) for a position of the answer."""
        z = _mix(self._at(position, stream) ^ _mix(trial & _MASK))
        return ((z >> 12) + 0.5) / (1 << 52)  # 52 bits: with 53 the largest would round to 1

    def gumbel(self, position: int, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Standard Gumbel noise of the given tokens at a position: ``-log(-log(u))``."""
        ids = np.asarray(tokens, dtype=np.uint64)
        z = _mix_array(_mix_array(ids) ^ np.uint64(self._at(position, 0)))
        u = ((z >> np.uint64(12)).astype(np.float64) + 0.5) / (1 << 52)
        noise: NDArray[np.float64] = -np.log(-np.log(u))
        return noise
