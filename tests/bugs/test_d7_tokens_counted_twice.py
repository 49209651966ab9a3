"""D7: two spans of one call, the framework's and the engine's, both hold its tokens: a backend shows twice the cost."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate
from opentelemetry import trace

from tests.bugs.kit import Heard
from tests.bugs.test_d1_async_steps_are_roots import BY, ours
from tests.bugs.watching import BROKEN, CALLS, LONG, MODELS, PROMPT, WAYS, counted, ended, instrumented, prompt_tokens


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
async def test_the_total_of_a_trace_is_what_was_used(spans: Any, by: str, way: str, model: str) -> None:
    llm = MODELS[model](**(LONG if way in BROKEN else {"max_tokens": 7}))
    with instrumented(by, trace.get_tracer_provider()):
        for target, asked in ((llm, PROMPT), (PromptTemplate.from_template("{p}") | llm, {"p": PROMPT})):
            spans.clear()
            await WAYS[way](llm, target, asked)
            await ended(llm)
            answers = [span.attributes["gen_ai.usage.output_tokens"] for span in ours(spans)]
            assert len(answers) == CALLS[way]
            assert all(0 < answer < 400 if way in BROKEN else answer == 7 for answer in answers)
            assert counted(spans.get_finished_spans()) == (prompt_tokens(llm) * CALLS[way], sum(answers))


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("streaming", [False, True])
async def test_several_prompts_and_answers_in_one_call(spans: Any, by: str, streaming: bool) -> None:
    llm = MODELS["llm"](max_tokens=5, streaming=streaming, temperature=0.7, seed=1)
    with instrumented(by, trace.get_tracer_provider()):
        for prompts, n in (([PROMPT], 3), ([PROMPT, "the dog"], 1), ([PROMPT, "the dog"], 2)):
            spans.clear()
            usage = llm.generate(prompts, n=n).llm_output["token_usage"]
            assert counted(spans.get_finished_spans()) == (usage["prompt_tokens"], usage["completion_tokens"])
            assert len(ours(spans)) == len(prompts) * n
            spans.clear()
            usage = (await llm.agenerate(prompts, n=n)).llm_output["token_usage"]
            assert counted(spans.get_finished_spans()) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("by", BY)
async def test_other_handlers_add_nothing(spans: Any, by: str) -> None:
    llm = MODELS["llm"](max_tokens=7)
    with instrumented(by, trace.get_tracer_provider()):
        llm.invoke(PROMPT, {"callbacks": [Heard(), BaseCallbackHandler()]})
    assert len(ours(spans)) == 1
    assert counted(spans.get_finished_spans()) == (llm.get_num_tokens(PROMPT), 7)


@pytest.mark.parametrize("by", BY)
async def test_a_call_that_fails_counts_once(spans: Any, by: str) -> None:
    llm = MODELS["llm"](**LONG, timeout=0.05)
    with instrumented(by, trace.get_tracer_provider()):
        with pytest.raises(TimeoutError):
            llm.invoke(PROMPT)
        await ended(llm)
    (span,) = ours(spans)
    assert span.attributes["error.type"] == "DeadlineExceeded"
    assert counted(spans.get_finished_spans())[1] == span.attributes["gen_ai.usage.output_tokens"]


async def test_metrics_count_each_call_and_prompt_once(meters: Any) -> None:
    from tests.bugs.test_d5_no_time_to_first_token import points

    llm = MODELS["llm"](max_tokens=5, temperature=0.7)
    llm.generate([PROMPT], n=3)
    found = {point.attributes["gen_ai.token.type"]: point for point in points(meters, "gen_ai.client.token.usage")}
    assert found["input"].sum == llm.get_num_tokens(PROMPT)
    assert found["output"].sum == 15
    assert [point.count for point in points(meters, "gen_ai.client.operation.duration")] == [3]
