"""What policies keep: plain means by arm, and how stored states are read back.

What was dumped must have the shape that was promised, or a BanditMemoryError says what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from metasd_langchain.bandits import State
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.values import Choice, Situation

__all__ = ["Means", "read_number", "read_owner", "read_table"]


class Means:
    """Count and sum of rewards by arm: the statistics of every stationary policy. A policy adds ``select``."""

    name: str = ""
    full_information: ClassVar[bool] = False

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._sums: dict[str, float] = {}

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played."""
        self._counts[choice.arm] = self._counts.get(choice.arm, 0.0) + 1.0
        self._sums[choice.arm] = self._sums.get(choice.arm, 0.0) + rewards[choice.arm]

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


def read_table(policy: str, state: Mapping[str, object], field: str) -> dict[str, Mapping[str, object]]:
    """A mapping from names to mappings."""
    table = state.get(field)
    if not isinstance(table, Mapping) or not all(
        isinstance(key, str) and isinstance(row, Mapping) for key, row in table.items()
    ):
        raise BanditMemoryError(f"state of policy {policy!r}: {field} is not a table by name")
    return dict(table)
