"""Scoring of all drafters on what is committed, for policies with full information (``bandits/hindsight.py``).

Drafters without weights are asked every round, before they observe it: it costs a look into a table. Drafters that have
to read are asked every few rounds, in one read of everything committed since, which they need to catch up anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from metasd_langchain.bandits.selector import Seat
from metasd_langchain.engine.sessions import Sessions

__all__ = ["Scoring"]


class Scoring:
    """One answer's.

    Args:
        sessions: whose drafters are asked.
        seat: what learns from it.
        drafters: those that score -> whether they do so after they observed.
        prompt: tokens of the prompt.
        every: rounds between two reads.
        drawn: whether tokens are drawn; else each is the most likely one.
    """

    def __init__(
        self, sessions: Sessions, seat: Seat, drafters: Mapping[str, bool], prompt: int, every: int, *, drawn: bool
    ) -> None:
        self._sessions, self._seat = sessions, seat
        self._early = [name for name, late in drafters.items() if not late]
        self._late = [name for name, late in drafters.items() if late]
        self._prompt, self._every, self._drawn = prompt, every, drawn
        self._chances: list[float] = []  # p of tokens that late drafters have not scored yet
        self._rounds, self._read = 0, prompt  # rounds so far; tokens that late drafters have been asked about
        self.seconds = 0.0  # in this round

    def foresee(self, tokens: Sequence[int], fresh: int, chance: Callable[[int], float]) -> None:
        """Ask those that score ahead. Before sessions observe the round.

        Args:
            tokens: prompt and answer.
            fresh: how many of them the round committed.
            chance: the target's probability of the fresh token at a place, counted from 0.
        """
        began = time.perf_counter()
        start = len(tokens) - fresh
        chances = [chance(place) for place in range(fresh)] if self._drawn and self._late else None
        self._chances += chances or ()
        for name in self._early:
            scores = self._sessions.score(name, tokens, start)
            if scores is not None and self._drawn and any(0.0 < score < 1.0 for score in scores):
                chances = chances or [chance(place) for place in range(fresh)]
            self._hear(name, scores, chances, fresh)
        self.seconds = time.perf_counter() - began

    def look_back(self, tokens: Sequence[int], *, ended: bool) -> None:
        """Ask those that read, when it is time, and credit what is known. After sessions observed the round.

        Args:
            tokens: prompt and answer.
            ended: whether the answer is complete.
        """
        began = time.perf_counter()
        self._rounds += 1
        if ended or self._rounds % self._every == 0:
            for name in self._late:
                scores = self._sessions.score(name, tokens, self._read)
                self._hear(name, scores, self._chances if self._drawn else None, len(tokens) - self._read)
            self._chances = []
            self._read = len(tokens)
        self._seat.settle(len(tokens) - self._prompt if ended else None)
        self.seconds += time.perf_counter() - began

    def _hear(self, name: str, scores: Sequence[float] | None, chances: Sequence[float] | None, count: int) -> None:
        if scores is None:
            self._seat.hear(name, [math.nan] * count)
            return
        sure = chances or [1.0] * count  # greedy: the target takes no other token
        self._seat.hear(name, [_taken(score, chance) for score, chance in zip(scores, sure, strict=True)])


def _taken(score: float, chance: float) -> float:
    """``min(1, q / p)``; nan stays nan."""
    if score >= chance:
        return 1.0 if score > 0.0 else 0.0
    return score / chance if chance > 0.0 else score
