"""Always the same arm: the baseline that any bandit has to beat.

Law: ``a_t = arm``; probability 1. While the arm is not on offer (benched), the first arm that is.
Prefer it when one drafter is known to win, and for measuring an arm by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metasd_langchain.bandits.statistics import Means
from metasd_langchain.errors import BadOption
from metasd_langchain.registry import known_options
from metasd_langchain.values import Choice, Situation

__all__ = ["Fixed", "create"]


class Fixed(Means):
    """Plays `arm` ("" = the first on offer); keeps means for display only."""

    name = "fixed"

    def __init__(self, arm: str = "") -> None:
        super().__init__()
        self.arm = arm

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm, else the first on offer."""
        return Choice(self.arm if self.arm in situation.arms else situation.arms[0])


def create(options: Mapping[str, object]) -> Fixed:
    """Options: ``arm``, its name (default: the first on offer)."""
    arm = known_options("policy fixed", options, {"arm": ""})["arm"]
    if not isinstance(arm, str):
        raise BadOption("arm", arm, "the name of an arm")
    return Fixed(arm)
