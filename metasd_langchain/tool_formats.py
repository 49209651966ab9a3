"""How model families write tool calls: what begins one, what ends it, under which key the arguments stand.

A format serves three sides that must agree: calls written into a prompt's history, the grammar of an answer, and the
parser of what comes back (`metasd_langchain.reply`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metasd_langchain.errors import BadOption

__all__ = ["FORMATS", "PLAIN_FORMAT", "Call", "Tool", "ToolFormat", "format_of"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call.

    Args:
        name: unique among the tools of a call.
        description: for the model.
        parameters: JSON schema of the arguments, an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def openai(self) -> dict[str, Any]:
        """As chat templates are given tools."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a conversation.

    Args:
        name: of the tool.
        args: the arguments.
        id: what the result refers to, or "".
    """

    name: str
    args: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way of writing tool calls.

    Args:
        name: what ``tool_format=`` calls it.
        opener, closer: what stands before and after a call, or around the list of calls.
        between: what parts two calls.
        key: under which the arguments stand, beside ``"name"``; "" where a call is its name, `parts` and the arguments.
        parts: what stands between name and arguments in calls of that kind, as far as the family writes them.
        listed: several calls are one JSON list inside one pair of opener and closer.
        opens: strings that begin calls anywhere in a reply.
        starts: strings that begin calls at the start of a reply, and are part of them.
        python: calls may be written as Python calls with keyword arguments.
    """

    name: str
    opener: str
    closer: str
    between: str
    key: str = "arguments"
    parts: str = ""
    listed: bool = False
    opens: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    python: bool = False

    def written(self, calls: Sequence[Call]) -> str:
        """Calls as the model would have written them."""
        bodies = [self.body(call) for call in calls]
        if self.listed:
            return f"{self.opener}[{', '.join(bodies)}]{self.closer}"
        return self.between.join(f"{self.opener}{body}{self.closer}" for body in bodies)

    def body(self, call: Call) -> str:
        """A call as the grammar demands it."""
        return f"{self.front(call.name)}{json.dumps(dict(call.args), ensure_ascii=False)}{self.back}"

    def front(self, name: str) -> str:
        """A call up to its arguments."""
        if not self.key:
            return f"{name}{self.parts}"
        return f'{json.dumps({"name": name}, ensure_ascii=False)[:-1]}, "{self.key}": '

    @property
    def back(self) -> str:
        """A call behind its arguments."""
        return "}" if self.key else ""

    def described(self, tools: Sequence[Tool]) -> str:
        """A block for the system message that offers the tools, for chat templates with no place for them."""
        listed = "\n".join(json.dumps(tool.openai["function"], ensure_ascii=False) for tool in tools)
        shape = f"{self.front('<name of the tool>')}{{<arguments>}}{self.back}"
        example = f"{self.opener}{f'[{shape}]' if self.listed else shape}{self.closer}"
        return (
            f"You have these tools, each with a JSON schema of its parameters:\n\n{listed}\n\n"
            "When a tool helps with the request, reply with a call of it and nothing else, in this form:\n\n"
            f"{example}\n\nWhen no tool is needed, reply in plain text."
        )

    def result(self, name: str, text: str) -> str:
        """A tool's result as a user's message, for chat templates without a role for it."""
        return f"<tool_response>\n{json.dumps({'name': name, 'content': text}, ensure_ascii=False)}\n</tool_response>"


# Ours, for models without a chat template: a call is a turn with a label of its own, as in a script or a transcript,
# which base models have seen.
PLAIN_FORMAT = ToolFormat(
    "plain",
    "Tool call: ",
    "",
    "\n\n",
    key="",
    parts="\nArguments: ",
    opens=("\nTool call:",),
    starts=("Tool call:",),
)

FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "\n", opens=("<tool_call>",)),
    "llama3": ToolFormat(
        "llama3",
        "",
        "",
        "; ",
        key="parameters",
        opens=("<|python_tag|>",),
        starts=('{"name"', '{"type": "function"', '{"type":"function"'),
        python=True,
    ),
    "mistral": ToolFormat(
        "mistral",
        "[TOOL_CALLS]",
        "",
        ", ",
        parts="[ARGS]",
        listed=True,
        opens=("[TOOL_CALLS]",),
        starts=('[{"name"',),
    ),
    "gemma": ToolFormat(
        "gemma",
        "```tool_code\n",
        "\n```",
        "\n",
        key="parameters",
        opens=("```tool_code", "```tool_call"),
        starts=('{"name"', '[{"name"'),
        python=True,
    ),
    "plain": PLAIN_FORMAT,
}

# A string in a chat template -> the format that its model was taught; the first that is found.
_SIGNS = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ("<|start_header_id|>", "llama3"),
    ("<start_of_turn>", "gemma"),
)


def format_of(template: str, wanted: str | None = None) -> ToolFormat:
    """The format for a chat template.

    Args:
        template: its text.
        wanted: ``tool_format=``; None: what the template's text says, else "hermes".

    Raises:
        BadOption: no such format.
    """
    if wanted is not None:
        if wanted not in FORMATS:
            raise BadOption("tool_format", wanted, ", ".join(sorted(FORMATS)))
        return FORMATS[wanted]
    return FORMATS[next((name for sign, name in _SIGNS if sign in template), "hermes")]
