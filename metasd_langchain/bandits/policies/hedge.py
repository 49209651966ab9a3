"""Hedge with full information: every round scores every arm, so nothing has to be explored.

Law: ``P(i) in proportion to exp(eta * gains of i)``. ``rate`` > 0 is a fixed eta; ``rate`` = 0 (default) tunes it as
AdaHedge does: ``eta = ln K / (mixability gaps so far)``, where a round's gap is ``ln(sum P_i exp(eta r_i)) / eta - sum
P_i r_i``; before the first gap the leaders share. AdaHedge's choices do not depend on the rewards' scale, so it suits
``throughput`` as well as ``expected_length``.
Reference: Freund and Schapire 1997 (Hedge); de Rooij, van Erven, Grunwald, Koolen, "Follow the Leader If You Can, Hedge
If You Must" (JMLR 2014, AdaHedge). For drafters: HedgeSpec, "Not-a-Bandit: Provably No-Regret Drafter Selection" (arXiv
2510.20064), which scores all drafters on the verified text, with the loss ``1 - expected length / (K + 1)``: the reward
``expected_length``.
Trust: laws published and proven; HedgeSpec's eta is not known, so the tuning is ours.

**Who gets what.** ``update`` takes a reward for every arm on offer where it is known: the engine estimates it by how
drafters score what was committed (``bandits/hindsight.py``). Arms whose reward is missing (of a drafter that cannot
score, unless it played) are left alone (they stand still against the policy's own gain on the known ones, as absent
experts do). When only the played arm's reward is known though others were on offer (no drafter of the pool can score),
that is bandit feedback, and it is importance-weighted: the played arm loses ``(1 - r) / p``, the others nothing. That
is unbiased and learns about as fast as ``exp3spec`` does (0.95 against 0.88 of rounds 101 to 200 on the best of four
coins, 0.8 against 0.2), but the proof does not cover it.
Prefer Hedge where drafters can be scored cheaply on accepted text; regret grows with ln K instead of K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import mul
from typing import ClassVar

from metasd_langchain.bandits import State
from metasd_langchain.bandits.statistics import EVERY, Regrets, gains_of, read_number, read_owner, softmax
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import Choice, Situation

__all__ = ["Hedge", "create"]


class Hedge(Regrets):
    """Regrets by arm and the mixability gaps so far; `rate` 0 tunes itself, `every` see ``create``."""

    name = "hedge"
    full_information: ClassVar[bool] = True

    def __init__(self, rate: float = 0.0, every: int = EVERY) -> None:
        super().__init__()
        self.rate, self.every = rate, every
        self._gaps = 0.0

    def eta(self, arms: int) -> float:
        """The learning rate among `arms` arms; inf before the first gap."""
        if self.rate > 0.0:
            return self.rate
        return math.log(arms) / self._gaps if self._gaps > 0.0 else math.inf

    def chances(self, arms: Sequence[str]) -> list[float]:
        """The weights' shares; at an infinite rate the leaders share."""
        regrets = [self._regrets.get(arm, 0.0) for arm in arms]
        top, eta = max(regrets), self.eta(len(arms))
        if math.isinf(eta):
            leaders = regrets.count(top)
            return [1.0 / leaders if regret == top else 0.0 for regret in regrets]
        return softmax([eta * (regret - top) for regret in regrets])

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit every arm whose reward is known."""
        gains = gains_of(situation, choice, rewards)
        self.credit(rewards)
        if len(gains) < 2:
            return  # an arm alone has nothing to be compared with
        arms, earned = tuple(gains), tuple(gains.values())
        chances, eta = self.chances(arms), self.eta(len(arms))
        own = sum(map(mul, chances, earned))
        before = max(self._regrets.get(arm, 0.0) for arm in arms) if math.isinf(eta) else 0.0
        self.charge(gains, own)
        if math.isinf(eta):
            gap = max(self._regrets[arm] for arm in arms) - before
        else:
            gap = _mixed(chances, earned, eta) - own
        self._gaps += max(0.0, gap)

    def fade(self, keep: float) -> None:
        """Keep the means and the chances, with `keep` times the evidence (in (0, 1])."""
        super().fade(keep)
        self._gaps *= keep

    def dump(self) -> State:
        """The regrets' state and ``"gaps"``."""
        return {**super().dump(), "gaps": self._gaps}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        gaps = read_number(self.name, state, "gaps")
        super().load(state)
        self._gaps = gaps


def _mixed(chances: Sequence[float], gains: Sequence[float], eta: float) -> float:
    """``ln(sum P exp(eta gain)) / eta``, without overflow."""
    live = [(chance, gain) for chance, gain in zip(chances, gains, strict=True) if chance > 0.0]
    top = max(gain for _, gain in live)
    return top + math.log(sum([chance * math.exp(eta * (gain - top)) for chance, gain in live])) / eta


def create(options: Mapping[str, object]) -> Hedge:
    """Options: ``rate``, a fixed learning rate; 0 tunes itself (default).

    ``every`` (4): rounds between two scorings by drafters that read to score.
    """
    known = known_options("policy hedge", options, {"rate": 0.0, "every": EVERY})
    return Hedge(number("rate", known["rate"], 0.0, 1e6), int(number("every", known["every"], 1, 1024)))
