"""The policy contract on every policy of the folder: a new file is tested without a new line here."""

import pytest

from metasd_langchain.bandits.registry import policy_factory, policy_names
from metasd_langchain.testing.policy_contract import PolicyContract

# What a policy claims beyond the contract's defaults.
CLAIMS = {
    "fixed": {"learns": False},
    "random": {"learns": False},
    "hinted_ucb": {"follows_switches": True},
}


def _contract(name):
    claims = CLAIMS.get(name, {})
    return type(f"Test_{name}", (PolicyContract,), {**claims, "make": lambda self: policy_factory(name)()})


for _name in policy_names():
    globals()[f"Test_{_name}"] = _contract(_name)


def test_the_folder_was_walked():
    assert {"fixed", "random", "ucb", "hinted_ucb"} <= set(policy_names())


@pytest.mark.parametrize("name", policy_names())
def test_module_says_what_it_is(name):
    module = __import__(f"metasd_langchain.bandits.policies.{name}", fromlist=["create"])
    assert len((module.__doc__ or "").split()) > 30
    assert policy_factory(name)().name == name
