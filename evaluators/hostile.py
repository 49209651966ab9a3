"""What a drafter that is always wrong costs: arms [hostile@8, plain] under the default policy, against plain alone.

The hostile drafter knows plain's answer and drafts other tokens at every position, with full confidence. Every answer
has ``--max-tokens`` tokens and starts with a fresh memory. ``ratio`` is hostile's tokens/s over plain's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from evaluators.arguments import add_common, add_prompts, at_least
from evaluators.errors import EvaluatorError
from evaluators.figures import arm_table, speedup, throughput
from evaluators.machine import machine
from evaluators.methods import Limits, Ours
from evaluators.prompts import encode, find, load, spread
from evaluators.report import number, say, table, write
from evaluators.speed import measure
from metasd_langchain import shared_engine
from metasd_langchain.testing.drafters import HostileDrafter

__all__ = ["add_arguments", "run"]

_BUDGET = 8
# --quick: no further prompt is begun after this many seconds
_QUICK_PROMPTS, _QUICK_REPETITIONS, _QUICK_SECONDS = 2, 2, 360.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="peer_prompts.jsonl", limit=3)
    parser.add_argument("--max-tokens", type=at_least(2), default=512)
    add_common(parser, repetitions=5)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    started = time.perf_counter()
    facts = machine(args.dtype)
    if args.quick:
        args.limit = min(args.limit, _QUICK_PROMPTS)
        args.repetitions = min(args.repetitions, _QUICK_REPETITIONS)
    args.stream = args.shared = False  # a fresh memory for every answer
    chosen = spread(load(find(args.prompts, args.data)), args.limit, args.seed)
    say(f"loading {args.model}")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    limits = Limits(args.max_tokens)
    ids = [encode(engine, prompt) for prompt in chosen]
    plain = Ours("plain", ["plain"]).bind(engine, limits)
    answers = {}
    for prompt, tokens in zip(chosen, ids, strict=True):
        say(f"plain's answer to {prompt.group} {prompt.name}")
        answers[tokens] = plain.answer(tokens, args.seed).ids
        if len(answers[tokens]) < args.max_tokens:
            raise EvaluatorError(f"prompt {prompt.name} leaves no room for {args.max_tokens} tokens")
    drafter = HostileDrafter(engine.target.lm.vocab_size, answers)
    hostile = Ours("hostile", [(drafter, _BUDGET), "plain"]).bind(engine, limits)
    deadline = started + _QUICK_SECONDS if args.quick else None
    cells = measure([plain, hostile], chosen, ids, args, deadline)
    own = [cell for cell in cells if cell.method == "hostile"]
    figures: dict[str, Any] = {
        "ratio": speedup(cells, "hostile", "plain", args.seed),
        "tokens_per_s": throughput(own)[0],
        "plain_tokens_per_s": throughput([cell for cell in cells if cell.method == "plain"])[0],
        "prompts": len({cell.prompt for cell in own}),
        "answers": len(own),
        **arm_table(own),
    }
    _print(figures, args)
    facts["dtype"] = str(engine.target.lm.dtype).removeprefix("torch.")
    write(args, facts, {"model": engine.target.name, **figures})


def _print(figures: dict[str, Any], args: argparse.Namespace) -> None:
    ratio = figures["ratio"]
    wasted = figures["arms"].get(f"hostile@{_BUDGET}", {"rounds": 0, "accepted": 0})
    row = [
        "hostile / plain",
        number(ratio["geomean"], 3),
        f"{ratio['low']:.3f}-{ratio['high']:.3f}",
        number(ratio["min"], 3),
        number(figures["tokens_per_s"], 1),
        number(figures["plain_tokens_per_s"], 1),
        number(wasted["rounds"] / figures["answers"], 1),
        number(wasted["accepted"], 0),
    ]
    columns = ["", "ratio", "95%", "min", "tok/s", "plain tok/s", "hostile rounds / answer", "accepted"]
    table(f"a drafter that is always wrong, {args.max_tokens} tokens, fresh memory", columns, [row])
