"""LangChain's messages and tools as what templates are given: turns of text, tools with a schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from metasd_langchain.errors import BadOption, BadTool, RequestError, UnknownName, UnknownRole, UnsupportedContent
from metasd_langchain.tool_formats import Call, Tool
from metasd_langchain.turns import Turn

__all__ = ["openai_tools", "tool_choice_of", "tools_of", "turns_of"]

_ROLES = {"human": "user", "ai": "assistant", "developer": "system", "function": "tool"}
_TEXT = ("text", "text-plain", "input_text", "output_text")
# Blocks that say again what the message's own tool_calls say, or that no model is to be told again.
_TOLD = (
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "invalid_tool_call",
    "function_call",
    "input_json_delta",
    "reasoning",
    "reasoning_content",
    "thinking",
    "redacted_thinking",
)


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """Messages as turns, in their order.

    Raises:
        RequestError: no message at all, or one that holds half a character.
        UnknownRole: a ChatMessage of a role of its own.
        UnsupportedContent: a content block that is no text.
    """
    if not messages:
        raise RequestError("there is no message", hint="a conversation has at least one")
    return [_turn(message, messages[:place]) for place, message in enumerate(messages)]


def _turn(message: BaseMessage, before: Sequence[BaseMessage]) -> Turn:
    role = _role(message)
    text = _text(message.content, role)
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        raise RequestError(f"a {role} message holds half a character (a lone surrogate)") from cause
    name = message.name or ""
    if role == "tool":
        given = str(getattr(message, "tool_call_id", "") or "")
        failed = getattr(message, "status", "success") == "error" and "error" not in text[:40].lower()
        return Turn(role, f"Error: {text}" if failed else text, call_id=given, name=name or _called(given, before))
    if not isinstance(message, AIMessage):
        return Turn(role, text, name=name)
    broken = [f"{call['name']}: {call['args']}" for call in message.invalid_tool_calls]
    calls = tuple(Call(call["name"], call["args"], call["id"] or "") for call in message.tool_calls)
    return Turn(role, "\n".join([text, *broken]) if broken else text, calls, name=name)


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, AIMessage):
        return "assistant"
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return "tool"
    role = message.role if isinstance(message, ChatMessage) else message.type
    known = _ROLES.get(role.lower(), role.lower())
    if known not in ("user", "assistant", "system", "tool"):
        raise UnknownRole(role)
    return known


def _text(content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    texts = (one if isinstance(one, str) else _block_text(one, role) for one in content or ())
    # What a model said was one text, whatever pieces it came in; blocks of others are texts of their own.
    return ("" if role == "assistant" else "\n").join(text for text in texts if text is not None)


def _block_text(block: Any, role: str) -> str | None:
    """A block's text; None for one that says nothing new."""
    kind = str(block.get("type", "text" if "text" in block else next(iter(block), "?")))
    if kind in _TEXT and isinstance(block.get("text"), str):
        text: str = block["text"]
        return text
    if kind in _TOLD and role == "assistant":
        return None
    raise UnsupportedContent(kind, role)


def _called(given: str, before: Sequence[BaseMessage]) -> str:
    """Name of the tool whose call has this id."""
    for message in reversed(before):
        for call in getattr(message, "tool_calls", ()):
            if call["id"] == given:
                return str(call["name"])
    return ""


def openai_tools(tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's shape.

    Raises:
        BadTool: what no schema can be made for, a tool that is no function, or two of one name.
    """
    shaped: list[dict[str, Any]] = []
    for tool in tools:
        name = str(getattr(tool, "name", None) or getattr(tool, "__name__", None) or type(tool).__name__)
        try:
            one = convert_to_openai_tool(dict(tool) if isinstance(tool, Mapping) else tool)
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            raise BadTool(name, f"no schema can be made for it ({type(cause).__name__})") from cause
        if one.get("type") != "function" or not isinstance(one.get("function"), Mapping):
            raise BadTool(str(one.get("type", name)), "it is no function; a local model can call nothing else")
        shaped.append(one)
    tools_of(shaped)
    return shaped


def tools_of(shaped: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Tools in OpenAI's shape as templates take them.

    Raises:
        BadTool: one without a name, or two of one name that differ.
    """
    tools: dict[str, Tool] = {}
    for one in shaped or ():
        function = one["function"]
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadTool(str(name), "it has no name")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        tool = Tool(name, str(function.get("description") or ""), {"type": "object", **parameters})
        if name not in tools:
            tools[name] = tool
        elif _bare(tools[name].parameters) != _bare(tool.parameters):  # a class and its own schema are one tool
            raise BadTool(name, "another tool has the same name and other parameters")
    return list(tools.values())


def _bare(schema: Any) -> Any:
    """A schema without words for people."""
    if isinstance(schema, Mapping):
        words = ("title", "description")
        return {key: _bare(one) for key, one in schema.items() if not (key in words and isinstance(one, str))}
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema


def tool_choice_of(given: Any, tools: Sequence[Tool]) -> tuple[str, list[Tool]]:
    """What ``tool_choice`` means: "none", "auto" or "forced", and the tools that may be called.

    Args:
        given: None, a bool, "auto", "none", "any", "required", a tool's name, or OpenAI's mapping.
        tools: what is on offer.

    Raises:
        UnknownName: it names no tool on offer.
        BadOption: it is none of these.
    """
    if isinstance(given, Mapping):
        inner = given.get("function")
        given = inner.get("name") if isinstance(inner, Mapping) else given.get("name", given.get("type"))
    offered = list(tools)
    if given in (None, "auto") or given is False:
        return ("auto" if offered else "none"), offered
    if given == "none":
        return "none", offered
    if not isinstance(given, (str, bool)):
        raise BadOption("tool_choice", type(given).__name__, "a tool's name, auto, none, any, required or a mapping")
    chosen = offered if given in (True, "any", "required") else [tool for tool in offered if tool.name == given]
    if not chosen:
        raise UnknownName("tool", str(given), [tool.name for tool in offered])
    return "forced", chosen


def schema_note(schema: Mapping[str, Any]) -> str:
    """What a model is told of the JSON that its answer has to be."""
    if set(schema) <= {"type"}:
        return "The answer is a JSON object and nothing else."
    return (
        f"The answer is JSON that matches this JSON schema, and nothing else: {json.dumps(schema, ensure_ascii=False)}"
    )
