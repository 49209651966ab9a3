"""EXP3Spec of BanditSpec: exponential weights on importance-weighted losses, a rate that falls by itself, no mixing.

Law: ``P(i) in proportion to exp(-eta_t * losses of i)`` with ``eta_t = sqrt(ln K / (t K))`` in round t; the arm played
at probability p loses ``(1 - r) / p``. With BanditSpec's reward Y of 1 to L + 1 tokens, r = (Y - 1) / L gives its
loss ``(L + 1 - Y) / L``. The first draw is uniform; there is no round of forced tries. K = arms on offer.
Reference: Hou et al., "BanditSpec: Adaptive Speculative Decoding via Bandit Algorithms" (ICML 2025, arXiv 2505.15141),
algorithms 5 and 9. The released code holds no EXP3.
Trust: primary text; the root in eta was lost in the copy read and restored after the standard anytime EXP3.
Prefer it to ``exp3`` when no choice has to stay possible, and to reproduce the paper, where it loses to UCBSpec in most
cells by a few percent. Learns from gaps of rewards on [0, 1], so ``throughput`` leaves it near uniform at real lengths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from metasd_langchain.bandits.statistics import Regrets, estimates, softmax
from metasd_langchain.registry import known_options
from metasd_langchain.values import Choice, Situation

__all__ = ["EXP3Spec", "create"]


class EXP3Spec(Regrets):
    """Losses by arm and a falling rate; nothing to tune."""

    name = "exp3spec"

    def rate(self, arms: int) -> float:
        """eta of the coming round among `arms` arms."""
        return math.sqrt(math.log(arms) / ((1.0 + sum(self._counts.values())) * arms))

    def chances(self, arms: Sequence[str]) -> list[float]:
        """The weights' shares."""
        rate = self.rate(len(arms))
        return softmax([rate * self._regrets.get(arm, 0.0) for arm in arms])

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Charge the arm that was played with its loss over its probability."""
        super().update(situation, choice, rewards)
        loss = 1.0 - rewards[choice.arm]
        self.charge(estimates(situation, choice, -loss), -loss)


def create(options: Mapping[str, object]) -> EXP3Spec:
    """No options."""
    known_options("policy exp3spec", options, {})
    return EXP3Spec()
