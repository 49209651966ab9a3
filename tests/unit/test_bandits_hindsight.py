"""Hindsight: HedgeSpec's estimate by hand, who is told what and when, and what full information is worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.hindsight import HORIZON, Decision, Hindsight
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.bandits.rewards import expected_length
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.values import PLAIN, Arm, Choice, Outcome, Situation

ARMS = (Arm("one@3", "one", 3), Arm("two@2", "two", 2), Arm("mute@4", "mute", 4), Arm(PLAIN, PLAIN, 0))
NAMES = tuple(arm.name for arm in ARMS)
NAN = math.nan


def published(agreement: Sequence[float]) -> float:
    """The estimate as the paper writes it: sum over k of k (1 - g_k) g_1 ... g_{k-1}, g = 0 at the bonus token."""
    g = [*agreement, 0.0]
    return sum((k + 1) * (1 - g[k]) * math.prod(g[:k]) for k in range(len(g)))


def test_estimate_by_hand() -> None:
    assert expected_length(()) == 1.0
    assert expected_length((1.0, 1.0, 1.0)) == 4.0
    assert expected_length((0.5, 0.5)) == pytest.approx(1.75)
    assert expected_length((0.0, 1.0)) == 1.0
    for agreement in itertools.product((0.0, 0.3, 1.0), repeat=3):
        assert expected_length(agreement) == pytest.approx(published(agreement))


def test_min_1_q_over_p_of_drawn_tokens_is_unbiased_for_speculative_sampling() -> None:
    """Over all texts of two tokens: the mean estimate is the mean length of a round of Leviathan's algorithm."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet([1.0] * 4, (5,)), rng.dirichlet([1.0] * 4, (5,))  # row 0 at the start, 1 + x after x
    estimated = sum(
        p[0, x] * p[1 + x, y] * expected_length([min(1.0, q[0, x] / p[0, x]), min(1.0, q[1 + x, y] / p[1 + x, y])])
        for x in range(4)
        for y in range(4)
    )
    overlap = np.minimum(p, q)  # a token is drafted and taken with min(p, q)
    exact = 1.0 + overlap[0].sum() + sum(overlap[0, x] * overlap[1 + x].sum() for x in range(4))
    assert estimated == pytest.approx(exact)


def decision(
    position: int, arm: str = "one@3", hints: dict[str, float] | None = None, committed: int = 1, width: int = 1
) -> Decision:
    outcome = Outcome(arm, 3, 3, committed - 1, committed, (0.5,) * 3, 0.001, 0.06, 0.05)
    return Decision(position, Situation(NAMES, hints or {}), Choice(arm, 0.25), outcome, width)


def hindsight(reward: str = "length", costs: CostModel | None = None) -> Hindsight:
    return Hindsight(ARMS, ("one", "two"), reward_named(reward), costs or CostModel())


def told(found: Hindsight, end: int | None = None) -> list[tuple[int, dict[str, float]]]:
    return [(item.position, dict(rewards)) for item, rewards in found.settled(end)]


def test_a_round_is_settled_when_every_estimate_is_known() -> None:
    found = hindsight()
    found.decided(decision(0))
    found.heard("two", [1.0, 0.5, 0.0])
    found.heard("one", [0.5, 1.0])
    assert told(found) == []  # one@3 may get a third token
    found.heard("one", [0.5])
    assert told(found) == [(0, {"one@3": 1 + 0.5 + 0.5 + 0.25, "two@2": 2.5, PLAIN: 1.0})]
    assert told(found) == []


def test_a_refused_token_ends_the_wait() -> None:
    found = hindsight()
    found.decided(decision(0))
    found.heard("one", [0.0])
    found.heard("two", [1.0, 0.0])
    assert told(found) == [(0, {"one@3": 1.0, "two@2": 2.0, PLAIN: 1.0})]


