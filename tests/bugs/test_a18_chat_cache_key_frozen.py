"""A18: LangChain keeps a chat model's serialised form, so its cache key stays when a field changes: old answers."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache

from metasd_langchain.testing.models import tiny_model
from tests.unit.chatkit import CHATML, HELLO, TOKENIZER, make


def count(message: Any) -> int:
    return int(message.usage_metadata["output_tokens"])


def test_a_changed_field_is_another_key() -> None:
    chat = make(cache=InMemoryCache())
    assert count(chat.invoke(HELLO)) == 24
    chat.max_tokens = 3
    assert count(chat.invoke(HELLO)) == 3
    assert count(chat.model_copy(update={"max_tokens": 5}).invoke(HELLO)) == 5
    chat.max_tokens = 24
    assert count(chat.invoke(HELLO)) == 24


CHANGES: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 1},
    {"stop": ["a"]},
    {"max_tokens": 3},
    {"chat_template": CHATML},
    {"chat_template": "plain"},
    {"tool_format": "gemma"},
    {"chat_template_kwargs": {"a": 1}},
    {"choices": ["yes", "no"]},
    {"response_format": {"type": "json_object"}},
    {"repetition_penalty": 1.3},
    {"logit_bias": {5: 3.0}},
    {"model": (tiny_model(seed=5, max_position_embeddings=4096), TOKENIZER)},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_options_of_the_object_a_copy_and_a_call_have_one_key_each(change: dict[str, Any]) -> None:
    cache = InMemoryCache()
    chat = make(cache=cache)
    plain = chat._get_llm_string()
    keys = {
        chat._get_llm_string(**change),
        chat.model_copy(update=change)._get_llm_string(),
        make(**change)._get_llm_string(),
    }
    if "model" not in change:
        assert len(keys) == 1  # the same answer, however it was asked for
    assert plain not in keys


def test_tools_are_part_of_the_key() -> None:
    def first(a: int) -> int:
        """One."""
        return a

    def second(a: int) -> int:
        """Two."""
        return a

    chat = make(cache=InMemoryCache(), max_tokens=120)
    names = [
        chat.bind_tools([tool], tool_choice=choice).invoke(HELLO).tool_calls
        for tool, choice in ((first, "any"), (second, "any"), (first, "none"))
    ]
    assert [[call["name"] for call in calls] for calls in names] == [["first"], ["second"], []]


def test_an_equal_call_is_answered_from_the_cache() -> None:
    cache = InMemoryCache()
    chat = make(cache=cache)
    wanted = chat.invoke(HELLO, max_tokens=4)
    rounds = chat._load().rounds
    assert chat.invoke(HELLO, max_tokens=4).content == wanted.content
    assert make(cache=cache, max_tokens=4).invoke(HELLO).content == wanted.content
    assert chat._load().rounds == rounds


def test_what_callbacks_are_told_of_the_object_is_fresh_too() -> None:
    chat = make(model=None, max_tokens=7)
    assert chat._serialized["kwargs"]["max_tokens"] == 7
    chat.max_tokens = 8
    assert chat._serialized["kwargs"]["max_tokens"] == 8
