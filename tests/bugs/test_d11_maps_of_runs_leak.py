"""D11: what is remembered for each call is never forgotten when its end is not told: streams dropped, tasks cancelled,
errors. With spans, metrics and an instrumentor on.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import Counter
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from tests.bugs.watching import LONG, MODELS, PROMPT, ended, instrumented
from tests.unit.calls import record, start, summary

PACKAGES = ("metasd_", "opentelemetry.", "openinference.", "langchain_core.tracers")


class Counts(SpanExporter):
    """Keeps none of what it gets."""

    def __init__(self) -> None:
        self.count = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.count += len(spans)
        return SpanExportResult.SUCCESS


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch, meters: Any) -> Any:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = Counts()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=100_000))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def watched() -> Counter[str]:
    """Objects of ours and of OpenTelemetry's that are alive, by class."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith(PACKAGES))


def test_ten_thousand_calls_leave_nothing(counts: Any, meters: Any) -> None:
    played = summary(tuple(record("suffix@16", 8, number) for number in (0, 3, 8)))

    def calls(count: int) -> None:
        for number in range(count):
            call = start(step=f"step {number}", arms=("a",))  # names that never come again
            for one in played.rounds:
                call.round(one)
            if number % 50 == 0:
                continue  # nobody ever ends it
            if number % 3 == 0:
                call.end(None, error=ValueError())
            else:
                call.end(played, cancelled=number % 3 == 1)
        trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]

    calls(1000)
    alive, before = watched(), sys.getallocatedblocks()
    calls(10_000)
    assert (watched() - alive).total() < 20
    assert sys.getallocatedblocks() - before < 5000  # half a block a call
    assert counts.count > 10_000
    series = [
        len(metric.data.data_points)
        for resource in meters.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    assert max(series) < 600  # however many steps there are


async def ask(llm: Any, long: Any, count: int) -> None:
    """So many calls of every kind, many of them never ended by who made them."""
    for number in range(count):
        llm.invoke(PROMPT)
        await llm.ainvoke(PROMPT)
        with pytest.raises(Exception):  # noqa: B017, PT011
            llm.invoke(PROMPT, timeout=1e-9)
        stream = long.stream(PROMPT)
        next(stream)
        if number % 2:
            stream.close()
        del stream
        gone = long.astream(PROMPT)
        await anext(gone)
        if number % 2:
            await gone.aclose()
        del gone
        task = asyncio.ensure_future(long.ainvoke(PROMPT))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ended(llm)
    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", ["nobody", "openinference"])
@pytest.mark.parametrize("model", MODELS)
async def test_real_calls_leave_nothing(counts: Any, by: str, model: str) -> None:
    llm, long = MODELS[model](max_tokens=3), MODELS[model](**LONG)
    with instrumented(by, trace.get_tracer_provider()):
        await ask(llm, long, 6)
        before = watched()
        seen = counts.count
        await ask(llm, long, 12)
        for _ in range(20):
            left = watched() - before
            if left.total() < 20:
                break
            await asyncio.sleep(0.05)
    assert left.total() < 20, left
    assert counts.count - seen >= 12 * 5  # the cancelled one may not have begun
