"""Sliding-window UCB: MetaSD-UCB on the last rounds only, for arms that switch.

Law: as ``ucb``, with counts and sums over the last ``window`` rounds, whoever played them: an arm not in the window
first, else ``argmax_i mean_i + beta * sqrt(2 ln min(t, window) / n_i)``.
Reference: Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems" (ALT 2011), SW-UCB;
their padding ``B sqrt(xi ln min(t, window) / n_i)`` with B = 1, xi = 0.6 is beta = 0.55. MetaSD names it (appendix H.2)
without numbers, so the defaults are ours.
Trust: formula published and proven; constants ours (beta 0.1 as in ``ucb``; 0.02 for ``throughput``).
Prefer it to ``discounted_ucb`` when changes are sudden: what is older than the window is gone at once, and what is
younger counts in full. Every arm is tried at least once a window, so with many arms take a longer one. An update reads
the whole window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from metasd_langchain.bandits import State
from metasd_langchain.bandits.policies.ucb import UCB
from metasd_langchain.bandits.statistics import read_number, read_owner
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["SlidingUCB", "create"]


class SlidingUCB(UCB):
    """UCB over a window of rounds (arm, reward, evidence); evidence is 1 until it is faded."""

    name = "sliding_ucb"

    def __init__(self, beta: float = 0.1, window: float = 60) -> None:
        super().__init__(beta)
        self.window = int(window)
        self._rounds: deque[tuple[str, float, float]] = deque(maxlen=self.window)

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played; the oldest round leaves."""
        self._rounds.append((choice.arm, rewards[choice.arm], 1.0))
        self._count()

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the evidence of every round in the window (in (0, 1])."""
        self._rounds = deque(((arm, reward, keep * weight) for arm, reward, weight in self._rounds), self.window)
        self._count()

    def dump(self) -> State:
        """``{"policy": name, "rounds": [[arm, reward, evidence], ...]}``, oldest first."""
        return {"policy": self.name, "rounds": [list(row) for row in self._rounds]}

    def load(self, state: State) -> None:
        """Replace the window by a dumped one; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        rows = state.get("rounds")
        if not isinstance(rows, list):
            raise BanditMemoryError(f"state of policy {self.name!r}: rounds is not a list")
        self._rounds = deque((self._read(row) for row in rows), self.window)
        self._count()

    def _read(self, row: object) -> tuple[str, float, float]:
        if not isinstance(row, (list, tuple)) or len(row) != 3 or not isinstance(row[0], str):
            raise BanditMemoryError(f"state of policy {self.name!r}: {row!r} is not an arm, a reward and its evidence")
        fields = {"reward": row[1], "evidence": row[2]}
        return row[0], read_number(self.name, fields, "reward"), read_number(self.name, fields, "evidence", 1e-12)

    def _count(self) -> None:
        """Counted anew each time: sums that are added to and taken from would drift, and differ after a load."""
        counts: dict[str, float] = {}
        sums: dict[str, float] = {}
        for arm, reward, weight in self._rounds:
            counts[arm] = counts.get(arm, 0.0) + weight
            sums[arm] = sums.get(arm, 0.0) + weight * reward
        self._counts, self._sums = counts, sums


def create(options: Mapping[str, object]) -> SlidingUCB:
    """Options: ``beta``, the strength of exploring (default 0.1); ``window``, in rounds (default 60)."""
    known = known_options("policy sliding_ucb", options, {"beta": 0.1, "window": 60})
    return SlidingUCB(number("beta", known["beta"], 0.0, 1e6), number("window", known["window"], 1, 10_000))
