"""``metasd memory``: what bandits remember in a file, as a table, as JSON, or not any more."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from rich.table import Table

from metasd_langchain.bandits.memory import SCHEMA, SqliteMemory, Stored
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.cli.screen import output, tell
from metasd_langchain.errors import BadOption, MetaSDError

__all__ = ["export", "reset", "show"]

_BEST = 3
_EVERY_STEP = "(all steps)"


def show(file: Path) -> None:
    """Print a table of what is stored.

    Raises:
        BadOption: no such file.
        BanditMemoryError: it cannot be read.
    """
    rows = _memory(file).rows()
    if not rows:
        tell("nothing is stored yet")
        return
    console = output()
    for (target, scope), group in groupby(rows, key=lambda row: (row.key.target, row.key.scope)):
        model = target.rpartition(" ")[0] or target  # the hash behind it is for telling apart, not for reading
        console.print(f"{_printable(model)}, {f'scope {scope}' if scope else 'no scope'}", style="bold")
        console.print(_table(group))


def _table(rows: Iterable[Stored]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "policy", "reward", "rounds", "best arms"):
        table.add_column(name, justify="right" if name == "rounds" else "left", overflow="fold")
    for row in rows:
        step = _EVERY_STEP if row.key.step is None else _printable(row.key.step) or "(no name)"
        best = ", ".join(f"{arm} {value:.2f}" for arm, value in list(_values(row).items())[:_BEST]) or "-"
        table.add_row(step, row.key.policy, row.key.reward, str(row.learned.rounds), best)
    return table


def export(file: Path) -> None:
    """Print everything as one JSON object. Errors as `show`."""
    rows = [
        {
            "target": row.key.target,
            "policy": row.key.policy,
            "arms": row.key.arms,
            "reward": row.key.reward,
            "scope": row.key.scope,
            "step": row.key.step,
            "rounds": row.learned.rounds,
            "saved": dt.datetime.fromtimestamp(row.saved, dt.UTC).isoformat(timespec="seconds"),
            "values": _values(row),
            "state": row.learned.state,
        }
        for row in _memory(file).rows()
    ]
    print(json.dumps({"schema": SCHEMA, "learned": rows}, ensure_ascii=False, indent=2))


def reset(file: Path, *, scope: str | None, step: str | None) -> None:
    """Delete rows and say how many. Errors as `show`, and BanditMemoryError when it cannot be written."""
    memory = _memory(file)
    gone = memory.reset(scope=scope, step=step)
    left = len(memory.rows())
    tell(f"{gone} {'entry' if gone == 1 else 'entries'} deleted, {left} left")


def _memory(file: Path) -> SqliteMemory:
    if not file.exists():
        raise BadOption("file", str(file), "a file that exists")
    return SqliteMemory(file)


def _printable(name: str) -> str:
    """A name that cannot move the terminal's cursor."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


def _values(row: Stored) -> Mapping[str, float]:
    """What each arm was worth in the reward's units, best first; empty for a policy that is not installed here."""
    name, reward = row.key.policy.partition(" ")[0], row.key.reward.partition(" ")[0]
    try:
        policy, worth = policy_factory(name)(), reward_named(reward)
        policy.load(row.learned.state)
    except MetaSDError:
        return {}
    values = {arm: worth.low + (worth.high - worth.low) * value for arm, value in policy.values().items()}
    return dict(sorted(values.items(), key=lambda item: -item[1]))
