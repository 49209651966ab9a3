"""A submitted request and how its steps reach whoever waits. No torch in here."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metasd_langchain.engine.pool import Pool
from metasd_langchain.errors import DeadlineExceeded
from metasd_langchain.events import Observer
from metasd_langchain.values import Request, Step, Summary

__all__ = ["Failure", "Sink", "Steps", "Ticket"]


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that failed: the error, and what had been done until then where that is known."""

    error: BaseException
    summary: Summary | None = None


Sink = Callable[["Step | Failure"], None]


class Ticket:
    """A submitted request.

    Args:
        request: what to generate.
        pool: what may be played.
        sink: called on the engine's thread with every step; the last one has a summary. A failed request ends with a
            `Failure` instead.
        observers: told of this request alone, on the engine's thread.
    """

    def __init__(self, request: Request, pool: Pool, sink: Sink, observers: Sequence[Observer] = ()) -> None:
        self.request, self.pool = request, pool
        self.observers = list(observers)
        self.started = time.perf_counter()
        self.cancelled = threading.Event()
        self._sink = sink
        self._text: list[str] = []
        self.call = -1

    def cancel(self) -> None:
        """Stop the request before its next round. Any thread, any number of times."""
        self.cancelled.set()

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        deadline = self.request.deadline_s
        return deadline is not None and time.perf_counter() - self.started > deadline

    def timeout(self) -> DeadlineExceeded:
        """The error for a passed deadline."""
        return DeadlineExceeded(self.request.deadline_s or 0.0, "".join(self._text))

    def deliver(self, message: Step | Failure) -> None:
        """Hand a step or the failure to whoever waits."""
        if self.request.deadline_s is not None and isinstance(message, Step):
            self._text.append(message.text)
        try:
            self._sink(message)
        except Exception:  # e.g. the event loop that waited is closed: nobody is left to tell
            self.cancel()


class Steps:
    """Iterator over a request's steps. Closing it, or dropping it, cancels the request."""

    def __init__(self, ticket: Ticket, steps: queue.SimpleQueue[Step | Failure], engine: object) -> None:
        self._ticket, self._steps = ticket, steps
        self._engine: object | None = engine  # an engine lives as long as somebody waits for it

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Step:
        if self._engine is None:
            raise StopIteration
        try:
            message = self._steps.get()
        except BaseException:  # KeyboardInterrupt while waiting
            self.close()
            raise
        if isinstance(message, Failure):
            self._engine = None
            raise message.error
        if message.summary is not None:
            self._engine = None
        return message

    def close(self) -> None:
        """Cancel the request; the engine sees it before its next round."""
        self._ticket.cancel()
        self._engine = None

    def __del__(self) -> None:
        self._ticket.cancel()
