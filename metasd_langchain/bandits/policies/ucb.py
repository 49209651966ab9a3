"""MetaSD-UCB: optimism in the face of uncertainty, one statistic an arm.

Law: play every arm on offer once, then ``argmax_i mean_i + beta * sqrt(2 ln t / n_i)``, t = rounds learned so far,
n_i = rounds of arm i.
Reference: Kim, Jung, Yun, "Multi-Drafter Speculative Decoding with Alignment Feedback" (arXiv 2604.05417),
Algorithm 2, beta = 0.1 (Auer et al. 2002 with a scaled bonus). The counts are those of each arm; BanditSpec's released
code divides by the total count, which gives every arm the same bonus and is greedy.
Prefer it to reproduce the paper (reward ``bd`` or ``be``, memory "request") and for long answers with nothing to tell
rounds apart. It assumes stationary arms, ignores hints, and spends the first K rounds of every answer on trying. With
``throughput``, whose gaps are small on [0, 1], use a beta of 0.02.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from metasd_langchain.bandits.statistics import Means
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["UCB", "create"]


class UCB(Means):
    """Plain means and counts by arm; `beta` is the strength of exploring."""

    name = "ucb"

    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.beta = beta

    def index(self, arm: str) -> float:
        """The arm's upper confidence bound, inf before its first round."""
        count = self._counts.get(arm, 0.0)
        if count <= 0.0:
            return math.inf
        rounds = max(1.0, sum(self._counts.values()))
        return self._sums[arm] / count + self.beta * math.sqrt(2.0 * math.log(rounds) / count)

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm of highest index; one not yet played comes first."""
        return Choice(max(situation.arms, key=self.index))  # max keeps the first of equals


def create(options: Mapping[str, object]) -> UCB:
    """Options: ``beta``, the strength of exploring, at least 0 (default 0.1)."""
    return UCB(number("beta", known_options("policy ucb", options, {"beta": 0.1})["beta"], 0.0, 1e6))
