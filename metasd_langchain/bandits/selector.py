"""Joins a policy, a reward, a cost model and a memory by key: chooses an arm a round and learns what it was worth."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.bandits import Encoding, Policy
from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.hindsight import Decision, Hindsight
from metasd_langchain.bandits.joining import evidence
from metasd_langchain.bandits.memory import Key, Memory, scope_id
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.bandits.shelf import Shelf, save_all
from metasd_langchain.bandits.statistics import EVERY
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.values import FEATURES, PLAIN, Arm, Choice, Outcome, Situation

__all__ = ["Fading", "Seat", "Selector", "warm_share"]

# Evidence of other keys that a new key starts with: enough to know which arms are hopeless, little enough that the
# key's own first dozen rounds outweigh it. The share suits policies that discount; the rounds bound those that do not.
_WARM_START, _WARM_ROUNDS = 0.25, 25.0


def warm_share(rounds: float) -> float:
    """What a new key keeps of evidence from so many rounds of other keys."""
    return min(_WARM_START, _WARM_ROUNDS / max(rounds, 1.0))


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
            faded statistics of all keys of its scope. "request": every call starts fresh (the papers' setting). A
            Memory: as "process", and a key's first call goes on where an earlier process stopped.
        capacity: most keys kept; the one least recently opened goes first.
        costs: running costs, shared where engines share a machine; None = own.
        stored: under what a Memory keeps it all; scope and step are filled in. None: names as far as they are known
            here, and the target by `bind`.

    Attributes:
        wants: features the policy asked for, of `FEATURES`; the others are passed where they cost nothing.
        encoding: how the policy wants prompts encoded, or None.
        compares: whether the policy wants drafts of near-free drafters compared before it chooses.

    Raises:
        BadOption: no arms, a name twice, a capacity below 1, an unknown memory.
        UnknownName: the policy wants a feature that nobody measures.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        policy: Callable[[], Policy],
        reward: Reward,
        *,
        memory: str | Memory = "process",
        capacity: int = 256,
        costs: CostModel | None = None,
        stored: Key | None = None,
    ) -> None:
        names = [arm.name for arm in arms]
        if not names or len(set(names)) != len(names):
            raise BadOption("arms", tuple(names), "at least one arm, no name twice")
        if memory not in ("process", "request") and not isinstance(memory, Memory):
            raise BadOption("memory", memory, "'process', 'request' or a Memory")
        if capacity < 1:
            raise BadOption("capacity", capacity, "a whole number of at least 1")
        self.arms = tuple(arms)
        self.reward = reward
        self.costs = CostModel() if costs is None else costs
        self._make, self._capacity = policy, capacity
        made = policy()
        self._name = made.name
        self.wants = frozenset(getattr(made, "features", ()))
        for feature in sorted(self.wants):
            if feature not in FEATURES:
                raise UnknownName(f"feature of policy {made.name!r}", feature, FEATURES)
        self.encoding: Encoding | None = getattr(made, "encoding", None)
        self.compares = bool(getattr(made, "compares", False))
        if hasattr(made, "fits"):
            made.fits(names)
        self.full_information = made.full_information
        self.every = int(getattr(made, "every", EVERY))
        self._live: OrderedDict[str, Policy] | None = None if memory == "request" else OrderedDict()
        self._scopes: OrderedDict[str, Policy] = OrderedDict()  # what all keys of a scope together have learned
        self._shelf = None if isinstance(memory, str) else Shelf(memory)
        self._stored = stored or Key("", self._name, ",".join(sorted(names)), reward.name)
        self._nameless = ""  # the scope that stands for none
        self._forgotten: set[str] | None = set()  # keys that are not loaded again; None: all of them

    @property
    def needs_agreement(self) -> bool:
        """Whether `Seat.learn` wants 1 - TV of every drafted node."""
        return self.reward.needs_agreement

    @property
    def policy_name(self) -> str:
        """The policy's name."""
        return self._name

    @property
    def stores(self) -> bool:
        """Whether a Memory is behind it, which `bind` has to be told the target for."""
        return self._shelf is not None

    def bind(self, target: str, nameless: str = "") -> None:
        """Say for which model a Memory keeps what is learned. Any thread, before the first call is opened.

        Args:
            target: the model, as exactly as is known: nothing is loaded that was learned for another one.
            nameless: a scope that means nothing outside this process, and is stored as no scope.
        """
        if self._shelf is None or (target, nameless) == (self._stored.target, self._nameless):
            return
        if self._stored.target:
            self._leave_all()
        self._nameless, self._stored = nameless, replace(self._stored, target=target)
        save_all()  # another object of this process may have learned for the same keys

    def open(self, key: str, rng: np.random.Generator) -> Seat:
        """A seat for one call. Seats of one key share one live policy.

        Args:
            key: ``scope/step`` ("/" in a scope is written "%2F", "%" is "%25"), or a step alone.
            rng: the call's own.

        Raises:
            BanditMemoryError: what is stored for the key cannot be read.
            BadOption: a Memory, and no target was named.
        """
        return Seat(self, self._policies(key), rng)

    def forget(self, key: str | None = None) -> None:
        """Drop what was learned for one key, or everything, and do not load it again.

        Costs stay (they are the machine's), open seats go on, and a Memory keeps what was learned until now.
        """
        if self._live is None:
            return
        if key is None:
            self._forgotten = None
            self._leave_all()
            return
        if self._forgotten is not None:
            self._forgotten.add(key)
        policy = self._live.pop(key, None)
        if self._shelf is not None and policy is not None:
            self._shelf.leave([policy])

    def _leave_all(self) -> None:
        live: Mapping[str, Policy] = self._live or {}
        scopes = self._scopes
        # anew, not emptied: the engine's thread may be looking at them
        self._live, self._scopes = OrderedDict(), OrderedDict()
        if self._shelf is not None:
            self._shelf.leave([*live.values(), *scopes.values()])

    def _policies(self, key: str) -> tuple[Policy, ...]:
        """The key's policy, and that of its whole scope; both learn."""
        live, scopes = self._live, self._scopes  # `forget` may put others in their place from another thread
        if live is None:
            return (self._make(),)
        head, mark, tail = key.partition("/")
        scope, step = (head, tail) if mark else ("", key)
        every = scopes.get(scope)
        if every is None:
            every = self._make()
            self._keep(every, scope, None, load=self._forgotten is not None)
            scopes[scope] = every
        policy = live.get(key)
        if policy is None:
            policy = self._make()
            if isinstance(policy, Fading):
                known = every.dump()
                policy.load(known)
                policy.fade(warm_share(evidence(known)))
            self._keep(policy, scope, step, load=self._forgotten is not None and key not in self._forgotten)
            live[key] = policy
        self._limit(live, key)
        self._limit(scopes, scope)
        return policy, every

    def _keep(self, policy: Policy, scope: str, step: str | None, *, load: bool) -> None:
        if self._shelf is None:
            return
        if not self._stored.target:
            raise BadOption("target", "", "the name of the model whose rounds are remembered; see Selector.bind")
        scope = "" if scope == self._nameless else scope_id(scope.replace("%2F", "/").replace("%25", "%"))
        self._shelf.open(replace(self._stored, scope=scope, step=step), policy, load=load)

    def _limit(self, policies: OrderedDict[str, Policy], latest: str) -> None:
        policies.move_to_end(latest)
        while len(policies) > self._capacity:
            _, policy = policies.popitem(last=False)
            if self._shelf is not None:
                self._shelf.leave([policy])

    def credit(self, policies: Sequence[Policy], situation: Situation, choice: Choice, reward: float) -> None:
        """Teach a key's policy, and that of its scope, a reward in its own units."""
        self.teach(policies, situation, choice, {choice.arm: reward})

    def teach(
        self, policies: Sequence[Policy], situation: Situation, choice: Choice, rewards: Mapping[str, float]
    ) -> None:
        """Teach them rewards of several arms, in the reward's units."""
        rewards = {arm: self.reward.rescaled(reward) for arm, reward in rewards.items()}
        if self._shelf is None:
            for policy in policies:
                policy.update(situation, choice, rewards)
            return
        with self._shelf.lock:
            for policy in policies:
                policy.update(situation, choice, rewards)
            self._shelf.note(policies)


