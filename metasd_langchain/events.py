"""What the engine tells those who watch. Frozen values; an observer turns them into metrics, rows or pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from metasd_langchain.values import Choice, Request, RoundRecord, Step, Summary

__all__ = ["CallEnded", "CallStarted", "Event", "Observer", "RoundPlayed"]


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A request was admitted, or ended before its turn came."""

    call: int
    request: Request


@dataclass(frozen=True, slots=True)
class RoundPlayed:
    """A round committed tokens.

    Attributes:
        call: the call's number in its engine.
        record: the round in numbers.
        step: what the caller is told of it.
        choice: the arm that was chosen, and how likely that was; None when there was nothing to choose. The record says
            "plain" where the chosen arm drafted nothing.
        values: the policy's value of each arm after the round, in the reward's units.
    """

    call: int
    record: RoundRecord
    step: Step
    choice: Choice | None = None
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A request ended. Each one that started does, once: with a summary, or with an error and perhaps a summary."""

    call: int
    summary: Summary | None
    error: BaseException | None = None


Event = CallStarted | RoundPlayed | CallEnded


class Observer(Protocol):
    """Receives events on the engine's thread. Must be quick; one that raises is logged once and muted."""

    def on(self, event: Event) -> None:
        """Take note of one event."""
        ...