def test_rounds_come_in_order_each_from_its_own_place() -> None:
    found = hindsight()
    found.decided(decision(0))
    found.decided(decision(2))
    found.heard("one", [1.0, 1.0, 1.0, 0.0])
    found.heard("two", [0.0, 1.0, 0.0, 1.0])
    assert told(found) == [
        (0, {"one@3": 4.0, "two@2": 1.0, PLAIN: 1.0}),
        (2, {"one@3": 2.0, "two@2": 1.0, PLAIN: 1.0}),
    ]


def test_behind_the_answers_end_nothing_counts_for_anyone() -> None:
    found = hindsight()
    found.decided(decision(1))
    found.decided(decision(3))
    for name in ("one", "two"):
        found.heard(name, [1.0] * 4)
    assert told(found, end=4) == [(1, {"one@3": 3.0, "two@2": 3.0, PLAIN: 1.0}), (3, dict.fromkeys(ABLE, 1.0))]


ABLE = ("one@3", "two@2", PLAIN)


def test_who_cannot_score_is_told_about_when_it_played() -> None:
    found = hindsight()
    found.decided(decision(0, "mute@4", committed=3))
    found.decided(decision(1))
    for name in ("one", "two"):
        found.heard(name, [0.0] * 4)
    assert told(found) == [(0, {**dict.fromkeys(ABLE, 1.0), "mute@4": 3.0}), (1, dict.fromkeys(ABLE, 1.0))]
    assert [found.estimates(arm) for arm in NAMES] == [True, True, False, True]


def test_what_is_not_known_is_not_made_up() -> None:
    found = hindsight()
    found.decided(decision(0))
    found.decided(decision(1))
    found.heard("one", [0.0, 1.0, NAN, 1.0, 1.0])  # refused before the gap; then not
    found.heard("two", [0.0] * 5)
    assert told(found) == [(0, dict.fromkeys(ABLE, 1.0)), (1, {"two@2": 1.0, PLAIN: 1.0})]


def test_block_divergence_waits_for_all_places() -> None:
    found = hindsight("bd")
    found.decided(decision(0))
    found.heard("one", [0.0, 0.5])
    found.heard("two", [0.0, 0.5])
    assert told(found) == []
    found.heard("one", [0.7])
    ((_, rewards),) = told(found)
    assert rewards == {"one@3": pytest.approx(0.4), "two@2": 0.25, PLAIN: 0.0}


def test_throughput_is_estimated_length_over_what_the_round_would_have_cost() -> None:
    costs = CostModel()
    for width, seconds in ((1, 0.05), (3, 0.06), (4, 0.08)):
        for _ in range(5):
            costs.note_forward(width, seconds)
    for _ in range(5):
        costs.note_draft("one@3", 0.02)
    found = hindsight("throughput", costs)
    found.decided(decision(0, hints={"two@2": 0.0}))
    found.heard("one", [1.0, 0.5, 0.0])
    found.heard("two", [0.0])
    ((_, rewards),) = told(found)
    assert rewards["one@3"] == pytest.approx(2.5 * 0.05 / (0.08 + 0.02))
    assert rewards["two@2"] == pytest.approx(1.0)  # it knew that it had nothing to say: a plain step
    assert rewards[PLAIN] == pytest.approx(1.0)


def test_no_more_than_the_horizon_is_waited_for() -> None:
    found = Hindsight([Arm("long@128", "long", 128)], ("long",), reward_named("length"), CostModel())
    outcome = Outcome("long@128", 128, 128, 0, 1)
    found.decided(Decision(0, Situation(("long@128",)), Choice("long@128"), outcome, 1))
    found.heard("long", [1.0] * HORIZON)
    assert told(found) == [(0, {"long@128": 17.0})]  # the reward saturates


# -- the seat ----------------------------------------------------------------------------------------------------------


class Told:
    name, full_information, every = "told", True, 7

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def select(self, situation: Situation, rng: Any) -> Choice:
        return Choice("two@2", 0.25)

    def update(self, situation: Situation, choice: Choice, rewards: Any) -> None:
        self.heard.append((situation, choice, dict(rewards)))

    def values(self) -> dict[str, float]:
        return {}

    dump = values

    def load(self, state: Any) -> None: ...


