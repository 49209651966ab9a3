"""Thompson sampling with Gaussian beliefs: an arm is played as often as it is likely to be the best.

Law: every arm once; then ``theta_i ~ N(mean_i, s^2 / n_i)`` and the arm of highest theta. ``s^2`` is the variance of
rewards around their arm's mean, one for all arms: ``(spread^2 + sum of squares) / (1 + sum of (n_i - 1))``.
Reference: Thompson 1933; Agrawal and Goyal, "Further Optimal Regret Bounds for Thompson Sampling" (AISTATS 2013) for
Gaussian beliefs, there with s = 1. TapOut (arXiv 2511.02017) uses Thompson sampling to choose stopping rules.
Trust: law published; estimating s is ours, and gives up the proof that holds for a known s.
Gaussian, not Beta: Beta beliefs take each reward on [0, 1] for a coin, so they see a spread of ``sqrt(m (1 - m))``
whatever it is. ``throughput`` has means near 0.08 and a spread near 0.03: a coin's would be 0.27, and exploring would
take 80 times the rounds. Measuring s fits any reward, coins too.
Prefer it when several keys or rows learn at once (a random choice does not send all to one arm), and for logs: the
choice carries its probability, computed to about 0.02. Stationary: evidence does not age.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from metasd_langchain.bandits import State
from metasd_langchain.bandits.statistics import Means, read_numbers, read_owner
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["Thompson", "create"]

_VALUES = 8
_NODES = tuple(NormalDist().inv_cdf((at + 0.5) / _VALUES) for at in range(_VALUES))  # equally likely values of a belief
_LEAST_CHANCE = 1e-4  # the sum over so few nodes knows no smaller ones


class Thompson(Means):
    """Means, counts and sums of squares by arm; `spread` is the guess of s before there is evidence."""

    name = "thompson"

    def __init__(self, spread: float = 0.1) -> None:
        super().__init__()
        self.spread = spread
        self._squares: dict[str, float] = {}

    def variance(self) -> float:
        """s^2, pooled over the arms."""
        total, freedom = self.spread * self.spread, 1.0
        for arm, count in self._counts.items():
            total += max(0.0, self._squares[arm] - self._sums[arm] * self._sums[arm] / count)
            freedom += max(0.0, count - 1.0)
        return total / freedom

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm of highest draw; one not yet played comes first."""
        arms = situation.arms
        for arm in arms:
            if arm not in self._counts:
                return Choice(arm)
        variance = self.variance()
        beliefs = [(self._sums[arm] / self._counts[arm], math.sqrt(variance / self._counts[arm])) for arm in arms]
        draws = rng.standard_normal(len(arms)).tolist()
        thetas = [mean + deviation * at for (mean, deviation), at in zip(beliefs, draws, strict=True)]
        best = thetas.index(max(thetas))
        return Choice(arms[best], _chance(beliefs, best))

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played."""
        super().update(situation, choice, rewards)
        reward = rewards[choice.arm]
        self._squares[choice.arm] = self._squares.get(choice.arm, 0.0) + reward * reward

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the counts (in (0, 1])."""
        super().fade(keep)
        self._squares = {arm: keep * total for arm, total in self._squares.items()}

    def dump(self) -> State:
        """The means' state and ``"squares": {arm: sum of squared rewards}``."""
        return {**super().dump(), "squares": dict(self._squares)}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        squares = read_numbers(self.name, state, "squares", 0.0)
        super().load(state)
        self._squares = {arm: squares.get(arm, 0.0) for arm in self._counts}


def _chance(beliefs: list[tuple[float, float]], best: int) -> float:
    """Probability that belief `best` draws the highest value: the mean over its values of all others lying below."""
    mean, deviation = beliefs[best]
    lowest = mean + deviation * _NODES[0]
    others = [
        (other, 1.0 / (math.sqrt(2.0) * wide))
        for at, (other, wide) in enumerate(beliefs)
        if at != best and lowest - other < 3.0 * wide  # who never reaches that high changes nothing
    ]
    total, erf = 0.0, math.erf
    for node in _NODES:
        value, product = mean + deviation * node, 1.0
        for other, steep in others:
            product *= 0.5 + 0.5 * erf((value - other) * steep)
        total += product
    return max(_LEAST_CHANCE, total / len(_NODES))


def create(options: Mapping[str, object]) -> Thompson:
    """Options: ``spread``, rewards' standard deviation before any is seen, above 0 (default 0.1)."""
    known = known_options("policy thompson", options, {"spread": 0.1})
    return Thompson(number("spread", known["spread"], 1e-6, 1e6))
