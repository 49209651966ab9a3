"""One call of a chat model: what it is about, and its steps as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from metasd_langchain.messages import chunks, facts, last_chunk, usage_of, whole, why_ended
from metasd_langchain.reply import ReplyParser
from metasd_langchain.reply_parts import Part
from metasd_langchain.tool_formats import Tool
from metasd_langchain.turns import Rendered, Turn
from metasd_langchain.values import Step

__all__ = ["Heard", "Reply", "Talk"]


class Heard(BaseCallbackHandler):
    """What LangChain tells handlers of one run: it stands for the run's manager where LangChain hands none on."""

    run_id: UUID | None = None
    parent_run_id: UUID | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] = MappingProxyType({})

    @property
    def handlers(self) -> list[BaseCallbackHandler]:
        """Handlers that are added to every manager, an instrumentor's among them."""
        return CallbackManager([]).handlers

    def on_chat_model_start(
        self,
        serialized: Mapping[str, Any],
        messages: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """The run began."""
        self.run_id, self.parent_run_id = run_id, parent_run_id
        self.tags, self.metadata = tags or (), metadata or {}


@dataclass(slots=True)
class Talk:
    """What one call is about, besides options.

    Args:
        turns: the conversation.
        tools: what is on offer.
        callable: which of them may be called.
        choice: "none", "auto" or "forced".
        several: whether more than one call may come; None: as the model was taught.
        answer: JSON schema of an answer that is no call, or None.
        rendered: the prompt, once the engine is at hand.
    """

    turns: list[Turn]
    tools: list[Tool]
    callable: list[Tool]
    choice: str
    several: bool | None = None
    answer: Mapping[str, Any] | None = None
    rendered: Rendered | None = None

    def parser(self) -> ReplyParser:
        """What reads the reply."""
        made = self.rendered
        if made is None:
            raise RuntimeError("the prompt has not been rendered")
        form = made.form if self.choice != "none" else None
        return ReplyParser(form, opened=made.opened, think=made.think, said=made.said, trim=made.trim)


class Reply:
    """One answer's steps as messages.

    Args:
        talk: what was asked.
        model: name for the metadata.
        logprobs: makes the entry for log-probabilities of the steps that hold some; None where nobody asked for them.
    """

    def __init__(self, talk: Talk, model: str, logprobs: Callable[[Sequence[Step]], dict[str, Any] | None]) -> None:
        self._talk, self._model, self._logprobs = talk, model, logprobs
        self._parser: ReplyParser | None = None
        self._with_logprobs: list[Step] = []
        self._all: list[Part] = []

    def read(self, step: Step) -> Iterator[ChatGenerationChunk]:
        """Chunks of a step; the last step's end with the one that holds usage and metadata."""
        parts = self._parts(step)
        for message in chunks(parts):
            yield ChatGenerationChunk(message=message)
        if step.summary is not None:
            message = last_chunk(self._facts(step), usage_of(step.summary), self._all)
            yield ChatGenerationChunk(message=message, generation_info=_short(message))

    def message(self, steps: Sequence[Step]) -> AIMessage:
        """The message of all steps."""
        for step in steps:
            self._parts(step)
        last = steps[-1]
        usage = None if last.summary is None else usage_of(last.summary)
        return whole(self._all, self._facts(last), usage)

    def _parts(self, step: Step) -> list[Part]:
        if self._parser is None:  # the prompt is there as soon as a step is
            self._parser = self._talk.parser()
        if step.logprobs:
            self._with_logprobs.append(step)
        parts = self._parser.feed(step.text)
        if step.summary is not None:
            parts += self._parser.end(why_ended(step.summary))
        self._all += parts
        return parts

    def _facts(self, step: Step) -> dict[str, Any]:
        if step.summary is None or self._parser is None:
            return {}
        return facts(self._model, step.summary, self._parser.calls, self._logprobs(self._with_logprobs))


def _short(message: AIMessageChunk) -> dict[str, Any]:
    return {name: message.response_metadata[name] for name in ("finish_reason", "model_name")}
