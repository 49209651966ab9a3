"""The call span: what it says, under whom it hangs, how it ends, and how much it tells of the rounds."""

from __future__ import annotations

import contextvars
import dataclasses
import sys
import threading
import types
from asyncio import CancelledError
from typing import ClassVar

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from metasd_langchain.telemetry import attributes
from metasd_langchain.values import Sampling
from tests.unit.calls import ARMS, CANARY, ROUNDS, only, record, start, summary


def test_says_what_was_asked_and_what_happened(spans):
    call = start(batch=(1, 3))
    call.end(summary())
    span = only(spans)
    assert (span.name, span.kind) == ("text_completion gemma-3-270m", SpanKind.INTERNAL)
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events
    told = dict(span.attributes)
    assert told.pop("gen_ai.response.id") == f"metasd-{span.context.span_id:016x}"
    assert told.pop("metasd.speedup_estimate") == pytest.approx(0.05 * 15 / 0.3)
    assert told.pop("metasd.latency.verify_s") == pytest.approx(7 * 0.04)
    assert told.pop("metasd.latency.draft_s") == pytest.approx(0.003)
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "metasd",
        "gen_ai.request.model": "gemma-3-270m",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "gemma-3-270m",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 11,
        "gen_ai.usage.output_tokens": 16,
        "openinference.span.kind": "LLM",
        "mlflow.spanType": "LLM",
        "metasd.request.min_p": 0.1,
        "metasd.batch.index": 1,
        "metasd.batch.size": 3,
        "metasd.bandit.policy": "hinted_ucb",
        "metasd.step": "rewrite",
        "metasd.round_count": 7,
        "metasd.tokens.drafted": 18,
        "metasd.tokens.accepted": 9,
        "metasd.accepted_length.mean": pytest.approx(1 + 9 / 7),
        "metasd.latency.total_s": 0.52,
        "metasd.latency.first_token_s": 0.21,
        "metasd.latency.prefill_s": 0.2,
        "metasd.drafters.names": (*ARMS, "recycling@4"),
        "metasd.drafters.rounds": (2, 0, 4, 1),
        "metasd.drafters.drafted_tokens": (14, 0, 0, 4),
        "metasd.drafters.accepted_tokens": (7, 0, 0, 2),
        "metasd.drafters.draft_time_s": (0.002, 0.0, 0.0, 0.001),
        "metasd.rounds.drafter": (2, 0, 0, 2, 2, 2, 3),
        "metasd.rounds.drafted": (0, 10, 4, 0, 0, 0, 4),
        "metasd.rounds.accepted": (0, 7, 0, 0, 0, 0, 2),
        "metasd.rounds.duration_ms": (200.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0),
        "metasd.rounds.truncated": False,
    }


@pytest.mark.parametrize("mode", ["arrays", "events"])
def test_no_key_is_a_prefix_of_another(spans, monkeypatch, mode):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", mode)
    call = start(batch=(0, 1), stream=True, capture_content=True)
    call.content("a", "b")
    call.end(summary(finish_reason="cancelled"), error=ValueError())
    keys = sorted(only(spans).attributes)
    assert not [(a, b) for a in keys for b in keys if b.startswith(f"{a}.")]


def test_options_that_were_not_given_are_left_out(spans):
    start(sampling=Sampling()).end(summary(rounds=(), finish_reason="length"))
    told = only(spans).attributes
    for key in ("gen_ai.request.top_p", "gen_ai.request.top_k", "gen_ai.request.seed", "metasd.request.min_p"):
        assert key not in told
    for key in ("metasd.batch.size", "metasd.accepted_length.mean", "metasd.speedup_estimate", "metasd.cancelled"):
        assert key not in told


@pytest.mark.parametrize("stream", [True, False])
def test_time_to_first_chunk_only_when_streaming(spans, stream):
    start(stream=stream).end(summary())
    assert only(spans).attributes.get("gen_ai.response.time_to_first_chunk") == (0.21 if stream else None)


