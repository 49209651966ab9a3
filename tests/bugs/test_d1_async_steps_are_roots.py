"""D1: the parent is taken from the ambient context only, so that under an instrumentor, in tasks, threads and async
generators a call becomes the root of a trace of its own, or hangs under the wrong span.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypedDict

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langgraph.graph import END, START, StateGraph
from opentelemetry import trace

from metasd_langchain.telemetry.recorder import record
from tests.bugs.watching import BROKEN, CALLS, LONG, MODELS, NAMES, PROMPT, WAYS, ended, instrumented, text_of

BY = ("nobody", "openinference", "traceloop")
_THEIRS = {
    ("openinference", "llm"): "MetaSDLLM",
    ("openinference", "chat"): "ChatMetaSD",
    ("traceloop", "llm"): "MetaSDLLM.completion",
    ("traceloop", "chat"): "ChatMetaSD.chat",
}
# langchain-core 1.8 does not tell instrumentors of an async LLM whose messages LangGraph streams
UNTOLD = {("openinference", "llm"): ["draft"]}


def under(by: str, model: str) -> set[str]:
    """The span that our spans belong under."""
    return {_THEIRS.get((by, model), "app")}


def ours(spans: Any) -> list[Any]:
    return [span for span in spans.get_finished_spans() if span.name in NAMES]


def parents(spans: Any) -> list[str]:
    """Names of the parents of our spans; all spans are in one trace."""
    everything = {span.context.span_id: span for span in spans.get_finished_spans()}
    assert len({span.context.trace_id for span in everything.values()}) == 1
    return [everything[span.parent.span_id].name for span in ours(spans)]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chained", [False, True], ids=["alone", "chain"])
@pytest.mark.parametrize("model", MODELS)
async def test_every_way_hangs_where_it_belongs(spans: Any, by: str, way: str, chained: bool, model: str) -> None:
    llm = MODELS[model](**(LONG if way in BROKEN else {"max_tokens": 8}))
    with instrumented(by, trace.get_tracer_provider()):
        chain = PromptTemplate.from_template("{p}") | llm
        if way != "closed early":  # a parser of langchain-core 1.8 reads the rest of what it is closed upon
            chain |= StrOutputParser()
        target = chain if chained else llm
        with trace.get_tracer("app").start_as_current_span("app"):
            await WAYS[way](llm, target, {"p": PROMPT} if chained else PROMPT)
        await ended(llm)
    found = parents(spans)
    assert len(found) == CALLS[way]
    assert set(found) == under(by, model)
    assert all(span.status.is_unset for span in ours(spans))  # broken off is no error
    assert all(("metasd.cancelled" in span.attributes) is (way in BROKEN) for span in ours(spans))


class State(TypedDict):
    asked: str
    answer: str


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("model", MODELS)
async def test_nodes_of_a_graph(spans: Any, by: str, model: str) -> None:
    llm = MODELS[model](max_tokens=6)

    async def draft(state: State) -> dict[str, str]:
        return {"answer": text_of(await llm.ainvoke(state["asked"]))}

    def polish(state: State) -> dict[str, str]:
        return {"answer": text_of(llm.invoke(state["answer"] or PROMPT))}

    graph = StateGraph(State).add_node("draft", draft).add_node("polish", polish)
    app = graph.add_edge(START, "draft").add_edge("draft", "polish").add_edge("polish", END).compile()
    with instrumented(by, trace.get_tracer_provider()):
        with trace.get_tracer("app").start_as_current_span("app"):
            await app.ainvoke({"asked": PROMPT, "answer": ""})
            [_ async for _ in app.astream({"asked": PROMPT, "answer": ""}, stream_mode="messages")]
        await ended(llm)
    found = parents(spans)
    assert len(found) == 4
    assert [name for name in found if name not in under(by, model)] == UNTOLD.get((by, model), [])
    assert {span.attributes["metasd.step"] for span in ours(spans)} == {"draft", "polish"}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("model", MODELS)
async def test_a_recording_takes_no_span_away(spans: Any, tmp_path: Path, by: str, model: str) -> None:
    llm = MODELS[model](max_tokens=6)
    with record(tmp_path / "run.jsonl"), instrumented(by, trace.get_tracer_provider()):
        with trace.get_tracer("app").start_as_current_span("app"):
            for way in ("invoke", "ainvoke", "abatch"):
                await WAYS[way](llm, llm, PROMPT)
        await ended(llm)
    found = parents(spans)
    assert len(found) == 4
    assert set(found) == under(by, model)


@pytest.mark.parametrize("model", MODELS)
async def test_two_requests_at_once_keep_their_traces_apart(spans: Any, model: str) -> None:
    llm = MODELS[model](max_tokens=12)
    tracer = trace.get_tracer("app")

    async def handle(number: int) -> None:
        with tracer.start_as_current_span(f"request {number}"):
            await (PromptTemplate.from_template("{p}") | llm).ainvoke({"p": f"{PROMPT} {number}"})

    await asyncio.gather(*(handle(number) for number in range(6)))
    await ended(llm)
    roots = {span.context.trace_id: span for span in spans.get_finished_spans() if span.parent is None}
    assert len(roots) == 6
    assert {roots[span.context.trace_id].context.span_id for span in ours(spans)} == {
        root.context.span_id for root in roots.values()
    }
    assert all(span.parent.span_id == roots[span.context.trace_id].context.span_id for span in ours(spans))
