"""A21: calls of one reply have one index, or none: added up they are one call, or pieces that never join."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest

from tests.unit.chatkit import CHATML, HELLO, TOOLED, make


def first(a: int) -> int:
    """One."""
    return a


def second(b: bool) -> bool:
    """Two."""
    return b


def two_calls(form: str | None, template: str | None) -> Any:
    """A model whose answer to HELLO holds at least two calls: the first seed that gives some."""
    for seed in range(200):
        chat = make(chat_template=template, tool_format=form, max_tokens=160, temperature=1.0, seed=seed)
        bound = chat.bind_tools([first, second], tool_choice="any", parallel_tool_calls=True)
        if len(bound.invoke(HELLO).tool_calls) >= 2:
            return bound
    raise AssertionError("no seed gives two calls")


@pytest.mark.parametrize(
    ("form", "template"),
    [(None, None), ("hermes", CHATML), ("llama3", CHATML), ("mistral", CHATML), ("gemma", CHATML), (None, TOOLED)],
)
async def test_calls_of_one_reply_stay_apart(form: str | None, template: str | None) -> None:
    chat = two_calls(form, template)
    wanted = chat.invoke(HELLO)
    assert wanted.invalid_tool_calls == []
    for chunks in (list(chat.stream(HELLO)), [chunk async for chunk in chat.astream(HELLO)]):
        total = reduce(add, chunks)
        assert [(call["name"], call["args"]) for call in total.tool_calls] == [
            (call["name"], call["args"]) for call in wanted.tool_calls
        ]
        assert total.invalid_tool_calls == []
        assert len({call["id"] for call in total.tool_calls}) == len(wanted.tool_calls)
        assert all(call["id"] for call in total.tool_calls)
        pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
        assert [piece["index"] for piece in pieces] == sorted(piece["index"] for piece in pieces)
        assert {piece["index"] for piece in pieces} == set(range(len(wanted.tool_calls)))


@pytest.mark.parametrize("template", [None, CHATML, TOOLED])
def test_one_call_where_one_is_asked_for(template: str | None) -> None:
    for seed in range(6):
        chat = make(chat_template=template, max_tokens=160, temperature=1.0, seed=seed)
        message = chat.bind_tools([first, second], tool_choice="any", parallel_tool_calls=False).invoke(HELLO)
        assert len(message.tool_calls) == 1
