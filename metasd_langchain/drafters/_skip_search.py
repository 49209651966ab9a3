"""Which parts of the target to leave out: a search over sets, and whether the best of them pays.

Not a drafter: this module has no ``create``.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

__all__ = ["Costs", "Search", "speed"]

_RANDOM = 12  # sets tried at random before the model is asked
_TRIALS = 48  # sets tried in all
_NOISE = 0.08  # spread of a share of 32 tokens
_EFFECT = 0.1  # how much leaving one part out may cost, by what is believed before


def speed(agreement: float, budget: int, draft: float, verify: float) -> float:
    """Tokens a second of chains of the best length up to `budget`, as a ratio to plain decoding.

    Args:
        agreement: chance that a drafted token is the target's, alike at each place (Leviathan et al. 2023, eq. 1).
        budget: longest chain.
        draft, verify: seconds of a drafted token, and of each further token in the target's forward, as shares of a
            plain step.
    """
    best = 0.0
    tokens = power = 1.0
    for length in range(1, budget + 1):
        power *= agreement
        tokens += power
        best = max(best, tokens / (1.0 + length * (draft + verify)))
    return best


class Costs:
    """Seconds of a plain step, a wider one and a draft step, measured on one thread one after the other."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=9)
        self._wide: deque[float] = deque(maxlen=9)
        self._draft: deque[float] = deque(maxlen=33)

    def note(self, plain: float, wide: float, extra: int) -> None:
        """A plain step, and a forward with `extra` more tokens."""
        self._plain.append(plain)
        self._wide.append(max(0.0, wide - plain) / extra)

    def note_draft(self, seconds: float) -> None:
        """A draft step of one token."""
        self._draft.append(seconds)

    @property
    def known(self) -> bool:
        """Whether `shares` means something."""
        return len(self._plain) >= 3 and len(self._draft) >= 3

    @property
    def shares(self) -> tuple[float, float]:
        """A draft step and a further token as shares of a plain step, by medians."""
        plain = statistics.median(self._plain)
        return statistics.median(self._draft) / plain, statistics.median(self._wide) / plain


class Search:
    """Sets of parts to leave out, all of one size, scored by agreement with what the target generated.

    Random sets first; then Thompson sampling on a linear model (Bayesian regression on "part i is left out"): draw
    effects from their posterior and leave out what they say costs least. Frozen after 48 sets.

    Source: SWIFT (Xia et al. 2024, arXiv 2410.06916) searches at random with Bayesian optimisation now and then; a
    linear model stands in for its Gaussian process: effects of single parts are most of what can be learned from some
    dozens of sets. As there, the first and the last layer stay.

    Args:
        layers: of the target.
        ratio: share of all parts that is left out.
        seed: of the search.
    """

    def __init__(self, layers: int, ratio: float, seed: int) -> None:
        self._free = list(range(2, 2 * layers - 2)) if layers > 2 else []
        self._size = min(len(self._free), round(ratio * 2 * layers))
        self._rng = np.random.default_rng(seed)
        self._rows: list[NDArray[np.float64]] = []
        self._scores: list[float] = []
        self.frozen = not self._size

    @property
    def trials(self) -> int:
        """Sets tried."""
        return len(self._scores)

    @property
    def size(self) -> int:
        """Parts that are left out."""
        return self._size

    @property
    def best_score(self) -> float:
        """Highest agreement seen, 0 before the first."""
        return max(self._scores, default=0.0)

    def suggest(self) -> frozenset[int]:
        """The set to try next."""
        if self.trials < _RANDOM:
            chosen = self._rng.choice(len(self._free), self._size, replace=False)
            return frozenset(self._free[i] for i in chosen)
        mean, spread = self._posterior()
        return self._cheapest(mean + np.linalg.cholesky(spread) @ self._rng.standard_normal(len(mean)))

    def learn(self, parts: frozenset[int], score: float) -> None:
        """A set was tried."""
        self._rows.append(np.array([float(part in parts) for part in self._free]))
        self._scores.append(score)
        self.frozen = self.frozen or self.trials >= _TRIALS

    def best(self) -> frozenset[int]:
        """The set to play: of those tried the one the model expects most of, before any was tried a spread-out one."""
        if not self._size:
            return frozenset()
        if not self._scores:
            places = np.linspace(0, len(self._free) - 1, self._size).round().astype(int)
            return frozenset(self._free[i] for i in places.tolist())
        mean, _ = self._posterior()
        row = max(self._rows, key=lambda row: float(row @ mean))
        return frozenset(part for part, out in zip(self._free, row, strict=True) if out)

    def _cheapest(self, effects: NDArray[np.float64]) -> frozenset[int]:
        return frozenset(self._free[i] for i in np.argsort(-effects, kind="stable")[: self._size])

    def _posterior(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and covariance of the effect that leaving each part out has on the agreement."""
        rows, scores = np.stack(self._rows), np.array(self._scores)
        rows = rows - self._size / len(self._free)
        precision = rows.T @ rows / _NOISE**2 + np.eye(len(self._free)) / _EFFECT**2
        spread = np.linalg.inv(precision)
        return spread @ (rows.T @ (scores - scores.mean())) / _NOISE**2, (spread + spread.T) / 2
