"""Milliseconds of one forward by width (new tokens) and context (tokens before them), for transformers and for us.

Every new token gets logits, as in verification. ``hf`` runs on the cache that ``generate`` would use, copied before
each forward outside the clock: a forward appends to it, and transformers cannot take that back exactly. Ours scores one
pending token and a chain; its slot keeps its length. Both alternate; medians.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function

from evaluators.arguments import add_common, numbers
from evaluators.errors import EvaluatorError
from evaluators.machine import machine
from evaluators.methods import PREFILL_TOKENS, load_reference
from evaluators.report import number, say, table, write
from evaluators.split import FORWARD, PARTS, split
from metasd_langchain import Draft, Engine, shared_engine
from metasd_langchain.models.lm import CausalLM, Feed, Slot

__all__ = ["add_arguments", "run"]

_WARM = 2  # forwards of a width before its first measured one
_SPLIT_WIDTHS = (1, 8)
_QUICK_REPETITIONS = 5
Forward = Callable[[], float]  # runs one forward, returns its seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--contexts", type=numbers, default=[128, 1024], help="default 128,1024")
    parser.add_argument("--widths", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128], help="default 1,2,4 .. 128")
    add_common(parser, repetitions=9)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine(args.dtype)
    if args.quick:
        args.repetitions = min(args.repetitions, _QUICK_REPETITIONS)
    say(f"loading {args.model}")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    reference = load_reference(args.model, engine, frozenset())
    _check(engine, args)
    tokens = _tokens(engine, max(args.contexts) + max(args.widths), args.seed)
    costs: dict[str, Any] = {}
    for context in args.contexts:
        say(f"context {context}")
        costs[str(context)] = _by_width(engine, reference, tokens, context, args)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    where = _where(engine, reference, tokens, args) if engine.target.lm.device.type == "cpu" else {}
    _print(costs, where, args)
    write(args, facts, {"model": engine.target.name, "forward_ms": costs, "split": where})


def _check(engine: Engine, args: argparse.Namespace) -> None:
    longest = max(args.contexts) + max(args.widths)
    if longest > engine.target.lm.window:
        raise EvaluatorError(
            f"context and width need {longest} tokens, the model's window has {engine.target.lm.window}"
        )


def _tokens(engine: Engine, count: int, seed: int) -> list[int]:
    """Any ids: a dense model's forward takes the same time for all of them."""
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(0, engine.target.lm.vocab_size, count)]


def _by_width(
    engine: Engine, reference: Any, tokens: list[int], context: int, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    ours = _ours(engine.target.lm, tokens[:context])
    hf = _hf(reference, tokens[:context])
    costs = {}
    for width in args.widths:
        new = tokens[context : context + width]
        one, two = hf(new), ours(new)
        for _ in range(_WARM):
            one(), two()
        pairs = np.array([(one(), two()) for _ in range(args.repetitions)]) * 1e3
        low, high = np.quantile(pairs[:, 1] / pairs[:, 0], [0.25, 0.75])
        there, here = np.median(pairs, axis=0)
        costs[str(width)] = {
            "hf": float(there),
            "ours": float(here),
            "ratio": float(here / there),
            "ratio_q25": float(low),
            "ratio_q75": float(high),
        }
    return costs


def _ours(lm: CausalLM, context: list[int]) -> Callable[[list[int]], Forward]:
    """Makes forwards of ours over a slot that holds the context."""
    slot = Slot()
    for start in range(0, len(context), PREFILL_TOKENS):
        feed = Feed(slot, tuple(context[start : start + PREFILL_TOKENS]), scored=0)
        lm.score([feed])
        lm.keep(feed)

    def make(new: list[int]) -> Forward:
        feed = Feed(slot, (new[0],), Draft.chain(new[1:]))

        def forward() -> float:
            with record_function(FORWARD):
                start = time.perf_counter()
                lm.score([feed])
                lm.synchronize()
                return time.perf_counter() - start

        return forward

    return make


def _hf(model: Any, context: list[int]) -> Callable[[list[int]], Forward]:
    """Makes forwards of transformers over its own cache that holds the context."""
    from transformers import DynamicCache

    filled = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([context], device=model.device), cache=filled, logits_to_keep=1)

    def make(new: list[int]) -> Forward:
        ids = torch.tensor([new], device=model.device)

        def forward() -> float:
            cache = copy.deepcopy(filled)
            _synchronize(model)
            with record_function(FORWARD), torch.no_grad():  # no_grad, as generate does
                start = time.perf_counter()
                model(ids, cache=cache, use_cache=True)
                _synchronize(model)
                return time.perf_counter() - start

        return forward

    return make


def _synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    elif model.device.type == "mps":
        torch.mps.synchronize()


def _where(engine: Engine, reference: Any, tokens: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Where the time goes at the first context, for both, by width."""
    context = args.contexts[0]
    makers = {"hf": _hf(reference, tokens[:context]), "ours": _ours(engine.target.lm, tokens[:context])}
    found: dict[str, Any] = {"context": context}
    for width in (w for w in _SPLIT_WIDTHS if w <= len(tokens) - context):
        for name, make in makers.items():
            say(f"profile of {name}, width {width}")
            found.setdefault(str(width), {})[name] = split(
                make(tokens[context : context + width]), engine.target.lm.vocab_size, args.repetitions
            )
    return found


def _print(costs: dict[str, Any], where: dict[str, Any], args: argparse.Namespace) -> None:
    rows = []
    for context, by_width in costs.items():
        for who, digits in (("hf", 1), ("ours", 1), ("ratio", 2)):
            rows.append([f"{context}, {who}", *(number(cost[who], digits) for cost in by_width.values())])
    table("ms a forward by new tokens; ratio = ours / hf", ["context", *map(str, args.widths)], rows)
    rows = [
        [f"{who}, width {width}", *(number(parts[key], 1) for key in ("total", *PARTS)), number(parts["operations"], 0)]
        for width, both in where.items()
        if width != "context"
        for who, parts in both.items()
    ]
    if rows:
        table(f"where the ms go, context {where['context']}", ["forward", "total", *PARTS, "operations"], rows)
