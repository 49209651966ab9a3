"""What ``metasd tune`` shows: how far it is, what a forward costs, and how fast everyone was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from metasd_langchain.cli.screen import colour, drafter_of, tell
from metasd_langchain.cli.tune_file import score_of
from metasd_langchain.cli.tuning import CHOSEN, Kept, Score, cheapness, speedup
from metasd_langchain.values import PLAIN

if TYPE_CHECKING:
    from metasd_langchain.cli.tune_runs import Curve

__all__ = ["Measured", "progress", "relative", "show_curve", "show_scores"]

_ROUNDING = (
    "Where an answer differs, the two tokens are as likely as each other but for rounding: in half precision a forward"
    " over several tokens may pick the other one. --dtype float32 is exact."
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was found out.

    Attributes:
        curve: cost of a forward.
        first: scores of all candidates.
        proposed: arms that were measured once more, together.
        fresh: scores of that, or None.
        kept, why_not: what they mean.
        gaps: of answers that differ from plain's: distance of the two logits, None where one answer just goes on.
        beyond: how many of these rounding does not explain.
    """

    curve: Curve
    first: Mapping[str, Score]
    proposed: tuple[str, ...]
    fresh: Mapping[str, Score] | None
    kept: Kept
    why_not: str
    gaps: Sequence[float | None]
    beyond: int

    def rows(self) -> list[tuple[str, Score, Score]]:
        """Name, score and plain's score beside it, fastest first and plain at the end."""
        plain = self.first[PLAIN]
        rows = [(name, own, plain) for name, own in self.first.items() if name != PLAIN]
        if self.fresh is not None:
            rows.append((CHOSEN, self.fresh[CHOSEN], self.fresh[PLAIN]))
        rows.sort(key=lambda row: -speedup(row[1], row[2]).mean)
        return [*rows, (PLAIN, plain, plain)]

    def in_numbers(self) -> dict[str, Any]:
        """The rows for the file."""
        found = {name: score_of(own, plain) for name, own, plain in self.rows()}
        if CHOSEN in found:
            found[CHOSEN]["drafters"] = list(self.proposed)
        return found


@contextmanager
def progress(words: str, total: int, *, lines: bool = True) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that moves between measurements only, so that it slows none of them; where nothing can
    move, a line each.
    """
    errors = Console(file=sys.stderr, highlight=False, emoji=False, markup=False)
    moving = errors.is_terminal and not errors.is_dumb_terminal
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=errors, transient=True, disable=not moving, auto_refresh=False)
    task = bar.add_task(f"measuring {words}", total=total)
    done = 0

    def tick(line: str) -> None:
        nonlocal done
        done += 1
        if moving:
            bar.update(task, completed=done, refresh=True)
        elif lines:
            tell(f"[{done}/{total}] {line}")

    if not moving:
        tell(f"measuring {words}")
    with bar:
        bar.refresh()
        yield tick


def relative(curve: Curve) -> dict[int, float]:
    """Width -> a forward of so many tokens, times one of one, at the first context."""
    return {width: cost.relative for width, cost in next(iter(curve.values())).items()}


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))


def show_curve(console: Console, curve: Curve) -> None:
    """How cheap verification is here."""
    widths = list(next(iter(curve.values())))
    console.print(Text("\na forward by new tokens, times a forward of one", "bold"))
    table = _table()
    table.add_column("context")
    table.add_column("one, ms", justify="right")
    for width in widths:
        table.add_column(str(width), justify="right")
    for context, costs in curve.items():
        table.add_row(str(context), f"{costs[1].ms:.1f}", *(f"{costs[width].relative:.2f}" for width in widths))
    console.print(table)
    console.print(Text(cheapness(relative(curve)), "dim"))


def show_scores(console: Console, measured: Measured) -> None:
    """A row a candidate, and whether all gave the same answers."""
    console.print(Text("\nspeed-up over plain, in brackets that of the slowest and of the fastest prompt", "bold"))
    table = _table()
    columns: tuple[tuple[str, Literal["left", "right"]], ...] = (
        ("drafters", "left"),
        ("tokens/s", "right"),
        ("speed-up", "right"),
        ("[low, high]", "left"),
        ("accepted length", "right"),
        ("same answer", "left"),
    )
    for title, justify in columns:
        table.add_column(title, justify=justify, no_wrap=title == "drafters")
    for name, own, plain in measured.rows():
        gained = speedup(own, plain)
        same = len(own.paces) - len(own.different)
        table.add_row(
            Text(name, colour(drafter_of(name)) if "@" in name else ""),
            f"{own.tokens_per_s:.1f}",
            f"{gained.mean:.2f}x",
            f"[{gained.low:.2f}, {gained.high:.2f}]",
            f"{own.accepted_length:.2f}",
            f"{same} of {len(own.paces)}",
        )
    console.print(table)
    if measured.fresh is not None:
        console.print(Text(f"{CHOSEN}: {' '.join(measured.proposed)}, measured once more beside the pool", "dim"))
    if measured.gaps:
        known = [gap for gap in measured.gaps if gap is not None]
        widest = f", largest difference of the logits {max(known):.2g}" if known else ""
        console.print(Text(f"{len(measured.gaps)} answers differ from plain's{widest}. {_ROUNDING}", "dim"))
    if measured.beyond:
        console.print(Text(f"{measured.beyond} of them differ by more than rounding: please report this.", "bold"))
