"""What full information is worth: policies that are told about every arm against those told about the played one.

Toy arms as in ``theory``: N drafters of one budget whose guesses are right with chances of their own, the first the
best, the others spread below it. Hedge and NormalHedge hear estimates of every arm, as late as in the engine
(``bandits/hindsight.py``, HedgeSpec, arXiv 2510.20064); the others the length of the round they played. Gross: tokens
a round over what the best arm alone gets. Net: tokens a second, when a round costs one forward and scoring a drafter
costs `score_cost` of one, every `every` rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluators.report import number, table
from metasd_langchain.bandits.costs import CostModel
from metasd_langchain.bandits.hindsight import Decision, Hindsight
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.values import Arm, Outcome, Situation

__all__ = ["compare", "gross"]

_POLICIES = ("hedge", "normalhedge", "ucb", "ucbspec", "exp3", "random")
_BEST, _NEXT, _WORST = 0.75, 0.6, 0.3  # chance that a guess is right: of the best drafter, and of the others


def compare(
    counts: Sequence[int], length: int, rounds: int, runs: int, cost: tuple[float, int], seed: int
) -> dict[str, Any]:
    """Gross and net by policy and number of drafters; printed, and returned.

    Args:
        counts: numbers of drafters.
        length: tokens of a draft.
        rounds: of each run.
        runs: to average over.
        cost: of scoring a drafter, as a share of a forward, and rounds between two scorings.
        seed: of everything.
    """
    figures: dict[str, Any] = {}
    for policy in _POLICIES:
        full = policy_factory(policy)().full_information
        own: dict[str, Any] = {}
        for count in counts:
            share = float(np.mean([gross(policy, count, length, rounds, cost[1], seed + i) for i in range(runs)]))
            own[str(count)] = {"gross": share, "net": share / (1.0 + count * cost[0] / cost[1]) if full else share}
        figures[policy] = own
    rows = [
        [policy, *(number(own[str(count)][what], 3) for count in counts for what in ("gross", "net"))]
        for policy, own in figures.items()
    ]
    table(
        f"tokens a round over the best drafter's, {rounds} rounds; net of scoring at {cost[0]:g} forwards a drafter, "
        f"every {cost[1]} rounds",
        ["policy", *(f"N={count}{what}" for count in counts for what in ("", " net"))],
        rows,
    )
    return figures


def gross(policy: str, count: int, length: int, rounds: int, every: int, seed: int) -> float:
    """Tokens a round, over what the best arm alone gets on average."""
    quality = np.array([_BEST, *np.linspace(_NEXT, _WORST, count - 1)])[:, None]
    arms = tuple(Arm(f"d{i}@{length}", f"d{i}", length) for i in range(count))
    situation, rng = Situation(tuple(arm.name for arm in arms)), np.random.default_rng(seed)
    live, reward = policy_factory(policy)(), reward_named("length")
    found = Hindsight(arms, [arm.drafter for arm in arms], reward, CostModel())
    heard: list[list[float]] = [[] for _ in arms]  # not told yet
    position = 0
    for turn in range(rounds):
        choice = live.select(situation, rng)
        right = rng.random((count, length + 1)) < quality  # guesses of the next tokens that are right
        own = right[situation.arms.index(choice.arm), :length]
        committed = 1 + (length if own.all() else int(own.argmin()))
        outcome = Outcome(choice.arm, length, length, committed - 1, committed)
        if not live.full_information:
            live.update(situation, choice, {choice.arm: reward.rescaled(reward(outcome))})
        else:
            found.decided(Decision(position, situation, choice, outcome, 1))
            for row, notes in enumerate(heard):
                notes.extend(right[row, :committed].astype(float).tolist())
            if turn % every == every - 1:
                for arm, notes in zip(arms, heard, strict=True):
                    found.heard(arm.drafter, notes)
                    notes.clear()
                for decision, rewards in found.settled():
                    scaled = {name: reward.rescaled(value) for name, value in rewards.items()}
                    live.update(decision.situation, decision.choice, scaled)
        position += committed
    best = 1.0 + _BEST * (1.0 - _BEST**length) / (1.0 - _BEST)
    return position / rounds / best
