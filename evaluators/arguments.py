"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["add_common", "add_prompts", "at_least", "numbers", "recorded"]


def add_common(parser: argparse.ArgumentParser, repetitions: int) -> None:
    """Model, precision, repetitions, output."""
    parser.add_argument("--model", default="gemma-3-270m", help="folder, hub id, .gguf file or gemma-3-270m (embedded)")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32, float16 or auto; the same for all")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--repetitions", type=at_least(1), default=repetitions, help=f"default {repetitions}")
    parser.add_argument("--quick", action="store_true", help="at most 8 minutes on two cores; the same keys")
    parser.add_argument("--seed", type=int, default=0, help="of the order of prompts, of draws and of the bootstrap")
    parser.add_argument("--json", metavar="OUT", help="write every figure to this file")


def add_prompts(parser: argparse.ArgumentParser, *, file: str | None, limit: int | None) -> None:
    """Which prompts."""
    parser.add_argument("--prompts", metavar="FILE", default=file, required=file is None, help="JSON lines")
    parser.add_argument("--data", metavar="DIR", help="where FILE is looked for (METASD_DATA, else ../shared/data)")
    parser.add_argument("--limit", type=at_least(1), default=limit, metavar="N", help="prompts, evenly over the groups")


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from `low`."""

    def whole(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is below {low}")
        return value

    return whole


def numbers(text: str) -> list[int]:
    """An argparse type: positive whole numbers, joined by commas."""
    return [at_least(1)(part) for part in text.split(",")]


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The options for a report. Of a path only the name: where it lies is nobody's business."""
    kept = {name: value for name, value in vars(args).items() if name not in ("json", "data")}
    for name in ("prompts", "code", "model", "heads", "save"):
        if isinstance(kept.get(name), str) and Path(kept[name]).exists():
            kept[name] = Path(kept[name]).name
    return kept
