"""The engine's life: who may end what, when, and what is left. Rounds are let through one by one, not timed."""

from __future__ import annotations

import gc
import logging
import os
import queue
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.engine import ticket as ticket_module
from metasd_langchain.engine.generation import Generation
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.pool import Pool
from metasd_langchain.engine.ticket import Failure, Ticket
from metasd_langchain.errors import (
    BadOption,
    DeadlineExceeded,
    EngineClosed,
    PromptTooLong,
    TargetError,
)
from metasd_langchain.events import CallEnded, CallStarted, Event, RoundPlayed
from metasd_langchain.models.load import Target
from metasd_langchain.testing.models import reference_tokens, tiny_model
from metasd_langchain.values import Request, Sampling, Step

LONG = 400
PATIENCE = 5.0
PROMPT = (2, 40, 41, 42)


class Gate:
    """Lets a number of forwards through; the others wait."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self._free = threading.Semaphore(0)
        self._wide = False
        self.batches: list[int] = []
        score = target.lm.score

        def scoring(feeds: Any, hidden_layers: Any = ()) -> Any:
            if not self._wide:
                self._free.acquire(timeout=PATIENCE)
            self.batches.append(len(feeds))
            return score(feeds, hidden_layers)

        monkeypatch.setattr(target.lm, "score", scoring)

    def let(self, rounds: int) -> None:
        for _ in range(rounds):
            self._free.release()

    def open(self) -> None:
        self._wide = True
        self.let(1)


class Log:
    """An observer that keeps what it is told and can be waited for."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()

    def on(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait(self, kind: type, count: int = 1) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.of(kind)) >= count, PATIENCE)


