"""What a choice costs: microseconds of select and update together, by policy, and milliseconds to load a memory.

Sixteen arms with hints that change from round to round, rewards at random, of every arm for policies with full
information; the median over repetitions of the mean of a block of rounds, blocks of all policies taking turns.
`contextual` are policies with options: those that read features, and those behind a router (five labels, vectors of 384
numbers, a new prompt every 40 rounds).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from evaluators.arguments import at_least
from evaluators.machine import machine
from evaluators.report import number, table, write
from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.joining import Learned
from metasd_langchain.bandits.memory import Change, Key, SqliteMemory
from metasd_langchain.bandits.registry import policy_factory, policy_names
from metasd_langchain.bandits.routers import fit_softmax
from metasd_langchain.values import FEATURES, PLAIN, Situation

__all__ = ["add_arguments", "run"]

_BLOCK, _ANSWER = 200, 40  # rounds
_SIZE = 384  # numbers of a vector
_HINTS = (float("nan"), 0.0, 1.0, 3.0, 9.0, 24.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--arms", type=at_least(2), default=16)
    parser.add_argument("--repetitions", type=at_least(1), default=15)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions; the same keys")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="OUT", help="write every figure to this file")


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine("none")
    repetitions = min(args.repetitions, 5) if args.quick else args.repetitions
    rng = np.random.default_rng(args.seed)
    arms = (*(f"drafter{i}@{4 + i}" for i in range(args.arms - 1)), PLAIN)
    vectors = rng.standard_normal((_BLOCK // _ANSWER, _SIZE))
    situations = [
        Situation(
            arms,
            dict(zip(arms, rng.choice(_HINTS, len(arms)).tolist(), strict=True)),
            {"position": float(i % _ANSWER), "batch": 1.0, "prompt": 100.0, "entropy": float(rng.exponential())},
            vectors[i // _ANSWER],
        )
        for i in range(_BLOCK)
    ]
    rewards = [dict(zip(arms, row, strict=True)) for row in rng.uniform(0.0, 1.0, (_BLOCK, len(arms))).tolist()]
    contextual = {label: policy_factory(name, options)() for label, name, options in _contextual(arms, rng)}
    policies = {**{name: policy_factory(name)() for name in policy_names()}, **contextual}
    seconds: dict[str, list[float]] = defaultdict(list)
    for repetition in range(repetitions + 1):
        for name, policy in policies.items():
            spent = _block(policy, situations, rewards, rng)
            if repetition:  # the first block warms up
                seconds[name].append(spent)
    figures = {
        name: {"microseconds": 1e6 * float(np.median(own)), "most": 1e6 * max(own)} for name, own in seconds.items()
    }
    load = _load_ms(policies["hinted_ucb"], repetitions)
    rows = [[name, number(f["microseconds"], 1), number(f["most"], 1)] for name, f in figures.items()]
    plain = {name: own for name, own in figures.items() if name not in contextual}
    table(f"select + update, {args.arms} arms, microseconds", ["policy", "median", "most"], rows)
    table("memory on disk, milliseconds", ["", "median"], [["load a key", number(load, 2)]])
    told = {name: figures[name] for name in contextual}
    write(args, facts, {"policies": plain, "contextual": told, "memory_load_ms": load})


def _contextual(arms: Sequence[str], rng: np.random.Generator) -> list[tuple[str, str, dict[str, object]]]:
    """What it is called, the policy, and its options."""
    labels = arms[:5]
    router = fit_softmax(rng.standard_normal((50, _SIZE)), [labels[i % len(labels)] for i in range(50)])
    return [
        ("linucb, four features", "linucb", {"features": list(FEATURES)}),
        ("routed, by a router", "routed", {"router": router}),
        ("routed, prior of hinted_ucb", "routed", {"router": router, "prior": "hinted_ucb"}),
    ]


def _block(
    policy: Policy, situations: list[Situation], rewards: list[dict[str, float]], rng: np.random.Generator
) -> float:
    """Seconds a round."""
    start = time.perf_counter()
    for situation, reward in zip(situations, rewards, strict=True):
        choice = policy.select(situation, rng)
        policy.update(situation, choice, reward if policy.full_information else {choice.arm: reward[choice.arm]})
    return (time.perf_counter() - start) / len(situations)


def _load_ms(policy: Policy, repetitions: int) -> float:
    fresh = policy_factory(policy.name)()
    with tempfile.TemporaryDirectory() as folder:
        memory = SqliteMemory(Path(folder) / "bandit.sqlite")
        key = Key("model", policy.name, "arms", "reward", scope="", step="step")
        memory.save([Change(key, Learned(policy.dump(), _BLOCK), Learned(fresh.dump(), 0))])
        spent = []
        for _ in range(repetitions):
            start = time.perf_counter()
            memory.load(key)
            spent.append(time.perf_counter() - start)
    return 1e3 * float(np.median(spent))
