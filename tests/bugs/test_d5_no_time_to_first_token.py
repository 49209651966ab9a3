"""D5: nobody learns how long a reader waited for the first token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bugs.test_d1_async_steps_are_roots import ours
from tests.bugs.watching import MODELS, PROMPT, WHOLE, ended

STREAMED = ("stream", "astream")


def points(meters: Any, name: str) -> list[Any]:
    data = meters.get_metrics_data()
    return [
        point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]


@pytest.mark.parametrize("way", WHOLE)
@pytest.mark.parametrize("model", MODELS)
async def test_a_stream_tells_it_and_nothing_else_does(spans: Any, meters: Any, way: str, model: str) -> None:
    llm = MODELS[model](max_tokens=40)
    await WHOLE[way](llm, llm, PROMPT)
    await ended(llm)
    for span in ours(spans):
        first = span.attributes.get("gen_ai.response.time_to_first_chunk")
        assert (first is not None) is (way in STREAMED)
        if first is not None:
            assert 0 < first < span.attributes["metasd.latency.total_s"]
            assert first < (span.end_time - span.start_time) * 1e-9
    found = points(meters, "gen_ai.client.operation.time_to_first_chunk")
    assert [point.count for point in found] == ([1] if way in STREAMED else [])
    if found:
        (duration,) = points(meters, "gen_ai.client.operation.duration")
        assert 0 < found[0].sum < duration.sum


async def test_invoke_with_tokens_for_callbacks_is_a_stream_to_them(spans: Any, meters: Any) -> None:
    llm = MODELS["llm"](max_tokens=20, streaming=True)
    llm.invoke(PROMPT)
    assert ours(spans)[0].attributes["gen_ai.request.stream"] is True
    assert ours(spans)[0].attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert len(points(meters, "gen_ai.client.operation.time_to_first_chunk")) == 1
