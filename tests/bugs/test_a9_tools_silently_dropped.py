"""A9: tools are bound, and nothing of them reaches the model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chatkit import CHATML, HELLO, TOOLED, asked, make

NO_TOOLS = CHATML  # what most templates of small models are: nothing in them about tools
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role') }}"
    "{% endif %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def book_flight(city: str, seats: int) -> str:
    """Book a flight to a city."""
    return f"{city} {seats}"


@pytest.mark.parametrize("template", [None, "plain", NO_TOOLS, STRICT, TOOLED])
@pytest.mark.parametrize("choice", [None, "any", "book_flight", "none"])
def test_the_prompt_holds_name_description_and_parameters(template: str | None, choice: str | None) -> None:
    chat = make(chat_template=template)
    bound: Any = chat.bind_tools([book_flight], tool_choice=choice)
    text = asked(chat, HELLO, **bound.kwargs).text
    for wanted in ("book_flight", "Book a flight to a city.", '"city"', '"seats"', "string", "integer", HELLO):
        assert wanted in text


@pytest.mark.parametrize("template", [None, NO_TOOLS, STRICT, TOOLED])
def test_tools_cost_tokens_and_usage_says_so(template: str | None) -> None:
    chat = make(chat_template=template)
    bare = chat.invoke(HELLO).usage_metadata
    bound = chat.bind_tools([book_flight], tool_choice="none").invoke(HELLO).usage_metadata
    assert bare is not None
    assert bound is not None
    assert bound["input_tokens"] > bare["input_tokens"]


@pytest.mark.parametrize("template", [None, NO_TOOLS, STRICT, TOOLED])
def test_what_the_model_says_is_taken_as_a_call(template: str | None) -> None:
    chat = make(chat_template=template, max_tokens=200)
    message = chat.bind_tools([book_flight], tool_choice="any").invoke(HELLO)
    assert [call["name"] for call in message.tool_calls][:1] == ["book_flight"]
