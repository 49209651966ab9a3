"""Index formulas against numbers worked out by hand, and what the default policy promises about drift and hints."""

import math

import numpy as np
import pytest

from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.policies.hinted_ucb import BUCKETS, HintedUCB, bucket_of
from metasd_langchain.bandits.policies.ucb import UCB
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.errors import BadOption, BanditMemoryError, UnknownName
from metasd_langchain.values import PLAIN, Choice, Situation

RNG = np.random.default_rng(0)
PLAIN_REWARD = 1 / 16


def teach(policy: Policy, arm: str, rewards, hint: float = math.nan):
    for reward in rewards:
        policy.update(Situation((arm,), {arm: hint}), Choice(arm), {arm: reward})


def test_fixed_plays_its_arm_and_falls_back_to_the_first():
    policy = policy_factory("fixed", {"arm": "b"})()
    assert policy.select(Situation(("a", "b")), RNG) == Choice("b", 1.0)
    assert policy.select(Situation(("c", "a")), RNG) == Choice("c", 1.0)


def test_random_says_its_probability_and_is_uniform():
    policy = policy_factory("random")()
    choices = [policy.select(Situation(("a", "b", "c", "d")), np.random.default_rng(seed)) for seed in range(400)]
    assert {choice.probability for choice in choices} == {0.25}
    assert all(60 < sum(choice.arm == arm for choice in choices) < 140 for arm in "abcd")


def test_ucb_index_by_hand():
    policy = UCB(beta=0.1)
    teach(policy, "a", [0.5, 0.7, 0.6])
    teach(policy, "b", [0.4])
    # t = 4: 0.6 + 0.1 sqrt(2 ln 4 / 3), 0.4 + 0.1 sqrt(2 ln 4 / 1)
    assert policy.index("a") == pytest.approx(0.6 + 0.1 * 0.961351)
    assert policy.index("b") == pytest.approx(0.4 + 0.1 * 1.665109)
    assert policy.select(Situation(("b", "a")), RNG).arm == "a"


def test_ucb_counts_are_those_of_each_arm():
    """With total counts (BanditSpec's code) the bonus would be the same for both and "a" would win."""
    policy = UCB(beta=0.1)
    teach(policy, "a", [0.42] * 50)
    teach(policy, "b", [0.4])
    assert policy.select(Situation(("a", "b")), RNG).arm == "b"


def test_ucb_plays_every_arm_once_first_in_the_order_offered():
    policy, played = UCB(), []
    for _ in range(3):
        choice = policy.select(Situation(("c", "a", "b")), RNG)
        played.append(choice.arm)
        policy.update(Situation(("c", "a", "b")), choice, {choice.arm: 0.1})
    assert played == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("hint", "bucket"),
    [
        (math.nan, "nan"), (-1.0, "0"), (0.0, "0"), (0.4, "1"), (1, "1"), (2, "2"), (3, "3-4"), (4, "3-4"), (5, "5-8"),
        (8, "5-8"), (9, "9-16"), (16, "9-16"), (17, "17+"), (math.inf, "17+"),
    ],
)  # fmt: skip
def test_buckets(hint, bucket):
    assert BUCKETS[bucket_of(hint)] == bucket


def test_hinted_posterior_by_hand():
    """Table 0.2 with miss 0.1 (promise 0.1), weight 3, keep 1, forget 0, one round of 0.5 in the cell (gain 0.4).

    Shared level: (2 * 0.05 + 0.4) / (2 * 0.05 + 0.1) = 2.5; the arm's: (0.05 * 2.5 + 0.4) / (0.05 + 0.1) = 3.5;
    cell: (3 * (0.1 + 3.5 * 0.1) + 0.5) / 4 = 0.4625. One round has nothing to forget.
    """
    table = {"x": {"miss": 0.1, "3-4": 0.2, "5-8": 0.4}}
    policy = HintedUCB(prior=table, prior_weight=3.0, keep=1.0, forget=0.0)
    teach(policy, "x@8", [0.5], hint=3.0)
    arm = policy._arms["x@8"]
    mean, certainty = policy._belief(arm, bucket_of(3.0), policy._levels())
    assert mean == pytest.approx(0.4625)
    assert certainty == pytest.approx(1 + 1 + 0.25)
    mean, certainty = policy._belief(arm, bucket_of(6.0), policy._levels())
    assert mean == pytest.approx(0.1 + 3.5 * 0.3)  # the other bucket is lifted in proportion
    assert certainty == pytest.approx(1 + 0.25)


def test_arms_of_one_kind_teach_each_other_by_hand():
    """As above, but the arm is of a kind: the kind's level is (0.05 * 2.5 + 0.4) / (0.05 + 0.1) = 3.5, which an arm of
    the kind that was never played takes over, and one of no kind does not.
    """
    row = {"miss": 0.1, "3-4": 0.2}
    policy = HintedUCB(prior={"x": row, "y": row}, prior_weight=3.0, keep=1.0, forget=0.0)
    teach(policy, "x-1@8", [0.5], hint=3.0)
    levels, bucket = policy._levels(), bucket_of(3.0)
    assert policy._belief(policy._fresh_arm("x-2@8"), bucket, levels)[0] == pytest.approx(0.1 + 3.5 * 0.1)
    assert policy._belief(policy._fresh_arm("y@8"), bucket, levels)[0] == pytest.approx(0.1 + 2.5 * 0.1)
    own = (3 * (0.1 + (0.05 * 3.5 + 0.4) / 0.15 * 0.1) + 0.5) / 4
    assert policy._belief(policy._arms["x-1@8"], bucket, levels)[0] == pytest.approx(own)


