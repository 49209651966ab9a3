"""What the call span never says, what it says on request, and what it costs."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest
from opentelemetry import trace
from opentelemetry.trace import NoOpTracerProvider

from metasd_langchain.telemetry import attributes
from tests.unit.calls import ARMS, CANARY, CAPTURE, only, record, start, summary


@pytest.mark.parametrize("mode", ["off", "summary", "arrays", "events", "spans"])
@pytest.mark.parametrize("switch", [None, "NO_CONTENT", "EVENT_ONLY", "false", "nonsense"])
@pytest.mark.parametrize("how", ["success", "error", "cancelled"])
def test_no_text_by_default(spans, monkeypatch, mode, switch, how):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", mode)
    if switch is not None:
        monkeypatch.setenv(CAPTURE, switch)
    call = start()
    call.content(f"prompt {CANARY}", f"answer {CANARY}")
    cause = RuntimeError(f"chained {CANARY}")
    error = ValueError(f"message {CANARY}", f"stop string {CANARY}")
    error.__cause__ = cause
    call.end(summary(), error=error if how == "error" else None, cancelled=how == "cancelled")
    finished = spans.get_finished_spans()
    assert finished
    assert not [span for span in finished if CANARY in span.to_json()]


@pytest.mark.parametrize("switch", ["SPAN_ONLY", "SPAN_AND_EVENT", "true"])
def test_content_when_the_environment_asks_for_it(spans, monkeypatch, switch):
    monkeypatch.setenv(CAPTURE, switch)
    call = start()
    call.content("Wer?", "Ich, é")
    call.end(summary())
    told = only(spans).attributes
    assert (told["input.value"], told["output.value"]) == ("Wer?", "Ich, é")
    assert told["input.mime_type"] == told["output.mime_type"] == "text/plain"
    assert json.loads(told["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "Wer?"}]}
    ]
    (reply,) = json.loads(told["gen_ai.output.messages"])
    assert reply == {
        "role": "assistant",
        "parts": [{"type": "text", "content": "Ich, é"}],
        "finish_reason": "stop",
    }
    assert told["metasd.content.truncated"] is False


@pytest.mark.parametrize(("switch", "argument"), [("NO_CONTENT", True), ("SPAN_ONLY", False)])
def test_the_argument_outranks_the_environment(spans, monkeypatch, switch, argument):
    monkeypatch.setenv(CAPTURE, switch)
    call = start(capture_content=argument)
    assert call.captures is argument
    call.content("Who?", "Me")
    call.end(None, error=ValueError())
    assert only(spans).attributes.get("output.value") == ("Me" if argument else None)


def test_long_content_is_cut_between_characters(spans):
    call = start(capture_content=True)
    call.content("a" + "é" * 5000, "short \ud800")  # a lone surrogate cannot be exported
    call.end(summary())
    told = only(spans).attributes
    assert told["input.value"] == "a" + "é" * 4095
    assert told["output.value"] == "short ?"
    assert told["metasd.content.truncated"] is True


# -- what it costs


def test_nobody_listening_builds_nothing(monkeypatch):
    monkeypatch.setattr(trace, "get_tracer_provider", NoOpTracerProvider)

    def refuse(*_):
        raise AssertionError

    for name in ("request", "summary_attributes", "content"):
        monkeypatch.setattr(attributes, name, refuse)
    long = summary((record(),) * 512)

    def call() -> None:
        span = start(capture_content=True)
        assert not span.captures
        span.content("a", "b")
        span.end(long)

    call()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(50):
        call()
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert left < 4096  # bytes over 50 calls
    fastest = min(_seconds(call) for _ in range(200))
    assert fastest < 200e-6  # about 15 us where this was written


def test_a_listener_costs_well_below_a_forward(spans):
    long = summary(tuple(record(ARMS[i % 3], 4, 2) for i in range(128)))
    fastest = min(_seconds(lambda: start().end(long)) for _ in range(30))
    assert fastest < 5e-3  # about 0.4 ms where this was written; one forward of the smallest model takes 30


def _seconds(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
