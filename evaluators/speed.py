"""Tokens a second of several methods on the same prompts, as ratios to bare transformers ``generate`` (``hf``).

Every method is warmed up, then all answer each prompt in turn, in an order that rotates with prompt and repetition.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, arm_table, speedup, throughput
from evaluators.identity import identity
from evaluators.machine import machine
from evaluators.methods import Limits, Method, Ours, Transformers, load_reference
from evaluators.overhead import overhead
from evaluators.peers import Economize
from evaluators.pools import unseen
from evaluators.prompts import Prompt, encode, find, load, spread
from evaluators.report import number, say, table, write
from metasd_langchain import Engine, Sampling, shared_engine

__all__ = ["add_arguments", "measure", "run"]

BASE = "hf"
_REFERENCES: dict[str, dict[str, Any]] = {"hf": {}, "hf-lookup": {"prompt_lookup_num_tokens": 10}}
_PEERS = ("economize",)
# --quick: one prompt of each of six groups; after so many seconds since the start no further prompt is begun, and no
# further one for the overhead
_QUICK_PROMPTS, _QUICK_REPETITIONS, _QUICK_SECONDS, _QUICK_OVERHEAD_SECONDS = 6, 2, 270.0, 390.0


@dataclass(frozen=True, slots=True)
class _Suite:
    """Everything that is loaded."""

    engine: Engine
    methods: list[Method]
    reference: Any  # the transformers model behind hf and hf-lookup, or None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file=None, limit=None)
    parser.add_argument(
        "--methods",
        default="plain,hf,hf-lookup,economize,metasd",
        help="joined by commas: hf, hf-lookup, economize, plain, metasd (the default pool), an arm such as suffix@16",
    )
    parser.add_argument("--max-tokens", type=at_least(1), default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--cold", action="store_true", help="forget everything before every prompt (the default)")
    modes.add_argument("--stream", action="store_true", help="each prompt once; what was learned about arms is kept")
    parser.add_argument("--shared", action="store_true", help="with --stream: text indexes are kept too")
    parser.add_argument("--overhead-prompts", type=int, default=3, metavar="N", help="0 leaves overhead_share out")
    add_common(parser, repetitions=5)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    started = time.perf_counter()
    facts = machine(args.dtype)
    _settle(args)
    ours = _ours(args.methods.split(","))
    chosen = spread(unseen(load(find(args.prompts, args.data)), args.methods.split(",")), args.limit, args.seed)
    suite = _load(args, ours)
    ids = [encode(suite.engine, prompt) for prompt in chosen]
    _warm_up(suite.methods, ids)
    deadline = started + _QUICK_SECONDS if args.quick else None
    cells = measure(suite.methods, chosen, ids, args, deadline)
    results = {method.name: _results(method.name, cells, suite, ids, args) for method in suite.methods}
    for method in suite.methods:
        if isinstance(method, Ours) and args.overhead_prompts:
            say(f"overhead of {method.name}: repeating its forwards bare")
            few, pairs = _few(chosen, ids, cells, args), _QUICK_REPETITIONS if args.quick else 3
            last = started + _QUICK_OVERHEAD_SECONDS if args.quick else None
            results[method.name] |= overhead(method, few, pairs, args.seed, last)
    _print(results, cells, args)
    raw = [
        {"prompt": chosen[c.prompt].name, "group": c.group, "method": c.method, "repetition": c.repetition}
        | {"tokens": len(c.ids), "seconds": c.seconds, "forwards": c.forwards}
        for c in cells
    ]
    facts["dtype"] = str(suite.engine.target.lm.dtype).removeprefix("torch.")
    write(args, facts, {"model": suite.engine.target.name, "results": results, "cells": raw})


def measure(
    methods: Sequence[Method],
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    args: argparse.Namespace,
    deadline: float | None = None,
) -> list[Cell]:
    """All methods on all prompts, repetition by repetition.

    Args:
        methods: who answers; answers of one prompt and repetition come one after the other.
        prompts, ids: the prompts and their tokens.
        args: `repetitions`, `seed`, `stream`, `shared`.
        deadline: reading of ``time.perf_counter`` after which no further prompt is begun.
    """
    cells: list[Cell] = []
    for repetition in range(args.repetitions):
        for index, prompt in enumerate(prompts):
            if deadline is not None and cells and time.perf_counter() > deadline:
                say("out of time: stopping early")
                return cells
            turn = (repetition + index) % len(methods)
            seed = (args.seed * 1_000_003 + index) * 1_009 + repetition
            now = []
            for method in [*methods[turn:], *methods[:turn]]:
                if not (args.stream and args.shared):
                    method.reset(memory=not args.stream)
                a = method.answer(ids[index], seed)
                now.append(Cell(index, prompt.group, method.name, repetition, a.ids, a.seconds, a.forwards, a.rounds))
            cells += now
            pace = "  ".join(f"{cell.method} {1 / cell.pace:.1f}" for cell in sorted(now, key=lambda cell: cell.method))
            done = repetition * len(prompts) + index + 1
            say(f"[{done}/{args.repetitions * len(prompts)}] {prompt.group} {prompt.name}, tokens/s: {pace}")
    return cells


def _settle(args: argparse.Namespace) -> None:
    """Check what argparse cannot, before anything is loaded; apply ``--quick`` and the modes."""
    Sampling(args.temperature, args.top_p)
    if args.shared and not args.stream:
        raise EvaluatorError("--shared goes with --stream")
    if args.quick:
        args.limit = min(args.limit or _QUICK_PROMPTS, _QUICK_PROMPTS)
        args.repetitions = min(args.repetitions, _QUICK_REPETITIONS)
        args.overhead_prompts = min(args.overhead_prompts, 2)
    if args.stream:
        args.repetitions = 1  # a second pass would meet a bandit that knows the prompts
    args.cold = not args.stream


def _ours(names: Sequence[str]) -> dict[str, Ours | None]:
    """The methods by name; ours are made, so that a wrong name shows before weights are loaded."""
    methods: dict[str, Ours | None] = {}
    for name in names:
        if name in methods:
            raise EvaluatorError(f"--methods names {name} twice")
        if name in _REFERENCES or name in _PEERS:
            methods[name] = None
        else:
            methods[name] = Ours(name, None if name == "metasd" else [name])
    return methods


def _load(args: argparse.Namespace, ours: dict[str, Ours | None]) -> _Suite:
    say(f"loading {args.model}")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    stop_ids = frozenset() if args.ignore_eos else engine.target.stop_ids
    limits = Limits(args.max_tokens, args.temperature, args.top_p, stop_ids)
    methods: list[Method] = []
    reference = load_reference(args.model, engine, stop_ids) if ours.keys() & _REFERENCES.keys() else None
    for name, own in ours.items():
        if own is not None:
            methods.append(own.bind(engine, limits))
        elif name in _REFERENCES:
            methods.append(Transformers(name, reference, limits, **_REFERENCES[name]))
        else:
            try:
                peer = Economize(load_reference(args.model, engine, stop_ids), limits)
            except EvaluatorError as error:
                say(f"economize is skipped: {error}")
                continue
            if peer.note:
                say(f"economize: {peer.note}")
            methods.append(peer)
    if not methods:
        raise EvaluatorError("none of --methods can run here")
    return _Suite(engine, methods, reference)


def _warm_up(methods: Sequence[Method], ids: Sequence[Sequence[int]]) -> None:
    """Each answers the longest prompt, then forgets it: kernels are chosen, memory is there, costs are known."""
    for method in methods:
        say(f"warming up {method.name}")
        method.answer(max(ids, key=len), 0)
        method.reset(memory=True)


def _few(
    prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], cells: Sequence[Cell], args: argparse.Namespace
) -> list[Sequence[int]]:
    """Prompts for the overhead: of different groups where there are, measured ones only."""
    firsts: dict[str, int] = {}
    measured = list(dict.fromkeys(cell.prompt for cell in cells))
    for index in measured:
        firsts.setdefault(prompts[index].group, index)
    order = [*firsts.values(), *(index for index in measured if index not in firsts.values())]
    return [ids[index] for index in order[: args.overhead_prompts]]


def _results(
    name: str, cells: list[Cell], suite: _Suite, ids: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, Any]:
    own = [cell for cell in cells if cell.method == name]
    per_second, per_forward = throughput(own)
    results: dict[str, Any] = {
        "speedup_vs_hf": speedup(cells, name, BASE, args.seed),
        "tokens_per_s": per_second,
        "tokens_per_forward": per_forward,
        "prompts": len({cell.prompt for cell in own}),
        "repetitions": max(cell.repetition for cell in own) + 1,
    }
    for other in suite.methods:
        if name == "metasd" and other.name not in (name, BASE):
            results[f"speedup_vs_{other.name.replace('-', '_')}"] = speedup(cells, name, other.name, args.seed)
    if args.temperature == 0.0 and any(method.name == BASE for method in suite.methods):
        results |= identity(cells, name, BASE, suite.reference, ids)
    if any(cell.rounds for cell in own):
        results |= arm_table(own)
    return results


def _print(results: dict[str, dict[str, Any]], cells: Sequence[Cell], args: argparse.Namespace) -> None:
    groups = list(dict.fromkeys(cell.group for cell in cells))
    columns = ["method", "x hf", "95%", "min", *groups, "tok/s", "tok/fwd", "overhead", "identical"]
    rows = []
    for name, result in results.items():
        ratio = result["speedup_vs_hf"]
        tasks = [number(ratio["tasks"].get(group) if ratio else None) for group in groups]
        heads = ["-", "-", "-"]
        if ratio:
            heads = [number(ratio["geomean"]), f"{ratio['low']:.2f}-{ratio['high']:.2f}", number(ratio["min"])]
        same = "-"
        if "identical_to_hf" in result:
            wrong = f", {result['wrong']} wrong" if result["wrong"] else ""
            same = f"{result['identical_to_hf']}/{result['prompts']} +{result['near_ties']} ties{wrong}"
        share = result.get("overhead_share")
        figures = [number(result["tokens_per_s"], 1), number(result["tokens_per_forward"]), number(share, 3), same]
        rows.append([name, *heads, *tasks, *figures])
    how = "stream" if args.stream else "cold"
    indexes = ", text indexes shared between prompts" if args.shared else ""
    draws = "greedy" if args.temperature == 0.0 else f"temperature {args.temperature:g}, top_p {args.top_p:g}"
    table(f"speed, {how}{indexes}, {draws}, up to {args.max_tokens} tokens; ratios to hf by group", columns, rows)
    if "metasd" in results and "arms" in results["metasd"]:
        arms = sorted(results["metasd"]["arms"].items(), key=lambda item: -item[1]["rounds"])
        rows = [
            [arm, f"{a['rounds']:.0f}", number(a["share"]), number(a["accepted_per_round"]), number(a["acceptance"])]
            for arm, a in arms
        ]
        table("metasd: arms played", ["arm", "rounds", "share", "accepted/round", "acceptance"], rows)
