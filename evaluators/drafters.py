"""What trained heads bring: which head is best for which task, what a pool with them gains, what switching costs.

Only rows outside the training third are used. Heads by task: see ``heads``; switching: see ``switching``. *Gains* are
of wall clock: both pools answer the same stream of prompts, prompt by prompt in turn, with the default policy and its
memory kept through the stream; ratios, 1.10 = 10 % more tokens a second. Prompts that pools answered at very different
length are left out, and counted (``figures.even``).
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evaluators.arguments import add_common, add_prompts, at_least, numbers
from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, arm_table, even, speedup
from evaluators.heads import HEADS, Heads, domain_prompts, held_out_prompts, load_heads, specialists
from evaluators.machine import machine
from evaluators.methods import Limits, Ours
from evaluators.prompts import Prompt, encode, spread
from evaluators.report import number, say, table, write
from evaluators.speed import measure
from evaluators.switching import AWAY, switch_costs
from metasd_langchain import Sampling
from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.drafters import Drafter
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.models.draft_lm import DraftLM, DraftLMConfig
from metasd_langchain.models.vocabulary import DraftVocabulary, fingerprint
from metasd_langchain.training.places import DOMAINS, FIVE_DOMAINS, OFA

__all__ = ["add_arguments", "run"]

_SMALL_COLUMNS, _SMALL_WINDOW = 8192, 512
# --quick: at most 8 minutes in all; after so many seconds no further prompt of a stream is begun
_QUICK_PROMPTS, _QUICK_TOKENS, _QUICK_STREAM, _QUICK_SECONDS = 5, 64, 24, 95.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_prompts(parser, file="spec_bench_dev.jsonl", limit=60)
    parser.add_argument("--code", metavar="FILE", default="humaneval_dev.jsonl", help="prompts of the code domain")
    parser.add_argument("--heads", metavar="DIR", help=f"folder of the six heads (default: the preset {FIVE_DOMAINS})")
    parser.add_argument("--budget", type=at_least(1), default=8, help="most nodes of a head's tree (DECISIONS 36)")
    parser.add_argument("--max-tokens", type=at_least(2), default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--domain-prompts", type=at_least(1), default=12, metavar="N", help="of each domain")
    parser.add_argument("--contexts", type=numbers, default=[256, 512, 1024, 2048, 4096, 8192], help="of switching")
    add_common(parser, repetitions=3)


def run(args: argparse.Namespace) -> None:
    """Measure, print, write."""
    facts = machine(args.dtype)
    if args.quick:
        _settle(args)
    Sampling(args.temperature)
    stream = spread(held_out_prompts(args.prompts, args.data), args.limit, args.seed)
    domains = domain_prompts(args)
    heads = load_heads(args)
    facts["dtype"] = str(heads.engine.target.lm.dtype).removeprefix("torch.")
    figures: dict[str, Any] = {"model": heads.engine.target.name, "domain_prompts": {}}
    figures |= specialists(heads, domains, args)
    figures |= _gains(heads, stream, args)
    say("switching")
    figures["switch_cost"] = _switching(heads, args)
    figures["switch_rounds_away"] = AWAY
    _print(figures, args)
    write(args, facts, figures)


def _settle(args: argparse.Namespace) -> None:
    args.limit = min(args.limit, _QUICK_STREAM)
    args.domain_prompts = min(args.domain_prompts, _QUICK_PROMPTS)
    args.max_tokens = min(args.max_tokens, _QUICK_TOKENS)
    args.repetitions = 1
    args.contexts = [context for context in args.contexts if context in (256, 2048)] or args.contexts[:1]


# -- pools -------------------------------------------------------------------------------------------------------------


def _gains(heads: Heads, stream: Sequence[Prompt], args: argparse.Namespace) -> dict[str, Any]:
    """The pool with heads against the pool without, and against OFA alone, on a mixed stream."""
    ids = [encode(heads.engine, prompt) for prompt in stream]
    figures: dict[str, Any] = {"vs_ofa": {}, "gain_intervals": {}, "gain_tasks": {}, "arms": {}, "stream_prompts": {}}
    figures |= {"uneven": {}, "of_all": {}}
    for mode, temperature in (("t08", args.temperature), ("greedy", 0.0)):
        say(f"pools, temperature {temperature:g}")
        cells = _stream(heads, stream, ids, temperature, args)
        level, uneven = even(cells)
        gain, ofa = (_ratio(level, base, args.seed) for base in ("training-free", "ofa"))
        figures[f"pool_gain_{mode}"] = gain["geomean"]
        figures["vs_ofa"][mode] = ofa["geomean"]
        figures["uneven"][mode] = len(uneven)
        figures["of_all"][mode] = {
            name: _ratio(cells, base, args.seed)["geomean"]
            for name, base in (("pool", "training-free"), ("ofa", "ofa"))
        }
        figures["gain_intervals"][mode] = {"pool": [gain["low"], gain["high"]], "ofa": [ofa["low"], ofa["high"]]}
        figures["gain_tasks"][mode] = {"pool": gain["tasks"], "ofa": ofa["tasks"]}
        figures["arms"][mode] = arm_table([cell for cell in cells if cell.method == "heads"])
        figures["stream_prompts"][mode] = len({cell.prompt for cell in cells})
    return figures


def _ratio(cells: Sequence[Cell], base: str, seed: int) -> dict[str, Any]:
    ratio = speedup(cells, "heads", base, seed)
    if ratio is None:
        raise EvaluatorError("the pools share no prompt")
    return ratio


def _stream(
    heads: Heads, stream: Sequence[Prompt], ids: Sequence[Sequence[int]], temperature: float, args: argparse.Namespace
) -> list[Cell]:
    """Passes through the stream; before each, everything learned is forgotten, and the order of prompts is drawn."""
    limits = Limits(args.max_tokens, temperature, stop_ids=heads.engine.target.stop_ids)
    methods = [
        Ours("training-free", list(DEFAULT_ARMS)),
        Ours("heads", [*heads.arms(HEADS, args.budget), *DEFAULT_ARMS]),
        Ours("ofa", heads.arms([OFA], args.budget)),
    ]
    for method in methods:
        method.bind(heads.engine, limits)
        method.answer(max(ids, key=len), 0)  # kernels are chosen, costs are known
    passing = copy.copy(args)
    passing.repetitions, passing.stream, passing.shared = 1, True, False
    cells: list[Cell] = []
    deadline = time.perf_counter() + _QUICK_SECONDS if args.quick else None
    for repetition in range(args.repetitions):
        for method in methods:
            method.reset(memory=True)
        order = np.random.default_rng(args.seed + repetition).permutation(len(stream)).tolist()
        passing.seed = args.seed + repetition
        for cell in measure(methods, [stream[i] for i in order], [ids[i] for i in order], passing, deadline):
            seen = Cell(order[cell.prompt], cell.group, cell.method, repetition, cell.ids, cell.seconds, cell.forwards,
                        cell.rounds)  # fmt: skip
            cells.append(seen)
    return cells


# -- switching ---------------------------------------------------------------------------------------------------------


def _switching(heads: Heads, args: argparse.Namespace) -> dict[str, Any]:
    """A head with its window and with all of the text, and a small model likewise.

    The small model is untrained, of the usual shape: what it guesses has no part in what reading costs.
    """
    target = heads.engine.target
    window = target.lm.window
    contexts = [context for context in args.contexts if context < window - 256] or [window // 2]
    drafters: dict[str, Drafter] = {
        "eagle": heads.bound[OFA],
        "eagle_full": Eagle(str(heads.folders[OFA]), name="eagle-full", window=max(contexts) + 256).bind(target),
    }
    longest = max(contexts) + 256
    with tempfile.TemporaryDirectory() as folder:
        columns = range(min(_SMALL_COLUMNS, target.lm.vocab_size))
        vocabulary = DraftVocabulary(columns, target.lm.vocab_size, fingerprint(target.tokenizer))
        DraftLM.fresh(vocabulary, DraftLMConfig(window=2 * longest), seed=args.seed).save(folder)
        drafters["small_lm_full"] = SmallLM(folder).bind(target)
        drafters["small_lm_window"] = SmallLM(folder, kv=f"window:{min(_SMALL_WINDOW, longest)}").bind(target)
    return switch_costs(heads.engine, drafters, contexts, 2 if args.quick else 5)


# -- on screen ---------------------------------------------------------------------------------------------------------


def _print(figures: Mapping[str, Any], args: argparse.Namespace) -> None:
    for mode, by_head in figures["matrix"].items():
        rows = [
            [head, *(f"{own[d]['tokens_per_round']:.2f} ({own[d]['speed']:.2f}x)" for d in DOMAINS)]
            for head, own in by_head.items()
        ]
        draws = "greedy" if mode == "greedy" else f"temperature {args.temperature:g}"
        table(f"tokens a round (speed, plain = 1), {draws}; rows: heads, columns: tasks", ["head", *DOMAINS], rows)
    rows = [
        [head, number(own["tokens_per_round_greedy"]), number(own["tokens_per_round_t08"]),
         f"{own['parameters'] / 1e6:.1f} M", number(own["draft_step_share"], 3)]
        for head, own in figures["heads"].items()
    ]  # fmt: skip
    table("heads on their own domain", ["head", "greedy", "sampled", "parameters", "draft step / plain"], rows)
    rows = []
    for mode in ("greedy", "t08"):
        low, high = figures["gain_intervals"][mode]["pool"]
        rows.append([mode, number(figures[f"pool_gain_{mode}"]), f"{low:.2f}-{high:.2f}",
                     number(figures["vs_ofa"][mode]), str(figures["stream_prompts"][mode]),
                     str(figures["uneven"][mode]), number(figures["of_all"][mode]["pool"]),
                     number(figures["of_all"][mode]["ofa"])])  # fmt: skip
    columns = ["", "training-free", "95%", "OFA alone", "prompts", "uneven", "with them", "OFA, with them"]
    table("pool with heads against", columns, rows)
    names = list(next(iter(figures["switch_cost"].values())))
    rows = [
        [context, *(f"{own[name]['back']:.1%} ({own[name]['first']:.1%})" for name in names)]
        for context, own in figures["switch_cost"].items()
    ]
    table(f"switching back after {AWAY} rounds (never played before), share of a plain step", ["context", *names], rows)
    wins = ", ".join(domain for domain, won in figures["diagonal"]["both"].items() if won) or "none"
    say(f"the specialist is best on {figures['diagonal_wins']} of {len(DOMAINS)} domains: {wins}")
