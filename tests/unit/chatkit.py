"""What chat tests are made of: a tiny model whose window takes prompts with tools, and what a call asks the engine."""

from __future__ import annotations

from typing import Any

from metasd_langchain import ChatMetaSD
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer

WINDOW = 4096
MODEL, TOKENIZER = tiny_model(max_position_embeddings=WINDOW), tiny_tokenizer()
HELLO = "the cat sat on the mat"
# Any conversation, nothing about tools.
CHATML = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Of the Qwen kind: tools and calls have places of their own.
TOOLED = (
    "{{ bos_token }}{% if tools %}Tools: {% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make(**options: Any) -> ChatMetaSD:
    """A ChatMetaSD over the tiny model; all of them share one engine."""
    return ChatMetaSD(**{"model": (MODEL, TOKENIZER), "max_tokens": 24, **options})


def asked(chat: ChatMetaSD, messages: Any, **given: Any) -> Any:
    """What a call asks the engine: ids, text, grammar."""
    bound, talk = chat._talk(chat._convert_input(messages).to_messages(), given)
    return bound._asked(bound._load(), talk)


def prompt_ids(chat: ChatMetaSD, messages: Any, **given: Any) -> tuple[int, ...]:
    """The prompt of a call."""
    ids: tuple[int, ...] = asked(chat, messages, **given).ids
    return ids
