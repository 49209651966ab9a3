"""The nouns of a prompt: turns of a conversation, and the text they become. No tokenizer in here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from metasd_langchain.tool_formats import Call, Tool, ToolFormat

__all__ = ["Rendered", "Template", "Turn", "leading", "merged"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message, as far as a prompt shows it.

    Args:
        role: "system", "user", "assistant" or "tool".
        text: its text.
        calls: the assistant's tool calls.
        call_id: the call that a tool's result belongs to.
        name: the tool's, or the speaker's.
    """

    role: str
    text: str
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, and what the reply to it looks like.

    Args:
        text: may hold cut marks, see `encoded`.
        form: how calls are written.
        stop: strings that end the reply.
        said: label that the reply begins with when it is text ("Assistant:"), or "".
        opened: what already stands before the reply: "", "call" (the opener of a call) or "think".
        taught: the model was taught the template, and so when a reply is complete.
        special: control tokens that mark calls -> their ids; they are no text.
        think: the tags around reasoning, where the model's template has them.
        trim: white space around the reply's text is no part of it.
    """

    text: str
    form: ToolFormat
    stop: tuple[str, ...] = ()
    said: str = ""
    opened: str = ""
    think: tuple[str, str] | None = None
    trim: bool = False
    taught: bool = True
    special: Mapping[str, int] = field(default_factory=dict)


class Template(Protocol):
    """What makes prompts of conversations."""

    def render(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), choice: str = "none", note: str = ""
    ) -> Rendered:
        """The prompt for a reply to a conversation.

        Args:
            turns: the conversation.
            tools: what is on offer.
            choice: what the reply may be: "none" (text), "auto" (calls or text) or "forced" (calls).
            note: what is asked of the reply's form.

        Raises:
            TemplateFailed: the template refuses the conversation in every form that we know.
        """
        ...


def merged(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbours of one role made one turn, as most templates demand; results of tools stay apart."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        same = last is not None and last.role == turn.role != "tool" and last.name == turn.name
        if last is None or not same or last.calls:
            joined.append(turn)
            continue
        text = "\n\n".join(part for part in (last.text, turn.text) if part)
        joined[-1] = replace(last, text=text, calls=turn.calls)
    return joined


def leading(turns: Sequence[Turn], role: str) -> Sequence[Turn]:
    """The turns of a role in front of all others."""
    end = next((place for place, turn in enumerate(turns) if turn.role != role), len(turns))
    return turns[:end]
