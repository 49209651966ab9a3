"""Structured output: which option asks for it, and what turns the message into an object. Nothing is repaired."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass

from metasd_langchain.errors import BadOption

__all__ = ["METHODS", "parsed", "response_format", "with_raw"]

METHODS = ("json_schema", "function_calling", "json_mode")


def response_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    """A schema in OpenAI's shape; None: any JSON object.

    Raises:
        BadOption: nothing that has a schema.
    """
    if schema is None:
        return {"type": "json_object"}
    shape = _shape(schema)
    named = {"name": str(shape.get("title", "answer")), "schema": shape}
    return {"type": "json_schema", "json_schema": named if strict is None else {**named, "strict": strict}}


def _shape(schema: Any) -> dict[str, Any]:
    if isinstance(schema, Mapping) and "title" not in schema and "name" not in schema and "function" not in schema:
        return dict(schema)  # a JSON schema without a name
    try:
        return convert_to_json_schema(schema)
    except (ValueError, TypeError, KeyError, AttributeError) as cause:
        name = getattr(schema, "__name__", type(schema).__name__)
        raise BadOption("schema", name, "a pydantic class, a TypedDict, a JSON schema or OpenAI's function") from cause


def parsed(schema: Any, method: str, name: str = "") -> Runnable[Any, Any]:
    """What turns a message into an object.

    Args:
        schema: what was asked for; None: any JSON object.
        method: one of METHODS.
        name: of the tool that stands for the schema.
    """
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    if method == "function_calling":
        if pydantic:
            return CompletePydanticCall(tools=[schema], first_tool_only=True)
        return CompleteCall(key_name=name, first_tool_only=True)
    return CompletePydantic(pydantic_object=schema) if pydantic else CompleteJson()


def with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """``{"raw", "parsed", "parsing_error"}`` instead of the object or an exception."""
    good = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    bad = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | good.with_fallbacks([bad], exception_key="parsing_error")


class CompleteJson(JsonOutputParser):
    """JSON as it is. LangChain's own parser completes what is cut, and would pass it off as the answer."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object; of a stream that goes on, as much as is there."""
        if partial and not _ended(result):
            return super().parse_result(result, partial=True)
        return _whole(result)


class CompletePydantic(PydanticOutputParser):  # type: ignore[type-arg]
    """See `CompleteJson`."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object."""
        if not partial or _ended(result):
            _whole(result)
        return super().parse_result(result, partial=partial)


class CompleteCall(JsonOutputKeyToolsParser):
    """See `CompleteJson`; for a schema that stood as a tool."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The arguments of the call."""
        if not partial or _ended(result):
            _check_calls(result)
        return super().parse_result(result, partial=partial)


class CompletePydanticCall(PydanticToolsParser):
    """See `CompleteCall`."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """The object made of the call's arguments."""
        if not partial or _ended(result):
            _check_calls(result)
        return super().parse_result(result, partial=partial)


def _ended(result: list[Generation]) -> bool:
    """Whether the generation is a stream's last state."""
    one = result[0]
    return isinstance(one, ChatGeneration) and bool(one.message.response_metadata.get("finish_reason"))


def _whole(result: list[Generation]) -> Any:
    text = result[0].text
    try:
        return json.loads(text)
    except ValueError as cause:
        raise OutputParserException(_why(result, f"the answer is no valid JSON: {cause}"), llm_output=text) from cause


def _why(result: list[Generation], reason: str) -> str:
    one = result[0]
    if isinstance(one, ChatGeneration) and one.message.response_metadata.get("finish_reason") == "length":
        usage = getattr(one.message, "usage_metadata", None) or {}
        return f"the answer was cut at {usage.get('output_tokens', '?')} tokens (finish_reason 'length'): {reason}"
    return reason


def _check_calls(result: list[Generation]) -> None:
    """Raise when a call is none."""
    message = getattr(result[0], "message", None)
    if not isinstance(message, AIMessage) or not message.invalid_tool_calls:
        return
    call, metadata = message.invalid_tool_calls[0], message.response_metadata
    error = call.get("error") or "; ".join(metadata.get("invalid_tool_call_errors", ())) or "it is no valid JSON"
    raise OutputParserException(_why(result, f"the call is not complete: {error}"), llm_output=str(call.get("args")))
