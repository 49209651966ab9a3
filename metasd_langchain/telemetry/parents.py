"""Under which span of a LangChain instrumentor a call belongs.

LangChain's callbacks tell an instrumentor of a run; the span it opens for it is current in some ways of calling and not
in others. So it is asked for, by the run's id.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from opentelemetry.trace import Span

__all__ = ["Parent", "parent_of"]

_OPENINFERENCE = "openinference.instrumentation.langchain"
_TRACELOOP = "opentelemetry.instrumentation.langchain"


class Parent(NamedTuple):
    """An instrumentor's span of a run.

    Attributes:
        span: it.
        counts: whether it will hold the run's tokens. A backend adds up those of all LLM spans, so one of the two spans
            must not be one.
    """

    span: Span
    counts: bool


def parent_of(run_id: object | None, around: object | None, handlers: Iterable[object], *, told: bool) -> Parent | None:
    """The instrumentor's span of a run, else of the run around it; None where no instrumentor knows either.

    langchain-core 1.8 tells handlers nothing of an async LLM where another handler runs inline, as LangGraph's
    ``stream_mode="messages"`` does.

    Args:
        run_id: LangChain's id of the run.
        around: the id of the run around it.
        handlers: the run's callback handlers.
        told: whether LangChain hands usage to callbacks in a result's ``llm_output`` or in a message. Of a streamed LLM
            it does not; OpenInference finds it in the ``generation_info`` of the last chunk, Traceloop nowhere.
    """
    for run, own in ((run_id, True), (around, False)):
        if run is None:
            continue
        span = _openinference(run)
        if span is not None:
            return Parent(span, counts=own)
        span = _traceloop(run, handlers)
        if span is not None:
            return Parent(span, counts=own and told)
    return None


def _openinference(run_id: object) -> Span | None:
    module = sys.modules.get(_OPENINFERENCE)
    if module is None:
        return None
    try:
        instrumentor = module.LangChainInstrumentor()
        if not instrumentor.is_instrumented_by_opentelemetry:  # imported only; get_span would complain on stderr
            return None
        return _usable(instrumentor.get_span(run_id))
    except Exception:  # noqa: BLE001  not ours, and no reason to fail
        return None


def _traceloop(run_id: object, handlers: Iterable[object]) -> Span | None:
    if _TRACELOOP not in sys.modules:
        return None
    try:
        for handler in handlers:
            if type(handler).__module__.startswith(_TRACELOOP):
                return _usable(handler.spans[run_id].span)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001  not ours, and no reason to fail
        return None
    return None


def _usable(span: object) -> Span | None:
    return span if isinstance(span, Span) and span.get_span_context().is_valid else None
