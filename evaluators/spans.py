"""What a call's span costs as a share of the call, with an OpenTelemetry SDK, a batch processor and a memory exporter.

``share``: seconds to open, fill, end and export the span of a real call's summary (medians of many, less the same
without SDK), over the median call. Export runs on another thread in life; here it counts in full.
``wall_on_over_off``: wall clock of calls with spans over calls without, alternating; to tell one percent it needs a
quiet machine.
"""

from __future__ import annotations

import argparse
import time
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
    from evaluators.tracing import Switch

__all__ = ["add_arguments", "run"]

_SPANS = 300  # of each kind; a span takes well under a millisecond
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
    switch = Switch.install()
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
    costs = {on: _span_seconds(switch, longest, args.max_tokens, on) for on in (True, False)}
    call = float(np.median([cell.seconds for cell in cells if cell.method == "off"]))
    paired = speedup(cells, "off", "on", args.seed)  # how much slower calls with spans are
    return {
        "share": (costs[True] - costs[False]) / call,
        "span_on_us": costs[True] * 1e6,
        "span_off_us": costs[False] * 1e6,
        "call_s": call,
        "rounds": len(longest.rounds),
        "wall_on_over_off": paired,
        "spans": switch.exported,
    }


def _span_seconds(switch: Switch, summary: Summary, max_tokens: int, on: bool) -> float:
    """Median seconds of one span's life, its export included."""
    switch.on = on
    arms = sorted({record.arm for record in summary.rounds})
    seconds = []
    for _ in range(_SPANS):
        start = time.perf_counter()
        span = CallSpan.start(
            operation="text_completion",
            model="evaluators",
            sampling=Sampling(),
            max_tokens=max_tokens,
            stream=True,
            policy=summary.policy,
            arms=arms,
        )
        span.end(summary)
        switch.flush()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _print(figures: dict[str, Any]) -> None:
    ratio = figures["wall_on_over_off"]
    row = [
        "spans",
        number(100 * figures["share"], 3, " %"),
        number(figures["span_on_us"], 0),
        number(figures["span_off_us"], 0),
        number(1e3 * figures["call_s"], 0),
        f"{ratio['geomean']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})",
        str(figures["spans"]),
    ]
    table("cost of spans", ["", "share", "on, us", "off, us", "call, ms", "wall on / off", "exported"], [row])
