"""Waiting for an exporter, but not for ever: threads that flush or end one when they are asked to."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

__all__ = ["Worker", "within"]

_log = logging.getLogger("metasd_langchain")


class Worker:
    """A thread that waits to flush or end one exporter, so that whoever asks for it need not wait.

    It is there from the start: from Python 3.12 on nobody may start one at exit.

    Args:
        flush: hands over what there is; called any number of times.
        stop: ends the exporter; called once.
    """

    def __init__(self, flush: Callable[[], object], stop: Callable[[], object]) -> None:
        self._flush, self._stop = flush, stop
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._wake = threading.Condition()
        self._tasks: list[tuple[Callable[[], object], threading.Event]] = []
        threading.Thread(target=self._work, name="metasd-telemetry", daemon=True).start()

    def flush(self) -> threading.Event:
        """Have it flush; the event says when it has."""
        return self._have(self._flush)

    def stop(self) -> threading.Event:
        """Have it end; the event says when it has."""
        return self._have(self._stop)

    def _have(self, task: Callable[[], object]) -> threading.Event:
        done = threading.Event()
        if self._pid != os.getpid():  # a fork takes no threads along
            try:
                self._begin()
            except RuntimeError:  # at exit
                done.set()
                return done
        with self._wake:
            self._tasks.append((task, done))
            self._wake.notify()
        return done

    def _work(self) -> None:
        task = None
        while task is not self._stop:
            with self._wake:
                while not self._tasks:
                    self._wake.wait()
                task, done = self._tasks.pop(0)
            try:
                task()
            except Exception as failure:  # noqa: BLE001  of an exporter, at its end: there is nothing left to do
                _log.warning("telemetry: %s", type(failure).__name__)
            done.set()


def within(timeout: float, tasks: Sequence[Callable[[], threading.Event]]) -> bool:
    """Begin all, wait for all, `timeout` seconds at most; whether all were done by then."""
    end = time.monotonic() + timeout
    begun = [task() for task in tasks]
    return all(done.wait(max(0.0, end - time.monotonic())) for done in begun)
