"""Routed: the arm that a router says suits the prompt. By itself the literature's baseline; else a bandit's start.

Law: without ``prior``, ``argmax`` over arms on offer of the router's probability of the labels that the arm serves; the
same in every round of the answer, whatever it earns. Statistics are for display.
Reference: the classifier that MetaSD (arXiv 2604.05417) and HedgeSpec (arXiv 2510.20064) compare bandits with.

With ``prior="hinted_ucb"``, or another policy that can fade: one such bandit for each label the router gives, and one
for all prompts, which learns every round. A label's bandit starts with a quarter of what that one knows (25 rounds at
most), and then ``weight`` pretended rounds of every arm that serves a label. Each is worth ``v (1 + min(1, K s - 1) /
2)``: v is what the arm earned over all prompts, s the router's probability of it, K the number of such arms. So the
router's arm starts half as high again, the others of its kind lower, and arms without a label where they were; real
rounds correct all of it. Nothing is pretended of an arm that was never played, since certainty about a made-up number
would keep a frugal policy from trying it: the router's own arm plays one real round instead. Ours, without proof.

**Labels and arms.** A label serves the arm of its name, else the arm whose drafter has it for a name or ends with it
(``math`` fits ``eagle-math@8``); the option ``arms`` says otherwise. While there is no vector (no router; or one that
reads the target's hidden state, in an answer's first round), plain plays where it is on offer, else the first arm; with
``prior``, the bandit of all prompts chooses.
Prefer it as a baseline; with ``prior`` where one pipeline step gets prompts of several kinds. Where a step's prompts
are of one kind, the step's own memory already knows what a router could say.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.bandits import Encoding, Policy, State
from metasd_langchain.bandits.joining import evidence
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.bandits.routers import Router, load_router
from metasd_langchain.bandits.selector import Fading, warm_share
from metasd_langchain.bandits.statistics import Means, read_owner, read_table
from metasd_langchain.errors import BadOption, BanditMemoryError, UnknownName
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import PLAIN, Choice, Situation

__all__ = ["Routed", "RoutedPrior", "create"]

_LIFT = 0.5
_OFFERS = 64  # sets of arms whose labels are remembered
_Shares = Mapping[str, float]


class _Reader:
    """What the router says of a situation: the best label that an arm on offer serves, and the arms' probabilities."""

    def __init__(self, router: Router | None, arms: Mapping[str, str]) -> None:
        self.router, self._given = router, dict(arms)
        self._offers: dict[tuple[str, ...], dict[str, str]] = {}
        self._last: tuple[NDArray[np.float64] | None, NDArray[np.float64] | None] = (None, None)

    def served(self, arms: tuple[str, ...]) -> dict[str, str]:
        """The arm of each label that has one among these."""
        known = self._offers.get(arms)
        if known is None:
            labels = () if self.router is None else self.router.labels
            found = {label: self._arm(label, arms) for label in labels}
            if len(self._offers) >= _OFFERS:
                self._offers.clear()
            known = self._offers[arms] = {label: arm for label, arm in found.items() if arm}
        return known

    def read(self, situation: Situation) -> tuple[str, dict[str, float]] | None:
        """The label, and each serving arm's share; None without a vector, or with no arm that serves a label."""
        vector, router = situation.vector, self.router
        served = self.served(situation.arms)
        if vector is None or router is None or not served:
            return None
        before, scores = self._last
        if scores is None or before is not vector:  # an answer's rounds bring the same array
            scores = router.scores(vector)
            self._last = vector, scores
        best, top = "", -1.0
        shares: dict[str, float] = {}
        for label, score in zip(router.labels, scores.tolist(), strict=True):
            arm = served.get(label)
            if arm is None:
                continue
            shares[arm] = shares.get(arm, 0.0) + score
            if score > top:
                best, top = label, score
        return best, shares

    def fits(self, arms: Sequence[str]) -> None:
        """Refuse arms of which none serves a label, and labels that were given an arm that does not exist."""
        if self.router is None:
            return
        for label, arm in self._given.items():
            if label not in self.router.labels:
                raise UnknownName("label of policy routed", label, self.router.labels)
            if arm not in arms:
                raise UnknownName(f"arm of label {label!r}", arm, arms)
        if not self.served(tuple(arms)):
            expected = "arms that serve its labels: " + ", ".join(self.router.labels)
            raise BadOption("arms of policy routed", tuple(arms), expected)

    def _arm(self, label: str, arms: tuple[str, ...]) -> str:
        if label in self._given:
            return self._given[label] if self._given[label] in arms else ""
        if label in arms:
            return label
        drafters = {arm: arm.partition("@")[0] for arm in arms}
        return next((arm for arm, name in drafters.items() if name == label or name.endswith(f"-{label}")), "")


