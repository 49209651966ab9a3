"""Every policy's index or probability after a short history, against numbers worked out by hand."""

import json
import math

import numpy as np
import pytest

from metasd_langchain.bandits.policies.discounted_ucb import DiscountedUCB
from metasd_langchain.bandits.policies.etc import ETC
from metasd_langchain.bandits.policies.exp3 import EXP3
from metasd_langchain.bandits.policies.exp3spec import EXP3Spec
from metasd_langchain.bandits.policies.halving import Halving
from metasd_langchain.bandits.policies.hedge import Hedge
from metasd_langchain.bandits.policies.linucb import LinUCB
from metasd_langchain.bandits.policies.normalhedge import NormalHedge
from metasd_langchain.bandits.policies.sliding_ucb import SlidingUCB
from metasd_langchain.bandits.policies.thompson import Thompson
from metasd_langchain.bandits.policies.ucbspec import UCBSpec
from metasd_langchain.bandits.registry import policy_factory
from metasd_langchain.bandits.statistics import draw
from metasd_langchain.errors import BadOption, BanditMemoryError, UnknownName
from metasd_langchain.values import Choice, Situation

RNG = np.random.default_rng(0)
AB = Situation(("a", "b"))


class Scripted:
    """A generator that gives what it is told."""

    def __init__(self, *values):
        self.values = values

    def random(self):
        return self.values[0]

    def standard_normal(self, count):
        return np.array(self.values[:count])


def teach(policy, arm, rewards, situation=None, probability=1.0):
    for reward in rewards:
        policy.update(situation or Situation((arm,)), Choice(arm, probability), {arm: reward})


def played(policy, arms, rewards, rounds):
    """The arms played when arm x always earns rewards[x]."""
    situation, arms_played = Situation(tuple(arms)), []
    for _ in range(rounds):
        choice = policy.select(situation, RNG)
        policy.update(situation, choice, {choice.arm: rewards[choice.arm]})
        arms_played.append(choice.arm)
    return "".join(arms_played)


# -- optimism ----------------------------------------------------------------------------------------------------------


def test_ucbspec_radius_is_the_published_one_over_l():
    """L = 4, K = 4, delta = 0.1, as in our notes on the paper: 7.3 at t = 8, n = 2 and 1.65 at t = 200, n = 50."""
    policy = UCBSpec()
    for count, published in ((2, 7.306), (48, 1.65)):
        for arm in "abcd":
            teach(policy, arm, [0.5] * count)
        assert 4 * policy.radius("a", 4) == pytest.approx(published, abs=0.01)


def test_ucbspec_index_by_hand():
    policy = UCBSpec(scale=0.1)
    for arm in "abcd":
        teach(policy, arm, [0.5, 0.7])
    # 0.6 + 0.1 * 0.5 sqrt(3/4 * (1 + 2 ln(4 * 64 * sqrt 3 / 0.1)))
    assert policy.index("a", 4) == pytest.approx(0.6 + 0.1 * 1.826584, abs=1e-6)
    assert policy.index("new", 4) == math.inf


def test_ucbspec_at_scale_one_explores_where_a_tenth_has_settled():
    """The reason for the scale: 40 rounds, gaps of 0.3."""
    means = {"a": 0.3, "b": 0.6, "c": 0.2, "d": 0.3}
    paper, ours = (played(UCBSpec(scale=scale), "abcd", means, 40).count("b") for scale in (1.0, 0.1))
    assert paper < 18
    assert ours > 25


def test_discounted_ucb_by_hand():
    policy = DiscountedUCB(beta=0.1, gamma=0.5)
    teach(policy, "a", [1.0, 0.0])
    teach(policy, "b", [0.5])
    # a: 0.75 rounds (0.5 + 0.25) of mean 1/3; b: 1; together 1.75
    assert policy.index("a") == pytest.approx(1 / 3 + 0.1 * 1.221601, abs=1e-6)
    assert policy.index("b") == pytest.approx(0.5 + 0.1 * 1.057938, abs=1e-6)


def test_discounted_ucb_forgets_an_arm_entirely():
    policy = DiscountedUCB(gamma=0.5)
    teach(policy, "a", [1.0])
    teach(policy, "b", [0.5] * 31)
    assert set(policy.values()) == {"b"}
    assert policy.index("a") == math.inf


