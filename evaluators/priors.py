"""What each arm earns by the hint its drafter gave: the table that the default policy starts from.

Every arm plays alone on every prompt, cold, greedy and at ``--temperature``. A cell is the mean reward of its rounds
at a hint, in the reward's rescaled units (plain = 1/16); ``miss`` is the mean over rounds that were worth less than a
plain step. Both samplings count alike. The shipped ``DEFAULT_PRIOR`` is this table, rounded.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.machine import machine
from evaluators.pools import unseen
from evaluators.prompts import encode, find, load, spread
from evaluators.report import say, table, write
from metasd_langchain import Request, Sampling, make_pool, shared_engine
from metasd_langchain.bandits import State
from metasd_langchain.bandits.policies.hinted_ucb import BUCKETS, bucket_of
from metasd_langchain.values import Choice, Situation

__all__ = ["add_arguments", "run"]

_ARMS = "suffix@16,suffix@8,lookup@8,recycling@4,recycling@8,recycling_tree@8,recycling_tree@12,recycling_tree@16"
_PLAIN = 1 / 16


class _Recorder:
    """Plays the only arm and notes what it earned at which hint."""

    name = "recorder"
    full_information: ClassVar[bool] = False

    def __init__(self) -> None:
        self.rewards: dict[str, list[float]] = defaultdict(list)

    def __deepcopy__(self, memo: object) -> _Recorder:
        return self  # the selector copies policies for each step; notes are taken in one place

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        return Choice(situation.arms[0])

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        hint, reward = situation.hint(choice.arm), rewards[choice.arm]
        if hint == 0:  # nothing was drafted
            return
        self.rewards[BUCKETS[bucket_of(hint)]].append(reward)
        if reward < _PLAIN:
            self.rewards["miss"].append(reward)

    def values(self) -> Mapping[str, float]:
        return {}

    def dump(self) -> State:
        return {}

    def load(self, state: State) -> None:
        """Nothing is kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="spec_bench_dev.jsonl", limit=24)
    parser.add_argument("--arms", default=_ARMS, help="joined by commas")
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    add_common(parser, repetitions=1)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine(args.dtype)
    known = unseen(load(find(args.prompts, args.data)), args.arms.split(","))
    chosen = spread(known, 6 if args.quick else args.limit, args.seed)
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    figures: dict[str, Any] = {}
    for arm in args.arms.split(","):
        say(f"{arm} on {len(chosen)} prompts")
        by_sampling = []
        for sampling in (Sampling(), Sampling(temperature=args.temperature, seed=args.seed)):
            recorder = _Recorder()
            pool = make_pool([arm], recorder)
            for prompt in chosen:
                pool.forget()
                request = Request(encode(engine, prompt), sampling, args.max_tokens, engine.target.stop_ids)
                for _ in engine.generate(request, pool):
                    pass
            by_sampling.append(recorder.rewards)
        figures[arm] = _cells(by_sampling)
    columns = ["miss", *BUCKETS[1:]]
    rows = [[arm, *(f"{cells[c]['mean']:.3f} ({cells[c]['rounds']})" if c in cells else "-" for c in columns)]
            for arm, cells in figures.items()]  # fmt: skip
    table("Rewards by hint (mean, rounds)", ["arm", *columns], rows)
    write(args, facts, {"model": engine.target.name, "priors": figures})


def _cells(by_sampling: list[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    cells = {}
    for column in sorted(set().union(*by_sampling)):
        means = [float(np.mean(rewards[column])) for rewards in by_sampling if rewards.get(column)]
        rounds = sum(len(rewards.get(column, ())) for rewards in by_sampling)
        cells[column] = {"mean": math.fsum(means) / len(means), "rounds": rounds}
    return cells
