"""What a round was worth. A reward is a function of an ``Outcome`` with a declared range.

``throughput`` (default) ranks arms of any budget against not speculating at all; ``bd`` and ``be`` are MetaSD's and
rank drafters of one common budget (arXiv 2604.05417, section 4; see also Kim et al., "A Unified Framework for
Speculative Decoding with Multiple Drafters as a Bandit"); ``length`` (BanditSpec's, arXiv 2505.15141) and
``expected_length`` (HedgeSpec's estimator of it, arXiv 2510.20064) rank arms of any budget by tokens a round, whatever
a round costs: plain, worth 1, is their floor.

**Range and map.** Policies want rewards in [0, 1]. The map is linear, ``(r - low) / (high - low)``, since a bandit
compares *means*: a bent map such as ``r / (1 + r)`` would rank a steady arm over a better one that varies (the mean of
a concave function). The price of a linear map is resolution, which a policy pays by measuring its exploration against
the spread it sees (``hinted_ucb``) or by a smaller constant (``ucb``).

**p and q under greedy decoding.** The papers do not say how they are formed. Here: p is the target's softmax at the
request's temperature, or at temperature 1 when it is greedy (one-hot p would reduce ``bd`` to a match indicator, as
sparse as ``be``); q is the drafter's own distribution, or a point mass for a drafter that offers tokens only, for which
1 - TV(p, q) = p(token). Positions past a rejection count too: their p is conditioned on the draft's own prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from metasd_langchain.errors import BadOption
from metasd_langchain.values import Outcome

__all__ = ["BD", "BE", "EXPECTED_LENGTH", "LENGTH", "REWARDS", "THROUGHPUT", "Reward", "expected_length"]

_SLACK = 1e-6  # rounding of sums of probabilities, relative to the range


@dataclass(frozen=True, slots=True)
class Reward:
    """A number for a round.

    Attributes:
        name: its registered name.
        low, high: declared range; ``low < high``.
        needs_agreement: whether ``Outcome.agreement`` must be filled (it costs a pass over the vocabulary a node).
        function: from an outcome to a number in [low, high].
    """

    name: str
    low: float
    high: float
    needs_agreement: bool
    function: Callable[[Outcome], float]

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise BadOption(f"range of reward {self.name!r}", (self.low, self.high), "low < high")

    def __call__(self, outcome: Outcome) -> float:
        """The reward in its own units. Outside the declared range: BadOption naming the reward."""
        if self.needs_agreement and len(outcome.agreement) != outcome.drafted:
            expected = f"{outcome.drafted} values, one a drafted node"
            raise BadOption(f"agreement for reward {self.name!r}", outcome.agreement, expected)
        value = float(self.function(outcome))
        slack = _SLACK * (self.high - self.low)
        if not self.low - slack <= value <= self.high + slack:  # nan fails too
            raise BadOption(f"reward {self.name!r}", value, f"its declared range {self.low:g} to {self.high:g}")
        return min(self.high, max(self.low, value))

    def rescaled(self, value: float) -> float:
        """`value`, in the reward's units, mapped linearly from [low, high] to [0, 1]."""
        return (value - self.low) / (self.high - self.low)


def _throughput(outcome: Outcome) -> float:
    """Tokens a second relative to a plain step: ``committed * plain_s / (draft_s + score_s)``; 1 = plain.

    The mean of this ratio is what each stretch of text is decoded at, if the stretch is decoded with this arm: tokens
    have to be produced wherever they are cheap or dear, so arms are ranked by local rate.
    """
    seconds = outcome.draft_s + outcome.score_s
    if seconds <= 0.0 or outcome.plain_s <= 0.0:  # nothing was timed: count forwards instead
        return min(_HIGH, float(outcome.committed))
    return min(_HIGH, outcome.committed * outcome.plain_s / seconds)


def _block_divergence(outcome: Outcome) -> float:
    """MetaSD eq. of r^BD: the mean of 1 - TV(p, q) over the budget's positions.

    A position of the budget that was not drafted counts 0: a drafter that keeps silent agrees with nothing, and one
    sure token must not beat eight good ones. For a drafter that fills its budget the mean is the acceptance rate
    whatever the budget. Nodes of a tree count as positions. Plain gives 0.
    """
    return sum(outcome.agreement) / outcome.budget if outcome.budget else 0.0


def _block_efficiency(outcome: Outcome) -> float:
    """MetaSD's r^BE: accepted draft tokens over the budget. Plain gives 0."""
    return outcome.accepted / outcome.budget if outcome.budget else 0.0


def _length(outcome: Outcome) -> float:
    """BanditSpec's Y: tokens the round committed, correction or bonus included. Plain gives 1.

    In tokens, not as a share of the arm's own budget: by such a share plain would always earn all it can, and 2 of 2
    drafted tokens would beat 8 of 16. The map to [0, 1] divides by one length for all arms, as BanditSpec's L + 1 does.
    """
    return min(_LONGEST, float(outcome.committed))


def expected_length(agreement: Sequence[float]) -> float:
    """Expected tokens of a round, the target's own included: ``1 + g_1 + g_1 g_2 + ...``, g by drafted token."""
    total = reach = 1.0
    for share in agreement:
        reach *= share
        total += reach
    return total


def _expected_length(outcome: Outcome) -> float:
    """HedgeSpec's estimate of ``length`` for the row: ``sum over k of k (1 - g_k) g_1 ... g_{k-1}`` up to the bonus
    token (g = 0 there), which is ``1 + g_1 + g_1 g_2 + ...``; g = 1 - TV(p, q). Plain gives 1.

    Less noisy than ``length``, since it does not wait for tokens to be drawn. g past a rejection are those of the
    draft's own prefix, where HedgeSpec takes verified text. Nodes count as a chain: of a tree this is a lower bound,
    since an outcome does not say which nodes are siblings; so it ranks chains, or trees of one shape.
    """
    return min(_LONGEST, expected_length(outcome.agreement))


# 16 accepted tokens at our steepest measured cost (1.5 plain steps) are worth 11, at free width 17. What lies above
# saturates rather than fails: on a device where width is free a wide draft may earn it honestly.
_HIGH = 16.0
_LONGEST = 17.0  # a draft of 16 and the bonus token; longer ones saturate

THROUGHPUT = Reward("throughput", 0.0, _HIGH, False, _throughput)
BD = Reward("bd", 0.0, 1.0, True, _block_divergence)
BE = Reward("be", 0.0, 1.0, False, _block_efficiency)
LENGTH = Reward("length", 0.0, _LONGEST, False, _length)
EXPECTED_LENGTH = Reward("expected_length", 0.0, _LONGEST, True, _expected_length)
REWARDS: Mapping[str, Reward] = {reward.name: reward for reward in (THROUGHPUT, BD, BE, LENGTH, EXPECTED_LENGTH)}
