"""What choosing is worth: a policy on a mixed stream of prompts, beside every arm of its pool played alone.

Each prompt comes once, in shuffled order, and every method answers it before the next one comes, in an order that
rotates. What was learned about arms is kept from prompt to prompt; text indexes are emptied before every answer, for
all alike. Answers do not depend on the drafter, so all methods write the same tokens (in bfloat16 up to near-ties).

=====================  ==============================================================================================
``vs_best_single``     policy / the arm that was fastest on this very stream, known only in hindsight
``vs_median_single``   policy / the median arm
``vs_task_oracle``     policy / of each task the arm that was fastest on it in hindsight
``vs_prompt_oracle``   policy / of each prompt the arm that was fastest on it in hindsight (noise counts for the arm)
``cold_start``         a policy that knows nothing before each prompt / the arm that was fastest on the stream
``by_step``            with ``--steps``: a policy that keeps each task apart, as it does a pipeline's steps / the same
=====================  ==============================================================================================

Prompts that methods answered at very different length are left out (``uneven``, see ``figures.even``; ``of_all``: the
ratios with them). All are ratios of speed (1.05 = 5% faster): the geometric mean over a task's prompts, then over
tasks. Intervals: 95%, from a bootstrap over prompts that chooses its best arms anew each time.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.curves import draw_stream
from evaluators.figures import Cell, arm_table, even, throughput
from evaluators.machine import machine
from evaluators.methods import Limits, Ours
from evaluators.pools import POOLS, arms_of, unseen
from evaluators.prompts import Prompt, encode, find, load, spread
from evaluators.report import number, say, table, write
from metasd_langchain import Sampling, shared_engine

__all__ = ["POLICY", "add_arguments", "ratios", "run"]

POLICY, COLD, BY_STEP = "policy", "policy, cold", "policy, by step"
_POLICIES = (POLICY, COLD, BY_STEP)
_DRAWS = 1000
_QUICK_SECONDS = 400.0
_QUICK_TOKENS = 64

Paces = Mapping[str, NDArray[np.float64]]  # method -> seconds a token, by prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="spec_bench_dev.jsonl", limit=60)
    parser.add_argument("--pool", choices=POOLS, default="auto", help="auto: with trained heads where there are any")
    parser.add_argument("--policy", default="", help="a policy by name; default: the default policy")
    parser.add_argument("--reward", default="", help="a reward by name; default: the default reward")
    parser.add_argument("--max-tokens", type=at_least(1), default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", action="store_true", help="play the policy with each task as a step of its own, too")
    parser.add_argument("--shared", action="store_true", help="text indexes are kept too, for every method alike")
    parser.add_argument("--curves", metavar="FILE", help="draw speed and choices over the stream (.png or .svg)")
    add_common(parser, repetitions=1)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    started = time.perf_counter()
    facts = machine(args.dtype)
    Sampling(args.temperature)
    if args.quick:
        args.repetitions, args.max_tokens = 1, min(args.max_tokens, _QUICK_TOKENS)
    prompts = load(find(args.prompts, args.data))
    say(f"loading {args.model}")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    arms = arms_of(args.pool, engine.target.name)
    chosen = spread(unseen(prompts, arms), args.limit, args.seed)
    how = {name: value for name, value in (("policy", args.policy), ("reward", args.reward)) if value}
    limits = Limits(args.max_tokens, args.temperature, 1.0, engine.target.stop_ids)
    methods = [
        Ours(POLICY, arms, "stream", **how),
        Ours(COLD, arms, "stream", **how),
        *([Ours(BY_STEP, arms, **how)] if args.steps else []),
        *(Ours(arm, [arm]) for arm in arms),
    ]
    for method in methods:
        method.bind(engine, limits)
    ids = [encode(engine, prompt) for prompt in chosen]
    _warm_up(methods, ids)
    cells = _play(methods, chosen, ids, args, started + _QUICK_SECONDS if args.quick else None)
    figures = summary(cells, args.seed)
    _print(figures, cells, args)
    facts_of_prompts = {"prompts": len({cell.prompt for cell in cells}), "pool": list(map(str, arms))}
    if args.curves:
        draw_stream(cells, args.curves)
    write(args, facts, {"model": engine.target.name, **facts_of_prompts, **figures})


def summary(cells: Sequence[Cell], seed: int) -> dict[str, Any]:
    """The module's ratios with their intervals, and tables by arm and by task."""
    of_all = ratios(*_paces(cells))
    cells, uneven = even(cells)
    paces, groups = _paces(cells)
    exact = ratios(paces, groups)
    rng = np.random.default_rng(seed)
    drawn: dict[str, list[float]] = defaultdict(list)
    places = _by_group(groups)
    for _ in range(_DRAWS):
        take = np.concatenate([rng.choice(own, len(own)) for own in places.values()])
        sample = ratios({method: pace[take] for method, pace in paces.items()}, [groups[i] for i in take])
        for name, value in sample.items():
            drawn[name].append(value)
    spans = {name: [float(q) for q in np.quantile(values, [0.025, 0.975])] for name, values in drawn.items()}
    singles = _singles(paces)
    speed = {method: throughput([c for c in cells if c.method == method])[0] for method in paces}
    by_task = {
        group: {method: float(np.exp(-np.log(pace[own]).mean())) for method, pace in paces.items()}
        for group, own in places.items()
    }
    best = _fastest(paces, groups, singles)
    return {
        **exact,
        "intervals": spans,
        "uneven": len(uneven),
        "of_all": of_all,
        "best_single": best,
        "tokens_per_s": speed,
        "tokens_per_s_by_task": by_task,
        "relative": {arm: _ratio(paces[arm], paces[best], groups) for arm in singles},
        **arm_table([cell for cell in cells if cell.method == POLICY]),
    }


