"""The policy contract on every policy of the folder: a new file is tested without a new line here."""

from dataclasses import replace

import numpy as np
import pytest

from metasd_langchain.bandits.policies.routed import RoutedPrior
from metasd_langchain.bandits.registry import policy_factory, policy_names
from metasd_langchain.bandits.routers import fit_centroids
from metasd_langchain.testing.policy_contract import PolicyContract

# What a policy claims beyond the contract's defaults. Not to learn, not to follow switches and to commit for good are
# what these policies are by definition; their docstrings say so.
CLAIMS = {
    "fixed": {"learns": False},
    "random": {"learns": False},
    "routed": {"learns": False},
    "hinted_ucb": {"follows_switches": True},
    "discounted_ucb": {"follows_switches": True},
    "sliding_ucb": {"follows_switches": True},
    "etc": {"commits": 4 * 3},  # each of the four arms three times
    "halving": {"commits": 4 * 3 + 2 * 6},
}


def _contract(name):
    claims = CLAIMS.get(name, {})
    return type(f"Test_{name}", (PolicyContract,), {**claims, "make": lambda self: policy_factory(name)()})


for _name in policy_names():
    globals()[f"Test_{_name}"] = _contract(_name)


class TestRoutedPrior(PolicyContract):
    """Without a vector it is the policy it starts, with all of its claims."""

    follows_switches = True

    def make(self):
        return policy_factory("routed", {"prior": "hinted_ucb"})()


class TestRoutedPriorOfARoutedPrompt(PolicyContract):
    """A prompt that the router knows, of which it is sure and always wrong."""

    def make(self):
        return Misrouted()


class Misrouted(RoutedPrior):
    """Every situation's prompt is routed to the third arm."""

    def __init__(self):
        router = fit_centroids([[1.0, 0.0], [0.0, 1.0]], ["three", "two"])
        super().__init__(router, policy_factory("hinted_ucb"))

    def select(self, situation, rng):
        return super().select(replace(situation, vector=VECTOR), rng)

    def update(self, situation, choice, rewards):
        super().update(replace(situation, vector=VECTOR), choice, rewards)


VECTOR = np.array([1.0, 0.0])


def test_the_folder_was_walked():
    papers = {"etc", "exp3", "exp3spec", "halving", "hedge", "linucb", "normalhedge", "thompson", "ucb", "ucbspec"}
    ours = {"discounted_ucb", "fixed", "hinted_ucb", "random", "routed", "sliding_ucb"}
    assert papers | ours <= set(policy_names())


def test_claims_are_of_policies_that_exist():
    assert CLAIMS.keys() <= set(policy_names())


@pytest.mark.parametrize("name", policy_names())
def test_module_says_what_it_is(name):
    module = __import__(f"metasd_langchain.bandits.policies.{name}", fromlist=["create"])
    said = module.__doc__ or ""
    assert len(said.split()) > 30
    assert "Law:" in said
    assert "Prefer" in said
    if name not in {"fixed", "random"}:
        assert "Reference" in said
    assert policy_factory(name)().name == name