def test_discounted_counts_say_that_they_cannot_be_added_up():
    assert DiscountedUCB().dump().keys() == {"policy", "arms", "gamma"}


def test_sliding_ucb_by_hand():
    policy = SlidingUCB(beta=0.1, window=3)
    teach(policy, "a", [1.0, 0.0])
    teach(policy, "b", [0.5])
    teach(policy, "a", [0.2])
    # the first round has left: a 2 of mean 0.1, b 1; ln 3
    assert policy.index("a") == pytest.approx(0.1 + 0.1 * 1.048147, abs=1e-6)
    assert policy.index("b") == pytest.approx(0.5 + 0.1 * 1.482304, abs=1e-6)
    teach(policy, "a", [0.2, 0.2])
    assert set(policy.values()) == {"a"}
    assert policy.select(AB, RNG).arm == "b"


def test_sliding_ucb_faded_rounds_weigh_less():
    policy = SlidingUCB(window=10)
    teach(policy, "a", [1.0] * 4)
    policy.fade(0.25)
    teach(policy, "a", [0.0])
    assert policy.values()["a"] == pytest.approx(0.5)


# -- commit ------------------------------------------------------------------------------------------------------------


def test_etc_tries_each_then_stays():
    assert played(ETC(each=2), "abc", {"a": 0.1, "b": 0.9, "c": 0.5}, 10) == "abcabcbbbb"


def test_etc_stays_when_the_arm_turns_bad():
    policy = ETC(each=1)
    played(policy, "ab", {"a": 0.5, "b": 0.6}, 2)
    assert played(policy, "ab", {"a": 0.5, "b": 0.0}, 20) == "b" * 20
    loaded = ETC(each=1)
    loaded.load(json.loads(json.dumps(policy.dump())))
    assert played(loaded, "ab", {"a": 0.5, "b": 0.0}, 3) == "bbb"  # though a's mean is higher now
    assert played(policy, "a", {"a": 1.0}, 3) == "aaa"
    assert played(policy, "ab", {"a": 0.5, "b": 0.0}, 3) == "bbb"


def test_etc_gives_a_late_arm_its_trial():
    policy = ETC(each=2)
    played(policy, "ab", {"a": 0.5, "b": 0.6}, 6)
    assert played(policy, "abc", {"a": 0.5, "b": 0.6, "c": 0.7}, 5) == "ccccc"
    assert played(policy, "abcd", {"a": 0.5, "b": 0.6, "c": 0.7, "d": 0.1}, 5) == "ddccc"


def test_etc_faded_trials_are_made_up_for():
    policy = ETC(each=2)
    played(policy, "ab", {"a": 0.5, "b": 0.6}, 12)  # a 2, b 10
    policy.fade(0.25)  # a 0.5, b 2.5
    assert played(policy, "ab", {"a": 0.9, "b": 0.6}, 4) == "aaaa"


def test_halving_by_hand():
    """T = 8: two phases; 8 / (4 * 2) = 1 round each, then 8 / (2 * 2) = 2."""
    policy = Halving(rounds=8)
    assert (policy.quota(4), policy.quota(2)) == (1, 4)  # of four, and of two who were never more
    assert played(policy, "abcd", {"a": 0.1, "b": 0.5, "c": 0.7, "d": 0.3}, 12) == "abcdbcbccccc"


def test_halving_keeps_the_larger_half_of_an_odd_field():
    # T = 12, K = 3: 12 // (3 * 2) = 2 each, then 12 // (2 * 2) = 3 each
    assert played(Halving(rounds=12), "abc", {"a": 0.1, "b": 0.5, "c": 0.7}, 14) == "abcabcbcbcbccc"


def test_halving_lets_a_late_arm_play_the_winner():
    policy = Halving(rounds=8)
    played(policy, "ab", {"a": 0.5, "b": 0.6}, 20)
    # K = 3: 8 // (2 * 2) = 2 rounds; then b is out and c has won
    assert played(policy, "abc", {"a": 0.5, "b": 0.6, "c": 0.7}, 4) == "cccc"
    assert policy.select(Situation(("a", "b")), RNG).arm == "b"  # all that is left is benched: the best of the others


