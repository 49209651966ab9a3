"""What the demo measured: a table, one span, and the sum of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from metasd_langchain.cli.screen import colour, shares
from metasd_langchain.values import RoundRecord, Summary

__all__ = ["Measured", "show_span", "show_table", "show_total"]

_ITEMS = 14  # of an array attribute
_NEAR_TIE = (
    "Where an answer differs: in half precision the two most likely tokens can be so close that a forward over several"
    " tokens rounds to the other one. transformers' assisted generation flips too; --dtype float32 is exact."
)
_UNEXPECTED = "In float32 answers should be the same; please report this with the document and the question."


@dataclass(frozen=True, slots=True)
class Measured:
    """One call, sped up and plain: same prompt, same options, same process.

    Attributes:
        name: of the step.
        adaptive, plain: the calls in numbers.
        differs_at: index of the first token that differs, -1 when all are the same.
    """

    name: str
    adaptive: Summary
    plain: Summary
    differs_at: int

    @property
    def speedup(self) -> float:
        """Tokens a second against plain decoding; from submission to the end, prompt included."""
        return _rate([self.adaptive]) / _rate([self.plain])

    @property
    def identical(self) -> str:
        """Whether plain decoding gave the same tokens."""
        return "yes" if self.differs_at < 0 else f"no, from token {self.differs_at + 1}"

    @property
    def line(self) -> str:
        """The call in a line."""
        return (
            f"{self.adaptive.completion_tokens} tokens in {self.adaptive.total_s:.2f} s, plain decoding"
            f" {self.plain.total_s:.2f} s: speed-up {self.speedup:.2f} x; identical: {self.identical}"
        )


def show_table(console: Console, calls: Sequence[Measured]) -> None:
    """A row a call and one for all of them."""
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, pad_edge=False, padding=(0, 1, 0, 0))
    rounds = [record for call in calls for record in call.adaptive.rounds]
    everything = [call.adaptive for call in calls]
    columns: tuple[tuple[str, Any, str | Text], ...] = (
        ("call", "left", "all"),
        ("proposed by", "left", _shares(rounds)),
        ("tokens", "right", str(sum(summary.completion_tokens for summary in everything))),
        ("a round", "right", f"{_a_round(rounds):.2f}"),
        ("latency", "right", f"{sum(summary.total_s for summary in everything):.2f} s"),
        ("plain", "right", f"{sum(call.plain.total_s for call in calls):.2f} s"),
        ("speed-up", "right", f"{_overall(calls):.2f} x"),
        ("identical", "left", f"{sum(call.differs_at < 0 for call in calls)} of {len(calls)}"),
    )
    for title, justify, total in columns:
        table.add_column(title, total, justify=justify, overflow="fold")
    for call in calls:
        table.add_row(
            call.name,
            _shares(call.adaptive.rounds),
            str(call.adaptive.completion_tokens),
            f"{_a_round(call.adaptive.rounds):.2f}",
            f"{call.adaptive.total_s:.2f} s",
            f"{call.plain.total_s:.2f} s",
            f"{call.speedup:.2f} x",
            "yes" if call.differs_at < 0 else "no",
        )
    console.print()
    console.print(table)


def show_span(console: Console, name: str, attributes: Mapping[str, Any], seconds: float) -> None:
    """A span's attributes, arrays cut short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title_justify="left", title_style="bold")
    table.title = f"span exported by OpenTelemetry: {name} ({seconds:.2f} s)"
    table.add_column("attribute", no_wrap=True)
    table.add_column("value", overflow="fold")
    for key in sorted(attributes):
        table.add_row(key, _value(attributes[key]))
    console.print(table)


def show_total(console: Console, calls: Sequence[Measured], *, exact: bool) -> None:
    """What it all comes to, in a sentence."""
    same = sum(call.differs_at < 0 for call in calls)
    if same < len(calls):
        console.print(Text(_UNEXPECTED if exact else _NEAR_TIE, "dim"))
    console.print(
        Text(
            f"{len(calls)} calls at {_overall(calls):.2f} x the speed of plain decoding,"
            f" {same} of {len(calls)} answers token for token the same.",
            "bold",
        )
    )


def _shares(rounds: Sequence[RoundRecord]) -> Text:
    return Text(", ").join(Text(f"{name} {share:.0%}", colour(name)) for name, share in shares(rounds))


def _a_round(rounds: Sequence[RoundRecord]) -> float:
    return sum(record.committed for record in rounds) / (len(rounds) or 1)


def _rate(summaries: Sequence[Summary]) -> float:
    seconds = sum(summary.total_s for summary in summaries)
    return sum(summary.completion_tokens for summary in summaries) / max(seconds, 1e-9)


def _overall(calls: Sequence[Measured]) -> float:
    return _rate([call.adaptive for call in calls]) / max(_rate([call.plain for call in calls]), 1e-9)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, (list, tuple)):
        return str(value)
    shown = ", ".join(_value(item) for item in value[:_ITEMS])
    return f"[{shown}]" if len(value) <= _ITEMS else f"[{shown}, ... {len(value)} in all]"
