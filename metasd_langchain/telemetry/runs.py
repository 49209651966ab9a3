"""Which runs of a pipeline are going on, so that a call can say which ones are around it. Ids and names only."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict

from metasd_langchain.telemetry.traced import Ancestor

__all__ = ["ancestors", "forget_run", "note_run"]

_RUNS = 4096  # known at a time; some never end, e.g. streams that nobody closed


def note_run(run: str, parent: str, name: str) -> None:
    """A LangChain run began: a chain, a graph's node, a tool."""
    with _lock:
        _runs[run] = (parent, name)
        while len(_runs) > _RUNS:
            _runs.popitem(last=False)


def forget_run(run: str) -> None:
    """It ended."""
    with _lock:
        _runs.pop(run, None)


def ancestors(parent: str) -> tuple[Ancestor, ...]:
    """The runs around a call, outermost first. One that nobody told us of has no name."""
    found: list[Ancestor] = []
    seen: set[str] = set()
    with _lock:
        while parent and parent not in seen:
            seen.add(parent)
            above, name = _runs.get(parent, ("", ""))
            found.append(Ancestor(parent, name))
            parent = above
    return tuple(reversed(found))


_lock = threading.Lock()
_runs: OrderedDict[str, tuple[str, str]] = OrderedDict()


def _forked() -> None:
    """In the child of a fork: another thread of the parent may have held the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
