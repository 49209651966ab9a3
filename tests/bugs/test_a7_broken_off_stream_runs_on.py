"""A7: the consumer leaves the stream (break, close, an exception, a dropped iterator) and the model runs on to
max_tokens; or leaving itself fails, or spoils the answers of others.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from tests.bugs.kit import PROMPT, TOKENIZER, Heard, ids, make
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, Speaker, playing, speaker, spell

LONG = 2000  # tokens asked for; the model's window ends the answer after some 480
SAID = (spell("the cat sat on the mat and in the end it is so. ") * 40)[:480]


class Gate:
    """Lets the model's forwards pass one by one, so that nothing depends on how fast the machine is."""

    def __init__(self) -> None:
        self._shut, self._permits = False, threading.Semaphore(0)

    def let(self, forwards: int) -> None:
        """Shut it after so many more."""
        self._shut, self._permits = True, threading.Semaphore(forwards)

    def open(self) -> None:
        self._shut = False
        self._permits.release(64)

    def wait(self) -> None:
        if self._shut and not self._permits.acquire(timeout=20.0):
            raise TimeoutError("nobody opened the gate")


class Gated(Speaker):
    gate = Gate()

    def forward(self, *args: Any, **options: Any) -> Any:
        self.gate.wait()
        return super().forward(*args, **options)


MODEL = speaker(SAID, kind=Gated)
PLAIN = make(model=(MODEL, TOKENIZER), max_tokens=LONG, drafters=["plain"])


@pytest.fixture(autouse=True)
def gate() -> Iterator[Gate]:
    Gated.gate.open()
    assert ids(PLAIN, max_tokens=3) == SAID[:3]  # loaded
    yield Gated.gate
    Gated.gate.open()


async def stops(gate: Gate, llm: MetaSDLLM = PLAIN) -> None:
    """The engine ends within two more rounds, and the next call is as ever."""
    engine, started = llm._load(), time.perf_counter()
    for _ in range(20):  # the loop closes iterators that were dropped
        await asyncio.sleep(0)
    since = engine.rounds
    gate.open()
    while engine.live and time.perf_counter() - started < 10.0:  # noqa: ASYNC110 - the engine knows no event loop
        await asyncio.sleep(0.001)
    assert engine.live == 0
    assert engine.rounds <= since + 2
    assert ids(llm, max_tokens=12) == SAID[:12]


def close(stream: Any) -> None:
    next(stream)
    stream.close()
    stream.close()


def leave_the_loop(stream: Iterator[Any]) -> None:
    for _ in stream:
        break


def fail() -> None:
    raise ZeroDivisionError


def fail_in_the_loop(stream: Iterator[Any]) -> None:
    for _ in stream:
        fail()


def forget_in_a_cycle(stream: Iterator[Any]) -> None:
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    next(stream)
    del cycle, stream


STREAMS: dict[str, Callable[..., Iterator[Any]]] = {
    "stream": lambda **options: PLAIN.stream(PROMPT, **options),
    "sampled": lambda **options: PLAIN.stream(PROMPT, temperature=0.7, seed=1, **options),
    "with a stop": lambda **options: PLAIN.stream(PROMPT, stop=["no such"], **options),
    "steps": lambda **options: PLAIN.steps(PROMPT, **options),
    "chain": lambda **options: (PromptTemplate.from_template("{p}") | PLAIN.bind(**options)).stream({"p": PROMPT}),
}


@pytest.mark.parametrize("leave", [close, leave_the_loop, fail_in_the_loop, forget_in_a_cycle])
@pytest.mark.parametrize("way", STREAMS)
async def test_however_a_stream_is_left(gate: Gate, leave: Callable[[Any], None], way: str) -> None:
    gate.let(4)
    try:
        leave(STREAMS[way]())
    except ZeroDivisionError:
        assert leave is fail_in_the_loop
    if leave is forget_in_a_cycle:
        gc.collect()
    await stops(gate)


@pytest.mark.parametrize("how", ["aclose", "break", "fail", "athrow"])
@pytest.mark.parametrize("way", ["astream", "chain", "events"])
async def test_however_an_astream_is_left(gate: Gate, how: str, way: str) -> None:
    gate.let(6)
    chain = PromptTemplate.from_template("{p}") | PLAIN | StrOutputParser()
    stream: Any = {
        "astream": lambda: PLAIN.astream(PROMPT),
        "chain": lambda: chain.astream({"p": PROMPT}),
        "events": lambda: PLAIN.astream_events(PROMPT, version="v2"),
    }[way]()
    try:
        async for _ in stream:
            if how == "break":
                break
            if how == "fail":
                fail()
            await (stream.aclose() if how == "aclose" else stream.athrow(ZeroDivisionError()))
            break
    except ZeroDivisionError:
        assert how in {"fail", "athrow"}
    del stream
    await stops(gate)


@pytest.mark.parametrize("setup", SETUPS[::2], ids=str)
async def test_whoever_drafts(gate: Gate, setup: tuple[str, str, int]) -> None:
    llm = playing(MODEL, SAID, setup, max_tokens=LONG)
    gate.let(2)
    close(llm.stream(PROMPT))
    await stops(gate, llm)


async def test_callbacks_hear_of_it_once_and_one_that_raises_stops_the_engine(gate: Gate) -> None:
    class Fails(BaseCallbackHandler):
        raise_error = True

        def on_llm_new_token(self, token: str, **options: Any) -> None:
            raise ZeroDivisionError

    heard = Heard()
    gate.let(4)
    close(PLAIN.stream(PROMPT, {"callbacks": [heard]}))
    assert (heard.events[0], heard.events[-1], heard.events.count("error")) == ("start", "error", 1)
    gate.let(4)  # the first stream may have used them all up
    with pytest.raises(ZeroDivisionError):
        next(PLAIN.stream(PROMPT, {"callbacks": [Fails()]}))
    await stops(gate)


async def test_a_reader_that_waits_is_let_go_by_a_close_from_another_thread(gate: Gate) -> None:
    gate.let(2)
    steps: Any = PLAIN.steps(PROMPT)
    read: list[Any] = []
    reader = threading.Thread(target=lambda: read.extend(steps))
    reader.start()
    while len(read) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    steps.close()
    await stops(gate)
    reader.join(10.0)
    assert not reader.is_alive()
    assert read[-1].summary is None or read[-1].summary.finish_reason == "cancelled"


async def test_others_are_not_disturbed_also_when_one_leaves_before_its_turn(gate: Gate) -> None:
    gate.let(3)
    others = [PLAIN.steps(PROMPT, max_tokens=30) for _ in range(8)]  # as many as run side by side
    waiting: Any = PLAIN.steps(PROMPT)
    left: Any = PLAIN.stream(PROMPT)
    left.close()  # never begun
    waiting.close()
    gate.open()
    assert [tuple(token for step in steps for token in step.tokens) for steps in others] == [SAID[:30]] * 8
    await stops(gate)
