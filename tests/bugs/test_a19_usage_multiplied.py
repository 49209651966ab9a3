"""A19: usage on several chunks: added up it is a multiple of the truth."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain_core.callbacks import UsageMetadataCallbackHandler
from langchain_core.messages import AIMessageChunk, HumanMessage

from tests.unit.chatkit import HELLO, make


def look(word: str) -> str:
    """Look a word up."""
    return word


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("version", [None, "v1"])
async def test_usage_of_a_stream_is_that_of_invoke(tools: bool, version: str | None) -> None:
    base = make(max_tokens=80, output_version=version)
    chat: Any = base.bind_tools([look], tool_choice="any") if tools else base
    wanted = chat.invoke(HELLO).usage_metadata
    assert wanted["total_tokens"] == wanted["input_tokens"] + wanted["output_tokens"]
    for chunks in (list(chat.stream(HELLO)), [chunk async for chunk in chat.astream(HELLO)]):
        assert reduce(add, chunks).usage_metadata == wanted
        assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        handler = UsageMetadataCallbackHandler()
        list(chat.stream(HELLO, {"callbacks": [handler]}))
        assert list(handler.usage_metadata.values()) == [wanted]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")
def test_usage_of_event_streams() -> None:
    chat = make()
    assert chat.stream_events(HELLO, version="v3").output.usage_metadata == chat.invoke(HELLO).usage_metadata


def test_usage_through_langgraph() -> None:
    from langgraph.graph import START, MessagesState, StateGraph

    chat = make()

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_edge(START, "agent")
    handler = UsageMetadataCallbackHandler()
    given: Any = {"messages": [HumanMessage(HELLO)]}
    chunks = [one for one, _ in graph.compile().stream(given, {"callbacks": [handler]}, stream_mode="messages")]
    wanted = chat.invoke(HELLO).usage_metadata
    assert reduce(add, [one for one in chunks if isinstance(one, AIMessageChunk)]).usage_metadata == wanted
    assert list(handler.usage_metadata.values()) == [wanted]
