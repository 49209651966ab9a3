"""Figures on screen and in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evaluators.arguments import recorded
from evaluators.errors import EvaluatorError
from evaluators.machine import now

__all__ = ["number", "say", "table", "write"]

_WIDTH = 150  # of tables that go into a file


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure for a table; a dash when there is none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    shown = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(shown)


def write(args: argparse.Namespace, machine: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write everything to ``--json``, if it was given.

    Raises:
        EvaluatorError: the file cannot be written.
    """
    if not args.json:
        return
    whole = {
        "evaluator": args.command,
        "date": now(),
        "arguments": recorded(args),
        "machine": dict(machine),
        **figures,
    }
    try:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(json.dumps(whole, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as cause:
        raise EvaluatorError(f"cannot write {Path(args.json).name}: {cause.strerror}") from cause
