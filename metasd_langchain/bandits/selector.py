"""Joins a policy, a reward, a cost model and a memory by key: chooses an arm a round and learns what it was worth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

import numpy as np

from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.values import PLAIN, Arm, Choice, Outcome, Situation

__all__ = ["Fading", "Seat", "Selector"]

# Evidence of other keys that a new key starts with: enough to know which arms are hopeless, little enough that the
# key's own first dozen rounds outweigh it.
_WARM_START = 0.25


@runtime_checkable
class Fading(Protocol):
    """What a policy offers, besides Policy, so that new keys can start from what others learned."""

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the evidence (in (0, 1])."""
        ...


class Selector:
    """Live policies by key. One engine, one thread.

    Args:
        arms: the pool, names unique. ``plain`` need not be in it; it is the fallback all the same.
        policy: makes a fresh policy, see ``bandits.registry.policy_factory``.
        reward: what a round was worth.
        memory: "process": calls of one key go on learning where the last one stopped, and a new key starts from the
            faded statistics of all keys. "request": every call starts fresh (the papers' setting).
        capacity: most keys kept; the one least recently opened goes first.
        costs: running costs, shared where engines share a machine; None = own.

    Raises:
        BadOption: no arms, a name twice, a capacity below 1, an unknown memory.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        policy: Callable[[], Policy],
        reward: Reward,
        *,
        memory: str = "process",
        capacity: int = 256,
        costs: CostModel | None = None,
    ) -> None:
        names = [arm.name for arm in arms]
        if not names or len(set(names)) != len(names):
            raise BadOption("arms", tuple(names), "at least one arm, no name twice")
        if memory not in ("process", "request"):
            raise BadOption("memory", memory, "'process' or 'request'")
        if capacity < 1:
            raise BadOption("capacity", capacity, "a whole number of at least 1")
        self.arms = tuple(arms)
        self.reward = reward
        self.costs = CostModel() if costs is None else costs
        self._make, self._capacity = policy, capacity
        self._live: OrderedDict[str, Policy] | None = OrderedDict() if memory == "process" else None
        self._all = policy()  # what all keys together have learned

    @property
    def needs_agreement(self) -> bool:
        """Whether `Seat.learn` wants 1 - TV of every drafted node."""
        return self.reward.needs_agreement

    @property
    def policy_name(self) -> str:
        """The policy's name."""
        return self._all.name

    def open(self, key: str, rng: np.random.Generator) -> Seat:
        """A seat for one call. Seats of one key share one live policy (memory "process")."""
        return Seat(self, self._policy(key), rng)

    def forget(self, key: str | None = None) -> None:
        """Drop what was learned for one key, or everything. Costs stay (they are the machine's); open seats go on."""
        if self._live is None:
            return
        if key is not None:
            self._live.pop(key, None)
            return
        self._live = OrderedDict()  # anew, not emptied: the engine's thread may be looking at it
        self._all = self._make()

    def _policy(self, key: str) -> Policy:
        live = self._live  # `forget` may put another in its place from another thread
        if live is None:
            return self._make()
        policy = live.get(key)
        if policy is None:
            policy = live[key] = self._make()
            if isinstance(policy, Fading):
                policy.load(self._all.dump())
                policy.fade(_WARM_START)
        live.move_to_end(key)
        while len(live) > self._capacity:
            live.popitem(last=False)
        return policy

    def credit(self, policy: Policy, situation: Situation, choice: Choice, reward: float) -> None:
        """Teach a key's policy, and what all keys know, a reward in its own units."""
        rewards = {choice.arm: self.reward.rescaled(reward)}
        policy.update(situation, choice, rewards)
        if self._live is not None:
            self._all.update(situation, choice, rewards)


class Seat:
    """One call's place at the bandit: one `choose`, then one `learn`, a round."""

    def __init__(self, selector: Selector, policy: Policy, rng: np.random.Generator) -> None:
        self._selector, self._policy, self._rng = selector, policy, rng
        self._arms = {arm.name: arm for arm in selector.arms}
        self._situation: Situation | None = None

    def choose(
        self,
        hints: Mapping[str, float],
        features: Mapping[str, float] | None = None,
        benched: AbstractSet[str] = frozenset(),
    ) -> Choice:
        """An arm for this round.

        Args:
            hints: arm name -> the drafter's guess, see `Situation`.
            features: step, position, live batch size and the like.
            benched: names of arms or of drafters that must not play. ``plain`` cannot be benched: when nothing else is
                left it is chosen, in the pool or not.
        """
        offered = tuple(
            name
            for name, arm in self._arms.items()
            if name == PLAIN or (name not in benched and arm.drafter not in benched)
        )
        if not offered:
            self._situation = None  # no choice was made, so nobody learns from it
            return Choice(PLAIN)
        self._situation = Situation(offered, hints, features or {})
        choice = self._policy.select(self._situation, self._rng)
        if choice.arm not in offered:
            raise UnknownName(f"arm chosen by policy {self._policy.name!r}", choice.arm, offered)
        if not 0.0 < choice.probability <= 1.0:
            raise BadOption(f"probability of policy {self._policy.name!r}", choice.probability, "a number in (0, 1]")
        return choice

    def learn(
        self,
        choice: Choice,
        *,
        drafted: int,
        accepted: int,
        committed: int,
        agreement: Sequence[float] = (),
        draft_s: float,
        score_s: float | None,
        width: int,
        batch: int = 1,
    ) -> Outcome:
        """Credit the round that `choice` played.

        An arm that drafted nothing is credited itself, as what it was: a plain step that took the arm's drafting time
        on top (0 for ``bd`` and ``be``). Only a policy that knew so beforehand (hint 0) may book it as plain.

        Args:
            drafted, accepted, committed: counts of this row, after the halting rules trimmed it.
            agreement: 1 - TV of each drafted node; needed where `Selector.needs_agreement`.
            draft_s: raw seconds of this row's draft.
            score_s: raw seconds of the packed forward. None when it says nothing about a round (it read a prompt):
                the round then costs what a forward of this row alone usually does.
            width: new tokens of the packed forward, all rows together; with no `score_s`, of this row alone.
            batch: rows in it. The row owns its share of a plain forward, but what its draft adds delays every row, so
                `Outcome.plain_s` is the share and the extra is charged in full. With one row: ``plain_s`` and
                ``score_s`` are the costs of forwards without and with the draft.
        """
        costs = self._selector.costs
        if score_s is None:
            batch = 1
        else:
            costs.note_forward(width, score_s)
        if choice.arm != PLAIN:
            costs.note_draft(choice.arm, draft_s)
        whole = costs.forward(width - drafted)
        share = whole / max(1, batch)
        arm = self._arms.get(choice.arm)
        outcome = Outcome(
            arm=choice.arm,
            budget=0 if arm is None else arm.budget,
            drafted=drafted,
            accepted=accepted,
            committed=committed,
            agreement=tuple(agreement),
            draft_s=0.0 if choice.arm == PLAIN else costs.draft(choice.arm),
            score_s=share + costs.forward(width) - whole,
            plain_s=share,
        )
        situation, self._situation = self._situation, None
        if situation is not None and committed > 0:
            self._selector.credit(self._policy, situation, choice, self._selector.reward(outcome))
        return outcome

    def values(self) -> Mapping[str, float]:
        """The policy's value of each arm, in the reward's units."""
        low, high = self._selector.reward.low, self._selector.reward.high
        return {arm: low + (high - low) * value for arm, value in self._policy.values().items()}