def test_a_seat_credits_late_with_the_situation_and_probability_of_then() -> None:
    policies: list[Told] = []
    made = Selector(ARMS, lambda: policies.append(Told()) or policies[-1], reward_named("expected_length"))  # type: ignore[func-returns-value]
    assert (made.full_information, made.every) == (True, 7)
    seat = made.open("a/b", np.random.default_rng(0))
    seat.score(("one", "two"))
    assert not seat.needs_agreement(Choice("two@2"))  # what it played is estimated like the others
    assert seat.needs_agreement(Choice("mute@4"))
    learning = [policy for policy in policies if policy is not policies[0]]
    for position in (0, 2):
        choice = seat.choose({"one@3": float(position)})
        cost = {"draft_s": 0.001, "score_s": 0.05, "width": 3, "position": position}
        seat.learn(choice, drafted=2, accepted=1, committed=2, **cost)  # type: ignore[arg-type]
    assert not any(policy.heard for policy in learning)
    seat.hear("one", [0.5, 0.0, 0.0, 0.0])
    seat.hear("two", [1.0, 0.0, 0.0, 0.0])
    seat.settle()
    for policy in learning:  # of the key, and of its scope
        (first, choice, rewards), (second, _, _) = policy.heard
        assert (first.hint("one@3"), second.hint("one@3")) == (0.0, 2.0)
        assert choice == Choice("two@2", 0.25)
        assert rewards == {
            "one@3": pytest.approx(1.5 / 17),
            "two@2": pytest.approx(2 / 17),
            PLAIN: pytest.approx(1 / 17),
        }


# -- what it is worth --------------------------------------------------------------------------------------------------


def shares(policy: str, arms: int, seed: int, *, full: bool, rounds: int = 150) -> float:
    """Share of the best arm in rounds 51 to the last; drafters of known quality, one budget, feedback as late as it is.

    Full information: by way of `Hindsight`. Else the round's own length.
    """
    quality = [0.8] + [0.55] * (arms - 1)
    pool = tuple(Arm(f"d{i}@4", f"d{i}", 4) for i in range(arms))
    names, rng = tuple(arm.name for arm in pool), np.random.default_rng(seed)
    live, reward = policy_factory(policy)(), reward_named("length")
    found = Hindsight(pool, [arm.drafter for arm in pool], reward, CostModel())
    position, best = 0, 0
    for turn in range(rounds):
        situation = Situation(names)
        choice = live.select(situation, rng)
        best += turn >= 50 and choice.arm == names[0]
        right = rng.random((arms, 5)) < np.array(quality)[:, None]  # of the next tokens, whose guess is right
        own = right[names.index(choice.arm), :4]
        committed = 1 + (4 if own.all() else int(own.argmin()))
        outcome = Outcome(choice.arm, 4, 4, committed - 1, committed)
        if full:
            found.decided(Decision(position, situation, choice, outcome, 1))
            for row, arm in enumerate(pool):
                found.heard(arm.drafter, right[row, :committed].astype(float).tolist())
            for decided, rewards in found.settled():
                scaled = {arm: reward.rescaled(value) for arm, value in rewards.items()}
                live.update(decided.situation, decided.choice, scaled)
        else:
            live.update(situation, choice, {choice.arm: reward.rescaled(reward(outcome))})
        position += committed
    return best / (rounds - 50)


@pytest.mark.parametrize("policy", ["hedge", "normalhedge"])
def test_late_feedback_of_all_arms_finds_the_best_before_exp3_does(policy: str) -> None:
    """HedgeSpec's claim, in the small; and more arms hardly hurt."""
    for arms in (4, 16):
        ours = np.mean([shares(policy, arms, seed, full=True) for seed in range(8)])
        theirs = np.mean([shares("exp3", arms, seed, full=False) for seed in range(8)])
        assert ours > 0.7, (arms, ours)
        assert ours > theirs + 0.2, (arms, ours, theirs)
