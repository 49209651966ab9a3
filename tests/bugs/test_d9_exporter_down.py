"""D9: the place that spans and metrics go to is down, slow or hangs: calls wait for it, the process does not end, or an
exporter's error becomes the caller's.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from metasd_langchain.telemetry import setup_telemetry
from tests.bugs.kit import ids, make, ref
from tests.bugs.watching import PROMPT, Sink, unset

PROGRAM = """
import sys, time
from metasd_langchain.telemetry import setup_telemetry
from tests.unit.calls import start, summary, record

handle = setup_telemetry(sys.argv[1], protocol=sys.argv[2], interval=1.0)
for _ in range(3000):
    call = start()
    call.round(record())
    call.end(summary())
if "explicit" in sys.argv:
    began = time.monotonic()
    handle.shutdown()
    assert time.monotonic() - began < 3.5
print("done", flush=True)
"""


@contextmanager
def nobody_there() -> Iterator[str]:
    with socket.socket() as taken:  # bound, not listening: refuses
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def hangs() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    held.append(server.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for one in held:
            one.close()


@contextmanager
def slow() -> Iterator[str]:
    with Sink("slow") as sink:
        yield sink.endpoint


PLACES = {"refused": nobody_there, "hangs": hangs, "slow": slow}


@pytest.mark.enable_socket
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "protocol", "how"),
    [
        ("refused", "http/protobuf", []),
        ("hangs", "http/protobuf", []),
        ("slow", "http/protobuf", []),
        ("refused", "grpc", []),
        ("hangs", "grpc", []),
        ("refused", "http/protobuf", ["explicit"]),
        ("hangs", "grpc", ["explicit"]),
    ],
)
def test_a_process_ends_all_the_same(place: str, protocol: str, how: list[str]) -> None:
    with PLACES[place]() as endpoint:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, endpoint, protocol, *how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        began = time.monotonic()
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0
        assert time.monotonic() - began < (5.0 if not how else 2.0)
    assert "Traceback" not in said
    assert len(said) < 10_000  # a few lines say what is wrong


@pytest.mark.enable_socket
@pytest.mark.parametrize("place", PLACES)
def test_answers_are_what_they_were(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    unset(monkeypatch)
    want = ref()
    llm = make()
    with PLACES[place]() as endpoint:
        handle = setup_telemetry(endpoint, interval=0.05)
        for _ in range(20):
            assert ids(llm) == want
        assert llm.invoke(PROMPT)
        before = time.monotonic()
        handle.shutdown(0.2)
        assert time.monotonic() - before < 2.0
        assert ids(llm) == want  # and nobody minds that it is gone


class Stuck(SpanExporter):
    """Hangs in its first export until it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.begun.set()
        self.let_go.wait(30)
        return SpanExportResult.SUCCESS


def test_no_call_waits_for_an_exporter(spans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace

    exporter = Stuck()
    provider: Any = trace.get_tracer_provider()
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=1)
    provider.add_span_processor(processor)
    # who ends them is the application's business
    for name in ("force_flush", "shutdown"):
        monkeypatch.setattr(type(provider), name, lambda *_, **__: pytest.fail("the library ended a provider"))
    llm, want = make(), ref()
    try:
        assert ids(llm) == want
        assert exporter.begun.wait(10)
        for _ in range(5):
            assert ids(llm) == want  # while it hangs
        assert not exporter.let_go.is_set()
    finally:
        exporter.let_go.set()
        processor.shutdown()


class Raises(SpanProcessor):
    """Fails wherever it is asked."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self.where == "start":
            raise RuntimeError(PROMPT)

    def on_end(self, span: Any) -> None:
        if self.where == "end":
            raise RuntimeError(PROMPT)


@pytest.mark.parametrize("where", ["start", "end", "meter"])
async def test_what_raises_in_there_reaches_nobody(
    spans: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    from opentelemetry import metrics, trace

    provider: Any = trace.get_tracer_provider()
    provider.add_span_processor(Raises(where))
    if where == "meter":

        class Broken:
            def get_meter(self, *_: Any) -> Any:
                raise RuntimeError(PROMPT)

        monkeypatch.setattr(metrics, "get_meter_provider", Broken)
    llm = make()
    want = llm.invoke(PROMPT, capture_content=False)
    assert await llm.ainvoke(PROMPT) == want
    assert "".join(llm.stream(PROMPT)) == "".join([piece async for piece in llm.astream(PROMPT)]) == want
    assert ids(llm) == ref()
    assert "cat sat" not in caplog.text
