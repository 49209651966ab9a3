"""Constrained JSON: tokens a second beside plain constrained decoding, what the grammar costs of a round, and whether
answers under random schemas are valid.

Both sides answer the same prompts under the same grammar on the same engine, one after the other, in an order that
turns with prompt and repetition: ``plain`` drafts nothing, ``metasd`` plays the default pool behind the tokens that the
grammar forces. The prompts below ask for short records and for records with sentences in them, where little is forced.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np

from evaluators.arguments import add_common, at_least
from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, speedup, throughput
from evaluators.machine import machine
from evaluators.report import number, say, table, write
from metasd_langchain import Engine, Request, Sampling, make_pool, shared_engine
from metasd_langchain.constraints import json_schema
from metasd_langchain.constraints.compiled import compiled
from metasd_langchain.constraints.legal import Legal
from metasd_langchain.engine.guide import Guide, RowMasks
from metasd_langchain.testing.schemas import random_schema
from metasd_langchain.values import Step

__all__ = ["add_arguments", "run"]

_QUICK_CASES, _QUICK_REPETITIONS, _QUICK_SCHEMAS = 4, 2, 12
_DRAFTERS: tuple[list[str], ...] = (["suffix@8"], ["recycling_tree@6"], ["lookup@4"], ["recycling@4", "plain"])
_SCHEMA_CAP = 160  # tokens, or what the schema needs
_SCOPE = "evaluators"

# Bounded: left to itself a small model may repeat itself in a string or number up to the cap, and drafting repetition
# is easy. Who asks for records bounds them.
_TEXT: dict[str, Any] = {"type": "string", "maxLength": 30}
_SENTENCE: dict[str, Any] = {"type": "string", "maxLength": 160}


def _whole(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "maximum": most}


def _record(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


# name -> (what is asked, schema)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Text: Maria Silva, 34, is a nurse from Lisbon. She speaks Portuguese, English and French.\nAs JSON: ",
        _record(name=_TEXT, age=_whole(120), profession=_TEXT, city=_TEXT, languages=_list(_TEXT, 4)),
    ),
    "weather call": (
        "User: Will it rain in Oslo tomorrow morning?\nFunction call as JSON: ",
        _record(
            function={"enum": ["get_weather_forecast", "search_web", "send_message"]},
            arguments=_record(location=_TEXT, day=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
        ),
    ),
    "invoice": (
        (
            "Invoice 2217 of Northwind Ltd: 3 desk lamps at 24.50 each and 1 office chair at 180.00, due in 30 days.\n"
            "As JSON: "
        ),
        _record(
            invoice_number=_whole(99999),
            company=_TEXT,
            items=_list(_record(description=_TEXT, quantity=_whole(99), unit_price_cents=_whole(999999)), 3),
            days_until_due=_whole(365),
        ),
    ),
    "sentiment": (
        "Review: The battery lasts two days, but the screen scratched within a week.\nAs JSON: ",
        _record(sentiment={"enum": ["positive", "negative", "mixed"]}, confidence_percent=_whole(100)),
    ),
    "summary": (
        (
            "Article: The river Elbe rose by two metres after a week of rain. Villages were evacuated, and trains "
            "between Dresden and Prague were cancelled.\nSummary as JSON: "
        ),
        _record(headline=_TEXT, summary=_SENTENCE, key_points=_list(_SENTENCE, 3)),
    ),
    "story": (
        "A short story about a lighthouse keeper who finds a letter, as JSON: ",
        _record(title=_TEXT, story=_SENTENCE | {"maxLength": 400}),
    ),
    "events": (
        "Notes: Stand-up on Monday at 9:00 with Ann and Raj. Design review on Thursday at 14:30 with Li.\nAs JSON: ",
        _record(events=_list(_record(title=_TEXT, weekday=_TEXT, start_time=_TEXT, participants=_list(_TEXT, 3)), 3)),
    ),
    "bug report": (
        "Report: After the update to 4.2 the export button does nothing on Windows; version 4.1 was fine.\nAs JSON: ",
        _record(
            component=_TEXT,
            severity={"enum": ["low", "medium", "high"]},
            affected_versions=_list(_TEXT, 3),
            reproducible={"type": "boolean"},
            description=_SENTENCE,
        ),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--max-tokens", type=at_least(1), default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--schemas", type=int, default=0, metavar="N", help="random schemas to check validity on")
    add_common(parser, repetitions=5)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine(args.dtype)
    Sampling(args.temperature)
    cases = list(CASES)
    if args.quick:
        cases = cases[:_QUICK_CASES]
        args.repetitions = min(args.repetitions, _QUICK_REPETITIONS)
        args.schemas = min(args.schemas, _QUICK_SCHEMAS)
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device)
    say("building the grammar's tokenizer")
    asked = {name: _asked(engine, name, args) for name in cases}
    pools = {"plain": make_pool(["plain"], "fixed"), "metasd": make_pool()}
    cells: list[Cell] = []
    for repetition, (index, name) in itertools.product(range(-1, args.repetitions), enumerate(cases)):
        order = list(pools) if (repetition + index) % 2 else list(pools)[::-1]
        for method in order:
            pools[method].forget()
            cell = _cell(engine, asked[name], pools[method], (index, name, method, max(0, repetition)))
            if repetition >= 0:  # the first time round warms up
                cells.append(cell)
        if repetition >= 0:
            say(f"[{repetition + 1}/{args.repetitions}] {name}")
    figures = _figures(cells, args) | {"mask_share": _mask_share(engine, asked, args)}
    if args.schemas:
        figures["validity"] = _validity(engine, args.schemas)
    _print(figures)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    raw = [
        {"case": c.group, "method": c.method, "repetition": c.repetition, "tokens": len(c.ids), "seconds": c.seconds}
        for c in cells
    ]
    write(args, facts, {"model": engine.target.name, "results": figures, "cells": raw})


def _asked(engine: Engine, name: str, args: argparse.Namespace) -> Request:
    prompt, schema = CASES[name]
    return Request(
        prompt=tuple(engine.target.encode(prompt)),
        sampling=Sampling(args.temperature, seed=args.seed),
        max_tokens=args.max_tokens,
        stop_ids=engine.target.stop_ids,
        step="constrained",
        scope=_SCOPE,
        constraint=compiled(json_schema(schema), engine.target),
    )


def _cell(engine: Engine, request: Request, pool: Any, place: tuple[int, str, str, int]) -> Cell:
    start = time.perf_counter()
    steps = list(engine.generate(request, pool))
    seconds = time.perf_counter() - start
    json.loads("".join(step.text for step in steps))  # a side that breaks off early would look fast
    summary = steps[-1].summary
    rounds = summary.rounds if summary is not None else ()
    index, name, method, repetition = place
    return Cell(index, name, method, repetition, _ids(steps), seconds, len(rounds), rounds)


def _ids(steps: Sequence[Step]) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def _figures(cells: Sequence[Cell], args: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"speedup_vs_plain": speedup(cells, "metasd", "plain", args.seed)}
    for method in ("plain", "metasd"):
        own = [cell for cell in cells if cell.method == method]
        per_second, per_forward = throughput(own)
        figures[method] = {"tokens_per_s": per_second, "tokens_per_forward": per_forward}
    own = [cell for cell in cells if cell.method == "metasd"]
    tokens = sum(len(cell.ids) for cell in own)
    figures["tokens_an_answer"] = {cell.group: len(cell.ids) for cell in own}
    figures["forced_share"] = sum(record.forced for cell in own for record in cell.rounds) / tokens
    answers = {(cell.group, cell.method): cell.ids for cell in cells}
    names = {cell.group for cell in cells}
    figures["identical_to_plain"] = sum(answers[name, "plain"] == answers[name, "metasd"] for name in names)
    figures["cases"] = len(names)
    return figures


# -- what the grammar costs --------------------------------------------------------------------------------------------


class _Clock:
    """Seconds inside wrapped functions; one that calls another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time taken."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return timed


