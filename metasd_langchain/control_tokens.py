"""Text that must stay text: names of control tokens inside it are cut before ids are made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["control_tokens", "encoded", "neutral", "neutral_value", "shown"]

_CUT = "\ue0f0"  # a private character: stands inside a control token's name that is only text


def control_tokens(tokenizer: Any, template: str) -> frozenset[str]:
    """Names that must not become control tokens when they stand in text: special tokens, and others that the chat
    template writes (``<tool_call>`` is an ordinary added token of some tokenizers, with a meaning all the same).
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {token.content for token in added if token.special or (token.content in template and token.content.strip())}
    return frozenset(names | set(getattr(tokenizer, "all_special_tokens", ())))


def neutral(text: str, names: frozenset[str]) -> str:
    """The text with a cut mark inside each control token's name."""
    lengths, firsts = _shape(names)
    if not any(first in text for first in firsts):
        return text
    parts: list[str] = []
    start = place = 0
    while place < len(text):
        if text[place] in firsts:
            size = next((size for size in lengths if text[place : place + size] in names), 0)
            if size > 1:
                parts.append(text[start : place + 1])
                start = place + 1
        place += 1
    return _CUT.join([*parts, text[start:]])


@functools.lru_cache(maxsize=16)
def _shape(names: frozenset[str]) -> tuple[tuple[int, ...], frozenset[str]]:
    return tuple(sorted({len(name) for name in names}, reverse=True)), frozenset(name[0] for name in names if name)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered prompt: control tokens of the template are read as such, and there is exactly one BOS where
    the tokenizer uses one.
    """
    # "\\ue0f0": a template may write JSON in ASCII
    pieces = text.replace("\\ue0f0", _CUT).split(_CUT)
    ids = [i for piece in pieces if piece for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    bos = tokenizer.bos_token_id
    if bos is not None:
        usual = tokenizer("a")["input_ids"][:1] == [bos]
        while ids[:2] == [bos, bos]:
            del ids[0]
        if usual and ids[:1] != [bos]:
            ids.insert(0, bos)
    return ids


def shown(text: str) -> str:
    """A rendered prompt for people."""
    return text.replace(_CUT, "")


def neutral_value(value: Any, clean: Callable[[str], str]) -> Any:
    """A JSON value with every string in it cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): neutral_value(one, clean) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [neutral_value(one, clean) for one in value]
    return value
