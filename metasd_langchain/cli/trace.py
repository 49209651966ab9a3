"""``metasd trace``: what a trace file holds, as a table, and as a page that shows which drafter wrote each token."""

from __future__ import annotations

import webbrowser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from metasd_langchain.cli.screen import TARGET, colour, drafter_of, output, tell
from metasd_langchain.errors import BadOption
from metasd_langchain.telemetry.traced import Trace, TracedCall, TracedRound, read_trace
from metasd_langchain.telemetry.tracefile import last_trace

__all__ = ["run"]

_CALLS = 40  # rows of the table; the page has them all
_CONTROL = dict.fromkeys((*range(32), *range(127, 160), *range(8234, 8239), *range(8294, 8298)), "�")


def run(file: Path | None, *, last: bool, out: Path | None, show: bool) -> None:
    """Print a summary and write the page.

    Args:
        file: a trace file.
        last: the newest one in the cache folder instead.
        out: the page; None: beside the trace, with ``.html`` at the end.
        show: open it in the browser.

    Raises:
        BadOption: no file, none that can be read or written.
        MissingExtra: Jinja2 is not installed; the summary has been printed by then.
    """
    if (file is None) != last:
        raise BadOption("file", file and str(file), "a trace file, or --last")
    source = last_trace() if file is None else file
    trace = read_trace(source)
    _show(trace)
    page = source.with_suffix(".html") if out is None else out
    if page.exists() and page.samefile(source):
        raise BadOption("out", str(page), "another file than the trace")
    content = trace.html()
    try:
        page.write_text(content, encoding="utf-8")
    except OSError as cause:
        raise BadOption("out", str(page), "a file that can be written") from cause
    tell(f"page: {page}")
    if show and not webbrowser.open(page.absolute().as_uri()):
        tell("no browser was found to open it with")


def _show(trace: Trace) -> None:
    console = output()
    console.print(_calls(trace.calls[-_CALLS:]))
    hidden = len(trace.calls) - _CALLS
    if hidden > 0:
        console.print(Text(f"and {hidden} earlier calls", "dim"))
    rounds = [one for call in trace.calls for one in call.rounds]
    if rounds:
        console.print(_arms(rounds))
    if trace.unreadable:
        tell(f"{trace.unreadable} lines of the file are no calls and were left out")
    if trace.left_out:
        tell(f"{trace.left_out} older calls of the file were left out")


def _calls(calls: Sequence[TracedCall]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name, justify in (("call", "left"), ("proposed by", "left"), ("tokens", "right"), ("rounds", "right")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for name in ("a round", "time", "first token"):
        table.add_column(name, justify="right")
    table.add_column("ended by")
    depth = min((len(call.path) for call in calls), default=0)
    for call in calls:
        ended = Text(_printable(call.error), "bold red") if call.error else Text(_printable(call.finish_reason))
        table.add_row(
            "  " * (len(call.path) - depth) + (_printable(call.label) or "(no name)"),
            _proposed(call.rounds),
            str(call.completion_tokens),
            str(len(call.rounds) + call.left_out),
            f"{call.accepted_length:.2f}" if call.rounds else "-",
            f"{call.total_s:.2f} s",
            f"{call.first_token_s:.2f} s" if call.rounds else "-",
            ended,
        )
    return table


def _proposed(rounds: Sequence[TracedRound]) -> Text:
    """Shares of the tokens by who proposed them, largest first, the target last."""
    tokens: Counter[str] = Counter()
    for one in rounds:
        tokens[_printable(drafter_of(one.arm))] += one.accepted
        tokens[TARGET] += max(0, one.committed - one.accepted)
    total = tokens.total()
    if not total:
        return Text("-")
    named = sorted((name for name in tokens if name != TARGET and tokens[name]), key=lambda name: -tokens[name])
    parts = (Text(f"{name} {tokens[name] / total:.0%}", colour(name)) for name in (*named, TARGET))
    return Text(", ").join(parts)


def _arms(rounds: Sequence[TracedRound]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", overflow="fold")
    for name in ("rounds", "drafted", "accepted", "accepted length", "draft", "verify"):
        table.add_column(name, justify="right")
    by_arm: dict[str, list[TracedRound]] = {}
    for one in rounds:
        by_arm.setdefault(_printable(one.arm), []).append(one)
    for arm, mine in sorted(by_arm.items(), key=lambda item: -len(item[1])):
        accepted = sum(one.accepted for one in mine)
        table.add_row(
            Text(arm, colour(drafter_of(arm))),
            f"{len(mine)} ({len(mine) / len(rounds):.0%})",
            str(sum(one.drafted for one in mine)),
            str(accepted),
            f"{1 + accepted / len(mine):.2f}",
            f"{1e3 * sum(one.draft_s for one in mine) / len(mine):.1f} ms",
            f"{1e3 * sum(one.score_s for one in mine) / len(mine):.1f} ms",
        )
    return table


def _printable(text: str) -> str:
    """A name without what moves the cursor, turns text around or is half a character."""
    return text.translate(_CONTROL).encode(errors="replace").decode()