# -- draws -------------------------------------------------------------------------------------------------------------


def test_draw_follows_the_chances():
    arms, chances = ("a", "b", "c"), (0.2, 0.0, 0.8)
    for mark, arm in ((0.0, "a"), (0.19, "a"), (0.2, "c"), (0.999, "c")):
        assert draw(arms, chances, Scripted(mark)) == Choice(arm, dict(zip(arms, chances, strict=True))[arm])
    assert draw(arms, (0.2, 0.0, 0.8 - 1e-9), Scripted(1.0 - 1e-12)).arm == "c"  # what rounding leaves


def test_exp3_by_hand():
    policy = EXP3(gamma=0.2)
    assert policy.chances(("a", "b")) == [0.5, 0.5]
    teach(policy, "a", [0.6], AB, 0.5)
    # gain 1.2, weight exp(0.1 * 1.2) = 1.127497; 0.8 * 1.127497 / 2.127497 + 0.1
    assert policy.chances(("a", "b")) == pytest.approx([0.523971, 0.476029], abs=1e-6)


def test_exp3_uses_the_probability_that_travelled():
    policy = EXP3(gamma=0.2)
    teach(policy, "a", [0.6], AB, 0.25)
    assert policy.chances(("a", "b"))[0] == pytest.approx(0.1 + 0.8 / (1 + math.exp(-0.1 * 2.4)))


def test_exp3spec_by_hand():
    policy = EXP3Spec()
    assert policy.chances(("a", "b")) == [0.5, 0.5]
    teach(policy, "a", [0.4], AB, 0.5)
    # loss 0.6 / 0.5; eta = sqrt(ln 2 / (2 * 2)) = 0.416277
    assert policy.rate(2) == pytest.approx(0.416277, abs=1e-6)
    assert policy.chances(("a", "b")) == pytest.approx([0.377651, 0.622349], abs=1e-6)


@pytest.mark.parametrize("make", [EXP3, EXP3Spec, Hedge, NormalHedge])
def test_weights_of_a_fixed_field_are_those_of_gains_and_a_late_arm_starts_level(make):
    policy = make()
    for reward in (0.9, 0.2, 0.7):
        choice = policy.select(AB, np.random.default_rng(1))
        policy.update(AB, choice, {choice.arm: reward})
    before = policy.chances(("a", "b"))
    assert policy.chances(("a", "b", "late"))[0] != before[0]
    assert policy._regrets.get("late", 0.0) == 0.0
    assert sum(policy.chances(("a", "b", "late"))) == pytest.approx(1.0)


def test_thompson_variance_by_hand():
    policy = Thompson(spread=0.1)
    teach(policy, "a", [0.2, 0.4])
    teach(policy, "b", [0.6])
    assert policy.variance() == pytest.approx((0.01 + 0.02) / 2)


def test_thompson_draws_means_with_their_uncertainty():
    policy = Thompson(spread=0.1)
    teach(policy, "a", [0.2, 0.4])
    teach(policy, "b", [0.6])
    # a: 0.3 + z sqrt(0.015 / 2), b: 0.6 + z sqrt(0.015)
    assert policy.select(AB, Scripted(2.0, -1.0)).arm == "b"  # 0.4732 against 0.4775
    assert policy.select(AB, Scripted(2.1, -1.0)).arm == "a"  # 0.4819


def test_thompson_plays_new_arms_first():
    policy = Thompson()
    teach(policy, "a", [0.9])
    assert policy.select(AB, RNG) == Choice("b", 1.0)


def test_thompson_says_how_likely_its_choice_was():
    """Two beliefs: Phi(difference / root of the summed variances). More: against 20,000 draws."""
    policy = Thompson(spread=0.1)
    teach(policy, "a", [0.2, 0.4])
    teach(policy, "b", [0.4, 0.5])
    exact = 0.5 + 0.5 * math.erf(0.15 / math.sqrt(policy.variance()) / math.sqrt(2))
    assert policy.select(AB, Scripted(-9.0, 9.0)).probability == pytest.approx(exact, abs=0.02)
    teach(policy, "c", [0.1, 0.5, 0.4])
    arms = ("a", "b", "c")
    deviations = [math.sqrt(policy.variance() / policy._counts[arm]) for arm in arms]
    thetas = np.random.default_rng(0).normal([policy.values()[arm] for arm in arms], deviations, (20_000, 3))
    for at in range(3):
        told = policy.select(Situation(arms), Scripted(*(9.0 if other == at else -9.0 for other in range(3))))
        assert told.arm == arms[at]
        assert told.probability == pytest.approx((thetas.argmax(1) == at).mean(), abs=0.03)


