"""The prompt for models that have no chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from metasd_langchain.control_tokens import neutral
from metasd_langchain.tool_formats import PLAIN_FORMAT, Call, Tool
from metasd_langchain.turns import Rendered, Template, Turn, leading, merged

__all__ = ["PlainTemplate"]

_LABELS = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool result"}
_CALL = "Tool call"
_SAID = f"{_LABELS['assistant']}:"
_ABOUT = "A conversation between a user and a helpful assistant."
_ABOUT_TOOLS = (
    f"{_ABOUT} The assistant can use tools. "
    "When a tool can help, the assistant writes a tool call; otherwise it answers."
)
# A conversation before the conversation, with a tool that nobody has: it shows the form of a call and of an answer.
_EXAMPLE = (
    Turn("user", "Hello!"),
    Turn("assistant", "Hello! How can I help you?"),
    Turn("user", "How many letters has the word banana?"),
    Turn("assistant", "", (Call("count_letters", {"word": "banana"}),)),
    Turn("tool", "6", name="count_letters"),
    Turn("assistant", "The word banana has 6 letters."),
)


class PlainTemplate(Template):
    """For models that have no chat template: turns with labels, as in a script, which a base model goes on with.

    Where tools are on offer, the label of the reply is the model's choice: an answer's or a tool call's.

    Args:
        names: control tokens of the tokenizer.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.form = PLAIN_FORMAT
        self.names = names

    def render(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), choice: str = "none", note: str = ""
    ) -> Rendered:
        """See `Template.render`."""
        turns = merged(turns)
        start = len(leading(turns, "system"))
        head = [turn.text for turn in turns[:start]] or [_ABOUT_TOOLS if tools else _ABOUT]
        if note:
            head.append(note)
        if tools:
            head.append("Tools:\n" + "\n".join(f"- {_signature(tool)}" for tool in tools))
            head += [_labelled(turn) for turn in _EXAMPLE]
        head += [_labelled(turn) for turn in turns[start:]]
        text = neutral("\n\n".join(part for part in head if part), self.names)
        labels = [f"\n{label}{mark}" for label in _LABELS.values() for mark in (":", " (")]
        if choice == "none":
            opened, said, stop = "", "", (*labels, f"\n{_CALL}:")
            goes_on = turns[-1].role == "assistant" and not turns[-1].calls
            end = "" if goes_on else f"\n\n{_SAID}"
        elif choice == "forced":
            opened, said, stop, end = "call", "", tuple(labels), f"\n\n{_CALL}:"
        else:  # the reply begins with its label
            stop = tuple(label for label in labels if label != f"\n{_SAID}")
            opened, said, end = "", _SAID, "\n\n"
        return Rendered(f"{text}{end}", self.form, stop, said, opened, trim=bool(end), taught=False)


def _labelled(turn: Turn) -> str:
    """A turn with its label; a line of its text that looks like a label moves one space to the right."""
    labels = tuple(f"{label}{mark}" for label in (*_LABELS.values(), _CALL) for mark in (":", " ("))
    lines = [f" {line}" if line.startswith(labels) else line for line in turn.text.split("\n")]
    text = "\n".join(lines).strip()
    calls = PLAIN_FORMAT.written(turn.calls)
    if calls and not text:
        return calls
    name = f" ({turn.name})" if turn.name else ""
    said = f"{_LABELS[turn.role]}{name}: {text}".rstrip()
    return f"{said}\n\n{calls}" if calls else said


def _signature(tool: Tool) -> str:
    about = f": {tool.description.strip()}" if tool.description else ""
    return f"{tool.name}{about} Arguments: {_type(tool.parameters, tool.parameters)}"


def _type(schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """A JSON schema in a few words: ``{"city": string (where), "days"?: integer}``."""
    if not isinstance(schema, Mapping) or depth > 6:
        return "any"
    if "$ref" in schema:
        found = root.get("$defs", root.get("definitions", {})).get(str(schema["$ref"]).rpartition("/")[2])
        return _type(found, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return " | ".join(_json(value) for value in schema.get("enum", [schema.get("const")]))
    several = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
    if several is not None:
        return " | ".join(dict.fromkeys(_type(one, root, depth + 1) for one in several))
    return _plain_type(schema, root, depth)


def _plain_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    kind = schema.get("type", "object" if "properties" in schema else "any")
    if kind == "array":
        return f"[{_type(schema.get('items'), root, depth + 1)}]"
    if kind == "object" and "properties" in schema:
        return _object_type(schema, root, depth)
    return " | ".join(map(str, kind)) if isinstance(kind, list) else str(kind)


def _object_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
    parts: list[str] = []
    for name, one in schema["properties"].items():
        optional = "" if name in schema.get("required", ()) else "?"
        about = one.get("description") if isinstance(one, Mapping) else None
        parts.append(f"{_json(name)}{optional}: {_type(one, root, depth + 1)}" + (f" ({about})" if about else ""))
    return "{" + ", ".join(parts) + "}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
