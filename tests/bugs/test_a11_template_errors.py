"""A11: "System role not supported", "roles must alternate": what RAG and trimmed histories send is refused."""

from __future__ import annotations

import itertools

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from metasd_langchain.errors import TemplateFailed
from tests.bugs.test_a9_tools_silently_dropped import STRICT
from tests.unit.chatkit import CHATML, HELLO, TOOLED, asked, make

FIRST_ONLY = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
DROPS = (  # worse than an error: what it does not know is left out
    "{{ bos_token }}{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
KINDS = {"s": SystemMessage, "u": HumanMessage, "a": AIMessage}
WORDS = ["plum", "fig", "lime", "pear", "kiwi", "nut", "leek"]


def talk(roles: str) -> list[BaseMessage]:
    return [KINDS[role](word) for role, word in zip(roles, WORDS, strict=False)]


@pytest.mark.parametrize("template", [None, CHATML, TOOLED, STRICT, FIRST_ONLY, DROPS])
@pytest.mark.parametrize("roles", ["ssuuaau", *map("".join, itertools.product("sua", repeat=3))])
def test_every_order_of_roles_with_every_text_once(template: str | None, roles: str) -> None:
    text = asked(make(chat_template=template), talk(roles)).text
    places = [text.find(word) for word in WORDS[: len(roles)]]
    assert min(places) >= 0
    assert places == sorted(places)
    assert all(text.count(word) == 1 for word in WORDS[: len(roles)])


def test_the_engine_answers_it() -> None:
    assert make(chat_template=STRICT).invoke(talk("ssuuaau")).usage_metadata is not None


def test_what_no_form_of_it_satisfies_is_an_error_and_the_next_call_works() -> None:
    chat = make()
    with pytest.raises(TemplateFailed, match="roles user"):
        chat.invoke(HELLO, chat_template="{{ raise_exception('never') }}")
    assert chat.invoke(HELLO).content