class Seat:
    """One call's place at the bandit: one `choose`, then one `learn`, a round."""

    def __init__(self, selector: Selector, policies: Sequence[Policy], rng: np.random.Generator) -> None:
        self._selector, self._policies, self._rng = selector, policies, rng
        self._policy = policies[0]  # chooses; the others learn along
        self._arms = {arm.name: arm for arm in selector.arms}
        self._situation: Situation | None = None
        self._hindsight: Hindsight | None = None

    def score(self, drafters: Collection[str]) -> None:
        """From now on these drafters score what is committed: `settle` teaches the policy, `learn` does not."""
        selector = self._selector
        self._hindsight = Hindsight(selector.arms, drafters, selector.reward, selector.costs)

    def hear(self, drafter: str, agreement: Sequence[float]) -> None:
        """How likely the drafter's guess was taken, for each of the answer's next tokens; see ``bandits.hindsight``."""
        if self._hindsight is not None:
            self._hindsight.heard(drafter, agreement)

    def settle(self, end: int | None = None) -> None:
        """Credit the rounds whose worth is known by now; with `end`, the answer's length, all that are left."""
        if self._hindsight is not None:
            for decision, rewards in self._hindsight.settled(end):
                self._selector.teach(self._policies, decision.situation, decision.choice, rewards)

    def needs_agreement(self, choice: Choice) -> bool:
        """Whether `learn` wants 1 - TV of every node that the choice drafted."""
        estimated = self._hindsight is not None and self._hindsight.estimates(choice.arm)
        return self._selector.needs_agreement and not estimated

    def choose(
        self,
        hints: Mapping[str, float],
        features: Mapping[str, float] | None = None,
        benched: AbstractSet[str] = frozenset(),
        vector: NDArray[np.float64] | None = None,
        seconded: Mapping[str, int] | None = None,
    ) -> Choice:
        """An arm for this round.

        Args:
            hints: arm name -> the drafter's guess, see `Situation`.
            features: by the names of `FEATURES`.
            benched: names of arms or of drafters that must not play. ``plain`` cannot be benched: when nothing else is
                left it is chosen, in the pool or not.
            vector: of the prompt, see `Situation`.
            seconded: by arm, see `Situation`.
        """
        offered = tuple(
            name
            for name, arm in self._arms.items()
            if name == PLAIN or (name not in benched and arm.drafter not in benched)
        )
        if not offered:
            self._situation = None  # no choice was made, so nobody learns from it
            return Choice(PLAIN)
        self._situation = Situation(offered, hints, features or {}, vector, seconded or {})
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
        position: int = 0,
    ) -> Outcome:
        """Credit the round that `choice` played; at once, or after `score` once its worth is known.

        An arm that drafted nothing is credited itself, as what it was: a plain step that took the arm's drafting time
        on top (0 for ``bd`` and ``be``). Only a policy that knew so beforehand (hint 0) may book it as plain.

        Args:
            drafted, accepted, committed: counts of this row, after the halting rules trimmed it.
            agreement: 1 - TV of each drafted node; needed where `needs_agreement`.
            draft_s: raw seconds of this row's draft.
            score_s: raw seconds of the packed forward. None when it says nothing about a round (it read a prompt):
                the round then costs what a forward of this row alone usually does.
            width: new tokens of the packed forward, all rows together; with no `score_s`, of this row alone.
            batch: rows in it. The row owns its share of a plain forward, but what its draft adds delays every row, so
                `Outcome.plain_s` is the share and the extra is charged in full. With one row: ``plain_s`` and
                ``score_s`` are the costs of forwards without and with the draft.
            position: tokens of the answer before the draft; needed after `score`.
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
        if situation is None or committed <= 0:
            return outcome
        if self._hindsight is not None:
            self._hindsight.decided(Decision(position, situation, choice, outcome, width - drafted))
        else:
            self._selector.credit(self._policies, situation, choice, self._selector.reward(outcome))
        return outcome

    def values(self) -> Mapping[str, float]:
        """The policy's value of each arm, in the reward's units."""
        low, high = self._selector.reward.low, self._selector.reward.high
        return {arm: low + (high - low) * value for arm, value in self._policy.values().items()}
