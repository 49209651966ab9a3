"""What OpenTelemetry hears of a call: one span, and its part in the metrics. Needs the API only; without an SDK a call
costs a few microseconds.

The span starts and ends by hand and is never made current: answers are streamed across threads, and whoever holds a
context open across a ``yield`` leaks it into the caller. Exception messages may hold prompt text, so an error leaves
its class name and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from metasd_langchain._version import __version__
from metasd_langchain.telemetry import attributes
from metasd_langchain.telemetry.attributes import Said
from metasd_langchain.telemetry.metrics import CallMetrics
from metasd_langchain.telemetry.parents import Parent, parent_of
from metasd_langchain.values import RoundRecord, Sampling, Summary

__all__ = ["CallSpan"]

CAPTURE_ENV = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ROUNDS_ENV = "METASD_TRACE_ROUNDS"

_log = logging.getLogger(__name__)
_NO_TRACER: Tracer = trace.NoOpTracer()


class CallSpan:
    """The span of one answer: ``CallSpan.start(...)``, ``round(...)`` and ``content(...)``, ``end(...)`` in a finally.

    Methods may be called from any thread. None of them raises on account of telemetry that is absent or not sampled.
    """

    __slots__ = (
        "_arms",
        "_began",
        "_capture",
        "_completion",
        "_content",
        "_metrics",
        "_once",
        "_span",
        "_started_ns",
        "_stream",
        "_tracer",
    )

    def __init__(
        self,
        span: Span,
        tracer: Tracer,
        metrics: CallMetrics | None,
        arms: Sequence[str],
        *,
        stream: bool,
        completion: int,
        capture: bool,
    ) -> None:
        self._span, self._tracer, self._metrics = span, tracer, metrics
        self._arms, self._stream, self._completion, self._capture = arms, stream, completion, capture
        self._content: tuple[Said, Said] | None = None
        self._once = threading.Lock()  # taken by the first end() and never given back
        self._began, self._started_ns = time.perf_counter(), time.time_ns()

    @property
    def captures(self) -> bool:
        """Whether `content` would be recorded, so that nobody gathers text for nothing."""
        return self._capture

    @classmethod
    def start(
        cls,
        *,
        operation: str,
        model: str,
        sampling: Sampling,
        max_tokens: int | None,
        stream: bool,
        policy: str,
        arms: Sequence[str],
        run_id: object | None = None,
        around: object | None = None,
        handlers: Iterable[object] = (),
        told: bool = True,
        step: str = "",
        batch: tuple[int, int] | None = None,
        completion: int = 0,
        capture_content: bool | None = None,
    ) -> CallSpan:
        """Open the span under an instrumentor's span of `run_id` if there is one, else under the current span.

        Call it on the caller's thread, or in a copy of the caller's context.

        Args:
            operation: "text_completion" or "chat".
            model: name of the target model.
            sampling: how tokens are drawn.
            max_tokens: most tokens of the answer, where there is a cap.
            stream: whether the caller sees the answer piece by piece.
            policy: name of the bandit's policy.
            arms: names of the arms on offer.
            run_id: LangChain's id of the run.
            around: the id of the run around it.
            handlers: the run's callback handlers.
            told: whether LangChain tells them the run's tokens; it does not for the stream of an LLM.
            step: the pipeline step's name where it has one; a metric's label, so not made from a prompt.
            batch: index of the prompt in its batch and the batch's size.
            completion: which of the answers to one prompt; the prompt's tokens count with the first.
            capture_content: whether prompt and answer go on the span; None asks the environment, now.
        """
        span: Span = trace.INVALID_SPAN
        tracer, metrics = _NO_TRACER, None
        try:
            parent = parent_of(run_id, around, handlers, told=told)
            tracer = trace.get_tracer("metasd_langchain", __version__)
            span = _open(tracer, parent, operation, model)
            if span.is_recording():
                kind = "CHAIN" if parent is not None and parent.counts else "LLM"
                span.set_attributes(attributes.request(sampling, max_tokens, stream, policy, kind, batch))
                span.set_attribute("gen_ai.response.model", model)
                span.set_attribute("gen_ai.response.id", f"metasd-{span.get_span_context().span_id:016x}")
            metrics = CallMetrics.start(operation, model, step)
        except Exception as failure:  # noqa: BLE001  whatever a provider does, the call goes on
            _log.warning("call not observed in full: %s", type(failure).__name__)
        wanted = _capture_by_environment() if capture_content is None else capture_content
        capture = wanted and span.is_recording()
        return cls(span, tracer, metrics, arms, stream=stream, completion=completion, capture=capture)

    def round(self, record: RoundRecord) -> None:
        """Count a round, while it is fresh: a long answer shows before it ends."""
        if self._metrics is None:
            return
        try:
            self._metrics.round(record)
        except Exception as failure:  # noqa: BLE001  an answer is not lost because it cannot be counted
            self._metrics = None
            _log.warning("call not counted: %s", type(failure).__name__)

    def content(self, asked: Said, answered: Said) -> None:
        """Offer prompt and answer; forgotten at once unless content is captured. The last offer counts.

        Args:
            asked: a text, or messages as the conventions have them: ``{"role": ..., "parts": [...]}``.
            answered: likewise.
        """
        if self._capture:
            self._content = (asked, answered)

    def end(self, summary: Summary | None, *, error: BaseException | None = None, cancelled: bool = False) -> None:
        """Write what is known and end the span. Only the first call counts.

        Args:
            summary: the call in numbers, or None when it has none (it failed before its first round).
            error: what the caller will see raised. A closed generator or cancelled task is no error but a cancellation.
            cancelled: whether the caller gave up.
        """
        if not self._once.acquire(blocking=False):
            return
        if isinstance(error, GeneratorExit | asyncio.CancelledError):
            error, cancelled = None, True
        if self._span.is_recording():
            try:
                self._write(summary, error, cancelled)
            except Exception as failure:  # noqa: BLE001  an answer is not lost because its span cannot be written
                _log.warning("span left incomplete: %s", type(failure).__name__)
        try:
            self._span.end()
        except Exception as failure:  # noqa: BLE001  nor because a span processor fails
            _log.warning("span not delivered: %s", type(failure).__name__)
        self._count(summary, error)

    def _count(self, summary: Summary | None, error: BaseException | None) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.end(
                summary,
                time.perf_counter() - self._began,
                stream=self._stream,
                error=None if error is None else type(error).__qualname__,
                prompt=self._completion == 0,
                context=trace.set_span_in_context(self._span),
            )
        except Exception as failure:  # noqa: BLE001  an answer is not lost because it cannot be counted
            _log.warning("call not counted: %s", type(failure).__name__)

    def _write(self, summary: Summary | None, error: BaseException | None, cancelled: bool) -> None:
        span = self._span
        if error is not None:  # first, so that no later trouble hides it
            name = type(error).__qualname__
            span.set_attribute("error.type", name)
            span.set_status(Status(StatusCode.ERROR, name))
        if summary is not None:
            detail = attributes.round_detail(os.environ.get(ROUNDS_ENV, ""))
            span.set_attributes(attributes.summary_attributes(summary, self._arms, detail))
            if self._completion:
                span.set_attribute("metasd.completion.index", self._completion)
                span.set_attribute("gen_ai.usage.input_tokens", 0)
            if self._stream and summary.rounds:
                span.set_attribute("gen_ai.response.time_to_first_chunk", summary.first_token_s)
            self._write_rounds(summary, detail)
        if cancelled or (summary is not None and summary.finish_reason == "cancelled"):
            cancelled = True
            span.set_attribute("metasd.cancelled", True)
            span.set_attribute("gen_ai.response.finish_reasons", ["cancelled"])
        if cancelled or error is not None:  # LangChain tells nobody the tokens of a call that did not finish
            span.set_attributes(attributes.kind("LLM"))
        if self._content is not None:
            reason = "cancelled" if cancelled else "error" if summary is None else summary.finish_reason
            span.set_attributes(attributes.content(*self._content, reason))

    def _write_rounds(self, summary: Summary, detail: attributes.RoundDetail) -> None:
        """Events or child spans; both are for debugging, arrays are the default."""
        if detail not in {"events", "spans"}:
            return
        rounds = summary.rounds
        kept = attributes.keep(len(rounds), attributes.EVENTS_CAP if detail == "events" else attributes.ROUNDS_CAP)
        self._span.set_attribute("metasd.rounds.truncated", len(kept) < len(rounds))
        times = attributes.round_times(summary)
        under = trace.set_span_in_context(self._span)
        for index in kept:
            start, end = (self._started_ns + int(seconds * 1e9) for seconds in times[index])
            about = attributes.round_attributes(index, rounds[index])
            if detail == "events":
                self._span.add_event("metasd.round", about, timestamp=end)
                continue
            about["openinference.span.kind"] = "CHAIN"
            self._tracer.start_span("metasd.round", under, attributes=about, start_time=start).end(end)


def _open(tracer: Tracer, parent: Parent | None, operation: str, model: str) -> Span:
    if otel_context.get_value("suppress_instrumentation"):  # what instrumentations agreed on to be switched off by
        return trace.INVALID_SPAN
    return tracer.start_span(
        f"{operation} {model}",
        context=None if parent is None else trace.set_span_in_context(parent.span),
        kind=SpanKind.INTERNAL,  # the model runs in this process
        attributes=attributes.identity(operation, model),
        record_exception=False,
        set_status_on_exception=False,
    )


def _capture_by_environment() -> bool:
    """Whether the conventions' variable asks for content on spans. We emit no log events, so EVENT_ONLY means no."""
    return os.environ.get(CAPTURE_ENV, "").strip().upper() in {"SPAN_ONLY", "SPAN_AND_EVENT", "TRUE"}
