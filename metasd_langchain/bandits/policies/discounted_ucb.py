"""Discounted UCB: MetaSD-UCB on evidence that fades, for arms that change.

Law: every round multiplies all counts and sums by ``gamma``; then, as ``ucb``, an arm without evidence first, else
``argmax_i mean_i + beta * sqrt(2 ln n / n_i)`` with the discounted counts ``n_i`` and their sum ``n``.
Reference: Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems" (ALT 2011), D-UCB;
their padding ``2 B sqrt(xi ln n / n_i)`` with B = 1, xi = 0.6 is beta = 1.1. MetaSD names it for non-stationary text
(appendix H.2) without numbers, so the defaults are ours: gamma 0.97 is a memory of 33 rounds.
Trust: formula published and proven; constants ours (beta 0.1 as in ``ucb``; 0.02 for ``throughput``).
Prefer it when an arm may turn bad within an answer or a long-lived key and there are no hints; ``hinted_ucb`` forgets
by surprise and is the better choice where hints exist. The price is exploring for ever: an arm unseen for some ``1 /
(1 - gamma)`` rounds is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping

from metasd_langchain.bandits import State
from metasd_langchain.bandits.policies.ucb import UCB
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["DiscountedUCB", "create"]

_NOTHING_LEFT = 1e-9  # of a round: the arm counts as never played


class DiscountedUCB(UCB):
    """UCB whose evidence loses ``1 - gamma`` each round."""

    name = "discounted_ucb"

    def __init__(self, beta: float = 0.1, gamma: float = 0.97) -> None:
        super().__init__(beta)
        self.gamma = gamma

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Fade everything, then credit the arm that was played."""
        self.fade(self.gamma)
        for arm in [arm for arm, count in self._counts.items() if count < _NOTHING_LEFT]:
            del self._counts[arm], self._sums[arm]
        super().update(situation, choice, rewards)

    def dump(self) -> State:
        """The means' state and ``"gamma"``, which tells whoever joins states that these counts cannot be added up."""
        return {**super().dump(), "gamma": self.gamma}


def create(options: Mapping[str, object]) -> DiscountedUCB:
    """Options: ``beta``, the strength of exploring (default 0.1); ``gamma``, what a round leaves (default 0.97)."""
    known = known_options("policy discounted_ucb", options, {"beta": 0.1, "gamma": 0.97})
    return DiscountedUCB(number("beta", known["beta"], 0.0, 1e6), number("gamma", known["gamma"], 0.5, 1.0))