def ratios(paces: Paces, groups: Sequence[str]) -> dict[str, float]:
    """The module's ratios.

    Args:
        paces: seconds a token of every method on every prompt.
        groups: the prompts' tasks.
    """
    singles = _singles(paces)
    policy, places = paces[POLICY], _by_group(groups)
    logs = {arm: np.log(paces[arm]) for arm in singles}
    best = _fastest(paces, groups, singles)
    level = sorted(_level(logs[arm], groups) for arm in singles)
    by_task, by_prompt = np.empty(len(groups)), np.min([logs[arm] for arm in singles], axis=0)
    for own in places.values():
        fastest = min(singles, key=lambda arm: float(logs[arm][own].mean()))
        by_task[own] = logs[fastest][own]
    mine = _level(np.log(policy), groups)
    return {
        "vs_best_single": _ratio(policy, paces[best], groups),
        "vs_median_single": float(np.exp(np.median(level) - mine)),
        "vs_task_oracle": float(np.exp(_level(by_task, groups) - mine)),
        "vs_prompt_oracle": float(np.exp(_level(by_prompt, groups) - mine)),
        "cold_start": _ratio(paces[COLD], paces[best], groups),
        **({"by_step": _ratio(paces[BY_STEP], paces[best], groups)} if BY_STEP in paces else {}),
    }


def _singles(paces: Paces) -> list[str]:
    return [method for method in paces if method not in _POLICIES]


def _fastest(paces: Paces, groups: Sequence[str], arms: Sequence[str]) -> str:
    return min(arms, key=lambda arm: _level(np.log(paces[arm]), groups))


def _level(logs: NDArray[np.float64], groups: Sequence[str]) -> float:
    """Mean over tasks of the mean over a task's prompts."""
    return float(np.mean([logs[own].mean() for own in _by_group(groups).values()]))


def _ratio(pace: NDArray[np.float64], base: NDArray[np.float64], groups: Sequence[str]) -> float:
    return float(np.exp(_level(np.log(base) - np.log(pace), groups)))


