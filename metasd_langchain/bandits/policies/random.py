"""Uniformly at random: the floor, and the way to collect unbiased logs.

Law: ``P(a_t = i) = 1 / K`` over the K arms on offer; the probability travels in the choice, so logged rounds can be
re-weighted for any other policy (inverse propensity scoring). Prefer it for measuring only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metasd_langchain.bandits.statistics import Means
from metasd_langchain.registry import known_options
from metasd_langchain.values import Choice, Situation

__all__ = ["Random", "create"]


class Random(Means):
    """Draws every arm equally often; keeps means for display only."""

    name = "random"

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """One uniform draw."""
        count = len(situation.arms)
        return Choice(situation.arms[int(rng.integers(count))], 1.0 / count)


def create(options: Mapping[str, object]) -> Random:
    """No options."""
    known_options("policy random", options, {})
    return Random()
