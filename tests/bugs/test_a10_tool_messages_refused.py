"""A10: "Last message must be a HumanMessage": no agent can loop."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from tests.bugs.test_a9_tools_silently_dropped import STRICT, book_flight
from tests.unit.chatkit import CHATML, TOOLED, asked, make

TEMPLATES = [None, CHATML, STRICT, TOOLED]


def talk(status: Literal["success", "error"], content: Any) -> list[BaseMessage]:
    call = {"name": "book_flight", "args": {"city": "Oslo", "seats": 3}, "id": "call_77", "type": "tool_call"}
    return [
        HumanMessage("Three to Oslo."),
        AIMessage("", tool_calls=[call]),
        ToolMessage(content, tool_call_id="call_77", status=status),
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("status", ["success", "error"])
@pytest.mark.parametrize("content", ["no seats left", [{"type": "text", "text": "no seats left"}]])
def test_a_result_may_be_the_last_message(template: str | None, status: Any, content: Any) -> None:
    chat = make(chat_template=template)
    for model in (chat, chat.bind_tools([book_flight])):
        assert isinstance(model.invoke(talk(status, content)), AIMessage)
    given: Any = chat.bind_tools([book_flight])
    text = asked(chat, talk(status, content), **given.kwargs).text
    for wanted in ("Three to Oslo.", "book_flight", '"Oslo"', "no seats left"):
        assert wanted in text
    assert ("Error: no seats left" in text) == (status == "error")


@pytest.mark.parametrize("template", TEMPLATES)
def test_results_stand_in_order_each_with_its_tool(template: str | None) -> None:
    calls = [
        {"name": name, "args": {"word": name[0]}, "id": f"id{number}", "type": "tool_call"}
        for number, name in enumerate(("alpha", "beta"))
    ]
    messages = [
        SystemMessage("Be quick."),
        HumanMessage("Both."),
        AIMessage("", tool_calls=calls),  # type: ignore[arg-type]
        ToolMessage("first result", tool_call_id="id0"),
        ToolMessage("second result", tool_call_id="id1"),
        AIMessage("Done."),
        HumanMessage("Again."),
    ]
    text = asked(make(chat_template=template), messages).text
    order = ["Be quick.", "Both.", '"a"', '"b"', "first result", "second result", "Done.", "Again."]
    places = [text.find(one) for one in order]
    assert all(place >= 0 for place in places)
    assert all(left < right for left, right in itertools.pairwise(places))


@pytest.mark.parametrize("template", TEMPLATES)
def test_any_message_may_be_the_last(template: str | None) -> None:
    for last in (SystemMessage("a"), AIMessage("b"), HumanMessage("c")):
        for first in ([], [HumanMessage("d")], [SystemMessage("e"), HumanMessage("f")]):
            assert isinstance(make(chat_template=template, max_tokens=2).invoke([*first, last]), AIMessage)