class Routed(Means):
    """The router's arm, always. `arms` maps labels to arms where their names do not say it."""

    name = "routed"

    def __init__(self, router: Router | None = None, arms: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.encoding = _encoding(router)
        self._reader = _Reader(router, arms or {})

    def fits(self, arms: Sequence[str]) -> None:
        """See `Policy`."""
        self._reader.fits(arms)

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The likeliest arm; without a vector plain, else the first on offer."""
        said = self._reader.read(situation)
        if said is None:
            return Choice(PLAIN if PLAIN in situation.arms else situation.arms[0])
        return Choice(_likeliest(said[1]))


class RoutedPrior:
    """A bandit a label, each started by the router; `make` gives fresh ones, `weight` is the pretended rounds."""

    name = "routed"
    full_information: ClassVar[bool] = False

    def __init__(
        self,
        router: Router | None,
        make: Callable[[], Policy],
        arms: Mapping[str, str] | None = None,
        weight: float = 3.0,
    ) -> None:
        self.encoding = _encoding(router)
        self.features = tuple(getattr(make(), "features", ()))
        self._reader, self._make, self._rounds = _Reader(router, arms or {}), make, round(weight)
        self._every = make()
        self._by_label: dict[str, Policy] = {}

    def fits(self, arms: Sequence[str]) -> None:
        """See `Policy`."""
        self._reader.fits(arms)

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """What the label's bandit chooses; keeps none that was not there, since another thread may be saving them."""
        said = self._reader.read(situation)
        if said is None:
            return self._every.select(situation, rng)
        label, shares = said
        policy = self._by_label.get(label)
        if policy is None:
            arm = _likeliest(shares)
            if arm not in self._every.values():
                return Choice(arm)
            policy = self._started(situation, shares)
        return policy.select(situation, rng)

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Teach the label's bandit and that of all prompts."""
        said = self._reader.read(situation)
        if said is not None:
            label, shares = said
            policy = self._by_label.get(label)
            if policy is None and _likeliest(shares) in self._every.values():
                policy = self._by_label[label] = self._started(situation, shares)
            if policy is not None:
                policy.update(situation, choice, rewards)
        self._every.update(situation, choice, rewards)

    def values(self) -> Mapping[str, float]:
        """Those of the bandit of all prompts."""
        return self._every.values()

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the evidence (in (0, 1])."""
        for policy in (self._every, *self._by_label.values()):
            if isinstance(policy, Fading):
                policy.fade(keep)

    def dump(self) -> State:
        """``{"policy": "routed", "all": state, "labels": {label: state}}``."""
        labels = {label: policy.dump() for label, policy in self._by_label.items()}
        return {"policy": self.name, "all": self._every.dump(), "labels": labels}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        known = () if self._reader.router is None else self._reader.router.labels
        rows = read_table(self.name, state, "labels")
        for label in rows:
            if label not in known:
                raise BanditMemoryError(f"state of policy {self.name!r}: the router has no label {label!r}")
        every = self._loaded(state.get("all"))
        self._by_label = {label: self._loaded(row) for label, row in rows.items()}
        self._every = every

    def _loaded(self, state: object) -> Policy:
        if not isinstance(state, Mapping):
            raise BanditMemoryError(f"state of policy {self.name!r}: all is not a mapping")
        policy = self._make()
        policy.load(dict(state))
        return policy

    def _started(self, situation: Situation, shares: _Shares) -> Policy:
        """A label's bandit before its first round."""
        policy, known = self._make(), self._every.dump()
        policy.load(known)
        if isinstance(policy, Fading):
            policy.fade(warm_share(evidence(known)))
        values = self._every.values()
        for arm, share in shares.items():
            if arm not in values:
                continue
            lift = _LIFT * min(1.0, len(shares) * share - 1.0)
            reward = min(1.0, max(0.0, values[arm] * (1.0 + lift)))
            for _ in range(self._rounds):
                policy.update(Situation(situation.arms), Choice(arm), {arm: reward})
        return policy


def _encoding(router: Router | None) -> Encoding | None:
    return None if router is None else Encoding(router.encoder, router.size)


def _likeliest(shares: _Shares) -> str:
    return max(shares, key=lambda arm: shares[arm])


def create(options: Mapping[str, object]) -> Policy:
    """Options: ``router``, a `Router` or the file of one; ``arms``, label -> arm; ``prior``, the name of the policy to
    start ("": none, the router decides), with ``prior_options``; ``weight``, pretended rounds of an arm (default 3).
    """
    defaults: dict[str, object] = {"router": None, "arms": {}, "prior": "", "prior_options": {}, "weight": 3.0}
    known = known_options("policy routed", options, defaults)
    router, arms = _router(known["router"]), known["arms"]
    if not isinstance(arms, Mapping) or not all(isinstance(name, str) for pair in arms.items() for name in pair):
        raise BadOption("arms", arms, "a mapping from the router's labels to arms")
    weight = number("weight", known["weight"], 0.0, 1000.0)
    prior, own = known["prior"], known["prior_options"]
    if not prior:
        if own:
            raise BadOption("prior_options", own, "nothing, since no prior is named")
        return Routed(router, arms)
    if not isinstance(prior, str) or prior == Routed.name or not isinstance(own, Mapping):
        raise BadOption("prior", prior, "the name of another policy, with a mapping prior_options")
    make = policy_factory(prior, own)
    if not isinstance(make(), Fading):
        raise BadOption("prior", prior, "a policy that can fade")
    return RoutedPrior(router, make, arms, weight)


def _router(given: object) -> Router | None:
    if given is None or isinstance(given, Router):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise BadOption("router", type(given).__name__, "a Router or the path of one")
    return load_router(given)