@pytest.fixture
def gate(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(target, monkeypatch)
    yield gate
    gate.open()


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def make(target: Target, log: Log) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(**options: Any) -> Engine:
        engines.append(Engine(target, observers=[log], **options))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def pool() -> Pool:
    return make_pool(["lookup@4", "plain"], "random")


@pytest.fixture(scope="module")
def plain() -> Pool:
    return make_pool(["plain"], "fixed")


def ids(steps: Any) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def truth(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(reference_tokens(tiny_model(), list(prompt), count))


def thread_of(engine: Engine) -> threading.Thread:
    thread = engine._loop._thread
    assert thread is not None
    return thread


class Box:
    """A sink."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Step | Failure] = queue.SimpleQueue()

    def __call__(self, message: Step | Failure) -> None:
        self._messages.put(message)

    def get(self) -> Step | Failure:
        return self._messages.get(timeout=PATIENCE)


# -- ends from outside -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_a_stream_left_alone_stops_within_two_rounds(
    make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool, how: str
) -> None:
    engine = make()
    gate.let(3)
    steps = engine.generate(Request(PROMPT, max_tokens=LONG), plain)
    got = [next(steps) for _ in range(3)]
    assert ids(got) == truth(PROMPT, 3)
    if how == "close":
        steps.close()
        assert list(steps) == []
    elif how == "break":
        gate.let(1)
        for _ in steps:
            break
    del steps
    gate.open()
    log.wait(CallEnded)
    assert engine.rounds <= 5
    assert log.of(CallEnded)[0].summary.finish_reason == "cancelled"
    assert engine.live == 0
    assert ids(engine.generate(Request(PROMPT, max_tokens=5), plain)) == truth(PROMPT, 5)


def test_a_cancelled_request_ends_with_all_it_has_and_says_so(
    make: Callable[..., Engine], gate: Gate, plain: Pool
) -> None:
    engine, box = make(), Box()
    ticket = engine.submit(Request(PROMPT, max_tokens=LONG, stop=("never said",)), plain, box)
    gate.let(2)
    first, second = box.get(), box.get()
    ticket.cancel()
    ticket.cancel()
    gate.open()
    last = box.get()
    while isinstance(last, Step) and last.summary is None:
        last = box.get()
    assert isinstance(last, Step)
    assert last.summary is not None
    assert last.summary.finish_reason == "cancelled"
    assert last.summary.completion_tokens <= 4
    assert ids([first, second]) == truth(PROMPT, 2)


def test_a_request_that_still_waits_can_be_cancelled_too(make: Callable[..., Engine], gate: Gate, plain: Pool) -> None:
    engine, box = make(max_batch=1), Box()
    running = engine.generate(Request(PROMPT, max_tokens=LONG), plain)
    waiting = engine.submit(Request(PROMPT, max_tokens=LONG), plain, box)
    gate.let(1)
    next(running)
    waiting.cancel()
    gate.let(2)
    next(running), next(running)
    message = box.get()  # while the other still runs
    assert isinstance(message, Step)
    assert message.summary is not None
    assert message.summary.finish_reason == "cancelled"


def test_close_fails_those_who_run_and_those_who_wait(make: Callable[..., Engine], gate: Gate, plain: Pool) -> None:
    engine, errors = make(max_batch=1), []
    streams = [engine.generate(Request(PROMPT, max_tokens=LONG), plain) for _ in range(3)]
    gate.let(1)
    next(streams[0])

    def drain(steps: Any) -> None:
        try:
            for _ in steps:
                pass
        except EngineClosed as error:
            errors.append(error)

    readers = [threading.Thread(target=drain, args=[steps]) for steps in streams]
    for reader in readers:
        reader.start()
    closer = threading.Thread(target=engine.close)
    closer.start()
    while not engine.closed:
        time.sleep(0.001)
    gate.open()
    for thread in [closer, *readers]:
        thread.join(PATIENCE)
    assert len(errors) == 3
    assert not thread_of(engine).is_alive()
    assert engine.live == 0
    engine.close()
    with pytest.raises(EngineClosed):
        engine.generate(Request(PROMPT), plain)


class _Session:
    def __init__(self, owner: _Counting) -> None:
        self._owner = owner

    def hint(self) -> float:
        return 0.0

    def propose(self, tokens: Any, budget: int, draws: Any) -> Any:
        from metasd_langchain.values import EMPTY_DRAFT

        return EMPTY_DRAFT

    def observe(self, round: Any) -> None: ...

    def close(self) -> None:
        self._owner.closed += 1


class _Counting:
    name, candidates, prompt_rows, hidden_layers = "counting", 0, 0, ()

    def __init__(self) -> None:
        self.opened = self.closed = 0

    def open(self, request: Request) -> _Session:
        self.opened += 1
        return _Session(self)

    def forget(self, scope: str | None = None) -> None: ...


def test_every_call_that_started_ends_and_every_session_is_closed_when_the_engine_closes(
    make: Callable[..., Engine], gate: Gate, log: Log
) -> None:
    engine, drafter = make(), _Counting()
    streams = [engine.generate(Request(PROMPT, max_tokens=LONG), make_pool([drafter], "fixed")) for _ in range(2)]
    gate.let(2)
    log.wait(CallStarted, 2)
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.open()
    closer.join(PATIENCE)
    for steps in streams:
        with pytest.raises(EngineClosed):
            list(steps)
    assert drafter.closed == drafter.opened == 2
    assert {event.call for event in log.of(CallEnded)} == {event.call for event in log.of(CallStarted)}
    assert all(isinstance(event.error, EngineClosed) for event in log.of(CallEnded))


@pytest.mark.parametrize("live", [True, False], ids=["live", "waiting"])
def test_who_gave_up_before_the_engine_closed_hears_cancelled(
    make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool, live: bool
) -> None:
    engine, other, given_up = make(max_batch=1), Box(), Box()
    first, second = (given_up, other) if live else (other, given_up)
    tickets = [engine.submit(Request(PROMPT, max_tokens=LONG), plain, sink) for sink in (first, second)]
    log.wait(CallStarted)  # the first is live and in its first forward, the second waits
    tickets[0 if live else 1].cancel()
    closer = threading.Thread(target=engine.close)
    closer.start()
    gate.open()
    closer.join(PATIENCE)
    steps = [given_up.get()]
    while steps[-1].summary is None:
        steps.append(given_up.get())
    assert steps[-1].summary.finish_reason == "cancelled"
    failure = other.get()
    while isinstance(failure, Step):
        failure = other.get()
    assert isinstance(failure.error, EngineClosed)


def test_a_sink_may_close_the_engine(make: Callable[..., Engine], plain: Pool) -> None:
    engine, seen = make(), Box()

    def sink(message: Step | Failure) -> None:
        seen(message)
        engine.close()

    engine.submit(Request(PROMPT, max_tokens=LONG), plain, sink)
    assert isinstance(seen.get(), Step)
    end = seen.get()
    assert isinstance(end, Failure)
    assert isinstance(end.error, EngineClosed)
    thread_of(engine).join(PATIENCE)
    assert not thread_of(engine).is_alive()


def test_a_sink_that_raises_ends_its_own_request_only(
    make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool
) -> None:
    engine = make()

    def sink(message: Step | Failure) -> None:
        raise RuntimeError("the event loop is closed")

    engine.submit(Request(PROMPT, max_tokens=LONG), plain, sink)
    other = engine.generate(Request(PROMPT, max_tokens=8), plain)
    gate.open()
    assert ids(other) == truth(PROMPT, 8)
    log.wait(CallEnded, 2)
    ended = {event.call: event.summary.finish_reason for event in log.of(CallEnded)}
    assert ended == {0: "cancelled", 1: "length"}


def test_an_interrupt_while_waiting_cancels(make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool) -> None:
    engine = make()
    steps = engine.generate(Request(PROMPT, max_tokens=LONG), plain)

    class Interrupted:
        def get(self) -> Step:
            raise KeyboardInterrupt

    steps._steps = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    gate.open()
    deadline = time.perf_counter() + PATIENCE
    while engine.live and time.perf_counter() < deadline:  # it may be dropped before its turn, without an event
        time.sleep(0.001)
    assert engine.live == 0
    assert engine.rounds <= 3
    assert list(steps) == []


# -- threads and processes ---------------------------------------------------------------------------------------------


def test_an_engine_nobody_refers_to_ends_its_thread(target: Target, plain: Pool) -> None:
    engine = Engine(target)
    list(engine.generate(Request(PROMPT, max_tokens=3), plain))
    thread, alive = thread_of(engine), weakref.ref(engine)
    assert thread in threading.enumerate()
    assert thread.daemon
    del engine
    gc.collect()
    assert alive() is None
    thread.join(PATIENCE)
    assert thread not in threading.enumerate()


def test_an_open_stream_keeps_its_engine_alive_and_the_end_of_it_lets_go(target: Target, plain: Pool) -> None:
    engine = Engine(target)
    steps = engine.generate(Request(PROMPT, max_tokens=6), plain)
    thread = thread_of(engine)
    del engine
    gc.collect()
    assert ids(steps) == truth(PROMPT, 6)
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_many_threads_get_their_own_answers(make: Callable[..., Engine], pool: Pool) -> None:
    engine = make(max_batch=3)
    prompts = [(2, 40 + i, 50 + i, *[60 + i, 61] * (i + 1)) for i in range(8)]
    expected = [truth(prompt, 12) for prompt in prompts]
    got: dict[int, list[tuple[int, ...]]] = {}

    def work(i: int) -> None:
        got[i] = [ids(engine.generate(Request(prompts[i], max_tokens=12), pool)) for _ in range(3)]

    threads = [threading.Thread(target=work, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
    assert got == {i: [expected[i]] * 3 for i in range(8)}


SCRIPT = """
import os, signal, sys, threading, time
import torch
from metasd_langchain.assemble import make_pool
from metasd_langchain.engine.loop import Engine
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import Request

engine = Engine(load_target((tiny_model(), tiny_tokenizer())))
pool = make_pool(["lookup@4", "plain"], "random")
prompt = (2, 40, 41, 42)

def answer(count=10):
    return [t for step in engine.generate(Request(prompt, max_tokens=count), pool) for t in step.tokens]

def in_child(what, seconds=10):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            os.write(writing, repr(what()).encode())
            os._exit(0)
        except BaseException as error:
            os.write(writing, repr(error).encode())
            os._exit(1)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    return status, os.read(reading, 100_000).decode()
"""


def python(script: str, seconds: float = 60.0) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT + textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return done, time.perf_counter() - start


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_answers_with_a_thread_of_its_own() -> None:
    done, _ = python(
        """
        before = answer()
        torch.randn(600, 600) @ torch.randn(600, 600)  # the parent's own team of OpenMP threads
        parent = engine._loop._thread
        def child():
            mine = answer()
            return mine, engine._loop._thread is not parent, engine._loop._thread.is_alive()
        print(in_child(child) == (0, repr((before, True, True))))
        stream = engine.generate(Request(prompt, max_tokens=400), pool)  # fork beside a running answer
        first = next(stream)
        print(in_child(lambda: (answer(), engine.live)) == (0, repr((before, 0))))
        stream.close()
        print(answer() == before and engine._loop._thread is parent)  # the parent goes on
        engine.close()
        status, text = in_child(answer)  # closed stays closed
        print(status == 256 and "EngineClosed" in text)
        """
    )
    assert done.stdout.split() == ["True"] * 4, done
    assert done.returncode == 0, done.stderr


def test_the_interpreter_exits_at_once_while_a_stream_is_open() -> None:
    done, _ = python(
        """
        stream = engine.generate(Request(prompt, max_tokens=500), pool)
        next(stream)
        others = [engine.generate(Request(prompt, max_tokens=500), pool) for _ in range(10)]
        next(others[0])
        print(time.time(), flush=True)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert time.time() - float(done.stdout) < 5.0


def test_the_interpreter_exits_after_an_exception_and_from_a_thread_that_reads() -> None:
    done, _ = python(
        """
        stream = engine.generate(Request(prompt, max_tokens=500), pool)
        threading.Thread(target=lambda: [step for step in stream], daemon=True).start()
        print(time.time(), flush=True)
        raise SystemExit(7)
        """
    )
    assert done.returncode == 7, done.stderr
    assert time.time() - float(done.stdout) < 5.0


# -- failures ----------------------------------------------------------------------------------------------------------


def test_an_observer_that_raises_is_muted_once_and_changes_nothing(
    target: Target, log: Log, plain: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        calls = 0

        def on(self, event: Event) -> None:
            self.calls += 1
            if isinstance(event, RoundPlayed):
                raise RuntimeError("secret text")  # noqa: TRY004 - not about types

    broken = Broken()
    engine = Engine(target, observers=[broken, log])
    try:
        with caplog.at_level(logging.WARNING, logger="metasd_langchain"):
            for _ in range(2):
                assert ids(engine.generate(Request(PROMPT, max_tokens=6), plain)) == truth(PROMPT, 6)
        assert broken.calls == 2  # the start and the first round
        assert len(caplog.records) == 1
        assert "Broken" in caplog.text
        assert "secret" not in caplog.text
        assert len(log.of(RoundPlayed)) == 12
        assert len(log.of(CallEnded)) == 2
    finally:
        engine.close()


def test_observers_hear_the_whole_story_in_order(make: Callable[..., Engine], log: Log, pool: Pool) -> None:
    engine = make()
    request = Request(PROMPT, max_tokens=9)
    got = ids(engine.generate(request, pool))
    start, *rounds, end = log.events
    assert start == CallStarted(0, request)
    assert all(isinstance(event, RoundPlayed) and event.call == 0 for event in rounds)
    assert isinstance(end, CallEnded)
    assert end.error is None
    assert end.summary is not None
    assert end.summary.rounds == tuple(event.record for event in rounds)  # type: ignore[union-attr]
    assert sum(record.committed for record in end.summary.rounds) == len(got) == 9


def poisoned(target: Target, monkeypatch: pytest.MonkeyPatch, poison: int, at: int = 0) -> None:
    """Forwards fail whenever the row of the prompt with `poison` in it is among them, from its round `at` on."""
    score, slots, rounds = target.lm.score, [], []

    def scoring(feeds: Any, hidden_layers: Any = ()) -> Any:
        slots.extend(feed.slot for feed in feeds if poison in feed.pending)
        if any(feed.slot is slot for feed in feeds for slot in slots):
            rounds.append(len(feeds))
            if len(rounds) > at:
                raise ValueError("boom")
        return score(feeds, hidden_layers)

    monkeypatch.setattr(target.lm, "score", scoring)


@pytest.mark.parametrize("at", [0, 3])
def test_a_forward_that_fails_for_one_row_ends_that_row_only(
    make: Callable[..., Engine], target: Target, monkeypatch: pytest.MonkeyPatch, pool: Pool, log: Log, at: int
) -> None:
    engine, bad = make(), (2, 40, 499, 41)
    poisoned(target, monkeypatch, 499, at)
    good = [PROMPT, (2, 60, 61, 62, 63, 64, 65, 66, 67, 68)]
    runs = [engine.generate(Request(prompt, max_tokens=10), pool) for prompt in (good[0], bad, good[1])]
    assert ids(runs[0]) == truth(good[0], 10)
    got: list[Step] = []
    with pytest.raises(TargetError, match="ValueError") as caught:  # noqa: PT012
        for step in runs[1]:
            got.append(step)  # noqa: PERF402 - what came before the error counts
    assert isinstance(caught.value.__cause__, ValueError)
    assert "boom" not in str(caught.value)  # may quote the prompt
    assert ids(got) == truth(bad, 10)[: len(ids(got))]
    assert len(got) >= (1 if at else 0)
    assert ids(runs[2]) == truth(good[1], 10)
    log.wait(CallEnded, 3)
    errors = {event.call: event.error for event in log.of(CallEnded)}
    assert [type(errors[call]) for call in range(3)] == [type(None), TargetError, type(None)]
    monkeypatch.undo()
    assert ids(engine.generate(Request(bad, max_tokens=10), pool)) == truth(bad, 10)


def test_a_prompt_with_an_id_the_model_does_not_have_fails_alone(make: Callable[..., Engine], plain: Pool) -> None:
    engine = make()
    runs = [engine.generate(Request(prompt, max_tokens=6), plain) for prompt in (PROMPT, (2, 10**6), (2, -3))]
    assert ids(runs[0]) == truth(PROMPT, 6)
    for run in runs[1:]:
        with pytest.raises((TargetError, BadOption)):
            list(run)
    assert ids(engine.generate(Request(PROMPT, max_tokens=6), plain)) == truth(PROMPT, 6)


def test_logits_of_nan_are_an_error_of_their_row_only(
    make: Callable[..., Engine], target: Target, monkeypatch: pytest.MonkeyPatch, plain: Pool
) -> None:
    engine, score = make(), target.lm.score

    def scoring(feeds: Any, hidden_layers: Any = ()) -> Any:
        scores = score(feeds, hidden_layers)
        with torch.inference_mode():
            for feed, start in zip(feeds, scores.starts, strict=True):
                if 499 in feed.pending:
                    scores.logits[start + feed.rows - 1] = torch.nan
        return scores

    monkeypatch.setattr(target.lm, "score", scoring)
    for sampling in (Sampling(), Sampling(1.0, seed=1)):
        runs = [engine.generate(Request(p, sampling, max_tokens=6), plain) for p in ((2, 499), PROMPT)]
        with pytest.raises(TargetError, match="nan"):
            list(runs[0])
        assert len(ids(runs[1])) == 6


def test_a_bandit_that_raises_ends_its_own_requests_only(make: Callable[..., Engine], plain: Pool) -> None:
    engine = make()

    class Broken:
        name, full_information = "broken", False

        def select(self, situation: Any, rng: Any) -> Any:
            raise ZeroDivisionError("policy")

        update = dump = load = values = lambda self, *args, **kwargs: {}

    broken = engine.generate(Request(PROMPT, max_tokens=6), make_pool(["lookup", "plain"], Broken()))
    fine = engine.generate(Request(PROMPT, max_tokens=6), plain)
    with pytest.raises(ZeroDivisionError):
        list(broken)
    assert ids(fine) == truth(PROMPT, 6)


# -- deadlines ---------------------------------------------------------------------------------------------------------


class Clock:
    """The clock that deadlines go by."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ticket_module, "time", clock)
    return clock


@pytest.mark.parametrize("stop", [(), ("\nnever",)])
def test_a_deadline_delivers_what_there_is_and_then_raises(
    make: Callable[..., Engine], target: Target, gate: Gate, clock: Clock, log: Log, plain: Pool, stop: tuple[str, ...]
) -> None:
    engine = make()
    decode = engine._loop._detokenizer.decode
    if stop:  # hold text back: a stop string that begins with what the model says third
        stop = (decode(truth(PROMPT, 3)[2:]) + "never said",)
    steps = engine.generate(Request(PROMPT, max_tokens=LONG, deadline_s=3.0, stop=stop), plain)
    other = engine.generate(Request(PROMPT, max_tokens=7), plain)
    gate.let(3)
    got = [next(steps) for _ in range(3)]
    clock.now = 2.9
    gate.let(1)
    got.append(next(steps))
    clock.now = 3.1
    gate.open()
    with pytest.raises(DeadlineExceeded, match="3 s") as caught:
        got.extend(steps)
    assert caught.value.retryable
    said = ids(got)
    assert said == truth(PROMPT, 10)[: len(said)]
    assert len(said) in {4, 5}
    assert caught.value.partial == "".join(step.text for step in got) == decode(said)
    assert ids(other) == truth(PROMPT, 7)
    log.wait(CallEnded, 2)
    ended = next(event for event in log.of(CallEnded) if event.error is not None)
    assert isinstance(ended.error, DeadlineExceeded)
    assert ended.summary is not None
    assert ended.summary.completion_tokens == len(said)


def test_a_deadline_counts_from_submission_also_for_those_who_wait(
    make: Callable[..., Engine], gate: Gate, clock: Clock, plain: Pool
) -> None:
    engine, box = make(max_batch=1), Box()
    running = engine.generate(Request(PROMPT, max_tokens=LONG), plain)
    engine.submit(Request(PROMPT, deadline_s=1.0), plain, box)
    gate.let(1)
    next(running)
    clock.now = 1.1
    gate.let(2)
    next(running), next(running)
    message = box.get()  # while the other still runs
    assert isinstance(message, Failure)
    assert isinstance(message.error, DeadlineExceeded)


def test_an_answer_in_time_is_not_touched(make: Callable[..., Engine], plain: Pool) -> None:
    assert ids(make().generate(Request(PROMPT, max_tokens=5, deadline_s=60.0), plain)) == truth(PROMPT, 5)


# -- wrong requests, order, memory -------------------------------------------------------------------------------------


def test_wrong_requests_raise_before_anything_is_queued_or_computed(
    make: Callable[..., Engine], target: Target, log: Log, plain: Pool
) -> None:
    engine, window = make(), target.lm.window
    for length in (window, window + 1, 5 * window):
        with pytest.raises(PromptTooLong, match=str(window)) as caught:
            engine.generate(Request((5,) * length), plain)
        assert (caught.value.length, caught.value.limit) == (length, window)
    for request, name in (
        (Request(()), "prompt"),
        (Request(PROMPT, max_tokens=0), "max_tokens"),
        (Request(PROMPT, max_tokens=-5), "max_tokens"),
    ):
        with pytest.raises(BadOption, match=name):
            engine.generate(request, plain)
        with pytest.raises(ValueError, match=name):
            engine.submit(request, plain, Box())
        with pytest.raises(BadOption, match=name):
            engine.check(request)
    assert (engine.rounds, engine.live, log.events) == (0, 0, [])
    assert engine._loop._thread is None
    engine.check(Request((5,) * (window - 1)))


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"prefill_tokens": 0}, {"max_batch": -1}])
def test_an_engine_that_could_do_nothing_is_refused(target: Target, options: dict[str, int]) -> None:
    with pytest.raises(BadOption):
        Engine(target, **options)


def test_requests_beyond_the_batch_wait_in_order(
    make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool
) -> None:
    engine = make(max_batch=2)
    lengths = [6, 2, 4, 3, 5]
    requests = [Request((*PROMPT, 70 + i), max_tokens=n, step=str(i)) for i, n in enumerate(lengths)]
    runs = [engine.generate(request, plain) for request in requests]
    assert engine.live == 5
    gate.open()
    assert [ids(run) for run in runs] == [truth(request.prompt, request.max_tokens) for request in requests]
    assert [event.request.step for event in log.of(CallStarted)] == ["0", "1", "2", "3", "4"]
    assert max(gate.batches) == 2
    log.wait(CallEnded, 5)
    started: set[int] = set()
    for event in log.events:  # a new one starts only when one has ended
        if isinstance(event, CallStarted):
            started.add(event.call)
            assert len(started) <= 2
        elif isinstance(event, CallEnded):
            started.discard(event.call)


def test_a_long_prompt_does_not_keep_others_from_their_rounds(
    make: Callable[..., Engine], gate: Gate, log: Log, plain: Pool
) -> None:
    engine = make(prefill_tokens=8)
    short = engine.generate(Request(PROMPT, max_tokens=30), plain)
    gate.let(1)
    first = next(short)
    prompt = tuple(range(40, 140))
    long = engine.generate(Request(prompt, max_tokens=2), plain)
    gate.open()
    assert ids([first, *short]) == truth(PROMPT, 30)
    assert ids(long) == truth(prompt, 2)
    log.wait(CallEnded, 2)
    kinds = [event.call for event in log.events if isinstance(event, RoundPlayed)]
    assert kinds.index(1) >= 100 // 8  # the short one answered while the long prompt was read


def held(kinds: tuple[type, ...]) -> int:
    gc.collect()
    return sum(issubclass(type(thing), kinds) for thing in gc.get_objects())


def test_nothing_grows_over_many_calls_and_dropped_streams(make: Callable[..., Engine], log: Log, plain: Pool) -> None:
    engine = make()
    kinds = (torch.Tensor, Generation, Ticket, Failure)

    def calls(count: int, dropped: int) -> None:
        for i in range(count):
            assert len(ids(engine.generate(Request((*PROMPT, 60 + i), max_tokens=2), plain))) == 2
        before = len(log.of(CallEnded))
        for i in range(dropped):
            next(engine.generate(Request((*PROMPT, 60 + i), max_tokens=LONG), plain))
        log.wait(CallEnded, before + dropped)
        log.events.clear()

    calls(5, 2)
    before = held(kinds)
    calls(200, 50)
    assert engine.live == 0
    assert held(kinds) <= before + 2
