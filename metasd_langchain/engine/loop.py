"""The worker: one daemon thread runs one round after another for all live generations.

Order: requests are admitted first come, first served, at most `max_batch` at a time; a round reads at most
`prefill_tokens` prompt tokens, oldest request first. So no request waits for more than those before it.

Callers never run engine code and never block the worker: each drains its own ticket. Closing, cancelling and deadlines
set a flag that the worker sees before its next round. The thread holds the loop's state, not the `Engine`: an engine
nobody refers to any more ends its thread. After a fork the child starts with an empty loop and a thread of its own.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from metasd_langchain.engine.generation import Forward, Generation
from metasd_langchain.engine.pool import Pool
from metasd_langchain.engine.text import Detokenizer
from metasd_langchain.engine.ticket import Failure, Sink, Steps, Ticket
from metasd_langchain.engine.verify import VERIFIERS
from metasd_langchain.errors import BadOption, CapTooSmall, EngineClosed, PromptTooLong, TargetError
from metasd_langchain.events import CallEnded, CallStarted, Event, Observer, RoundPlayed
from metasd_langchain.models.lm import Feed
from metasd_langchain.models.load import Target
from metasd_langchain.models.threads import release_team
from metasd_langchain.values import Request, Step, Summary

__all__ = ["Engine"]

logger = logging.getLogger("metasd_langchain")
_CLOSED = "the engine was closed before the answer was complete"


class Engine:
    """Generates answers of one target for any number of threads and tasks.

    Args:
        target: the model that answers.
        observers: told about calls and rounds, on the engine's thread.
        max_batch: generations that run at the same time.
        prefill_tokens: prompt tokens a round may read.
        num_threads: CPU threads; torch keeps one such number a process. None leaves it alone.
    """

    def __init__(
        self,
        target: Target,
        *,
        observers: Sequence[Observer] = (),
        max_batch: int = 8,
        prefill_tokens: int = 1024,
        num_threads: int | None = None,
    ) -> None:
        if max_batch < 1 or prefill_tokens < 1:
            raise BadOption("max_batch, prefill_tokens", (max_batch, prefill_tokens), "at least 1")
        self.target = target
        self._loop = _Loop(target, observers, max_batch, prefill_tokens, num_threads)
        self._finalizer = weakref.finalize(self, _Loop.stop, self._loop)

    def submit(self, request: Request, pool: Pool, sink: Sink, observers: Sequence[Observer] = ()) -> Ticket:
        """Queue a request.

        Args:
            request: what to generate.
            pool: what may be played.
            sink: told every message, on the engine's thread.
            observers: told of this request alone, beside the engine's own.

        Raises:
            PromptTooLong, CapTooSmall, BadOption: before anything is queued.
            LoadError: a drafter of the pool does not fit the target.
            EngineClosed: after `close`.
        """
        self.check(request)
        pool.check(request.verify)
        pool = pool.bound(self.target)
        release_team()  # the caller's, e.g. left by an embedding model: idle now, and in the way
        ticket = Ticket(request, pool, sink, observers)
        self._loop.add(ticket)
        return ticket

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise for a wrong request."""
        limit = self.target.lm.window if request.limit is None else min(request.limit, self.target.lm.window)
        if not request.prompt:
            raise BadOption("prompt", "", "at least one token")
        if len(request.prompt) >= limit:
            raise PromptTooLong(len(request.prompt), limit)
        if not isinstance(request.max_tokens, int) or request.max_tokens < 1:
            raise BadOption("max_tokens", request.max_tokens, "a whole number of at least 1")
        if request.deadline_s is not None and not isinstance(request.deadline_s, (int, float)):
            raise BadOption("deadline_s", request.deadline_s, "a number of seconds")
        if request.verify not in VERIFIERS:
            raise BadOption("verify", request.verify, " or ".join(map(repr, VERIFIERS)))
        vocab = self.target.lm.vocab_size
        if any(not 0 <= token < vocab for token in request.stop_ids - self.target.stop_ids):
            raise BadOption("stop_token_ids", sorted(request.stop_ids), f"token ids below {vocab}")
        if any(token >= vocab for token, _ in request.shaping.logit_bias):
            raise BadOption("logit_bias", max(request.shaping.logit_bias)[0], f"token ids below {vocab}")
        shortest = None if request.constraint is None else request.constraint.shortest()
        cap = min(request.max_tokens, limit - len(request.prompt))
        if shortest is not None and shortest > cap:
            raise CapTooSmall(shortest, cap)

    def generate(
        self, request: Request, pool: Pool, watch: Sink | None = None, observers: Sequence[Observer] = ()
    ) -> Steps:
        """Steps of a request as they come.

        Args:
            request: what to generate; a wrong one raises here, not at the first step.
            pool: what may be played.
            watch: told every message first, on the engine's thread.
            observers: as for `submit`.
        """
        steps: queue.SimpleQueue[Step | Failure] = queue.SimpleQueue()

        def sink(message: Step | Failure) -> None:
            try:
                if watch is not None:
                    watch(message)
            finally:  # whatever a watcher does, the caller must not wait for ever
                steps.put(message)

        return Steps(self.submit(request, pool, sink, observers), steps, self)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._loop.closed

    @property
    def rounds(self) -> int:
        """Rounds run so far."""
        return self._loop.rounds

    @property
    def live(self) -> int:
        """Requests waiting or running."""
        return self._loop.size

    def close(self) -> None:
        """End the worker; requests that still run fail with EngineClosed."""
        self._finalizer()
        self._loop.join(2.0)


