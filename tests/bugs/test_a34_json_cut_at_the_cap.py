"""A34: JSON that the cap cut comes back as if it were complete, or repaired.

The LLM's side: under a schema JSON closes within the cap, whatever the cap; where none can, nothing is generated and
both numbers are named. Text without a grammar, and grammars that may end anywhere, say "length" when they are cut.
"""

from __future__ import annotations

import json
from functools import reduce
from operator import add
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from metasd_langchain.errors import CapTooSmall
from tests.bugs.kit import PROMPT, Heard, make
from tests.unit import chatkit

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "pages": {"type": "array", "items": {"type": "string"}}},
    "required": ["title", "pages"],
}


def asked(**options: Any) -> tuple[str, str]:
    heard = Heard()
    text = make(**options).invoke(PROMPT, {"callbacks": [heard]})
    return text, heard.responses[0].generations[0][0].generation_info["finish_reason"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_closes_within_every_cap_that_fits_any(temperature: float) -> None:
    with pytest.raises(CapTooSmall) as raised:
        asked(response_format=SCHEMA, max_tokens=6)
    for room in range(0, 40, 3):
        cap = raised.value.shortest + room
        text, finish = asked(response_format=SCHEMA, max_tokens=cap, temperature=temperature, seed=room)
        jsonschema.validate(json.loads(text), SCHEMA)
        assert finish == "stop"


def test_a_cap_that_fits_none_names_both_numbers_and_the_next_call_works() -> None:
    llm = make(response_format=SCHEMA)
    with pytest.raises(CapTooSmall, match=r"has \d\d tokens, and 6 may be generated.*max_tokens") as raised:
        llm.invoke(PROMPT, max_tokens=6)
    assert (raised.value.cap, raised.value.shortest > 6) == (6, True)
    assert json.loads(llm.invoke(PROMPT, max_tokens=60)).keys() >= {"title", "pages"}


def test_the_window_is_a_cap_like_any_other() -> None:
    llm = make(response_format=SCHEMA, max_tokens=None)
    fits = len(llm.get_token_ids(PROMPT)) + 60
    jsonschema.validate(json.loads(llm.invoke(PROMPT, max_model_len=fits)), SCHEMA)
    with pytest.raises(CapTooSmall, match="and 5 may"):
        llm.invoke(PROMPT, max_model_len=fits - 55)


def test_what_may_end_anywhere_is_cut_and_says_so() -> None:
    text, finish = asked(regex="[a-z]+", max_tokens=7)
    assert finish == "length"
    assert text.isalpha()
    assert asked(max_tokens=7)[1] == "length"


def test_an_answer_with_one_end_reaches_it() -> None:
    for cap in range(7, 20):
        text, finish = asked(regex="[a-z]+, the end[.]", max_tokens=cap + 6)
        assert text.endswith(", the end.")
        assert finish == "stop"


# -- the chat model's side --------------------------------------------------------------------------------------------


class Book(BaseModel):
    """What `SCHEMA` says."""

    title: str
    pages: list[str]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("include_raw", [False, True])
def test_structured_output_names_the_cap_that_fits_none(method: Any, include_raw: bool) -> None:
    chat = chatkit.make(max_tokens=6).with_structured_output(Book, method=method, include_raw=include_raw)
    with pytest.raises(CapTooSmall, match="and 6 may be generated"):
        chat.invoke(PROMPT)
    with pytest.raises(CapTooSmall, match="and 6 may be generated"):
        list(chat.stream(PROMPT))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_closes_within_every_cap_that_fits_any(method: Any) -> None:
    with pytest.raises(CapTooSmall) as raised:
        chatkit.make(max_tokens=6).with_structured_output(Book, method=method).invoke(PROMPT)
    for room in (0, 1, 2, 5, 17):
        cap = raised.value.shortest + room
        chat = chatkit.make(max_tokens=cap, temperature=1.0, seed=room)
        result = chat.with_structured_output(Book, method=method, include_raw=True).invoke(PROMPT)
        assert isinstance(result["parsed"], Book)
        assert result["parsing_error"] is None
        assert result["raw"].response_metadata["finish_reason"] in ("stop", "tool_calls")


def test_a_call_that_a_stop_string_cuts_is_no_call() -> None:
    chat: Any = chatkit.make(max_tokens=200).bind_tools([Book], tool_choice="any")
    message = chat.invoke(PROMPT, stop=['"pages"'])
    assert message.tool_calls == []
    assert "cut" in message.invalid_tool_calls[0]["error"]
    total = reduce(add, chat.stream(PROMPT, stop=['"pages"']))
    assert total.tool_calls == []
    assert "cut" in total.response_metadata["invalid_tool_call_errors"][0]
