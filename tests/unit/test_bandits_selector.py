"""The selector: what is offered, what a round is worth, who shares what with whom."""

import math

import numpy as np
import pytest

from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.values import PLAIN, Arm, Choice

ARMS = (
    Arm("suffix@8", "suffix", 8),
    Arm("suffix@16", "suffix", 16),
    Arm("lookup@8", "lookup", 8),
    Arm(PLAIN, PLAIN, 0),
)


class Recorder:
    """A policy that plays the first arm and keeps what it was told."""

    name = "recorder"
    full_information = False

    def __init__(self):
        self.told = []

    def select(self, situation, rng):
        return Choice(situation.arms[0])

    def update(self, situation, choice, rewards):
        self.told.append((situation, choice, dict(rewards)))

    def values(self):
        return {"suffix@8": 0.25}

    def dump(self):
        return {}

    def load(self, state):
        pass


def selector(policy=None, reward="throughput", **options):
    return Selector(options.pop("arms", ARMS), policy or policy_factory("hinted_ucb"), reward_named(reward), **options)


def rng():
    return np.random.default_rng(0)


def settle(seat, choice, *, accepted=2, drafted=4, **given):
    values = {"committed": accepted + 1, "draft_s": 0.002, "score_s": 0.060, "width": drafted + 1, **given}
    return seat.learn(choice, drafted=drafted, accepted=accepted, **values)


def test_outcome_by_hand():
    costs = CostModel()
    for seconds in (0.050, 0.0501, 0.0502):
        costs.note_forward(1, seconds)
    seat = selector(Recorder, costs=costs).open("a", rng())
    outcome = settle(seat, seat.choose({}))
    assert (outcome.arm, outcome.budget) == ("suffix@8", 8)
    assert (outcome.drafted, outcome.accepted, outcome.committed) == (4, 2, 3)
    assert outcome.score_s == pytest.approx(0.060)
    assert outcome.plain_s == pytest.approx(0.0501)
    assert outcome.draft_s == pytest.approx(0.002)


def test_policies_get_rescaled_rewards_and_the_situation_they_saw():
    made = []
    seat = selector(lambda: made.append(Recorder()) or made[-1]).open("a", rng())
    choice = seat.choose({"suffix@8": 3.0}, {"position": 5.0})
    outcome = settle(seat, choice)
    situation, told_choice, rewards = made[-1].told[0]
    expected = 3 * outcome.plain_s / (outcome.draft_s + outcome.score_s) / 16
    assert rewards == {"suffix@8": pytest.approx(expected)}
    assert (situation.hint("suffix@8"), situation.features["position"]) == (3.0, 5.0)
    assert told_choice is choice
    assert seat.values() == {"suffix@8": 4.0}


def test_a_prompt_round_is_judged_by_usual_costs():
    costs = CostModel(slope=0.0)
    costs.note_forward(1, 0.050)
    seat = selector(Recorder, costs=costs).open("a", rng())
    outcome = settle(seat, seat.choose({}), score_s=None, batch=4)
    assert outcome.plain_s == outcome.score_s == pytest.approx(0.050)


def test_a_row_of_a_batch_pays_for_what_its_draft_adds():
    """A forward of 8 plain rows takes 80 ms; 4 nodes more take 4 ms. The row owns 10 ms, and its draft costs 4 ms."""
    costs = CostModel()
    costs.note_forward(8, 0.080)
    seat = selector(Recorder, costs=costs).open("a", rng())
    outcome = settle(seat, seat.choose({}), width=12, score_s=0.084, batch=8)
    assert outcome.plain_s == pytest.approx(0.010)
    assert outcome.score_s == pytest.approx(0.014)


def test_an_empty_draft_is_a_plain_step_with_drafting_time():
    seat = selector(Recorder).open("a", rng())
    outcome = settle(seat, seat.choose({}), drafted=0, accepted=0, score_s=0.048)
    assert outcome.arm == "suffix@8"
    assert outcome.score_s == outcome.plain_s == pytest.approx(0.048)
    assert reward_named("throughput")(outcome) == pytest.approx(0.048 / 0.050)


@pytest.mark.parametrize("benched", [{"suffix"}, {"suffix@8", "suffix@16"}])
def test_benched_arms_are_not_offered(benched):
    seat = selector(Recorder).open("a", rng())
    assert seat.choose({}, {}, benched).arm == "lookup@8"


def test_plain_is_left_when_all_are_benched():
    everything = {arm.name for arm in ARMS}
    assert selector().open("a", rng()).choose({}, {}, everything) == Choice(PLAIN, 1.0)
    made = []
    without = selector(lambda: made.append(Recorder()) or made[-1], arms=ARMS[:3]).open("a", rng())
    choice = without.choose({}, {}, everything)
    assert choice == Choice(PLAIN, 1.0)
    outcome = settle(without, choice, drafted=0, accepted=0, draft_s=0.0)
    assert (outcome.arm, outcome.budget, outcome.draft_s) == (PLAIN, 0, 0.0)
    assert not any(policy.told for policy in made)  # nobody chose, nobody learns


def test_a_policy_that_leaves_the_offer_is_caught():
    class Stray(Recorder):
        def select(self, situation, rng):
            return Choice("elsewhere@8")

    with pytest.raises(UnknownName, match=r"recorder.*suffix@8"):
        selector(Stray).open("a", rng()).choose({})


def test_a_policy_without_probability_is_caught():
    class Stray(Recorder):
        def select(self, situation, rng):
            return Choice(PLAIN, 0.0)

    with pytest.raises(BadOption, match="probability"):
        selector(Stray).open("a", rng()).choose({})


