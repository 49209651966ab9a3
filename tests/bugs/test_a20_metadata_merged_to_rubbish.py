"""A20: metadata on several chunks: LangChain joins strings, adds numbers and fails on floats."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest

from tests.unit.chatkit import HELLO, make


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}, {"stop": ["e"]}, {"max_tokens": 1}, {"output_version": "v1"}])
async def test_metadata_of_a_stream_is_that_of_invoke(options: dict[str, Any]) -> None:
    chat = make(**options)
    wanted = chat.invoke(HELLO).response_metadata
    for chunks in (list(chat.stream(HELLO)), [chunk async for chunk in chat.astream(HELLO)]):
        found = reduce(add, chunks).response_metadata
        for name in ("finish_reason", "model_name", "model_provider"):
            assert found[name] == wanted[name]
        assert found.keys() == wanted.keys()
        assert isinstance(found["metasd"]["total_s"], float)
        assert found["metasd"]["policy"] == wanted["metasd"]["policy"]
        assert found["metasd"]["step"] == wanted["metasd"]["step"]
        if "logprobs" in wanted:
            assert [one["id"] for one in found["logprobs"]["content"]] == [
                one["id"] for one in wanted["logprobs"]["content"]
            ]
    assert wanted["finish_reason"] in ("stop", "length")
    assert wanted["model_provider"] == "metasd"


def test_a_stream_inside_invoke() -> None:
    wanted, found = make().invoke(HELLO), make(streaming=True).invoke(HELLO)
    assert found.response_metadata["finish_reason"] == wanted.response_metadata["finish_reason"]
    assert found.response_metadata["model_name"] == wanted.response_metadata["model_name"]
    assert found.usage_metadata == wanted.usage_metadata
