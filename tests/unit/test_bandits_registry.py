"""Names become things: modules, dotted names, entry points, instances; errors list what there is."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from metasd_langchain import registry
from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.policies.ucb import UCB
from metasd_langchain.bandits.registry import POLICY_GROUP, policy_factory, policy_names
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.values import Choice, Situation

PACKAGE = "metasd_langchain.bandits.policies"


def test_the_folder_is_the_list():
    assert {"fixed", "hinted_ucb", "random", "ucb"} <= set(policy_names())


def test_listing_imports_no_policy_and_no_torch():
    code = (
        "import sys; from metasd_langchain.bandits.registry import policy_names; policy_names();"
        f"print([m for m in sys.modules if m.startswith('{PACKAGE}.') or m.split('.')[0] == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(UnknownName, match=r"unknown policy 'ubc'.*fixed, .*did you mean 'ucb'"):
        policy_factory("ubc")


def test_each_make_is_fresh():
    make = policy_factory("ucb", {"beta": 0.5})
    first, second = make(), make()
    first.update(Situation(("a",)), Choice("a"), {"a": 1.0})
    assert isinstance(second, UCB)
    assert second.beta == 0.5
    assert second.values() == {}


def test_dotted_name():
    assert policy_factory("metasd_langchain.bandits.policies.ucb:create", {"beta": 0.2})().name == "ucb"


@pytest.mark.parametrize("name", ["no.such.module:create", "metasd_langchain.bandits.policies.ucb:nothing", ":create"])
def test_a_dotted_name_that_leads_nowhere(name):
    with pytest.raises(BadOption, match="policy="):
        policy_factory(name)


def test_a_factory_of_something_else():
    with pytest.raises(BadOption, match="methods of Policy"):
        policy_factory("builtins:dict")


def test_an_instance_is_copied_for_each_key():
    mine = UCB(beta=0.3)
    make = policy_factory(mine)
    made = make()
    assert made is not mine
    assert made.beta == 0.3
    with pytest.raises(BadOption, match="no options"):
        policy_factory(mine, {"beta": 1})
    with pytest.raises(BadOption, match="policy"):
        policy_factory(3)


def test_entry_points(monkeypatch):
    point = EntryPoint("mine", f"{PACKAGE}.ucb:create", POLICY_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: (point,) if group == POLICY_GROUP else ())
    assert "mine" in policy_names()
    policy = policy_factory("mine", {"beta": 0.7})()
    assert isinstance(policy, Policy)
    assert policy.select(Situation(("a",)), np.random.default_rng(0)) == Choice("a")


def test_resolve_hands_on_options_and_arguments():
    made = registry.resolve("thing", "builtins:dict", None, None, {"a": 1})
    assert made == {"a": 1}
    with pytest.raises(UnknownName, match="unknown thing 'x'; there are: none"):
        registry.resolve("thing", "x", None, None, None)


@pytest.mark.parametrize("value", ["1", True, float("nan"), 3.0, None])
def test_number_names_the_option(value):
    with pytest.raises(BadOption, match="speed="):
        registry.number("speed", value, 0.0, 2.0)