@contextmanager
def _clocked() -> Iterator[_Clock]:
    """Everything that only constrained rounds do has its time taken: forced tokens, pruning, masks and their use, the
    way to the end.
    """
    clock = _Clock()
    points = [(Guide, "forced"), (Guide, "hung"), (Guide, "ended"), (RowMasks, "legal"), (RowMasks, "refuses")]
    with ExitStack() as stack:
        for owner, name in [*points, (Legal, "masked")]:
            stack.enter_context(mock.patch.object(owner, name, clock.around(getattr(owner, name))))
        stack.enter_context(mock.patch.object(Legal, "few", property(clock.around(Legal.few.fget))))  # type: ignore[attr-defined]
        yield clock


def _mask_share(engine: Engine, asked: dict[str, Request], args: argparse.Namespace) -> dict[str, float]:
    """Seconds that the grammar took over seconds of all rounds, of the default pool: the median of the repetitions."""
    pool = make_pool()
    shares: list[float] = []
    for _ in range(args.repetitions):
        total = 0.0
        with _clocked() as clock:
            for request in asked.values():
                pool.forget()
                summary = list(engine.generate(request, pool))[-1].summary
                total += sum(record.total_s for record in summary.rounds) if summary is not None else 0.0
        shares.append(clock.seconds / total)
    return {"median": float(np.median(shares)), "low": min(shares), "high": max(shares)}


