"""Policies and rewards by name. Outsiders register entry points in the groups below, or pass a dotted name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from metasd_langchain import registry
from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.rewards import REWARDS, Reward
from metasd_langchain.errors import BadOption

__all__ = ["POLICY_GROUP", "REWARD_GROUP", "policy_factory", "policy_names", "reward_named", "reward_names"]

POLICY_GROUP = "metasd_langchain.policies"
REWARD_GROUP = "metasd_langchain.rewards"
_PACKAGE = "metasd_langchain.bandits.policies"


def policy_names() -> tuple[str, ...]:
    """Every policy there is, sorted."""
    return registry.known_names(_PACKAGE, POLICY_GROUP)


def policy_factory(policy: str | Policy, options: Mapping[str, object] | None = None) -> Callable[[], Policy]:
    """A maker of fresh policies. Makes one at once, so that a wrong name or option fails here.

    Args:
        policy: a name, ``package.module:factory``, or an instance (each new key then starts from a copy of it).
        options: what ``create`` takes; not allowed with an instance.

    Raises:
        UnknownName: no such policy or option.
        BadOption: an option of the wrong type or range, or a factory that makes no policy.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, Policy):
            raise BadOption("policy", policy, "a name or an object with the methods of Policy")
        if options:
            raise BadOption("policy_options", dict(options), "no options with an instance; it has its own")
        return lambda: copy.deepcopy(policy)
    create = registry.find("policy", policy, _PACKAGE, POLICY_GROUP)
    fixed = copy.deepcopy(dict(options or {}))
    if not isinstance(create(dict(fixed)), Policy):
        raise BadOption("policy", policy, "a factory of objects with the methods of Policy")

    def make() -> Policy:
        made: Policy = create(dict(fixed))
        return made

    return make


def reward_names() -> tuple[str, ...]:
    """Every reward there is, sorted."""
    return registry.known_names(None, REWARD_GROUP, REWARDS)


def reward_named(reward: str | Reward) -> Reward:
    """The reward of a name, or the instance. A dotted name or entry point is a Reward or a function that gives one."""
    if isinstance(reward, Reward):
        return reward
    if not isinstance(reward, str):
        raise BadOption("reward", reward, "a name or a Reward")
    if reward in REWARDS:
        return REWARDS[reward]
    found = registry.find("reward", reward, None, REWARD_GROUP, REWARDS)
    made = found if isinstance(found, Reward) else found()
    if not isinstance(made, Reward):
        raise BadOption("reward", reward, "the name of a Reward, or of a function that returns one")
    return made
