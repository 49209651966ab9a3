"""D2: a context is attached when a stream begins and detached when it ends, in another task or thread: "Failed to
detach context" in the log, and a span that stays current in the caller.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace

from tests.bugs.watching import BROKEN, LONG, MODELS, NAMES, PROMPT, WAYS, ended


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> Any:
    with caplog.at_level(logging.DEBUG, logger="opentelemetry"):
        yield
        said = [r for r in caplog.records if r.name.startswith("opentelemetry") and r.levelno >= logging.WARNING]
        assert not [record.getMessage() for record in said]


def done(spans: Any, count: int) -> None:
    assert sum(span.name in NAMES for span in spans.get_finished_spans()) == count


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
async def test_nothing_is_attached_in_the_caller(spans: Any, way: str, model: str) -> None:
    llm = MODELS[model](**(LONG if way in BROKEN else {"max_tokens": 8}))
    with trace.get_tracer("app").start_as_current_span("app") as app:
        before = otel_context.get_current()
        await WAYS[way](llm, llm, PROMPT)
        assert otel_context.get_current() is before
        stream = llm.stream(PROMPT)
        next(stream)
        assert trace.get_current_span() is app  # in the middle of one
        stream.close()
    await ended(llm)


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_begun_in_one_task_and_ended_in_another(spans: Any, model: str) -> None:
    llm = MODELS[model](**LONG)

    async def begin(**options: Any) -> AsyncIterator[str]:
        with trace.get_tracer("app").start_as_current_span("request"):
            stream = llm.astream(PROMPT, **options)
            await anext(stream)
            return stream

    for leave in ("read", "close", "drop"):
        stream = await asyncio.create_task(begin(**({"max_tokens": 20} if leave == "read" else {})))

        async def finish(stream: Any = stream, leave: str = leave) -> None:
            if leave == "read":
                [_ async for _ in stream]
            elif leave == "close":
                await stream.aclose()

        await asyncio.create_task(finish())
        del stream, finish
        gc.collect()
        for _ in range(10):
            await asyncio.sleep(0)  # the loop closes generators that were dropped
    await ended(llm)
    done(spans, 3)


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_begun_in_one_thread_and_ended_in_another(spans: Any, model: str) -> None:
    llm = MODELS[model](**LONG)
    for leave, most in ((list, 20), (lambda stream: stream.close(), 400)):
        stream = llm.stream(PROMPT, max_tokens=most)
        next(stream)
        other = threading.Thread(target=leave, args=(stream,))
        other.start()
        other.join(20)
        assert not other.is_alive()
    await ended(llm)
    done(spans, 2)


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_left_behind_when_its_loop_is_closed(spans: Any, model: str) -> None:
    llm = MODELS[model](**LONG)

    async def leave() -> None:
        stream = llm.astream(PROMPT)
        await anext(stream)
        leave.stream = stream  # type: ignore[attr-defined]

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()  # no shutdown_asyncgens: nobody is left to be told
    asyncio.run(ended(llm))
    done(spans, 1)
    del leave.stream  # type: ignore[attr-defined]
