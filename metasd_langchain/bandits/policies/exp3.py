"""EXP3: exponential weights on importance-weighted rewards, mixed with uniform exploration; proven against any arms.

Law: ``P(i) = (1 - gamma) * w_i / sum w + gamma / K``; the arm played at probability p gains ``r / p``, and
``w_i = exp(gamma / K * gains of i)``; K = arms on offer.
Reference: Auer, Cesa-Bianchi, Freund, Schapire, "The Nonstochastic Multiarmed Bandit Problem" (SIAM J. Comput. 2002),
Exp3. MetaSD compares an EXP3 whose constants are not known, finds UCB better, and a reviewer found it near random.
Trust: formula published and proven; gamma ours (0.2: about what the published tuning gives for four arms and 100 to
200 rounds).
Prefer it for logs to learn from (every choice carries a probability of at least gamma / K) and as the cautious
baseline. A share gamma of all rounds goes to chance for ever, and gaps as small as those of ``throughput`` need
thousands of rounds: use it with ``be``, ``bd`` or ``length``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metasd_langchain.bandits.statistics import Regrets, estimates, softmax
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["EXP3", "create"]


class EXP3(Regrets):
    """Weights by arm; `gamma` is both the share of uniform draws and the learning rate."""

    name = "exp3"

    def __init__(self, gamma: float = 0.2) -> None:
        super().__init__()
        self.gamma = gamma

    def chances(self, arms: Sequence[str]) -> list[float]:
        """The weights' shares, mixed with the uniform ones."""
        even = self.gamma / len(arms)
        weights = softmax([even * self._regrets.get(arm, 0.0) for arm in arms])
        return [(1.0 - self.gamma) * weight + even for weight in weights]

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the arm that was played with its reward over its probability."""
        super().update(situation, choice, rewards)
        reward = rewards[choice.arm]
        self.charge(estimates(situation, choice, reward), reward)


def create(options: Mapping[str, object]) -> EXP3:
    """Options: ``gamma``, share of uniform draws and learning rate, in (0, 1] (default 0.2)."""
    return EXP3(number("gamma", known_options("policy exp3", options, {"gamma": 0.2})["gamma"], 1e-6, 1.0))