# -- full information --------------------------------------------------------------------------------------------------


def test_hedge_with_a_fixed_rate_by_hand():
    policy = Hedge(rate=1.0)
    policy.update(AB, Choice("a", 0.5), {"a": 0.8, "b": 0.2})
    assert policy.chances(("a", "b"))[0] == pytest.approx(1 / (1 + math.exp(-0.6)))


def test_adahedge_by_hand():
    policy = Hedge()
    assert policy.chances(("a", "b")) == [0.5, 0.5]
    policy.update(AB, Choice("a", 0.5), {"a": 0.8, "b": 0.2})
    # the policy earned 0.5, the leader 0.8: gap 0.3, eta = ln 2 / 0.3, exp(-eta 0.6) = 1/4
    assert policy.eta(2) == pytest.approx(math.log(2) / 0.3)
    assert policy.chances(("a", "b")) == pytest.approx([0.8, 0.2])
    policy.update(AB, Choice("a", 0.8), {"a": 0.4, "b": 0.6})
    # earned 0.44; gap ln(0.8 exp(-0.04 eta) + 0.2 exp(0.16 eta)) / eta = 0.008075; regrets 0.26, -0.14
    assert policy.eta(2) == pytest.approx(2.24993, abs=1e-4)
    assert policy.chances(("a", "b"))[0] == pytest.approx(0.710944, abs=1e-5)


def test_normalhedge_by_hand():
    policy = NormalHedge()
    assert policy.chances(("a", "b", "c")) == [1 / 3] * 3
    policy._regrets = {"a": 2.0, "b": 1.0, "c": -5.0}
    # exp(y) + exp(y / 4) + 1 = 3 e: z^4 + z = 3 e - 1 for z = exp(y / 4) gives z = 1.53934; weights z^4 : z / 2 : 0
    z = 1.53934
    assert z**4 + z == pytest.approx(3 * math.e - 1, abs=1e-3)
    assert policy.chances(("a", "b", "c")) == pytest.approx([z**3 / (z**3 + 0.5), 0.5 / (z**3 + 0.5), 0.0], abs=1e-4)


def test_normalhedge_drops_what_is_worse_than_itself():
    policy = NormalHedge()
    policy.update(AB, Choice("a", 0.5), {"a": 0.8, "b": 0.2})
    assert policy._regrets == pytest.approx({"a": 0.3, "b": -0.3})
    assert policy.chances(("a", "b")) == [1.0, 0.0]


@pytest.mark.parametrize("make", [Hedge, NormalHedge])
def test_full_information_does_not_depend_on_the_scale(make):
    large, small, rng = make(), make(), np.random.default_rng(2)
    arms = tuple("abcd")
    for _ in range(40):
        rewards = dict(zip(arms, rng.random(4).tolist(), strict=True))
        for policy, scale in ((large, 1.0), (small, 0.02)):
            policy.update(Situation(arms), Choice("a", 0.25), {arm: scale * value for arm, value in rewards.items()})
        assert small.chances(arms) == pytest.approx(large.chances(arms), abs=1e-6)


@pytest.mark.parametrize("make", [Hedge, NormalHedge])
def test_full_information_needs_no_exploring(make):
    """The arm played is the worst; the others are seen all the same."""
    policy = make()
    arms = tuple("abcd")
    for _ in range(30):
        policy.update(Situation(arms), Choice("d", 0.25), {"a": 0.3, "b": 0.3, "c": 0.6, "d": 0.1})
    assert policy.chances(arms)[2] > 0.95
    assert policy.values() == pytest.approx({"a": 0.3, "b": 0.3, "c": 0.6, "d": 0.1})


