"""The heads of a preset, and which of them is best for which task.

Tokens a round come from replaying every head, alone, through the same answers (see ``replay``), so that differences
between heads are no differences between texts. A head's *speed* is what its rounds would take by its own draft time and
the measured cost of a forward of each width, as a ratio to plain decoding. A specialist *wins* its domain when it
commits more tokens a round there than OFA and every other specialist, greedy and sampled taken together (geometric
mean).
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from evaluators.errors import EvaluatorError
from evaluators.methods import Limits
from evaluators.playback import Played, Record, forward_seconds, record, replay
from evaluators.prompts import Prompt, encode, find, load, spread
from evaluators.report import say
from metasd_langchain import Engine, Sampling, shared_engine
from metasd_langchain.drafters import Drafter
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.models.checkpoints import preset_folder
from metasd_langchain.training.places import DOMAINS, FIVE_DOMAINS, OFA
from metasd_langchain.training.split import held_out

__all__ = ["HEADS", "Heads", "domain_prompts", "held_out_prompts", "load_heads", "missing_heads", "specialists"]

HEADS = (*DOMAINS, OFA)
# Spec-Bench's name of a domain's task; code is HumanEval, which is a file of its own.
_TASKS = {"translation": "translation", "summarization": "summarization", "qa": "qa", "math": "math_reasoning"}
_MODES = ("greedy", "t08")
_CONTEXT = 256  # of the forwards whose cost stands for all rounds'
_QUICK_SECONDS = 110.0  # --quick: after so long no further answer is begun


@dataclass(frozen=True, slots=True)
class Heads:
    """The six heads on an engine."""

    engine: Engine
    bound: Mapping[str, Drafter]
    folders: Mapping[str, Path]

    @property
    def layers(self) -> list[int]:
        """Hidden states that any of them reads."""
        return sorted({layer for head in self.bound.values() for layer in head.hidden_layers})

    def arms(self, names: Sequence[str], budget: int) -> list[str]:
        """Arms of some heads."""
        return [f"eagle:{self.folders[name]}@{budget}" for name in names]


def held_out_prompts(file: str, data: str | None) -> list[Prompt]:
    """Prompts that no training saw."""
    kept = [prompt for prompt in load(find(file, data)) if held_out(prompt.name)]
    if not kept:
        raise EvaluatorError(f"every row of {Path(file).name} is in the training third")
    return kept


def domain_prompts(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    """Held-out prompts of each domain.

    Raises:
        EvaluatorError: a domain has none.
    """
    found = held_out_prompts(args.prompts, args.data)
    by_task = {domain: [prompt for prompt in found if prompt.group == task] for domain, task in _TASKS.items()}
    by_task["code"] = held_out_prompts(args.code, args.data)
    empty = [domain for domain in DOMAINS if not by_task[domain]]
    if empty:
        raise EvaluatorError(f"{Path(args.prompts).name} holds no prompts of {', '.join(empty)}")
    return {domain: spread(by_task[domain], args.domain_prompts, args.seed) for domain in DOMAINS}


def load_heads(args: argparse.Namespace) -> Heads:
    """The engine and the six heads, bound to its target.

    Raises:
        EvaluatorError: they are not trained yet.
        MetaSDError: a checkpoint that is damaged or does not fit.
    """
    name = Path(args.model).name
    folders, missing = _folders(args), missing_heads(args)
    if missing:
        raise EvaluatorError(
            f"no trained heads for {', '.join(missing)} of {name}; train them: metasd train preset {FIVE_DOMAINS}"
        )
    say(f"loading {name} and {len(folders)} heads")
    engine = shared_engine(args.model, dtype=args.dtype, device=args.device, progress=say)
    bound = {head: Eagle(str(place), name=f"eagle-{head}").bind(engine.target) for head, place in folders.items()}
    return Heads(engine, bound, folders)


def missing_heads(args: argparse.Namespace) -> list[str]:
    """Which of the six are not trained."""
    return [head for head, place in _folders(args).items() if not (place / "config.json").is_file()]


def _folders(args: argparse.Namespace) -> dict[str, Path]:
    folder = Path(args.heads).expanduser() if args.heads else preset_folder(Path(args.model).name, FIVE_DOMAINS)
    return {head: folder / head for head in HEADS}


def specialists(heads: Heads, domains: Mapping[str, Sequence[Prompt]], args: argparse.Namespace) -> dict[str, Any]:
    """Every head on every domain: ``matrix``, ``diagonal_wins``, ``heads``."""
    forwards = forward_seconds(heads.engine, range(1, args.budget + 2), _CONTEXT, 5 if args.quick else 15)
    played: dict[str, dict[str, dict[str, list[Played]]]] = {
        mode: {head: defaultdict(list) for head in HEADS} for mode in _MODES
    }
    prompts: dict[str, set[str]] = defaultdict(set)
    for domain, mode, taken in _records(heads, domains, args, prompts):
        for head, drafter in heads.bound.items():
            played[mode][head][domain].append(replay(drafter, taken, args.budget))
    matrix = {
        mode: {
            head: {domain: _figures(runs, forwards) for domain, runs in by_domain.items()}
            for head, by_domain in by_head.items()
        }
        for mode, by_head in played.items()
    }
    wins = {mode: _wins(matrix, [mode]) for mode in _MODES}
    return {
        "matrix": matrix,
        "diagonal_wins": sum(_wins(matrix, _MODES).values()),
        "diagonal": {"both": _wins(matrix, _MODES), **wins},
        "heads": {head: _head(heads, head, played, forwards) for head in HEADS},
        "forward_s": {str(width): seconds for width, seconds in forwards.items()},
        "domain_prompts": {domain: len(names) for domain, names in prompts.items()},
    }


def _records(
    heads: Heads, domains: Mapping[str, Sequence[Prompt]], args: argparse.Namespace, used: dict[str, set[str]]
) -> Iterator[tuple[str, str, Record]]:
    """Answers of one prompt of each domain after the other, so that running out of time hits all domains alike."""
    started = time.perf_counter()
    limits = Limits(args.max_tokens, stop_ids=heads.engine.target.stop_ids)
    modes = {"greedy": Sampling(), "t08": Sampling(temperature=args.temperature, seed=args.seed)}
    for index in range(max(len(prompts) for prompts in domains.values())):
        for domain, prompts in domains.items():
            if index >= len(prompts):
                continue
            if args.quick and index > 1 and time.perf_counter() - started > _QUICK_SECONDS:
                say("out of time: stopping early")
                return
            prompt = prompts[index]
            used[domain].add(prompt.name)
            say(f"[{index + 1}/{len(prompts)}] {domain} {prompt.name}")
            for mode, sampling in modes.items():
                yield domain, mode, record(heads.engine, encode(heads.engine, prompt), sampling, limits, heads.layers)


def _figures(runs: Sequence[Played], forwards: Mapping[int, float]) -> dict[str, float]:
    """Tokens a round and speed over all rounds of some answers."""
    committed = [count for run in runs for count in run.committed]
    drafted = [count for run in runs for count in run.drafted]
    if not committed:
        raise EvaluatorError("answers of a single token: nothing was drafted")
    seconds = sum(second for run in runs for second in run.draft_s) + sum(forwards[1 + count] for count in drafted)
    return {
        "tokens_per_round": sum(committed) / len(committed),
        "speed": sum(committed) * forwards[1] / seconds,
        "rounds": float(len(committed)),
    }


def _wins(matrix: Mapping[str, Any], modes: Sequence[str]) -> dict[str, bool]:
    """By domain whether its specialist commits most tokens a round."""

    def worth(head: str, domain: str) -> float:
        return math.prod(float(matrix[mode][head][domain]["tokens_per_round"]) for mode in modes)

    return {
        domain: all(worth(domain, domain) > worth(other, domain) for other in HEADS if other != domain)
        for domain in DOMAINS
    }


def _head(
    heads: Heads, head: str, played: Mapping[str, Any], forwards: Mapping[int, float]
) -> dict[str, float | int | None]:
    """A head on its own domain; the one trained on all of them on all."""
    figures: dict[str, float | int | None] = {}
    for mode in _MODES:
        runs = [run for domain, own in played[mode][head].items() if head in (domain, OFA) for run in own]
        figures[f"tokens_per_round_{mode}"] = _figures(runs, forwards)["tokens_per_round"]
    every = [run for mode in _MODES for runs in played[mode][head].values() for run in runs]
    steps = sum(sum(run.drafted) for run in every)
    seconds = [second / count for run in every for second, count in zip(run.draft_s, run.drafted, strict=True) if count]
    figures["draft_step_share"] = float(np.median(seconds)) / forwards[1] if steps else None
    figures["parameters"] = _parameters(heads.folders[head])
    figures["memory_bytes"] = int(getattr(heads.bound[head], "memory_bytes", 0))
    return figures


def _parameters(folder: Path) -> int:
    """Numbers in a checkpoint's tensors, maps between vocabularies not counted."""
    count = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="np") as stored:
            for name in stored.keys():  # noqa: SIM118 - no mapping
                if name not in ("d2t", "t2d"):
                    count += math.prod(stored.get_slice(name).get_shape())
    return count
