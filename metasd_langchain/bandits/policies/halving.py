"""Sequential halving: a tournament; each phase plays the arms that are left equally often and drops the worse half.

Law: with K arms and a budget of T rounds there are ``ceil(log2 K)`` phases. A phase with S arms left plays each
``floor(T / (S ceil(log2 K)))`` times (at least once), then keeps the ``ceil(S / 2)`` of highest mean. The last one is
played for good.
Reference: Karnin, Koren, Somekh, "Almost Optimal Exploration in Multi-Armed Bandits" (ICML 2013); MetaSD (arXiv
2604.05417), algorithm 4, proposes it to switch drafters less often. Here all rounds of the tournament count towards an
arm's mean, not those of the phase alone, which wastes none.
Trust: published; MetaSD's schedule is not known, so ``rounds`` = 24 is ours (four arms: 3 each, then 6 each).
Prefer it to ``etc`` with many arms, since bad ones cost little, and when switching costs. Like ``etc`` it never looks
back: who is out stays out. An arm that shows up later plays the winner for its place; an arm benched for a while keeps
it; while all that are left are benched, the best of the others stands in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from metasd_langchain.bandits import State
from metasd_langchain.bandits.statistics import Means, read_numbers, read_owner
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["Halving", "create"]


class Halving(Means):
    """Means by arm, rounds of this phase by arm, and who is out; `rounds` is the tournament's length."""

    name = "halving"

    def __init__(self, rounds: float = 24) -> None:
        super().__init__()
        self.rounds = rounds
        self._phase: dict[str, float] = {}
        self._out: set[str] = set()

    def quota(self, left: int) -> int:
        """Rounds of each of the `left` arms in this phase."""
        phases = math.ceil(math.log2(max(2, left + len(self._out))))
        return max(1, math.floor(self.rounds / (left * phases)))

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm with fewest rounds in this phase; the winner has no rival."""
        left = [arm for arm in situation.arms if arm not in self._out]
        if left:
            return Choice(min(left, key=lambda arm: self._phase.get(arm, 0.0)))  # min keeps the first of equals
        return Choice(max(situation.arms, key=self._mean))

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played; when all have their rounds, the worse half goes."""
        super().update(situation, choice, rewards)
        if choice.arm in self._out:
            return
        self._phase[choice.arm] = self._phase.get(choice.arm, 0.0) + 1.0
        left = [arm for arm in situation.arms if arm not in self._out]
        if len(left) > 1 and min(self._phase.get(arm, 0.0) for arm in left) >= self.quota(len(left)):
            ranked = sorted(left, key=self._mean, reverse=True)
            self._out.update(ranked[math.ceil(len(left) / 2) :])
            self._phase = {}

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the counts, and hold the tournament again."""
        super().fade(keep)
        self._phase, self._out = {}, set()

    def dump(self) -> State:
        """The means' state, ``"phase": {arm: rounds}`` and ``"out": [arm, ...]``."""
        return {**super().dump(), "phase": dict(self._phase), "out": sorted(self._out)}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        phase, out = read_numbers(self.name, state, "phase", 0.0), state.get("out")
        if not isinstance(out, list) or not all(isinstance(arm, str) for arm in out):
            raise BanditMemoryError(f"state of policy {self.name!r}: out is not a list of arms")
        super().load(state)
        self._phase, self._out = phase, set(out)

    def _mean(self, arm: str) -> float:
        return self._sums[arm] / self._counts[arm] if arm in self._counts else -math.inf


def create(options: Mapping[str, object]) -> Halving:
    """Options: ``rounds``, length of the tournament (default 24)."""
    return Halving(number("rounds", known_options("policy halving", options, {"rounds": 24})["rounds"], 1, 1e6))
