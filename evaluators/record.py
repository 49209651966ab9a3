"""Rounds of every arm on every prompt, written down, so that policies can be compared without a model (``replay``).

Each arm plays alone on each prompt, cold. Of every round: where it began, what it drafted, accepted and committed,
``1 - TV`` of each drafted node, the hints of all drafters of the pool there, and how far drafts of near-free ones
agree. Beside it, live runs of the default policy on the same stream, to hold the replay against, and of one that has
all drafters scored, for the seconds that takes; and the seconds of forwards by width and of drafts by arm.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.errors import EvaluatorError
from evaluators.machine import machine
from evaluators.pools import POOLS, arms_of, unseen
from evaluators.prompts import encode, find, load, spread
from evaluators.report import say
from metasd_langchain import Engine, Request, Sampling, make_pool, shared_engine
from metasd_langchain.bandits import State
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.values import Choice, Outcome, RoundRecord, Situation

__all__ = ["FORMAT", "add_arguments", "costs", "read", "run", "scoring_seconds"]

FORMAT = "metasd-rounds 1"
_QUICK_PROMPTS = 6


class _Only:
    """Plays one arm and writes what is known of all."""

    name = "only"
    compares = True
    full_information: ClassVar[bool] = False

    def __init__(self, arm: str) -> None:
        self._arm = arm
        self.hints: list[dict[str, float]] = []
        self.seconded: list[dict[str, int]] = []

    def __deepcopy__(self, memo: object) -> _Only:
        return self  # notes are taken in one place

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        # here, not in `update`: the key's policy and its scope's are this one object, and both are taught
        self.hints.append(dict(situation.hints))
        self.seconded.append(dict(situation.seconded))
        return Choice(self._arm)

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Nothing is learned."""

    def values(self) -> Mapping[str, float]:
        return {}

    def dump(self) -> State:
        return {}

    def load(self, state: State) -> None:
        """Nothing is kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="spec_bench_dev.jsonl", limit=24)
    parser.add_argument("--pool", choices=POOLS, default="auto")
    parser.add_argument("--arms", help="joined by commas, instead of a pool")
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", metavar="FILE", required=True, help="JSON lines")
    add_common(parser, repetitions=1)


def run(args: argparse.Namespace) -> None:
    """Play, write."""
    facts = machine(args.dtype)
    prompts = load(find(args.prompts, args.data))
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    arms = args.arms.split(",") if args.arms else arms_of(args.pool, engine.target.name)
    chosen = spread(unseen(prompts, arms), _QUICK_PROMPTS if args.quick else args.limit, args.seed)
    names = [arm.name for arm in make_pool(arms).selector.arms]  # of "eagle:PATH/math@8": "eagle-math@8"
    head: dict[str, Any] = {"format": FORMAT, "machine": facts, "model": engine.target.name, "arms": names}
    head |= {"temperature": args.temperature, "max_tokens": args.max_tokens, "prompts": len(chosen)}
    try:
        with Path(args.out).open("w", encoding="utf-8") as file:
            file.write(json.dumps(head) + "\n")
            live, informed = make_pool(arms), make_pool(arms, "normalhedge", "expected_length")
            for index, prompt in enumerate(chosen):
                sampling = Sampling(args.temperature, seed=args.seed * 1_000_003 + index)
                ids = encode(engine, prompt)
                request = Request(ids, sampling, args.max_tokens, engine.target.stop_ids, step="record", scope="record")
                for arm in names:
                    rounds = _alone(engine, request, arms, arm)
                    row = {"prompt": index, "group": prompt.group, "arm": arm, "rounds": rounds}
                    file.write(json.dumps(row) + "\n")
                live.forget("record")  # text, not what was learned about arms
                records = _rounds(engine, request, live)
                told = [[r.arm, r.drafted, r.accepted, r.committed] for r in records]
                file.write(json.dumps({"prompt": index, "group": prompt.group, "live": told}) + "\n")
                informed.forget("record")
                spent = [round(r.scoring_s, 6) for r in _rounds(engine, request, informed)]
                file.write(json.dumps({"prompt": index, "group": prompt.group, "scoring": spent}) + "\n")
                say(f"[{index + 1}/{len(chosen)}] {prompt.group} {prompt.name}: {len(records)} rounds live")
    except OSError as cause:
        raise EvaluatorError(f"cannot write {Path(args.out).name}: {cause.strerror}") from cause


def read(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and rows of a record.

    Raises:
        EvaluatorError: no such file, or no record of this format; a cut last line is named too.
    """
    rows: list[dict[str, Any]] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    rows.append(json.loads(line))
                except ValueError as cause:
                    raise EvaluatorError(f"{Path(path).name}, line {number}: not a whole JSON object") from cause
    except OSError as cause:
        raise EvaluatorError(f"cannot read {Path(path).name}: {cause.strerror}") from cause
    if not rows or rows[0].get("format") != FORMAT:
        raise EvaluatorError(f"{Path(path).name} is no record of `evaluators record` ({FORMAT})")
    return rows[0], rows[1:]


def _alone(engine: Engine, request: Request, arms: Sequence[str], arm: str) -> list[dict[str, Any]]:
    """An arm's rounds on a prompt, with the hints of the whole pool."""
    policy, outcomes = _Only(arm), list[Outcome]()

    def note(outcome: Outcome) -> float:
        outcomes.append(outcome)
        return 0.0

    pool = make_pool(arms, policy, Reward("note", -1.0, 1.0, True, note))
    records = _rounds(engine, request, pool)
    rounds: list[dict[str, Any]] = []
    at = 0
    for index, record in enumerate(records):
        known = index < len(outcomes)  # the answer's last token is committed without a choice
        rounds.append(
            {
                "at": at,
                "drafted": record.drafted,
                "accepted": record.accepted,
                "committed": record.committed,
                "agreement": [round(value, 4) for value in outcomes[index].agreement] if known else [],
                "hints": _plain_hints(policy.hints[index]) if known else {},
                "seconded": policy.seconded[index] if known else {},
                "draft_s": round(record.draft_s, 6),
                "score_s": round(record.score_s, 6) if index else None,  # the first forward reads the prompt
            }
        )
        at += record.committed
    return rounds


def _plain_hints(hints: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no nan: None says "no idea"."""
    return {arm: None if math.isnan(hint) else hint for arm, hint in hints.items()}


def _rounds(engine: Engine, request: Request, pool: Any) -> tuple[RoundRecord, ...]:
    summary = None
    for step in engine.generate(request, pool):
        summary = step.summary
    if summary is None:
        raise RuntimeError("the engine's last step has no summary")
    return summary.rounds


def costs(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[int, float], dict[str, float]]:
    """Median seconds of a forward by width (non-decreasing), and of a draft by arm."""
    forwards: dict[int, list[float]] = defaultdict(list)
    drafts: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for one in row.get("rounds", ()):
            if one["score_s"] is not None:
                forwards[1 + one["drafted"]].append(one["score_s"])
            if one["drafted"]:
                drafts[row["arm"]].append(one["draft_s"])
    level, curve = 0.0, {}
    for width in sorted(forwards):
        level = max(level, float(np.median(forwards[width])))
        curve[width] = level
    return curve, {arm: float(np.median(seconds)) for arm, seconds in drafts.items()}


def scoring_seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds a round in which all drafters were scored; nan where a record does not say."""
    spent = [seconds for row in rows for seconds in row.get("scoring", ())]
    return float(np.mean(spent)) if spent else math.nan