def _by_group(groups: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    places: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        places[group].append(index)
    return {group: np.array(own) for group, own in places.items()}


def _paces(cells: Sequence[Cell]) -> tuple[dict[str, NDArray[np.float64]], list[str]]:
    """Median over repetitions of seconds a token, by method and prompt, in the order of the stream."""
    own: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    groups: dict[int, str] = {}
    for cell in cells:
        own[cell.method][cell.prompt].append(cell.pace)
        groups[cell.prompt] = cell.group
    order = sorted(groups)
    paces = {method: np.array([np.median(by[prompt]) for prompt in order]) for method, by in own.items()}
    return paces, [groups[prompt] for prompt in order]


def _warm_up(methods: Sequence[Ours], ids: Sequence[Sequence[int]]) -> None:
    """Each answers the shortest prompt, then forgets it: kernels are chosen, costs are known."""
    for method in methods:
        say(f"warming up {method.name}")
        method.answer(min(ids, key=len), 0)
        method.reset(memory=True)


def _play(
    methods: Sequence[Ours],
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    args: argparse.Namespace,
    deadline: float | None,
) -> list[Cell]:
    cells: list[Cell] = []
    for repetition in range(args.repetitions):
        for method in methods:
            method.reset(memory=True)
        for index, prompt in enumerate(prompts):
            if deadline is not None and cells and time.perf_counter() > deadline:
                say("out of time: stopping early")
                return cells
            turn = (repetition + index) % len(methods)
            seed = (args.seed * 1_000_003 + index) * 1_009 + repetition
            for method in [*methods[turn:], *methods[:turn]]:
                if method.name == COLD or not args.shared:
                    method.reset(memory=method.name == COLD)
                if method.name == BY_STEP:
                    method.step = prompt.group
                a = method.answer(ids[index], seed)
                cells.append(Cell(index, prompt.group, method.name, repetition, a.ids, a.seconds, a.forwards, a.rounds))
            say(f"[{index + 1}/{len(prompts)}] {prompt.group} {prompt.name}: {_now(cells, index, repetition)}")
    return cells


def _now(cells: Sequence[Cell], prompt: int, repetition: int) -> str:
    now = [cell for cell in cells if (cell.prompt, cell.repetition) == (prompt, repetition)]
    speed: Callable[[Cell], float] = lambda cell: 1.0 / cell.pace  # noqa: E731
    best = max((cell for cell in now if cell.method not in _POLICIES), key=speed)
    mine = next(cell for cell in now if cell.method == POLICY)
    return f"policy {speed(mine):.1f}, best here {best.method} {speed(best):.1f} tokens/s"


def _print(figures: Mapping[str, Any], cells: Sequence[Cell], args: argparse.Namespace) -> None:
    draws = "greedy" if args.temperature == 0.0 else f"temperature {args.temperature:g}"
    rows = [
        [name, number(figures[name], 3), _span(span), number(figures["of_all"][name], 3)]
        for name, span in figures["intervals"].items()
    ]
    prompts = len({cell.prompt for cell in cells})
    table(f"stream of {prompts} prompts, {draws}; best single arm: {figures['best_single']}",
          ["ratio", "", "95%", f"with the {figures['uneven']} uneven"], rows)  # fmt: skip
    tasks = list(figures["tokens_per_s_by_task"])
    rows = [
        [method, number(speed, 1), *(number(figures["tokens_per_s_by_task"][task][method], 1) for task in tasks)]
        for method, speed in sorted(figures["tokens_per_s"].items(), key=lambda item: -(item[1] or 0.0))
    ]
    table("tokens a second (all; geometric mean of a task's prompts)", ["method", "all", *tasks], rows)
    shares = figures["shares"]
    arms = sorted(figures["arms"], key=lambda arm: -figures["arms"][arm]["rounds"])
    rows = [[arm, *(number(shares.get(task, {}).get(arm, 0.0)) for task in tasks)] for arm in arms]
    table("the policy's choices: share of rounds", ["arm", *tasks], rows)


def _span(interval: Sequence[float]) -> str:
    return f"{interval[0]:.3f}-{interval[1]:.3f}"
