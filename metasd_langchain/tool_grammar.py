"""What a reply may be, as a grammar: calls of the tools on offer, text, JSON, reasoning in front of any of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from metasd_langchain.constraints import Grammar, json_rule
from metasd_langchain.tool_formats import Tool
from metasd_langchain.turns import Rendered

__all__ = ["closed", "reply_grammar"]

_ANY = r"/(.|\n)*/"


def reply_grammar(
    rendered: Rendered,
    tools: Sequence[Tool],
    *,
    choice: str,
    several: bool,
    answer: Mapping[str, Any] | None = None,
) -> Grammar:
    """What may follow a prompt.

    Args:
        rendered: the prompt.
        tools: what may be called.
        choice: "none", "auto" (calls or an answer) or "forced" (calls).
        several: whether more than one call may come.
        answer: JSON schema of the answer; None: free text.
    """
    start: list[str] = []
    rules: list[str] = []
    if choice != "none":
        rules += _calls(rendered, tools, several)
        start.append("calls")
    if choice != "forced":
        body, more = _answer(
            rendered, answer, choice == "auto" and rendered.form.opener.strip() not in rendered.special
        )
        start.append(body)
        rules += more
    front, more = _reasoning(rendered)
    label = "tools" if choice != "none" else "response_format"
    return Grammar("\n".join([f"start: {front}({' | '.join(start)})", *rules, *more]), label)


def _calls(rendered: Rendered, tools: Sequence[Tool], several: bool) -> list[str]:
    """Rules for ``calls``, and for ``opened``: what follows a call's opener."""
    form, special = rendered.form, rendered.special
    opens, closes = _marker(form.opener, special), _marker(form.closer, special)
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        rules.append(f"call_{number}: {_text(form.front(tool.name))} args_{number} {_text(form.back)}")
        rules.append(f"args_{number}: {json_rule(closed(tool.parameters, filled=True), label='tools')}")
    if form.listed:
        more = f" ({_text(form.between)} call)*" if several else ""
        return [f"opened: {_text('[')} call{more} {_text(']')} {closes}", f"calls: {opens} opened", *rules]
    joined = _marker(f"{form.between}{form.opener}", special)
    more = f" ({joined} call {closes})*" if several else ""
    # A model without an end of turn goes on with the next turn's label: that is its way to say that no call follows.
    labels = [_text(form.between[:-1] + label) for label in rendered.stop] if several else []
    end = f" ({' | '.join(labels)})?" if labels else ""
    rules = [f"opened: {_text(_tail(form.opener))} call {closes}{more}{end}", *rules]
    # Where the prompt ends with the opener, only the space behind it is still to come.
    mark = "" if rendered.opened == "call" else _marker(form.opener.rstrip(), special)
    return [f"calls: {mark} opened", *rules]


def _tail(text: str) -> str:
    """White space at the end of a text."""
    return text[len(text.rstrip()) :]


def _marker(text: str, special: Mapping[str, int]) -> str:
    """A marker in Lark, as the token that it is."""
    mark = text.strip()
    if mark not in special:
        return _text(text)
    before, _, after = text.partition(mark)
    return " ".join(part for part in (_text(before), f"<[{special[mark]}]>", _text(after)) if part)


def _answer(rendered: Rendered, schema: Mapping[str, Any] | None, switch: bool) -> tuple[str, list[str]]:
    """Rule and helpers for an answer that is no call, or that calls follow."""
    form = rendered.form
    said = rendered.said
    if schema is not None:
        # A prompt that ends with a label leaves the space behind it to the model.
        front = f"{said} " if said else " " if rendered.trim else ""
        return f"{_text(front)} answer", [f"answer: {json_rule(schema)}"]
    start = [f"/{_quoted(start)}(.|\\n)*/" for start in form.starts] if not said else []
    if said:  # nobody speaks twice
        start.append(f"/(.|\\n)*\\n{_quoted(said)}(.|\\n)*/")
    opener = form.opener.rstrip() if rendered.taught else f"{form.between}{form.opener.rstrip()}"
    if not switch or not opener:
        without = "".join(f" & ~{one}" for one in start)
        return f"{_text(said)} TEXT", [f"TEXT: {_ANY}{without}"]
    # Text, and calls behind it: from a marker on, what follows is a call or nothing.
    marks = [f"/(.|\\n)*{_quoted(mark)}(.|\\n)*/" for mark in dict.fromkeys((opener, *form.opens))]
    without = "".join(f" & ~{one}" for one in (*start, *marks))
    rules = [f"TEXT: {_ANY}{without}", f"before[suffix={_text(opener)}]: {_ANY}"]
    return f"{_text(said)} (TEXT | before opened)", rules


def _reasoning(rendered: Rendered) -> tuple[str, list[str]]:
    """What may or must stand in front: the reasoning of a model that was taught to reason between tags."""
    if rendered.think is None:
        return "", []
    opens, closes = rendered.think
    rules = [f"thought[suffix={_text(closes)}]: {_ANY}", r"gap: /\n{0,2}/"]
    if rendered.opened == "think":
        return "thought gap ", rules
    return f"({_text(opens)} thought gap)? ", rules


def closed(schema: Mapping[str, Any], *, filled: bool = False) -> dict[str, Any]:
    """The schema with no keys but those it names, as OpenAI's strict mode has it: a model would go on inventing more.

    Objects that say ``additionalProperties``, or have no ``properties``, stay as they are, and so do schemas put
    together with ``allOf``.

    Args:
        schema: JSON schema.
        filled: required strings have at least one character.
    """
    joined = "allOf" in json.dumps(schema, default=str) and _joins(schema)
    result: dict[str, Any] = _closed(schema, filled, not joined)
    return result


def _joins(schema: Any) -> bool:
    if isinstance(schema, Mapping):
        parts = schema.get("allOf")
        if isinstance(parts, list) and (len(parts) > 1 or "properties" in schema):
            return True
        return any(_joins(one) for one in schema.values())
    return isinstance(schema, list) and any(_joins(one) for one in schema)


def _closed(schema: Any, filled: bool, close: bool) -> Any:
    if isinstance(schema, list):
        return [_closed(one, filled, close) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in ("items", "anyOf", "oneOf", "allOf", "prefixItems"):
        if key in result:
            result[key] = _closed(result[key], filled, close)
    for key in ("$defs", "definitions"):
        if isinstance(result.get(key), Mapping):
            result[key] = {name: _closed(one, filled, close) for name, one in result[key].items()}
    names = result.get("properties")
    if isinstance(names, Mapping):
        required = result.get("required", ())
        result["properties"] = {
            name: _closed(_filled(one) if filled and name in required else one, filled, close)
            for name, one in names.items()
        }
        if close and not any(key in result for key in ("additionalProperties", "patternProperties")):
            result["additionalProperties"] = False
    return result


def _filled(schema: Any) -> Any:
    """A string's schema that allows no empty one, unless it says itself what it allows."""
    own = ("enum", "const", "pattern", "format", "minLength", "maxLength")
    if not isinstance(schema, Mapping) or schema.get("type") != "string" or any(key in schema for key in own):
        return schema
    return {**schema, "minLength": 1}


def _text(text: str) -> str:
    """A text in Lark; nothing for nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _quoted(text: str) -> str:
    """A text in a regular expression of Lark."""
    return "".join(
        {"\n": r"\n", "\r": r"\r"}.get(char, f"\\{char}" if char in r"\.+*?()|[]{}^$/" else char) for char in text
    )
