"""D4: a streamed call's span has no tokens, while that of the same call by invoke has."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate
from opentelemetry import trace

from tests.bugs.watching import BROKEN, LONG, MODELS, NAMES, PROMPT, WAYS, WHOLE, ended, instrumented, prompt_tokens

USAGE = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")


def told(spans: Any) -> list[tuple[int, int]]:
    """Usage of our spans; they are forgotten then."""
    found = [span.attributes for span in spans.get_finished_spans() if span.name in NAMES]
    spans.clear()
    return [tuple(one[key] for key in USAGE) for one in found]  # type: ignore[misc]


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"temperature": 0.8, "seed": 3}, {"speculative": False}])
@pytest.mark.parametrize("model", MODELS)
async def test_every_way_tells_the_usage_that_invoke_tells(spans: Any, options: dict[str, Any], model: str) -> None:
    llm = MODELS[model](max_tokens=11, **options)
    llm.invoke(PROMPT)
    want = (prompt_tokens(llm), 11)
    assert told(spans) == [want]
    for run in WHOLE.values():
        for target, asked in ((llm, PROMPT), (PromptTemplate.from_template("{p}") | llm, {"p": PROMPT})):
            await run(llm, target, asked)
            found = told(spans)
            assert set(found) == {want}


@pytest.mark.parametrize("way", BROKEN)
@pytest.mark.parametrize("model", MODELS)
async def test_a_call_that_was_broken_off_tells_the_tokens_so_far(spans: Any, way: str, model: str) -> None:
    llm = MODELS[model](**LONG)
    await WAYS[way](llm, llm, PROMPT)
    await ended(llm)
    ((prompt, answer),) = told(spans)
    assert prompt == prompt_tokens(llm)
    assert 0 < answer < 400


@pytest.mark.parametrize("way", ["stream", "astream"])
async def test_openinference_counts_a_streamed_llm_too(spans: Any, way: str) -> None:
    llm = MODELS["llm"](max_tokens=11)
    with instrumented("openinference", trace.get_tracer_provider()):
        await WAYS[way](llm, llm, PROMPT)
        await ended(llm)
    (theirs,) = [span.attributes for span in spans.get_finished_spans() if span.name == "MetaSDLLM"]
    assert theirs["llm.token_count.prompt"] == llm.get_num_tokens(PROMPT)
    assert theirs["llm.token_count.completion"] == 11
    assert theirs["llm.token_count.total"] == llm.get_num_tokens(PROMPT) + 11
