"""What every bandit policy must do. Subclass it, give ``make``, and pytest runs the walks.

::

    class TestMine(PolicyContract):
        follows_switches = True

        def make(self):
            return create({})
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from metasd_langchain.bandits import Policy, State
from metasd_langchain.bandits.selector import Fading
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.values import PLAIN, Choice, Situation

__all__ = ["PolicyContract", "play"]

ARMS = ("one@8", "two@8", "three@4", PLAIN)


def play(
    policy: Policy,
    reward: Callable[[str], float],
    rounds: int,
    rng: np.random.Generator,
    situation: Situation | None = None,
) -> list[str]:
    """Play `rounds` rounds; `reward` gives an arm's reward in [0, 1]. Returns the arms played, in order.

    A full-information policy is told the reward of every arm on offer, others that of the arm played.
    """
    seen = Situation(ARMS) if situation is None else situation
    played = []
    for _ in range(rounds):
        choice = policy.select(seen, rng)
        told = seen.arms if policy.full_information else (choice.arm,)
        policy.update(seen, choice, {arm: reward(arm) for arm in told})
        played.append(choice.arm)
    return played


class PolicyContract:
    """The walks. Flags say what a policy claims; the defaults suit a stationary bandit.

    Attributes:
        learns: finds the best arm, also a late one, and tries an arm again that had no luck in its first round.
        follows_switches: when the best arm turns bad, leaves it within 30 rounds, and comes back when it is good again.
        commits: 0, or the rounds among the contract's four arms after which the policy plays one arm for good, as the
            textbook's explore-then-commit does. It is then held to that: what the arm earns changes nothing any more.
    """

    learns: ClassVar[bool] = True
    follows_switches: ClassVar[bool] = False
    commits: ClassVar[int] = 0

    def make(self) -> Policy:
        """A fresh policy."""
        raise NotImplementedError

    def _coins(self, means: dict[str, float], seed: int) -> Callable[[str], float]:
        rng = np.random.default_rng((seed, 1))  # not the policy's stream: its draws would decide what they earn
        return lambda arm: float(rng.random() < means[arm])

    def test_is_a_policy(self) -> None:
        policy = self.make()
        assert isinstance(policy, Policy)
        assert policy.name

    def test_choice_is_on_offer_with_its_probability(self) -> None:
        policy, rng = self.make(), np.random.default_rng(0)
        odd = (math.nan, 0.0, 0.5, 1.0, 3.0, 7.5, 40.0, math.inf)
        for turn in range(120):
            arms = tuple(arm for at, arm in enumerate(ARMS) if turn % 7 != at) or ARMS[:1]
            hints = {arm: odd[int(rng.integers(len(odd)))] for arm in arms[: turn % 5]}
            situation = Situation(arms, hints, {"position": float(turn)})
            choice = policy.select(situation, rng)
            assert choice.arm in arms
            assert 0.0 < choice.probability <= 1.0
            told = arms if policy.full_information else (choice.arm,)
            policy.update(situation, choice, {arm: float(rng.random()) for arm in told})
            assert all(math.isfinite(value) for value in policy.values().values())

    def test_one_arm_is_enough(self) -> None:
        policy, rng = self.make(), np.random.default_rng(0)
        for hints in ({}, {"one@8": 0.0}):
            situation = Situation(("one@8",), hints)
            assert play(policy, lambda _: 0.5, 5, rng, situation) == ["one@8"] * 5

    def test_arms_appear_and_vanish(self) -> None:
        policy, rng = self.make(), np.random.default_rng(1)
        reward = self._coins(dict.fromkeys((*ARMS, "late@2"), 0.5), 1)
        for arms in (ARMS[:2], ARMS[2:], ("late@2",), ("late@2", *ARMS), (PLAIN,)):
            assert set(play(policy, reward, 12, rng, Situation(arms))) <= set(arms)

    def test_same_rng_same_choices(self) -> None:
        runs = [
            play(self.make(), self._coins(dict.fromkeys(ARMS, 0.5), 2), 60, np.random.default_rng(2)) for _ in range(2)
        ]
        assert runs[0] == runs[1]

    @pytest.mark.parametrize("rounds", [3, 6, 50])
    def test_dump_and_load_go_on_alike(self, rounds: int) -> None:
        first, second = self.make(), self.make()
        seen = Situation(ARMS, {"one@8": 3.0, "two@8": 9.0}, {"position": 7.0})
        play(first, self._coins(dict.fromkeys(ARMS, 0.4), 3), rounds, np.random.default_rng(3), seen)
        state: State = json.loads(json.dumps(first.dump(), allow_nan=False))
        second.load(state)
        assert second.values() == pytest.approx(first.values())
        assert json.loads(json.dumps(second.dump())) == state
        rest = [
            play(policy, self._coins(dict.fromkeys(ARMS, 0.4), 4), 50, np.random.default_rng(4), seen)
            for policy in (first, second)
        ]
        assert rest[0] == rest[1]

    def test_a_fresh_state_loads(self) -> None:
        policy = self.make()
        policy.load(json.loads(json.dumps(self.make().dump(), allow_nan=False)))
        assert policy.select(Situation(ARMS), np.random.default_rng(0)).arm in ARMS

    def test_a_wrong_state_is_an_error_and_changes_nothing(self) -> None:
        policy, rng = self.make(), np.random.default_rng(5)
        play(policy, lambda _: 0.3, 20, rng)
        before = policy.dump()
        wrong: list[object] = [{}, {**before, "policy": "another"}, None, [], {"policy": policy.name, "arms": 3}]
        for state in wrong:
            with pytest.raises(BanditMemoryError):
                policy.load(state)  # type: ignore[arg-type]
        assert policy.dump() == before

    def test_finds_the_best_arm(self) -> None:
        if not self.learns:
            pytest.skip("does not claim to learn")
        for best in ARMS[:3]:
            means = {arm: 0.8 if arm == best else 0.2 for arm in ARMS}
            shares = []
            for seed in range(8):
                played = play(self.make(), self._coins(means, seed), 200, np.random.default_rng(seed))
                shares.append(played[100:].count(best) / 100)
            assert float(np.median(shares)) >= 0.6, (best, shares)

    def test_an_unlucky_arm_is_tried_again(self) -> None:
        if not self.learns:
            pytest.skip("does not claim to learn")
        for seed in range(8):
            policy, rng = self.make(), np.random.default_rng(seed)
            policy.update(Situation(ARMS), Choice("two@8", 0.25), dict.fromkeys(ARMS, 0.0))
            means = {arm: 0.9 if arm == "two@8" else 0.15 for arm in ARMS}
            assert "two@8" in play(policy, self._coins(means, seed), 300, rng), seed

    def test_a_late_arm_has_its_chance(self) -> None:
        if not self.learns:
            pytest.skip("does not claim to learn")
        shares = []
        for seed in range(8):
            policy, rng = self.make(), np.random.default_rng(seed)
            reward = self._coins({**dict.fromkeys(ARMS, 0.2), "late@8": 0.8}, seed)
            play(policy, reward, 100, rng)
            play(policy, reward, 100, rng, Situation((*ARMS, "late@8")))
            shares.append(play(policy, reward, 100, rng, Situation((*ARMS, "late@8"))).count("late@8") / 100)
        assert float(np.median(shares)) >= 0.5, shares

    def test_commits_for_good_where_it_claims_to(self) -> None:
        if not self.commits:
            pytest.skip("never commits")
        for seed in range(8):
            policy, rng = self.make(), np.random.default_rng(seed)
            play(policy, self._coins(dict.fromkeys(ARMS, 0.5), seed), self.commits, rng)
            committed = play(policy, lambda _: 0.0, 200, rng)
            assert len(set(committed)) == 1, seed
            others = tuple(arm for arm in ARMS if arm != committed[0])
            assert set(play(policy, lambda _: 1.0, 20, rng, Situation(others))) <= set(others)
            assert play(policy, lambda _: 0.0, 20, rng) == committed[:20], seed

    def test_fading_keeps_the_means(self) -> None:
        policy, rng = self.make(), np.random.default_rng(6)
        if not isinstance(policy, Fading):
            pytest.skip("starts every key from nothing")
        reward = self._coins(dict.fromkeys(ARMS, 0.5), 6)
        play(policy, reward, 50, rng)
        before = dict(policy.values())
        for keep in (0.25, 1.0, 1e-3):
            policy.fade(keep)
            assert policy.values() == pytest.approx(before)
        other = self.make()
        other.load(json.loads(json.dumps(policy.dump(), allow_nan=False)))
        rest = [
            play(one, self._coins(dict.fromkeys(ARMS, 0.5), 7), 50, np.random.default_rng(7)) for one in (policy, other)
        ]
        assert rest[0] == rest[1]

    def test_a_reward_not_known_leaves_its_arm_alone(self) -> None:
        policy, rng = self.make(), np.random.default_rng(8)
        if not policy.full_information:
            pytest.skip("learns from the arm played only")
        situation = Situation(ARMS)
        for known in (ARMS, ARMS[:2], ARMS[:2], ()):
            before = dict(policy.values())
            policy.update(situation, policy.select(situation, rng), dict.fromkeys(known, 0.7))
            after = policy.values()
            assert {arm: after[arm] for arm in before if arm not in known} == {
                arm: value for arm, value in before.items() if arm not in known
            }

    def test_learns_from_the_played_arm_alone(self) -> None:
        if not self.make().full_information:
            pytest.skip("learns from nothing else")
        means = {arm: 0.8 if arm == "two@8" else 0.2 for arm in ARMS}
        shares = []
        for seed in range(8):
            policy, rng, reward = self.make(), np.random.default_rng(seed), self._coins(means, seed)
            for turn in range(300):
                choice = policy.select(Situation(ARMS), rng)
                policy.update(Situation(ARMS), choice, {choice.arm: reward(choice.arm)})
                if turn == 200:
                    shares.append(0.0)
                if turn >= 200:
                    shares[-1] += (choice.arm == "two@8") / 100
        assert float(np.median(shares)) >= 0.6, shares

    def test_follows_switches(self) -> None:
        if not self.follows_switches:
            pytest.skip("does not claim to follow switches")
        good = {"one@8": 0.8, "two@8": 0.3, "three@4": 0.3, PLAIN: 0.3}
        bad = {**good, "one@8": 0.05, "two@8": 0.7}
        left, back = [], []
        for seed in range(8):
            policy, rng = self.make(), np.random.default_rng(seed)
            play(policy, self._coins(good, seed), 100, rng)
            play(policy, self._coins(bad, seed), 30, rng)
            left.append(play(policy, self._coins(bad, seed + 100), 30, rng).count("one@8") / 30)
            play(policy, self._coins(good, seed), 150, rng)
            back.append(play(policy, self._coins(good, seed + 100), 100, rng).count("one@8") / 100)
        assert float(np.median(left)) < 0.2, left
        assert float(np.median(back)) > 0.5, back
