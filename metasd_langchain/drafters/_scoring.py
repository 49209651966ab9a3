"""How a drafter without weights scores committed tokens: by asking itself what it would have drafted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.drafters import Draws
from metasd_langchain.values import Draft

__all__ = ["guessed"]


class _NoDraws:
    def gumbel(self, position: int, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        return np.zeros(len(tokens))


def guessed(propose: Callable[[Sequence[int], int, Draws], Draft], tokens: Sequence[int], start: int) -> list[float]:
    """1 where the first guess after the tokens before is the token, else 0; of each of ``tokens[start:]``.

    For sessions whose `propose` changes nothing. They know no more than when they drafted: the tokens are those of the
    round that is about to be observed, as forced ones are when a grammar puts them in front.
    """
    text, draws, found = list(tokens[:start]), _NoDraws(), list[float]()
    for token in tokens[start:]:
        found.append(1.0 if propose(text, 1, draws).tokens[:1] == (token,) else 0.0)
        text.append(token)
    return found