@pytest.mark.parametrize("make", [Hedge, NormalHedge])
def test_an_arm_of_unknown_reward_stands_still(make):
    policy = make()
    policy.update(Situation(("a", "b", "c")), Choice("a", 1 / 3), {"a": 0.8, "b": 0.2})
    assert policy._regrets == pytest.approx({"a": 0.3, "b": -0.3})  # against the mean of the two, not of three
    policy.update(Situation(("a", "b", "c")), Choice("a", 1 / 3), {})
    assert policy._regrets == pytest.approx({"a": 0.3, "b": -0.3})


@pytest.mark.parametrize("make", [Hedge, NormalHedge])
def test_the_played_arm_alone_is_importance_weighted(make):
    policy = make()
    policy.update(AB, Choice("a", 0.5), {"a": 0.6})
    # a lost 0.4 / 0.5 = 0.8, b nothing, the policy half of 0.8
    assert policy._regrets == pytest.approx({"a": -0.4, "b": 0.4})
    assert policy.values() == {"a": 0.6}


@pytest.mark.parametrize("make", [Hedge, NormalHedge])
def test_fading_keeps_the_chances(make):
    policy = make()
    for _ in range(5):
        policy.update(AB, Choice("a", 0.5), {"a": 0.5, "b": 0.6})
    before = policy.chances(("a", "b"))
    policy.fade(0.1)
    assert policy.chances(("a", "b")) == pytest.approx(before)


# -- context -----------------------------------------------------------------------------------------------------------


def test_linucb_without_context_by_hand():
    policy = LinUCB(ridge=0.5)
    teach(policy, "a", [0.2, 0.4])
    teach(policy, "b", [0.9])
    means, widths = policy.predict(AB)
    # overall mean 0.5; a: 0.5 + (0.6 - 2 * 0.5) / 2.5, b: 0.5 + 0.4 / 1.5
    assert means == pytest.approx([0.34, 0.5 + 0.4 / 1.5])
    assert widths == pytest.approx([1 / math.sqrt(2.5), 1 / math.sqrt(1.5)])
    assert policy._noise == pytest.approx((0.01 + 0.2**2) / 2)  # a's second round surprised by 0.2


def test_linucb_with_a_hint_by_hand():
    """One round with x = (1, 1, h): A = I / 2 + x x^T, A^-1 x = x / (1/2 + x.x)."""
    policy = LinUCB(ridge=0.5)
    teach(policy, "a", [0.8], Situation(("a",), {"a": 16.0}))  # h = ln 17 / ln 17 = 1
    teach(policy, "b", [0.2])
    means, widths = policy.predict(Situation(("a",), {"a": 16.0}))
    assert means == pytest.approx([0.5 + 3 * 0.3 / 3.5])
    assert widths == pytest.approx([math.sqrt(3 / 3.5)])


def test_linucb_chooses_by_hint_and_by_feature():
    """The best fixed arm earns 0.76 of what the best arm of each round does."""
    earned = []
    for seed in range(10):
        policy, rng = LinUCB(), np.random.default_rng(seed)
        for turn in range(300):
            hint, entropy = float(rng.integers(0, 30)), float(rng.random())
            situation = Situation(("a", "b", "c"), {"a": hint}, {"entropy": entropy})
            choice = policy.select(situation, rng)
            worth = {"a": 0.02 * hint, "b": 0.3, "c": 0.6 - 0.6 * entropy}
            policy.update(situation, choice, {choice.arm: worth[choice.arm] + 0.05 * float(rng.standard_normal())})
            if turn >= 200:
                earned.append(worth[choice.arm] / max(worth.values()))
    assert np.mean(earned) > 0.9


def test_linucb_is_bounded_whatever_features_come_and_go():
    policy = LinUCB()
    for turn in range(30):
        odd = (math.nan, math.inf, -math.inf, -3.0, 1e300)[turn % 5]
        situation = Situation(("a", "b"), {"a": odd}, {f"f{turn}": odd, "position": float(turn)})
        choice = policy.select(situation, RNG)
        policy.update(situation, choice, {choice.arm: 0.5})
    assert policy._names == ["f0", "position", "f1", "f2", "f3"]
    assert policy._products.shape == (2, 8, 8)
    for situation in (AB, Situation(("a", "b"), {}, {"position": 4.0})):
        means, widths = policy.predict(situation)
        assert np.isfinite(means).all()
        assert np.isfinite(widths).all()


