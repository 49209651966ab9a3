"""NormalHedge with full information: no learning rate at all, and no weight for arms worse than the policy itself.

Law: ``P(i) in proportion to [R_i]+ / c * exp([R_i]+^2 / (2 c))`` with R_i the cumulative regret to arm i, and c such
that the mean of ``exp([R_i]+^2 / (2 c))`` over the arms on offer is e; uniform while no regret is positive.
Reference: Chaudhuri, Freund, Hsu, "A Parameter-Free Hedging Algorithm" (NeurIPS 2009). HedgeSpec, "Not-a-Bandit:
Provably No-Regret Drafter Selection" (arXiv 2510.20064), uses it, with delayed feedback, on the loss ``1 - expected
length / (K + 1)``: the reward ``expected_length``.
Trust: the law was quoted from memory in our notes and is the paper's standard form; HedgeSpec's queue is
``bandits/hindsight.py``, its skipped updates are not done.

**Who gets what.** As ``hedge``: a reward for every arm on offer where it is known; arms whose reward is missing are
left alone; when only the played arm's reward is known though others were on offer, it is importance-weighted (the
played arm loses ``(1 - r) / p``, the others nothing), which is unbiased and learns, without a proof.
Prefer it to ``hedge`` with many arms of which most are bad: those drop out entirely. Like ``hedge`` it does not
depend on the rewards' scale. Regrets may be fed late; they add up in any order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import ClassVar

from metasd_langchain.bandits.statistics import EVERY, Regrets, gains_of
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["NormalHedge", "create"]


class NormalHedge(Regrets):
    """Regrets by arm; nothing to tune. `every`: see ``create``."""

    name = "normalhedge"
    full_information: ClassVar[bool] = True

    def __init__(self, every: int = EVERY) -> None:
        super().__init__()
        self.every = every

    def chances(self, arms: Sequence[str]) -> list[float]:
        """The weights' shares."""
        regrets = [max(0.0, self._regrets.get(arm, 0.0)) for arm in arms]
        top = max(regrets)
        if top <= 0.0:
            return [1.0 / len(arms)] * len(arms)
        squares = [(regret / top) ** 2 for regret in regrets]
        steep = _steepness(squares)
        weights = [math.sqrt(square) * math.exp(steep * (square - 1.0)) for square in squares]
        total = sum(weights)
        return [weight / total for weight in weights]

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit every arm whose reward is known."""
        gains = gains_of(situation, choice, rewards)
        self.credit(rewards)
        if len(gains) > 1:
            self.charge(gains, sum(map(mul, self.chances(tuple(gains)), gains.values())))


def _steepness(squares: Sequence[float]) -> float:
    """The y with ``mean exp(y * square) = e``, the largest square being 1. Newton from above: the mean is convex."""
    count = len(squares)
    guess = 1.0 + math.log(count)  # there the largest alone suffices
    for _ in range(50):
        terms = [math.exp(guess * square) for square in squares]
        excess = sum(terms) - math.e * count
        step = excess / sum(map(mul, squares, terms))
        guess -= step
        if abs(step) < 1e-12:
            break
    return guess


def create(options: Mapping[str, object]) -> NormalHedge:
    """Options: ``every`` (4), rounds between two scorings by drafters that read to score."""
    known = known_options("policy normalhedge", options, {"every": EVERY})
    return NormalHedge(int(number("every", known["every"], 1, 1024)))
