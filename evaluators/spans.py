"""What spans and metrics of a call cost as a share of the call, with an OpenTelemetry SDK, a batch processor, a metric
reader and exporters that keep nothing.

``share``: seconds to open, fill, end and export the span of a real call's summary and to count its rounds (medians of
many, less the same without SDK), over the median call. Export runs on another thread in life; here it counts in full.
``share_at_100``: the same for 100 rounds like those of the real call, over the time of 100 rounds.
``round_us``: what one more round costs the thread that plays it, by its CPU clock: the slope between 64 and 256 rounds.
``collect_us``: one reading of all metrics, which a reader's thread does every few seconds.
``wall_on_over_off``: wall clock of calls with spans and metrics over calls without, alternating; to tell one percent it
needs a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, speedup
from evaluators.machine import machine
from evaluators.prompts import find, load, spread
from evaluators.report import number, say, table, write
from metasd_langchain import MetaSDLLM, Sampling, Summary, shared_engine
from metasd_langchain.telemetry.otel import CallSpan

if TYPE_CHECKING:
    from collections.abc import Callable

    from evaluators.tracing import Switch

__all__ = ["add_arguments", "run"]

SPANS = 300  # of each kind; a span takes well under a millisecond
KINDS = 4  # of them that are exported
_AT, _FEW, _MANY = 100, 64, 256  # rounds
_QUICK_REPETITIONS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="peer_prompts.jsonl", limit=6)
    parser.add_argument("--max-tokens", type=at_least(1), default=64)
    add_common(parser, repetitions=5)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine(args.dtype)
    if args.quick:
        args.repetitions = min(args.repetitions, _QUICK_REPETITIONS)
    try:
        from evaluators.tracing import Switch
    except ImportError as cause:
        raise EvaluatorError("needs the OpenTelemetry SDK: pip install 'metasd-langchain[otel]'") from cause
    with Switch.installed() as switch:
        _measure(switch, args, facts)


def _measure(switch: Switch, args: argparse.Namespace, facts: dict[str, Any]) -> None:
    chosen = spread(load(find(args.prompts, args.data)), args.limit, args.seed)
    say(f"loading {args.model}")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    llm = MetaSDLLM(engine=engine, max_tokens=args.max_tokens)
    list(llm.steps(chosen[0].text))
    cells: list[Cell] = []
    summaries: list[Summary] = []
    for repetition in range(args.repetitions):
        for index, prompt in enumerate(chosen):
            for on in (True, False) if (repetition + index) % 2 else (False, True):
                switch.on = on
                cell, summary = _call(llm, prompt.text, index, prompt.group, repetition, on)
                cells.append(cell)
                summaries.append(summary)
        say(f"[{repetition + 1}/{args.repetitions}]")
    figures = _figures(switch, cells, summaries, args)
    _print(figures)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    write(args, facts, {"model": engine.target.name, **figures})


def _call(llm: MetaSDLLM, text: str, index: int, group: str, repetition: int, on: bool) -> tuple[Cell, Summary]:
    llm.forget()
    start = time.perf_counter()
    steps = list(llm.steps(text))
    seconds = time.perf_counter() - start
    summary = steps[-1].summary
    if summary is None:
        raise RuntimeError("the engine's last step has no summary")
    ids = tuple(token for step in steps for token in step.tokens)
    return Cell(index, group, "on" if on else "off", repetition, ids, seconds, len(summary.rounds)), summary


def _figures(switch: Switch, cells: list[Cell], summaries: list[Summary], args: argparse.Namespace) -> dict[str, Any]:
    longest = max(summaries, key=lambda summary: len(summary.rounds))
    off = [cell for cell in cells if cell.method == "off"]
    call = float(np.median([cell.seconds for cell in off]))
    a_round = float(np.median([cell.seconds / max(1, cell.forwards) for cell in off]))
    costs = {on: _seconds(switch, longest, args.max_tokens, on) for on in (True, False)}
    at = [_seconds(switch, _of(longest, _AT), args.max_tokens, on) for on in (True, False)]
    few, many = (
        _seconds(switch, _of(longest, count), args.max_tokens, True, clock=time.thread_time) for count in (_FEW, _MANY)
    )
    paired = speedup(cells, "off", "on", args.seed)  # how much slower observed calls are
    return {
        "share": (costs[True] - costs[False]) / call,
        "share_at_100": (at[0] - at[1]) / (_AT * a_round),
        "round_us": (many - few) / (_MANY - _FEW) * 1e6,
        "collect_us": switch.collect_seconds() * 1e6,
        "span_on_us": costs[True] * 1e6,
        "span_off_us": costs[False] * 1e6,
        "call_s": call,
        "round_s": a_round,
        "rounds": len(longest.rounds),
        "wall_on_over_off": paired,
        "spans": switch.exported,
        "metrics": switch.metrics,
    }


def _of(summary: Summary, rounds: int) -> Summary:
    """The call as if it had had so many rounds: its own, again and again."""
    return replace(summary, rounds=tuple(itertools.islice(itertools.cycle(summary.rounds), rounds)))


def _seconds(
    switch: Switch, summary: Summary, max_tokens: int, on: bool, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median seconds of one call's span and metrics; by the wall clock its export is included."""
    switch.on = on
    arms = sorted({record.arm for record in summary.rounds})
    seconds = []
    for _ in range(SPANS):
        start = clock()
        span = CallSpan.start(
            operation="text_completion",
            model="evaluators",
            sampling=Sampling(),
            max_tokens=max_tokens,
            stream=True,
            policy=summary.policy,
            arms=arms,
        )
        for record in summary.rounds:
            span.round(record)
        span.end(summary)
        switch.flush()
        seconds.append(clock() - start)
    return float(np.median(seconds))


def _print(figures: dict[str, Any]) -> None:
    ratio = figures["wall_on_over_off"]
    row = [
        "spans and metrics",
        number(100 * figures["share"], 3, " %"),
        number(100 * figures["share_at_100"], 3, " %"),
        number(figures["round_us"], 1),
        number(figures["collect_us"], 0),
        number(figures["span_on_us"], 0),
        number(figures["span_off_us"], 0),
        number(1e3 * figures["call_s"], 0),
        f"{ratio['geomean']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})",
        str(figures["spans"]),
    ]
    heads = ["", "share", "at 100 rounds", "a round, us", "collect, us", "on, us", "off, us", "call, ms"]
    table("cost of observing", [*heads, "wall on / off", "exported"], [row])
