"""The checks that backends are held to hold for the spans themselves, and each of them can fail. Needs no server."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from integrations.pipeline import agent, retriever
from integrations.running import QUESTIONS, instrument, make_llm, parser, play
from tests.apps import backends
from tests.apps.backends import Backend, Shown


def _shown(span: Any) -> Shown:
    context, status = span.get_span_context(), span.status
    return Shown(
        span.name,
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        f"{span.parent.span_id:016x}" if span.parent else None,
        status.status_code.name,
        status.description or "",
        {key: list(value) if isinstance(value, tuple) else value for key, value in span.attributes.items()},
    )


@pytest.fixture(scope="module")
def backend() -> Backend:
    """The run under OpenInference's spans, as an exporter gets it."""
    from openinference.instrumentation.langchain import LangChainInstrumentor
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    args = parser("").parse_args([])
    text = files("metasd_langchain.cli").joinpath("document.md").read_text(encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer_provider", lambda: provider)
        instrument(args)
        try:
            llm = make_llm(args)
            runs = play(llm, agent(llm, retriever(text, DeterministicFakeEmbedding(size=8))), QUESTIONS)
            llm.close()
        finally:
            LangChainInstrumentor().uninstrument()
    return Backend({"runs": runs}, tuple(_shown(span) for span in exporter.get_finished_spans()))


def _silence(backend: Backend) -> None:
    backends.check_silence([dataclasses.asdict(span) for span in backend.spans])


def _ends(backend: Backend) -> None:
    backends.check_ends(backend, "ERROR")


CHECKS = {
    "calls": backends.check_calls,
    "nesting": backends.check_nesting,
    "ends": _ends,
    "silence": _silence,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_the_spans_pass(backend: Backend, check: Callable[[Backend], None]) -> None:
    check(backend)


def _of_answer(span: Shown) -> bool:
    return span.attributes.get("metasd.step") == "answer"


def _broken_off(span: Shown) -> bool:
    return "metasd.cancelled" in span.attributes


def _failed(span: Shown) -> bool:
    return span.ours and "error.type" in span.attributes


def _set(key: str, value: Any) -> Callable[[Shown], Shown]:
    return lambda span: dataclasses.replace(span, attributes={**span.attributes, key: value})


def _more(key: str) -> Callable[[Shown], Shown]:
    return lambda span: _set(key, span.attributes[key] + 1)(span)


def _up(backend: Backend) -> Callable[[Shown], Shown]:
    """Hang a span under its grandparent."""
    by_id = {span.id: span for span in backend.spans}
    return lambda span: dataclasses.replace(span, parent=by_id[span.parent or ""].parent)


@pytest.mark.parametrize(
    ("check", "which", "change"),
    [
        ("calls", _of_answer, _set("gen_ai.request.model", "another")),
        ("calls", _of_answer, _more("gen_ai.usage.input_tokens")),
        ("calls", _of_answer, _more("gen_ai.usage.output_tokens")),
        ("calls", _of_answer, _more("metasd.accepted_length.mean")),
        ("calls", _of_answer, _more("metasd.tokens.accepted")),
        ("calls", _of_answer, _set("metasd.step", "check")),
        ("calls", _of_answer, _set("metasd.drafters.names", ["a", "b", "c", "d", "e"])),
        ("calls", _of_answer, _set("metasd.rounds.accepted", [])),
        ("nesting", _of_answer, None),
        ("ends", _failed, _set("error.type", "ValueError")),
        ("ends", _failed, lambda span: dataclasses.replace(span, status="UNSET")),
        ("ends", _failed, lambda span: dataclasses.replace(span, message="the prompt was: Where?")),
        ("ends", _broken_off, lambda span: dataclasses.replace(span, status="ERROR")),
        ("ends", _broken_off, _set("metasd.cancelled", False)),
        ("ends", _broken_off, _set("gen_ai.response.finish_reasons", ["error"])),
        ("silence", _of_answer, _set("input.value", QUESTIONS[0])),
    ],
)
def test_a_check_fails_when_one_span_is_wrong(
    backend: Backend, check: str, which: Callable[[Shown], bool], change: Callable[[Shown], Shown] | None
) -> None:
    change = change or _up(backend)
    wrong = next(span for span in backend.spans if which(span))
    spans = tuple(change(span) if span is wrong else span for span in backend.spans)
    with pytest.raises(AssertionError):
        CHECKS[check](Backend(copy.deepcopy(backend.told), spans))


@pytest.mark.parametrize("check", ["calls", "ends"])
def test_a_check_fails_when_spans_are_lost(backend: Backend, check: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        CHECKS[check](Backend(backend.told, tuple(span for span in backend.spans if not span.ours)))
