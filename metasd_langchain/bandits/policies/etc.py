"""Explore, then commit: each arm a fixed number of times, then the best of them for good.

Law: while an arm on offer has fewer than ``each`` rounds, the one with fewest; then the arm of highest mean, for ever.
Reference: the baseline of Kim, Jung, Yun, "Multi-Drafter Speculative Decoding with Alignment Feedback" (arXiv
2604.05417): ETC(15), 15 rounds over five drafters, was the best length and came near MetaSD-UCB. ``each`` = 3 is that.
Trust: named in the authors' rebuttal, whose tables are lost; the schedule is the textbook's (Lattimore and
Szepesvari 2020, chapter 6).
Prefer it when switching costs (a drafter with a cache to catch up) and answers have one known length: the best
``each`` depends on it. It never looks back: an arm that turns bad after the trial stays, and an arm unlucky in all
its ``each`` rounds is out. An arm that shows up later gets its trial, and then the choice is made anew. While the arm
is benched the best of the others stands in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from metasd_langchain.bandits import State
from metasd_langchain.bandits.statistics import Means
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["ETC", "create"]


class ETC(Means):
    """Means by arm and the arm committed to ("" = none yet); `each` is the length of an arm's trial."""

    name = "etc"

    def __init__(self, each: float = 3) -> None:
        super().__init__()
        self.each = each
        self._committed = ""

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm on trial with fewest rounds, else the one committed to, else the best."""
        fewest = min(situation.arms, key=self._rounds)  # min and max keep the first of equals
        if self._rounds(fewest) < self.each:
            return Choice(fewest)
        return Choice(self._committed if self._committed in situation.arms else self._best(situation))

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played; the end of a trial is when the choice is made."""
        on_trial = self._rounds(choice.arm) < self.each
        super().update(situation, choice, rewards)
        if (on_trial or not self._committed) and all(self._rounds(arm) >= self.each for arm in situation.arms):
            self._committed = self._best(situation)

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the counts; what that leaves short of a trial is tried again."""
        super().fade(keep)
        self._committed = ""

    def dump(self) -> State:
        """The means' state and ``"committed": arm``."""
        return {**super().dump(), "committed": self._committed}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        committed = state.get("committed", "") if isinstance(state, Mapping) else ""
        if not isinstance(committed, str):
            raise BanditMemoryError(f"state of policy {self.name!r}: committed={committed!r} is not an arm")
        super().load(state)
        self._committed = committed

    def _rounds(self, arm: str) -> float:
        return self._counts.get(arm, 0.0)

    def _best(self, situation: Situation) -> str:
        return max(situation.arms, key=lambda arm: self._sums[arm] / self._counts[arm])


def create(options: Mapping[str, object]) -> ETC:
    """Options: ``each``, rounds of every arm's trial (default 3)."""
    return ETC(number("each", known_options("policy etc", options, {"each": 3})["each"], 1, 1e6))
