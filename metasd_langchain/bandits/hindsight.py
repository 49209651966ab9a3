"""Rewards of all arms in hindsight: what each would have been worth, by how its drafter scores the committed tokens.

Committed text says how good a drafter is that did not play: at each place, how likely its token would have been taken.
HedgeSpec ("Not-a-Bandit: Provably No-Regret Drafter Selection", arXiv 2510.20064) estimates from that the length of the
round that an arm would have played from a place on, ``sum over k of k (1 - g_k) g_1 ... g_{k-1}`` with g = 0 behind the
arm's K tokens, which is ``1 + g_1 + g_1 g_2 + ... + g_1 ... g_K``; one number for every arm and every round, without a
forward of the target.

**g.** A drafted token is taken with chance 1 - TV(p, q). Of a committed token x, drawn from p, ``min(1, q(x) / p(x))``
is an unbiased estimate of it, and products of such along the text are unbiased for products of 1 - TV. Greedy, p is
a point mass and g = q(x). A drafter that offers tokens only has g = 1 where its guess is the token, else 0.

**Delay.** A round's estimate needs K tokens beyond its beginning (fewer when nothing would have been taken any more),
so rewards come some rounds late, oldest first, with the situation and the choice of then (the reduction of Joulani,
György, Szepesvári 2013, for delayed feedback). When the answer ends, tokens behind its end count for no arm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.rewards import EXPECTED_LENGTH, Reward, expected_length
from metasd_langchain.values import Arm, Choice, Outcome, Situation

__all__ = ["HORIZON", "Decision", "Hindsight"]

HORIZON = 32  # tokens behind a round's beginning that are looked at: what a longer draft earns more comes too late
_NOTHING = 1e-3  # a chance to get as far as this token that is not worth waiting for the rest


@dataclass(frozen=True, slots=True)
class Decision:
    """A round whose worth is not known yet.

    Attributes:
        position: tokens of the answer when its arm was chosen (a grammar's forced ones behind it included).
        situation, choice: as the policy saw and made them.
        outcome: what the round gave.
        width: new tokens of the round's forward without the draft, all rows together.
    """

    position: int
    situation: Situation
    choice: Choice
    outcome: Outcome
    width: int


class Hindsight:
    """Decisions of one answer, and g of its tokens by drafter.

    Args:
        arms: the pool's.
        scored: drafters that score. Arms of others have no estimate: they are told about when they played.
        reward: what teaches the policy.
        costs: what forwards and drafts take.
    """

    def __init__(self, arms: Sequence[Arm], scored: Collection[str], reward: Reward, costs: CostModel) -> None:
        self._arms = {arm.name: arm for arm in arms if arm.drafter in scored or not arm.budget}
        self._reward, self._costs = reward, costs
        # Block divergence counts places past a refusal too, so that it has to wait for all of them.
        self._whole = reward.needs_agreement and reward is not EXPECTED_LENGTH
        self._heard: dict[str, list[float]] = {name: [] for name in scored}
        self._waiting: deque[Decision] = deque()

    def estimates(self, arm: str) -> bool:
        """Whether an arm's worth is estimated."""
        return arm in self._arms

    def decided(self, decision: Decision) -> None:
        """A round was played."""
        self._waiting.append(decision)

    def heard(self, drafter: str, agreement: Sequence[float]) -> None:
        """g of the answer's next tokens, after those heard before; nan where it is not known."""
        self._heard[drafter] += agreement

    def settled(self, end: int | None = None) -> Iterator[tuple[Decision, Mapping[str, float]]]:
        """Decisions whose worth is known now, with rewards by arm in the reward's units.

        Args:
            end: tokens of the answer, when it is complete: then nothing is left waiting.
        """
        while self._waiting:
            found = self._agreements(self._waiting[0], end)
            if found is None:
                return
            decision = self._waiting.popleft()
            rewards = {arm: self._reward(self._outcome(decision, arm, own)) for arm, own in found.items()}
            if decision.choice.arm not in self._arms:
                rewards[decision.choice.arm] = self._reward(decision.outcome)
            yield decision, rewards

    def _agreements(self, decision: Decision, end: int | None) -> dict[str, tuple[float, ...]] | None:
        """g by arm as far as it counts, of arms where it is known; None: wait."""
        found: dict[str, tuple[float, ...]] = {}
        for name in decision.situation.arms:
            arm = self._arms.get(name)
            if arm is None:
                continue
            most = min(arm.budget, HORIZON)
            if end is not None:
                most = min(most, end - decision.position - 1)
            own = self._heard[arm.drafter][decision.position : decision.position + most] if most > 0 else []
            counts, over = _counting(own)
            if counts is None:
                continue
            if len(own) < most and end is None and (self._whole or not over):
                return None
            if self._whole:
                counts = [0.0 if math.isnan(share) else share for share in own]
            found[name] = tuple(counts)
        return found

    def _outcome(self, decision: Decision, name: str, agreement: tuple[float, ...]) -> Outcome:
        """The round that an arm would have played."""
        arm, costs, played = self._arms[name], self._costs, decision.outcome
        length = expected_length(agreement)
        silent = not arm.budget or decision.situation.hint(name) == 0.0
        drafted = 0 if silent else arm.budget
        added = costs.forward(decision.width + drafted) - costs.forward(decision.width)
        return Outcome(
            arm=name,
            budget=arm.budget,
            drafted=len(agreement) if self._reward.needs_agreement else drafted,  # g of each is what it is given
            accepted=length - 1.0,
            committed=length,
            agreement=agreement,
            draft_s=0.0 if silent else costs.draft(name),
            score_s=played.plain_s + added,
            plain_s=played.plain_s,
        )


def _counting(agreement: Sequence[float]) -> tuple[Sequence[float] | None, bool]:
    """g up to where nothing more is taken, and whether that was reached; None when one before that is not known."""
    reach = 1.0
    for place, share in enumerate(agreement):
        reach *= share
        if math.isnan(reach):
            return None, False
        if reach < _NOTHING:
            return agreement[: place + 1], True
    return agreement, False
