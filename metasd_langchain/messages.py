"""Parts of a reply as LangChain's messages: whole for ``invoke``, in chunks that add up to the same for ``stream``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call, tool_call_chunk

from metasd_langchain.reply_parts import CallArgs, CallBroken, CallStart, Part, Reasoning, Text
from metasd_langchain.runtime import finish_info
from metasd_langchain.values import Summary

__all__ = ["chunks", "facts", "last_chunk", "usage_of", "whole", "why_ended"]

_REASONING = "reasoning_content"  # the key under which LangChain looks for reasoning


def whole(parts: Sequence[Part], metadata: Mapping[str, Any], usage: UsageMetadata | None) -> AIMessage:
    """The message that all parts of a reply make."""
    starts = {part.index: part for part in parts if isinstance(part, CallStart)}
    broken = {part.index: part for part in parts if isinstance(part, CallBroken)}
    args = dict.fromkeys(starts, "")
    for part in parts:
        if isinstance(part, CallArgs):
            args[part.index] += part.text
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return AIMessage(
        content="".join(part.text for part in parts if isinstance(part, Text)),
        additional_kwargs={_REASONING: reasoning} if reasoning else {},
        tool_calls=[
            tool_call(name=start.name, args=json.loads(args[index]), id=start.id)
            for index, start in starts.items()
            if index not in broken
        ],
        invalid_tool_calls=[
            invalid_tool_call(name=starts[index].name, args=args[index], id=starts[index].id, error=part.error)
            for index, part in broken.items()
        ],
        response_metadata=dict(metadata),
        usage_metadata=usage,
    )


def chunks(parts: Iterable[Part]) -> Iterator[AIMessageChunk]:
    """Parts as chunks: one for each run of parts of a kind, so that their order shows."""
    for kind, run in groupby(parts, key=_kind):
        if kind is Text:
            yield AIMessageChunk(content="".join(part.text for part in run if isinstance(part, Text)))
        elif kind is Reasoning:
            text = "".join(part.text for part in run if isinstance(part, Reasoning))
            yield AIMessageChunk(content="", additional_kwargs={_REASONING: text})
        else:
            yield AIMessageChunk(content="", tool_call_chunks=_call_chunks(run))


def last_chunk(metadata: Mapping[str, Any], usage: UsageMetadata, parts: Iterable[Part]) -> AIMessageChunk:
    """The chunk that ends a stream: facts about the call are on no other, since LangChain adds chunks up."""
    errors = [part.error for part in parts if isinstance(part, CallBroken)]
    more = {"invalid_tool_call_errors": errors} if errors else {}
    return AIMessageChunk(
        content="", response_metadata={**metadata, **more}, usage_metadata=usage, chunk_position="last"
    )


def facts(model: str, summary: Summary, calls: int, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a message's metadata says of its call."""
    info = finish_info(model, summary)
    del info["usage"]
    if calls and info["finish_reason"] == "stop":
        info["finish_reason"] = "tool_calls"
    info["model_provider"] = "metasd"
    return info if logprobs is None else {**info, "logprobs": logprobs}


def usage_of(summary: Summary) -> UsageMetadata:
    """Tokens of a call."""
    return UsageMetadata(
        input_tokens=summary.prompt_tokens,
        output_tokens=summary.completion_tokens,
        total_tokens=summary.prompt_tokens + summary.completion_tokens,
        input_token_details={"cache_read": 0},  # no prompt is read from a cache
    )


def why_ended(summary: Summary) -> str:
    """Why a reply ended, in words."""
    if summary.finish_reason == "length":
        return f"max_tokens or the model's window was reached after {summary.completion_tokens} tokens"
    return {"stop": "a stop came"}.get(summary.finish_reason, f"the call was {summary.finish_reason}")


def _kind(part: Part) -> type:
    return type(part) if isinstance(part, (Text, Reasoning)) else CallStart


def _call_chunks(parts: Iterable[Part]) -> list[ToolCallChunk]:
    """One chunk a call. Its id and name are on its first chunk only; LangChain joins the others by index."""
    made: dict[int, ToolCallChunk] = {}
    for part in parts:
        if isinstance(part, CallStart):
            made[part.index] = tool_call_chunk(name=part.name, args="", id=part.id, index=part.index)
        elif isinstance(part, CallArgs | CallBroken):
            # Of a broken call LangChain would complete what is open, and pass it off as a call.
            text = part.text if isinstance(part, CallArgs) else part.ending
            chunk = made.setdefault(part.index, tool_call_chunk(args="", index=part.index))
            chunk["args"] = f"{chunk['args']}{text}"
    return list(made.values())