def test_one_key_shares_a_policy_and_request_memory_does_not():
    shared = selector(memory="process")
    first, second = shared.open("a", rng()), shared.open("a", rng())
    settle(first, Choice("suffix@8"))  # not chosen by this seat: nothing learned
    assert set(second.values()) == {PLAIN}
    settle(first, first.choose({"suffix@8": 5.0}))
    assert second.values() == first.values() != {}
    fresh = selector(memory="request")
    seat = fresh.open("a", rng())
    settle(seat, seat.choose({"suffix@8": 5.0}))
    assert set(fresh.open("a", rng()).values()) == {PLAIN}


def _teach(made, key, rounds, accepted):
    seat = made.open(key, rng())
    for _ in range(rounds):
        settle(seat, seat.choose({"suffix@8": 6.0, "suffix@16": 0.0, "lookup@8": 0.0}), accepted=accepted)


def test_a_new_key_starts_from_all_keys_with_less_evidence():
    made = selector()
    _teach(made, "a", 30, accepted=0)
    values = made.open("b", rng()).values()
    assert values["suffix@8"] == pytest.approx(made.open("a", rng()).values()["suffix@8"], rel=0.1)
    warm, known = made._live["b"], made._live["a"]
    assert warm._arms["suffix@8"].count < 0.5 * known._arms["suffix@8"].count


def test_keys_do_not_disturb_each_other():
    made = selector()
    _teach(made, "a", 10, accepted=4)
    before = made.open("a", rng()).values()
    _teach(made, "b", 30, accepted=0)
    assert made.open("a", rng()).values() == before


def test_a_policy_that_cannot_fade_starts_cold():
    made = selector(Recorder)
    seat = made.open("a", rng())
    settle(seat, seat.choose({}))
    assert made.open("b", rng())._policy.told == []


def test_least_recently_opened_key_goes_first():
    made = selector(capacity=2)
    for key in ("a", "b", "a", "c"):
        made.open(key, rng())
    assert list(made._live) == ["a", "c"]


def test_forget_one_key_or_all():
    made = selector()
    _teach(made, "a", 20, accepted=4)
    made.forget("a")
    assert "suffix@8" in made.open("a", rng()).values()  # from what all keys know
    made.forget()
    assert set(made.open("a", rng()).values()) == {PLAIN}
    selector(memory="request").forget()


def test_needs_agreement_comes_from_the_reward():
    assert not selector().needs_agreement
    made = selector(reward="bd")
    assert made.needs_agreement
    seat = made.open("a", rng())
    settle(seat, seat.choose({"suffix@8": 3.0}), agreement=(0.9, 0.8, 0.2, 0.1))
    assert made.policy_name == "hinted_ucb"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"arms": ()}, "arms"),
        ({"arms": (ARMS[0], ARMS[0])}, "arms"),
        ({"memory": "forever"}, "memory"),
        ({"capacity": 0}, "capacity"),
    ],
)
def test_wrong_set_up_is_named(options, says):
    with pytest.raises(BadOption, match=says):
        selector(**options)


def test_a_simulated_stream_ends_near_its_best_arm():
    """suffix accepts 4 of 8, lookup 1 of 8, forwards as measured on two cores: suffix is worth 5 / 1.27 = 3.9."""
    made, generator = selector(), np.random.default_rng(1)
    seat = made.open("a", generator)
    played = []
    for _ in range(120):
        choice = seat.choose(dict.fromkeys(("suffix@8", "suffix@16", "lookup@8"), math.nan))
        drafted = {"suffix@8": 8, "suffix@16": 16, "lookup@8": 8, PLAIN: 0}[choice.arm]
        accepted = {"suffix@8": 4, "suffix@16": 4, "lookup@8": 1, PLAIN: 0}[choice.arm]
        seconds = (0.055 + 0.00185 * drafted) * (1 + 0.05 * generator.standard_normal())
        settle(seat, choice, drafted=drafted, accepted=accepted, score_s=float(seconds))
        played.append(choice.arm)
    assert played[60:].count("suffix@8") > 40


def test_scopes_do_not_warm_each_other():
    made = selector()
    _teach(made, "ann/one", 30, accepted=4)
    assert set(made.open("ben/one", rng()).values()) == {PLAIN}
    assert "suffix@8" in made.open("ann/two", rng()).values()


@pytest.mark.parametrize("policy", ["ucb", "hinted_ucb"])
def test_a_warm_start_is_worth_25_rounds_at_most(policy):
    made = selector(policy_factory(policy))
    _teach(made, "a", 1000, accepted=4)
    begun = made.open("b", rng())._policy.dump()["arms"]
    assert 0 < sum(row["count"] for row in begun.values()) <= 25.001


def test_an_open_seat_goes_on_after_everything_was_forgotten():
    made = selector()
    seat = made.open("a", rng())
    made.forget()
    settle(seat, seat.choose({"suffix@8": 5.0}))
    assert "suffix@8" in seat.values()
    assert set(made.open("a", rng()).values()) == {PLAIN}


def test_least_recently_opened_scope_goes_first():
    made = selector(capacity=2)
    for scope in "abac":
        made.open(f"{scope}/one", rng())
    assert list(made._scopes) == ["a", "c"]


def test_binding_without_a_memory_means_nothing():
    made = selector()
    _teach(made, "a", 5, accepted=4)
    made.bind("a model")
    assert not made.stores
    assert "suffix@8" in made.open("a", rng()).values()