# -- validity ----------------------------------------------------------------------------------------------------------


def _validity(engine: Engine, schemas: int) -> dict[str, Any]:
    """Greedy and at temperature 1, by drafters in turn: how many answers are JSON that its schema allows."""
    jsonschema: Any = importlib.import_module("jsonschema")  # has no types of its own
    pools = [make_pool(arms, "fixed") for arms in _DRAFTERS] + [make_pool()]
    prompt = tuple(engine.target.encode("Some data as JSON: "))
    answers, valid = 0, 0
    failed: list[dict[str, Any]] = []
    for seed in range(schemas):
        schema = random_schema(seed)
        constraint = compiled(json_schema(schema), engine.target)
        cap = max(_SCHEMA_CAP, constraint.shortest() or 0)
        runs = {
            temperature: engine.generate(
                Request(prompt, Sampling(temperature, seed=seed), cap, engine.target.stop_ids, constraint=constraint),
                pools[seed % len(pools)],
            )
            for temperature in (0.0, 1.0)
        }
        for temperature, run_ in runs.items():
            text = "".join(step.text for step in run_)
            answers += 1
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                failed.append({"schema": seed, "temperature": temperature, "error": type(error).__name__})
            else:
                valid += 1
        if (seed + 1) % 10 == 0:
            say(f"[{seed + 1}/{schemas}] schemas, {valid} of {answers} answers valid")
    return {"schemas": schemas, "answers": answers, "valid": valid, "failed": failed}


def _print(figures: dict[str, Any]) -> None:
    ratio, share = figures["speedup_vs_plain"], figures["mask_share"]
    if ratio is None:
        raise EvaluatorError("no case was measured")
    lengths = figures["tokens_an_answer"]
    rows = [[name, number(value), str(lengths[name])] for name, value in ratio["tasks"].items()]
    title = "constrained JSON, tokens a second as a ratio to plain constrained decoding"
    table(title, ["case", "x plain", "tokens an answer"], rows)
    same = f"{figures['identical_to_plain']} of {figures['cases']}"
    rows = [
        ["x plain, geometric mean", number(ratio["geomean"])],
        ["95%", f"{ratio['low']:.2f}-{ratio['high']:.2f}"],
        ["slowest case", number(ratio["min"])],
        ["tokens/s, plain", number(figures["plain"]["tokens_per_s"], 1)],
        ["tokens/s, metasd", number(figures["metasd"]["tokens_per_s"], 1)],
        ["tokens a forward", number(figures["metasd"]["tokens_per_forward"])],
        ["forced tokens, share", number(figures["forced_share"], 3)],
        ["grammar, share of a round", number(share["median"], 3)],
        ["same ids as plain", same],
    ]
    if "validity" in figures:
        found = figures["validity"]
        rows.append(["valid under random schemas", f"{found['valid']} of {found['answers']}"])
    table("all cases", ["figure", "value"], rows)
