"""D10: in thread pools a call loses the context it was made in, and with it its parent."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from opentelemetry import trace

from tests.bugs.test_d1_async_steps_are_roots import BY, ours, parents, under
from tests.bugs.watching import MODELS, PROMPT, ended, instrumented, text_of

PROMPTS = [f"{PROMPT} {number}" for number in range(8)]


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("model", MODELS)
async def test_a_batch(spans: Any, by: str, limit: int | None, model: str) -> None:
    llm = MODELS[model](max_tokens=6)
    chain = PromptTemplate.from_template("{p}") | llm
    with instrumented(by, trace.get_tracer_provider()):
        with trace.get_tracer("app").start_as_current_span("app"):
            llm.batch(PROMPTS, {"max_concurrency": limit})
            chain.batch([{"p": prompt} for prompt in PROMPTS], {"max_concurrency": limit})
            await llm.abatch(PROMPTS, {"max_concurrency": limit})
            list(llm.batch_as_completed(PROMPTS, {"max_concurrency": limit}))
        await ended(llm)
    found = parents(spans)
    assert len(found) == 32
    assert set(found) == under(by, model)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("model", MODELS)
async def test_steps_side_by_side(spans: Any, by: str, model: str) -> None:
    llm = MODELS[model](max_tokens=6)
    pair = RunnableParallel(one=llm, two=RunnableLambda(lambda asked: text_of(llm.invoke(asked))) | llm)
    with instrumented(by, trace.get_tracer_provider()):
        with trace.get_tracer("app").start_as_current_span("app"):
            pair.invoke(PROMPT)
            await pair.ainvoke(PROMPT)
            list(pair.stream(PROMPT))
        await ended(llm)
    found = parents(spans)
    assert len(found) == 9
    assert set(found) == under(by, model)


@pytest.mark.parametrize("model", MODELS)
async def test_threads_of_the_application(spans: Any, model: str) -> None:
    """As the language has it: a thread with a copy of the context is in it, one without is not."""
    llm = MODELS[model](max_tokens=6)
    with trace.get_tracer("app").start_as_current_span("app") as app:
        with ThreadPoolExecutor(4) as pool:
            copies = [contextvars.copy_context() for _ in PROMPTS]
            list(pool.map(lambda pair: pair[0].run(llm.invoke, pair[1]), zip(copies, PROMPTS, strict=True)))
        assert {span.parent.span_id for span in ours(spans)} == {app.get_span_context().span_id}
        spans.clear()
        thread = threading.Thread(target=llm.invoke, args=(PROMPT,))
        thread.start()
        thread.join()
    await ended(llm)
    assert [span.parent for span in ours(spans)] == [None]


@pytest.mark.parametrize("model", MODELS)
async def test_the_engines_thread_has_nobodys_context(spans: Any, model: str) -> None:
    """Calls of several traces share forwards; each ends its own span, with its own parent."""
    llm = MODELS[model](max_tokens=30)
    tracer = trace.get_tracer("app")

    def ask(number: int) -> None:
        with tracer.start_as_current_span(f"request {number}"):
            list(llm.stream(PROMPTS[number]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    await ended(llm)
    everything = {span.context.span_id: span for span in spans.get_finished_spans()}
    assert sorted(everything[span.parent.span_id].name for span in ours(spans)) == [f"request {n}" for n in range(8)]