def test_speedup_is_left_out_when_undrafted_rounds_are_few():
    assert attributes.speedup_estimate(ROUNDS[:5]) is None
    assert attributes.speedup_estimate(()) is None
    assert attributes.speedup_estimate([record()] * 4) == pytest.approx(1.0)
    assert attributes.speedup_estimate([record(total_s=0.0)] * 4) is None


# -- under whom it hangs


def test_hangs_under_the_current_span_and_becomes_no_context(spans):
    tracer = trace.get_tracer("app")
    with tracer.start_as_current_span("app") as app:
        before = otel_context.get_current()
        call = start()
        assert otel_context.get_current() is before
        call.end(summary())
        assert trace.get_current_span() is app
    ours = spans.get_finished_spans()[0]
    assert ours.parent.span_id == app.get_span_context().span_id


def test_without_a_current_span_it_is_a_root(spans):
    start().end(summary())
    assert only(spans).parent is None


def test_in_a_worker_thread_the_callers_context_counts(spans):
    with trace.get_tracer("app").start_as_current_span("app") as app:
        copied = contextvars.copy_context()
    calls = []
    opener = threading.Thread(target=lambda: calls.append(copied.run(start)))
    opener.start()
    opener.join()
    closer = threading.Thread(target=calls[0].end, args=(summary(),))
    closer.start()
    closer.join()
    ours = spans.get_finished_spans()[-1]
    assert ours.parent.span_id == app.get_span_context().span_id


class Instrumentor:
    """Stands for OpenInference's: knows the span of a run, makes none current."""

    known: ClassVar[dict] = {}
    is_instrumented_by_opentelemetry = True

    def get_span(self, run_id):
        return self.known[run_id]


@pytest.fixture
def instrumentor(monkeypatch):
    module = types.ModuleType("openinference.instrumentation.langchain")
    module.LangChainInstrumentor = Instrumentor
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Instrumentor, "known", {})
    return Instrumentor


def test_hangs_under_the_instrumentors_span_and_is_then_no_second_llm(spans, instrumentor):
    theirs = trace.get_tracer("theirs").start_span("MetaSDLLM")
    instrumentor.known["run"] = theirs
    start(run_id="run").end(summary())
    ours = only(spans)
    assert ours.parent.span_id == theirs.get_span_context().span_id
    assert ours.attributes["openinference.span.kind"] == "CHAIN"
    assert ours.attributes["gen_ai.usage.output_tokens"] == 16


@pytest.mark.parametrize("known", [{}, {"run": None}, {"run": object()}, {"run": trace.INVALID_SPAN}])
def test_an_instrumentor_that_does_not_know_the_run_changes_nothing(spans, instrumentor, known):
    instrumentor.known.update(known)
    start(run_id="run").end(summary())
    assert only(spans).parent is None
    assert only(spans).attributes["openinference.span.kind"] == "LLM"


def test_an_instrumentor_that_is_off_is_not_asked(spans, instrumentor, monkeypatch):
    instrumentor.known["run"] = trace.get_tracer("theirs").start_span("MetaSDLLM")
    monkeypatch.setattr(instrumentor, "is_instrumented_by_opentelemetry", False)
    start(run_id="run").end(summary())
    assert only(spans).parent is None


# -- how it ends


def test_an_error_leaves_its_class_and_no_message(spans):
    call = start()
    call.content(CANARY, CANARY)
    call.end(None, error=ValueError(CANARY))
    span = only(spans)
    assert span.attributes["error.type"] == "ValueError"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "ValueError")
    assert not span.events
    assert "gen_ai.response.finish_reasons" not in span.attributes


def test_an_error_after_some_rounds_keeps_the_numbers(spans):
    start().end(summary(), error=TimeoutError())
    span = only(spans)
    assert span.attributes["error.type"] == "TimeoutError"
    assert span.attributes["gen_ai.usage.output_tokens"] == 16