class _Loop:
    """State of the worker thread."""

    def __init__(
        self,
        target: Target,
        observers: Sequence[Observer],
        max_batch: int,
        prefill_tokens: int,
        num_threads: int | None,
    ) -> None:
        self._target = target
        self._num_threads = num_threads
        self._detokenizer = Detokenizer(target.tokenizer, target.lock)
        self._observers = list(observers)
        self._max_batch, self._prefill_tokens = max_batch, prefill_tokens
        self._calls = itertools.count()
        self.rounds = 0
        self.closed = False
        self._reset()
        _loops.add(self)

    def _reset(self) -> None:
        self._wake = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._live: list[tuple[Ticket, Generation]] = []
        self._admitting = 0  # no longer waiting, not yet live
        self._thread: threading.Thread | None = None

    @property
    def size(self) -> int:
        with self._wake:
            return len(self._waiting) + self._admitting + len(self._live)

    def add(self, ticket: Ticket) -> None:
        with self._wake:
            if self.closed:
                raise EngineClosed("the engine is closed")
            ticket.call = next(self._calls)
            self._waiting.append(ticket)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="metasd-engine", daemon=True)
                thread.start()
                self._thread = thread
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self.closed = True
            self._wake.notify()

    def join(self, seconds: float) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def forked(self) -> None:
        """In the child of a fork: the parent's requests and thread do not exist here."""
        self._reset()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:  # nothing below lets one through; if it does all the same, nobody may wait for ever
            logger.exception("the engine failed and is closed")
        with self._wake:
            self.closed = True
        for ticket, generation in list(self._live):
            self._abort(ticket, generation, EngineClosed(_CLOSED))
        while self._waiting:
            self._refuse(self._waiting.popleft(), Failure(EngineClosed(_CLOSED)))

    def _work(self) -> None:
        """Rounds until the engine is closed."""
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while True:
            with self._wake:
                if not (self.closed or self._waiting or self._live):
                    release_team()  # an idle team here would slow the application's own torch operations down
                while not (self.closed or self._waiting or self._live):
                    self._wake.wait()
                if self.closed:
                    break
            self._drop_waiting()
            self._admit()
            self._round()
        self._drop_waiting()  # who gave up before the engine was closed was not failed by it
        self._drop_ended()

    def _drop_waiting(self) -> None:
        """End requests that were cancelled, or ran out of time, before their turn came."""
        with self._wake:
            ended = [ticket for ticket in self._waiting if ticket.cancelled.is_set() or ticket.overdue]
            for ticket in ended:
                self._waiting.remove(ticket)
        for ticket in ended:
            if ticket.cancelled.is_set():
                waited = time.perf_counter() - ticket.started
                self._refuse(
                    ticket, Step((), summary=Summary(len(ticket.request.prompt), 0, "cancelled", total_s=waited))
                )
            else:
                self._refuse(ticket, Failure(ticket.timeout()))

    def _admit(self) -> None:
        while len(self._live) < self._max_batch:
            with self._wake:
                if not self._waiting:
                    return
                ticket = self._waiting.popleft()
                self._admitting = 1
            try:  # outside the lock: indexing a long prompt takes a while, and callers must not wait for it
                generation = Generation(ticket.request, ticket.pool, self._target, self._detokenizer, ticket.started)
            except Exception as error:
                self._admitting = 0
                self._refuse(ticket, Failure(error))
                continue
            with self._wake:
                self._live.append((ticket, generation))
                self._admitting = 0
            self._emit(ticket, CallStarted(ticket.call, ticket.request))

    # -- one round ---------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        self._drop_ended()
        planned = self._plan()
        if not planned:
            return
        self.rounds += 1
        try:
            forward = self._score([feed for _, _, feed in planned])
        except Exception as error:
            self._score_singly(planned, error)
            return
        for place, (ticket, generation, feed) in enumerate(planned):
            self._settle(ticket, generation, feed, forward, place)

    def _drop_ended(self) -> None:
        for ticket, generation in list(self._live):
            if not (ticket.cancelled.is_set() or ticket.overdue):
                continue
            try:
                step = generation.end("cancelled" if ticket.cancelled.is_set() else "error")
            except Exception as error:
                self._abort(ticket, generation, error)
                continue
            if ticket.cancelled.is_set():
                self._finish(ticket, generation, step)
            else:
                if step.pieces:
                    ticket.deliver(Step((), step.pieces))
                self._abort(ticket, generation, ticket.timeout())

    def _plan(self) -> list[tuple[Ticket, Generation, Feed]]:
        room = self._prefill_tokens
        planned: list[tuple[Ticket, Generation, Feed]] = []
        for ticket, generation in list(self._live):
            if room <= 0 and len(generation.tokens) - generation.slot.length > 1:
                continue  # its prompt's turn comes next round
            try:
                feed = generation.plan(max(1, room), len(self._live))
            except Exception as error:
                self._abort(ticket, generation, error)
                continue
            if len(feed.pending) > 1:
                room -= len(feed.pending)
            planned.append((ticket, generation, feed))
        return planned

    def _score(self, feeds: list[Feed]) -> Forward:
        layers = sorted({layer for _, generation in self._live for layer in generation.hidden_layers})
        start = time.perf_counter()
        scores = self._target.lm.score(feeds, layers)
        self._target.lm.synchronize()
        seconds = time.perf_counter() - start
        return Forward(scores, sum(feed.width for feed in feeds), seconds, len(feeds))

    def _score_singly(self, planned: list[tuple[Ticket, Generation, Feed]], error: Exception) -> None:
        """A forward failed: find the row it failed for, so that the others go on."""
        for ticket, generation, feed in planned:
            if len(planned) > 1:
                try:
                    forward = self._score([feed])
                except Exception as cause:
                    error = cause
                else:
                    self._settle(ticket, generation, feed, forward, 0)
                    continue
            failure = TargetError(f"the target's forward failed: {type(error).__name__}")
            failure.__cause__ = error
            self._abort(ticket, generation, failure)

    def _settle(self, ticket: Ticket, generation: Generation, feed: Feed, forward: Forward, place: int) -> None:
        try:
            step = generation.settle(feed, forward, place)
        except Exception as error:
            self._abort(ticket, generation, error)
            return
        if step is None:
            return
        if self._observers or ticket.observers:  # else the bandit need not be asked what it thinks
            self._emit(
                ticket,
                RoundPlayed(ticket.call, generation.last_record, step, generation.last_choice, generation.values),
            )
        if step.summary is None:
            ticket.deliver(step)
        else:
            self._finish(ticket, generation, step)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, ticket: Ticket, generation: Generation, step: Step) -> None:
        self._remove(ticket, generation)
        self._emit(ticket, CallEnded(ticket.call, step.summary))
        ticket.deliver(step)

    def _abort(self, ticket: Ticket, generation: Generation, error: BaseException) -> None:
        try:
            summary = generation.end("error").summary  # what was done until then, for whoever counts
        except Exception:
            summary = None
        self._remove(ticket, generation)
        self._emit(ticket, CallEnded(ticket.call, summary, error))
        ticket.deliver(Failure(error, summary))

    def _refuse(self, ticket: Ticket, message: Step | Failure) -> None:
        """End a request that never ran."""
        self._emit(ticket, CallStarted(ticket.call, ticket.request))
        error = message.error if isinstance(message, Failure) else None
        self._emit(ticket, CallEnded(ticket.call, message.summary, error))
        ticket.deliver(message)

    def _remove(self, ticket: Ticket, generation: Generation) -> None:
        self._live = [pair for pair in self._live if pair[0] is not ticket]
        try:
            generation.close()
        except Exception:
            logger.exception("closing a generation failed")

    def _emit(self, ticket: Ticket, event: Event) -> None:
        for observers in (self._observers, ticket.observers):
            for observer in list(observers):
                try:
                    observer.on(event)
                except Exception as error:
                    logger.warning("observer %s failed (%s); muted", type(observer).__name__, type(error).__name__)
                    observers.remove(observer)


_loops: weakref.WeakSet[_Loop] = weakref.WeakSet()


def _at_exit() -> None:
    """End the threads before the interpreter takes their modules away."""
    running = list(_loops)
    for loop in running:
        loop.stop()
    for loop in running:
        loop.join(2.0)


def _in_child() -> None:
    for loop in list(_loops):
        loop.forked()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    # GNU's OpenMP hangs in a child whose parent thread held a team
    os.register_at_fork(before=release_team, after_in_child=_in_child)
