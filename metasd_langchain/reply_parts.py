"""What replies are made of: parts for the caller, and the two ways in which calls are written, read strictly."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass

__all__ = [
    "CallArgs",
    "CallBroken",
    "CallStart",
    "JsonObject",
    "Part",
    "Reasoning",
    "Text",
    "json_string",
    "python_calls",
]


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text between think tags."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArgs:
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that is none.

    Attributes:
        index: of the call.
        text: its arguments as far as they came.
        error: why it is none.
        ending: appended to the streamed arguments it keeps LangChain from completing them by guess.
    """

    index: int
    text: str
    error: str
    ending: str


Part = Text | Reasoning | CallStart | CallArgs | CallBroken


class JsonObject:
    """Follows one JSON object, character by character.

    Attributes:
        text: what was read.
        done: the object is closed.
        values: finished values of its own keys, as JSON text.
        key: whose value is being read, or "".
    """

    def __init__(self) -> None:
        self.text = ""
        self.done = False
        self.values: dict[str, str] = {}
        self.key = ""
        self._value = ""
        self._string = self._escaped = False
        self._stack: list[str] = []

    def push(self, char: str) -> str:
        """Read a character; returns it when it is part of a value of one of the object's own keys."""
        self.text += char
        if self._string:
            self._in_string(char)
        elif char == '"':
            self._string = True
        elif char in "{[":
            self._stack.append(char)
            if len(self._stack) == 1:
                return ""
        elif char in "}]":
            return self._closed(char)
        elif len(self._stack) == 1 and char in ":,":
            self._parted(char)
            return ""
        return self._part(char)

    def ending(self) -> str:
        """What makes the text invalid for good, where something lenient would close what is open."""
        string = ('\\"' if self._escaped else '"') if self._string else ""
        return string + ("}" if self._stack and self._stack[-1] == "[" else "]")

    def _in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._string = False

    def _closed(self, char: str) -> str:
        if self._stack:
            self._stack.pop()
        if self._stack:
            return self._part(char)
        self.done = True
        self._finish()
        return ""

    def _parted(self, char: str) -> None:
        if char == ",":
            self._finish()
        elif not self.key:
            self.key, self._value = json_string(self._value.strip()), ""

    def _finish(self) -> None:
        if self.key:
            self.values.setdefault(self.key, self._value.strip())
        self.key, self._value = "", ""

    def _part(self, char: str) -> str:
        """A character of a key or of a value."""
        if not self._value and char.isspace():
            return ""
        self._value += char
        return char if self.key else ""


def json_string(text: str) -> str:
    """A JSON string's value, or "" for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments of ``f(a=1)``, of ``print(f(a=1))`` or of a list of calls; None for anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, (ast.List, ast.Tuple)) else [tree]
        return [_python_call(call) for call in calls] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr) -> tuple[str, str]:
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print" and call.args:
        call = call.args[0]
    if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("no call with keyword arguments")
    args = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    return ast.unparse(call.func), json.dumps(args, ensure_ascii=False, allow_nan=False)