@pytest.mark.parametrize(
    "how",
    [
        {"cancelled": True},
        {"error": GeneratorExit()},
        {"error": CancelledError()},
        {"summary": summary(finish_reason="cancelled")},
    ],
    ids=["flag", "closed", "task", "summary"],
)
def test_a_cancellation_is_no_error(spans, how):
    start().end(**{"summary": summary()} | how)
    span = only(spans)
    assert span.attributes["metasd.cancelled"] is True
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert span.attributes["gen_ai.usage.output_tokens"] == 16
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in span.attributes


def test_only_the_first_end_counts(spans):
    call = start()
    call.end(summary())
    call.end(None, error=ValueError())
    assert "error.type" not in only(spans).attributes


def test_a_span_that_cannot_be_written_spoils_nothing(spans, monkeypatch, caplog):
    monkeypatch.setattr(attributes, "summary_attributes", lambda *_: 1 / 0)
    start().end(summary())
    assert only(spans).attributes["gen_ai.request.max_tokens"] == 64
    assert "ZeroDivisionError" in caplog.text


# -- rounds


def test_long_calls_keep_both_ends_of_the_arrays(spans):
    rounds = tuple(record("suffix@16", 16, index % 17) for index in range(300))
    start().end(summary(rounds))
    told = only(spans).attributes
    assert told["metasd.round_count"] == 300
    assert told["metasd.rounds.truncated"] is True
    assert told["metasd.rounds.accepted"] == tuple(i % 17 for i in (*range(128), *range(172, 300)))
    assert told["metasd.drafters.rounds"] == (300, 0, 0)


@pytest.mark.parametrize(("mode", "by_arm", "by_round"), [("off", False, False), ("summary", True, False)])
def test_less_detail_on_request(spans, monkeypatch, mode, by_arm, by_round):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", mode)
    start().end(summary())
    told = only(spans).attributes
    assert ("metasd.drafters.names" in told) is by_arm
    assert ("metasd.rounds.drafter" in told) is by_round
    assert told["metasd.tokens.accepted"] == 9


def test_scoring_is_told_of_and_is_no_arms_drafting(spans):
    start().end(summary([dataclasses.replace(r, draft_s=r.draft_s + 0.25, scoring_s=0.25) for r in ROUNDS[:2]]))
    told = only(spans).attributes
    assert told["metasd.latency.scoring_s"] == pytest.approx(0.5)
    assert told["metasd.latency.draft_s"] == pytest.approx(0.501)
    assert told["metasd.drafters.draft_time_s"] == pytest.approx((0.001, 0.0, 0.0))


def test_rounds_as_events(spans, monkeypatch):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", "events")
    start().end(summary((*ROUNDS, *[record()] * 40)))
    span = only(spans)
    assert [event.attributes["metasd.round.index"] for event in span.events] == [*range(16), *range(31, 47)]
    assert span.events[1].attributes["metasd.round.accepted"] == 7
    assert span.attributes["metasd.rounds.truncated"] is True
    assert "metasd.rounds.drafter" not in span.attributes


def test_rounds_as_child_spans(spans, monkeypatch):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", "spans")
    start().end(summary())
    *children, call = spans.get_finished_spans()
    assert len(children) == len(ROUNDS)
    assert {child.parent.span_id for child in children} == {call.context.span_id}
    assert [child.attributes["metasd.round.drafter"] for child in children] == [r.arm for r in ROUNDS]
    assert children[0].end_time - call.start_time == pytest.approx(0.21e9, abs=5e6)
    for child, played in zip(children, ROUNDS, strict=True):
        assert child.end_time - child.start_time == pytest.approx(played.total_s * 1e9, rel=1e-3)
        assert child.attributes["openinference.span.kind"] == "CHAIN"


def test_an_unknown_mode_is_said_once_and_means_arrays(spans, monkeypatch, caplog):
    monkeypatch.setenv("METASD_TRACE_ROUNDS", "evrything")
    start().end(summary())
    start().end(summary())
    assert caplog.text.count("METASD_TRACE_ROUNDS") == 1
    assert all("metasd.rounds.drafter" in span.attributes for span in spans.get_finished_spans())
