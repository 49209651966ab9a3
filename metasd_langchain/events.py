"""What the engine tells those who watch. Frozen values; an observer turns them into metrics, rows or pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from metasd_langchain.values import Request, RoundRecord, Summary

__all__ = ["CallEnded", "CallStarted", "Event", "Observer", "RoundPlayed"]


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A request was admitted."""

    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class RoundPlayed:
    """A round committed tokens."""

    call: int
    record: RoundRecord


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A request ended: with a summary, or with an error and no summary."""

    call: int
    summary: Summary | None
    error: BaseException | None = None


Event = CallStarted | RoundPlayed | CallEnded


class Observer(Protocol):
    """Receives events on the engine's thread. Must be quick; one that raises is logged once and muted."""

    def on(self, event: Event) -> None:
        """Take note of one event."""
        ...