def test_hinted_follows_the_prior_when_cold():
    policy = HintedUCB()
    arms = ("short@8", "long@8", PLAIN)
    assert policy.select(Situation(arms, {"short@8": 2.0, "long@8": 20.0}), RNG).arm == "long@8"
    assert policy.select(Situation(arms, {"short@8": 20.0, "long@8": 2.0}), RNG).arm == "short@8"


def test_hint_zero_is_worth_plain_and_never_explored():
    policy = HintedUCB()
    arms = ("a@8", "b@8", PLAIN)
    for _ in range(200):
        situation = Situation(arms, {"a@8": 0.0, "b@8": 0.0})
        choice = policy.select(situation, RNG)
        assert choice.arm == PLAIN
        policy.update(situation, choice, {PLAIN: PLAIN_REWARD})
    assert policy.select(Situation(("a@8", "b@8"), {"a@8": 0.0, "b@8": 0.0}), RNG).arm == "a@8"


def test_what_acted_as_plain_teaches_plain_not_the_arm():
    policy = HintedUCB()
    teach(policy, "a@8", [0.05] * 5, hint=0.0)
    assert set(policy.values()) == {PLAIN}


def test_one_bucket_warns_about_the_others():
    policy = HintedUCB()
    situation = Situation(("a@8", PLAIN), {"a@8": 20.0})
    assert policy.select(situation, RNG).arm == "a@8"
    teach(policy, "a@8", [0.04] * 12, hint=6.0)
    assert policy.select(situation, RNG).arm == PLAIN


def _throughput_share(policy, rng, rounds, chance, arms, hint):
    """Share of each arm when a draft of 8 is accepted token by token with `chance[arm]`; 3 % a token."""
    played = []
    for _ in range(rounds):
        situation = Situation(arms, {arm: hint(rng) for arm in arms if arm != PLAIN})
        choice = policy.select(situation, rng)
        drafted = 0 if choice.arm == PLAIN else 8
        accepted = 0
        while accepted < drafted and rng.random() < chance[choice.arm]:
            accepted += 1
        reward = (accepted + 1) / (1 + 0.03 * drafted) / 16
        policy.update(situation, choice, {choice.arm: reward})
        played.append(choice.arm)
    return {arm: played.count(arm) / rounds for arm in arms}


@pytest.mark.parametrize("hints", ["none", "constant", "varied"])
@pytest.mark.parametrize("other", [0.3, 0.6])
def test_hostile_drift_is_followed_within_30_rounds_and_forgiven(hints, other):
    arms = ("turns@8", "steady@8", PLAIN)
    hint = {
        "none": lambda _: math.nan,
        "constant": lambda _: 12.0,
        "varied": lambda rng: float(rng.integers(1, 30)),
    }
    good, bad = {"turns@8": 0.85, "steady@8": other}, {"turns@8": 0.0, "steady@8": other}
    before, after, again = [], [], []
    for seed in range(12):
        policy, rng = HintedUCB(), np.random.default_rng(seed)
        _throughput_share(policy, rng, 60, good, arms, hint[hints])
        before.append(_throughput_share(policy, rng, 40, good, arms, hint[hints])["turns@8"])
        _throughput_share(policy, rng, 30, bad, arms, hint[hints])
        after.append(_throughput_share(policy, rng, 50, bad, arms, hint[hints])["turns@8"])
        _throughput_share(policy, rng, 150, good, arms, hint[hints])
        again.append(_throughput_share(policy, rng, 50, good, arms, hint[hints])["turns@8"])
    assert np.mean(before) > 0.7, before
    assert np.mean(after) < 0.2, after
    assert np.mean(again) > 0.5, again


def test_counts_are_capped():
    policy = HintedUCB()
    teach(policy, "a@8", [0.2, 0.3] * 1000, hint=5.0)
    assert policy._arms["a@8"].count < 60


@pytest.mark.parametrize("name", ["ucb", "hinted_ucb", "fixed", "random"])
def test_fade_keeps_means(name):
    policy = policy_factory(name)()
    teach(policy, "a@8", [0.2, 0.4], hint=5.0)
    before = dict(policy.values())
    policy.fade(0.25)
    assert policy.values() == pytest.approx(before)


def test_faded_evidence_is_outweighed_sooner():
    fresh, faded = HintedUCB(), HintedUCB()
    for policy in (fresh, faded):
        teach(policy, "a@8", [0.3] * 20, hint=5.0)
    faded.fade(0.1)
    for policy in (fresh, faded):
        teach(policy, "a@8", [0.1], hint=5.0)
    assert faded.values()["a@8"] < fresh.values()["a@8"]


def test_a_damaged_cell_is_an_error():
    policy = HintedUCB()
    teach(policy, "a@8", [0.2], hint=5.0)
    state = policy.dump()
    state["arms"]["a@8"]["cells"] = {"6-7": {"count": 1.0, "total": 1.0, "clock": 0.0}}
    with pytest.raises(BanditMemoryError, match="6-7"):
        HintedUCB().load(state)


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("ucb", {"betta": 1.0}, UnknownName, "beta"),
        ("ucb", {"beta": "much"}, BadOption, "beta"),
        ("ucb", {"beta": -1}, BadOption, "beta"),
        ("fixed", {"arm": 3}, BadOption, "arm"),
        ("random", {"seed": 1}, UnknownName, "seed"),
        ("hinted_ucb", {"keep": 0.0}, BadOption, "keep"),
        ("hinted_ucb", {"prior": {"suffix": {"6-7": 0.5}}}, UnknownName, "6-7"),
        ("hinted_ucb", {"prior": {"suffix": {"5-8": 2.0}}}, BadOption, "5-8"),
        ("hinted_ucb", {"prior": {"suffix": 0.5}}, BadOption, "prior"),
    ],
)
def test_wrong_options_are_named(name, options, error, says):
    with pytest.raises(error, match=says):
        policy_factory(name, options)