def test_linucb_takes_a_context_it_never_saw_for_average():
    policy = LinUCB()
    teach(policy, "a", [0.5] * 20, Situation(("a",), {}, {"batch": 0.0}))
    means, _ = policy.predict(Situation(("a",), {}, {"batch": 8.0}))
    assert means == pytest.approx([0.5])


# -- states and options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("sliding_ucb", {"rounds": 3}, "rounds"),
        ("sliding_ucb", {"rounds": [["a", 0.5]]}, "evidence"),
        ("sliding_ucb", {"rounds": [["a", 0.5, 1.0], ["a", "much", 1.0]]}, "reward"),
        ("etc", {"committed": 3}, "committed"),
        ("halving", {"phase": {"a": -1.0}}, "a=-1.0"),
        ("halving", {"out": "a"}, "out"),
        ("thompson", {"squares": {"a": "1"}}, "a='1'"),
        ("exp3", {"regrets": [1.0]}, "regrets"),
        ("exp3spec", {"regrets": {"a": math.nan}}, "nan"),
        ("hedge", {"gaps": -1.0}, "gaps"),
        ("normalhedge", {"regrets": {"a": None}}, "None"),
        ("linucb", {"features": ["f"] * 9}, "features"),
        ("linucb", {"noise": None}, "noise"),
        ("linucb", {"models": {}}, "same arms"),
        ("linucb", {"models": {"a": {"products": [0.0] * 64, "rewarded": [0.0] * 7}}}, "rewarded"),
        ("linucb", {"models": {"a": {"products": [0.0] * 63 + ["x"], "rewarded": [0.0] * 8}}}, "products"),
        ("ucbspec", {"arms": {"a": {"count": 0.0, "sum": 0.0}}}, "count"),
    ],
)
def test_a_damaged_state_is_an_error_and_changes_nothing(name, change, says):
    policy = policy_factory(name)()
    teach(policy, "a", [0.5, 0.7])
    before = json.dumps(policy.dump())
    with pytest.raises(BanditMemoryError, match=says):
        policy.load({**policy.dump(), **change})
    assert json.dumps(policy.dump()) == before


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("ucbspec", {"scale": -0.1}, BadOption, "scale"),
        ("ucbspec", {"delta": 0}, BadOption, "delta"),
        ("ucbspec", {"beta": 0.1}, UnknownName, "delta, scale"),
        ("exp3", {"gamma": 0.0}, BadOption, "gamma"),
        ("exp3spec", {"gamma": 0.1}, UnknownName, "gamma"),
        ("etc", {"each": 0}, BadOption, "each"),
        ("halving", {"rounds": "all"}, BadOption, "rounds"),
        ("thompson", {"spread": 0.0}, BadOption, "spread"),
        ("discounted_ucb", {"gamma": 1.1}, BadOption, "gamma"),
        ("discounted_ucb", {"window": 3}, UnknownName, "beta, gamma"),
        ("sliding_ucb", {"window": 0}, BadOption, "window"),
        ("linucb", {"ridge": 0.0}, BadOption, "ridge"),
        ("linucb", {"alpha": True}, BadOption, "alpha"),
        ("hedge", {"rate": -1.0}, BadOption, "rate"),
        ("hedge", {"every": 0}, BadOption, "every"),
        ("normalhedge", {"every": True}, BadOption, "every"),
        ("normalhedge", {"rate": 1.0}, UnknownName, "rate"),
    ],
)
def test_wrong_options_are_named(name, options, error, says):
    with pytest.raises(error, match=says):
        policy_factory(name, options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ucbspec", {"scale": 0.3, "delta": 0.05}),
        ("exp3", {"gamma": 0.1}),
        ("etc", {"each": 5}),
        ("halving", {"rounds": 40}),
        ("thompson", {"spread": 0.3}),
        ("discounted_ucb", {"beta": 0.2, "gamma": 0.9}),
        ("sliding_ucb", {"beta": 0.2, "window": 30}),
        ("linucb", {"alpha": 0.5, "ridge": 2.0}),
        ("hedge", {"rate": 2.0, "every": 1}),
        ("normalhedge", {"every": 8}),
    ],
)
def test_options_arrive(name, options):
    policy = policy_factory(name, options)()
    assert {option: getattr(policy, option) for option in options} == options
