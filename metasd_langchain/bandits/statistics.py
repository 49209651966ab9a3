"""What policies keep: plain means by arm, regrets by arm, and how stored states are read back.

What was dumped must have the shape that was promised, or a BanditMemoryError says what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from metasd_langchain.bandits import State
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.values import Choice, Situation

__all__ = [
    "EVERY",
    "Means",
    "Regrets",
    "draw",
    "estimates",
    "gains_of",
    "read_number",
    "read_numbers",
    "read_owner",
    "read_table",
    "softmax",
]

EVERY = 4  # rounds between two scorings by drafters that read to score, for policies that do not say


class Means:
    """Count and sum of rewards by arm: the statistics of every stationary policy. A policy adds ``select``."""

    name: str = ""
    full_information: ClassVar[bool] = False

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played."""
        self.credit({choice.arm: rewards[choice.arm]})

    def credit(self, rewards: Mapping[str, float]) -> None:
        """Count one round of every arm in `rewards`."""
        for arm, reward in rewards.items():
            self._counts[arm] = self._counts.get(arm, 0.0) + 1.0
            self._sums[arm] = self._sums.get(arm, 0.0) + reward

    def values(self) -> Mapping[str, float]:
        """Mean reward of every arm played so far."""
        return {arm: self._sums[arm] / count for arm, count in self._counts.items()}

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the counts (in (0, 1])."""
        self._counts = {arm: keep * count for arm, count in self._counts.items()}
        self._sums = {arm: keep * total for arm, total in self._sums.items()}

    def dump(self) -> State:
        """``{"policy": name, "arms": {arm: {"count", "sum"}}}``."""
        arms = {arm: {"count": count, "sum": self._sums[arm]} for arm, count in self._counts.items()}
        return {"policy": self.name, "arms": arms}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        rows = read_table(self.name, state, "arms")
        counts = {arm: read_number(self.name, row, "count", 1e-12) for arm, row in rows.items()}
        sums = {arm: read_number(self.name, row, "sum") for arm, row in rows.items()}
        self._counts, self._sums = counts, sums


class Regrets(Means):
    """Cumulative regret by arm, for policies that draw from weights. A policy adds ``chances`` and ``update``.

    Regret is the arm's gain less the policy's own, summed over the rounds that had the arm on offer. While the same
    arms are on offer it orders and weighs them as cumulative gains would; an arm that comes late starts where the
    policy itself stands, neither lost behind the others' past nor owed a past of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._regrets: dict[str, float] = {}

    def chances(self, arms: Sequence[str]) -> list[float]:
        """Probability of each of `arms`; their sum is 1."""
        raise NotImplementedError

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """One draw from the chances; uses one random number."""
        return draw(situation.arms, self.chances(situation.arms), rng)

    def charge(self, gains: Mapping[str, float], own: float) -> None:
        """Add a round: `gains` of the arms it told about, `own` gain of the policy."""
        for arm, gain in gains.items():
            self._regrets[arm] = self._regrets.get(arm, 0.0) + gain - own

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the counts and regrets (in (0, 1])."""
        super().fade(keep)
        self._regrets = {arm: keep * regret for arm, regret in self._regrets.items()}

    def dump(self) -> State:
        """The means' state and ``"regrets": {arm: number}``."""
        return {**super().dump(), "regrets": dict(self._regrets)}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        regrets = read_numbers(self.name, state, "regrets")
        super().load(state)
        self._regrets = regrets


def estimates(situation: Situation, choice: Choice, gain: float) -> dict[str, float]:
    """Unbiased gains of all arms on offer from that of the one played: ``gain / probability``, 0 for the others."""
    return {arm: gain / choice.probability if arm == choice.arm else 0.0 for arm in situation.arms}


def gains_of(situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> dict[str, float]:
    """What a full-information policy learns from: the rewards of arms on offer, where known.

    The played arm's alone, with others on offer, is bandit feedback: its loss ``1 - reward`` is importance-weighted.
    """
    if len(situation.arms) > 1 and rewards.keys() == {choice.arm}:
        return estimates(situation, choice, rewards[choice.arm] - 1.0)
    return {arm: rewards[arm] for arm in situation.arms if arm in rewards}


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities in proportion to ``exp(score)``."""
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def draw(arms: Sequence[str], chances: Sequence[float], rng: np.random.Generator) -> Choice:
    """One arm by its chance, which travels in the choice. An arm without a chance is never drawn."""
    mark = rng.random()
    for arm, chance in zip(arms, chances, strict=True):
        mark -= chance
        if mark < 0.0:
            return Choice(arm, min(1.0, chance))
    chance, at = max((chance, -at) for at, chance in enumerate(chances))  # rounding left a rest of the mark
    return Choice(arms[-at], min(1.0, chance))


def read_owner(policy: str, state: State) -> None:
    """Check that `state` was dumped by `policy`."""
    if not isinstance(state, Mapping):
        raise BanditMemoryError(f"state of policy {policy!r} is a {type(state).__name__}, expected a mapping")
    if state.get("policy") != policy:
        raise BanditMemoryError(f"state of policy {state.get('policy')!r} cannot be loaded into policy {policy!r}")


def read_number(policy: str, state: Mapping[str, object], field: str, low: float = 0.0) -> float:
    """A finite number of at least `low`."""
    value = state.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < low:
        raise BanditMemoryError(f"state of policy {policy!r}: {field}={value!r} is not a number of at least {low:g}")
    return float(value)


def read_numbers(policy: str, state: Mapping[str, object], field: str, low: float = -math.inf) -> dict[str, float]:
    """A mapping from names to finite numbers of at least `low`."""
    table = state.get(field)
    if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
        raise BanditMemoryError(f"state of policy {policy!r}: {field} is not a table by name")
    return {key: read_number(policy, table, key, low) for key in table}


def read_table(policy: str, state: Mapping[str, object], field: str) -> dict[str, Mapping[str, object]]:
    """A mapping from names to mappings."""
    table = state.get(field)
    if not isinstance(table, Mapping) or not all(
        isinstance(key, str) and isinstance(row, Mapping) for key, row in table.items()
    ):
        raise BanditMemoryError(f"state of policy {policy!r}: {field} is not a table by name")
    return dict(table)
