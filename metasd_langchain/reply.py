"""What a reply's text means: content, reasoning, tool calls; as it streams, piece by piece.

Nothing is repaired. A call that is cut or is no valid JSON is reported as broken, with the reason.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

from metasd_langchain.reply_parts import (
    CallArgs,
    CallBroken,
    CallStart,
    JsonObject,
    Part,
    Reasoning,
    Text,
    json_string,
    python_calls,
)
from metasd_langchain.tool_formats import ToolFormat

__all__ = ["ReplyParser"]

_PARTING = (",", ";", "[", "]", "`")  # between calls, and around lists of them


class ReplyParser:
    """Text pieces of one reply to parts.

    Joined, the texts of all parts hold everything but markers and, with `trim`, the white space around the content.

    Args:
        form: how calls are written; None: the reply holds none, whatever it looks like.
        opened: what the prompt has begun already: "", "call" or "think".
        think: the tags around reasoning, or None.
        said: label that a reply in text begins with, or "".
        trim: drop white space around the content.
        short_ids: ids of nine characters, as Mistral's templates want them.
    """

    def __init__(
        self,
        form: ToolFormat | None,
        *,
        opened: str = "",
        think: tuple[str, str] | None = None,
        said: str = "",
        trim: bool = False,
        short_ids: bool = False,
    ) -> None:
        self._form, self._said, self._trim, self._short_ids = form, said, trim, short_ids
        self._think = think
        self._held = ""
        self._state = {"call": self._between, "think": self._thinking}.get(opened, self._start)
        self._index = -1  # of the call
        self._begun = False  # text for the user has come
        self._object: JsonObject | None = None
        self._told = False  # the call's start has been reported
        self._early = ""  # arguments that came before the name
        self._white = ""  # white space that may turn out to stand at the end

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return self._index + 1

    def feed(self, text: str) -> list[Part]:
        """Parts that became final with a piece of text."""
        self._held += text
        parts: list[Part] = []
        while True:
            before = (self._held, self._state)
            parts += self._state(last=False)
            if (self._held, self._state) == before:
                return _joined(parts)

    def end(self, why: str) -> list[Part]:
        """The rest, when no more text comes.

        Args:
            why: why it ends, for the error of a call that is not complete.
        """
        parts: list[Part] = []
        while self._held:
            before = (self._held, self._state)
            parts += self._state(last=True)
            if (self._held, self._state) == before:
                break
        if self._object is not None:
            parts += self._broken(f"the call is cut: {why}")
        elif self._state == self._between and self._index < 0:
            parts += self._no_call("", f"the call is cut: {why}")
        return _joined(parts)

    # -- states: each takes what it can from the front of what is held ------------------------------------------------

    def _start(self, last: bool) -> list[Part]:
        """Nothing but white space has been read."""
        text = self._held.lstrip()
        labels = [self._said] if self._said else []
        if self._think is not None:
            labels.append(self._think[0])
        starts = self._form.starts if self._form is not None else ()
        if not last and any(label.startswith(text) for label in (*labels, *starts)):
            return []
        if self._think is not None and text.startswith(self._think[0]):
            self._held = text[len(self._think[0]) :]
            self._state = self._thinking
            return []
        if self._form is not None and text.startswith(starts):
            label = next(start for start in starts if text.startswith(start))
            # a label is no part of the call; the beginning of JSON is
            self._held = text if label[0] in "{[" else text[len(label) :]
            self._state = self._between
            return []
        if self._said and text.startswith(self._said):
            self._held = text[len(self._said) :]
        self._state = self._text
        return []

    def _thinking(self, last: bool) -> list[Part]:
        assert self._think is not None  # noqa: S101 - the state is entered with tags only
        text, found = self._until((self._think[1],), last)
        if found:
            self._state = self._start
        return [Reasoning(text)] if text else []

    def _text(self, last: bool) -> list[Part]:
        opens = self._form.opens if self._form is not None else ()
        text, found = self._until(opens, last)
        if found:
            self._state = self._between
        if not self._trim:
            return [Text(text)] if text else []
        if not self._begun:
            text = text.lstrip()
        if not text:
            return []
        self._begun = True
        text = self._white + text
        kept = text.rstrip()
        self._white = text[len(kept) :]
        return [Text(kept)] if kept else []

    def _between(self, last: bool) -> list[Part]:
        """In front of a call, or behind one."""
        form = self._form
        if form is None:
            self._state = self._text
            return []
        text = self._held.lstrip()
        marks = tuple(mark.strip() for mark in (*form.opens, form.closer, form.opener) if mark.strip())
        mark = next((mark for mark in marks if text.startswith(mark)), "")
        if not last and not mark and any(one.startswith(text) for one in marks):
            return []
        python = form.python and text.startswith("[") and not text[1:].lstrip().startswith("{")
        if mark or (text[:1] in _PARTING and not python):
            self._held = text[max(1, len(mark)) :]
            return []
        if text.startswith("{"):
            self._held, self._object, self._told, self._early = text, JsonObject(), False, ""
            self._index += 1
            self._state = self._in_call
            return []
        return self._other(form, text, last)

    def _other(self, form: ToolFormat, text: str, last: bool) -> list[Part]:
        """Neither an object nor a marker stands where a call may."""
        if form.python and (text or not last):
            return self._python(text, last)
        mark = form.parts.strip()
        if mark and mark in text:
            name, _, self._held = text.partition(mark)
            self._index += 1
            self._state = self._bare
            return [CallStart(self._index, self._id(), name.strip())]
        if mark and not last and _is_name(text[: len(text) - _overlap(text, mark)]):
            return []
        if self._index < 0:
            # all that is left belongs to the error
            return self._no_call(text, "no JSON object follows the beginning of the call") if last else []
        self._held, self._begun = text, True  # calls were read: this is text again
        if text:
            self._state = self._text
        return []

    def _no_call(self, text: str, error: str) -> list[Part]:
        """A marker was read, and what stands behind it is no call."""
        self._index += 1
        self._held = ""
        return [
            CallStart(self._index, self._id(), ""),
            CallArgs(self._index, text),
            CallBroken(self._index, text, error, "]"),
        ]

    def _in_call(self, last: bool) -> list[Part]:
        assert self._object is not None  # noqa: S101 - the state is entered with one
        assert self._form is not None  # noqa: S101
        parts: list[Part] = []
        keys = (self._form.key, "arguments", "parameters")
        for place, char in enumerate(self._held):
            inside = self._object.push(char)
            if inside and self._object.key in keys:
                self._early += inside
            if not self._told and "name" in self._object.values and not self._object.done:
                self._told = True
                parts.append(CallStart(self._index, self._id(), json_string(self._object.values["name"])))
            if self._told and self._early:
                parts.append(CallArgs(self._index, self._early))
                self._early = ""
            if self._object.done:
                self._held = self._held[place + 1 :]
                return parts + self._ended(keys)
        self._held = ""
        return parts

    def _bare(self, last: bool) -> list[Part]:
        """The arguments alone, behind ``name[ARGS]``."""
        if self._object is None:
            self._held = self._held.lstrip()
            if not self._held:
                return []
            self._object, self._told = JsonObject(), True
        for place, char in enumerate(self._held):
            self._object.push(char)
            if self._object.done:
                text, self._held = self._held[: place + 1], self._held[place + 1 :]
                return [CallArgs(self._index, text), *self._checked(self._object.text)]
        text, self._held = self._held, ""
        return [CallArgs(self._index, text)]

    def _python(self, text: str, last: bool) -> list[Part]:
        """Calls written in Python, read when they are complete."""
        form = self._form
        assert form is not None  # noqa: S101 - the state is entered with a form
        end = text.find("```")
        if end < 0 and not last:
            return []
        body, self._held = (text[:end], text[end + 3 :]) if end >= 0 else (text, "")
        self._state = self._between if end >= 0 else self._text
        found = python_calls(body)
        if found is None:
            if self._index >= 0:
                self._state = self._text
                return [Text(body)] if body.strip() else []
            self._index += 1
            return [
                CallStart(self._index, self._id(), ""),
                CallArgs(self._index, body),
                CallBroken(self._index, body, "it is neither a JSON object nor a Python call", "]"),
            ]
        parts: list[Part] = []
        for name, args in found:
            self._index += 1
            parts += [CallStart(self._index, self._id(), name), CallArgs(self._index, args)]
        return parts

    # -- ends of calls ------------------------------------------------------------------------------------------------

    def _ended(self, keys: tuple[str, ...]) -> list[Part]:
        """A call's object is closed."""
        assert self._object is not None  # noqa: S101
        found = self._object
        parts: list[Part] = []
        if not self._told:
            self._told = True
            parts.append(CallStart(self._index, self._id(), json_string(found.values.get("name", ""))))
            if self._early:
                parts.append(CallArgs(self._index, self._early))
        if not any(key in found.values for key in keys):
            parts.append(CallArgs(self._index, "{}"))  # a tool without parameters
        if not json_string(found.values.get("name", "")):
            return parts + self._broken("the call names no tool")
        args = next((found.values[key] for key in keys if key in found.values), "{}")
        return parts + self._checked(args, found.text)

    def _checked(self, args: str, whole: str = "{}") -> list[Part]:
        try:
            json.loads(whole)
            if not isinstance(json.loads(args), dict):
                return self._broken("the arguments are no JSON object")
        except ValueError as error:
            return self._broken(f"the arguments are no valid JSON: {error}")
        self._object, self._state = None, self._between
        return []

    def _broken(self, error: str) -> list[Part]:
        assert self._object is not None  # noqa: S101
        found, self._object, self._state = self._object, None, self._between
        parts: list[Part] = []
        if not self._told:
            self._told = True
            parts.append(CallStart(self._index, self._id(), ""))
            parts.append(CallArgs(self._index, self._early or found.text))
        form = self._form
        args = found.values.get(form.key, "") if form is not None else ""
        return [*parts, CallBroken(self._index, args or self._early or found.text, error, found.ending())]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _until(self, marks: tuple[str, ...], last: bool) -> tuple[str, bool]:
        """Text up to the first mark, which is dropped; what may yet become one is held."""
        places = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if places:
            at, _, mark = min(places)
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return text, True
        keep = 0 if last else max((_overlap(self._held, mark) for mark in marks), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _id(self) -> str:
        name = uuid.uuid4().hex
        return name[:9] if self._short_ids else f"call_{name[:24]}"


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that begins the mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def _is_name(text: str) -> bool:
    return text.strip().replace("-", "_").replace(".", "_").isidentifier()


def _joined(parts: list[Part]) -> list[Part]:
    """Neighbouring pieces of one text or call made one part."""
    return list(_joining(parts))


def _joining(parts: list[Part]) -> Iterator[Part]:
    held: Part | None = None
    for part in parts:
        if isinstance(held, Text) and isinstance(part, Text):
            held = Text(held.text + part.text)
        elif isinstance(held, Reasoning) and isinstance(part, Reasoning):
            held = Reasoning(held.text + part.text)
        elif isinstance(held, CallArgs) and isinstance(part, CallArgs) and held.index == part.index:
            held = CallArgs(held.index, held.text + part.text)
        else:
            if held is not None:
                yield held
            held = part
    if held is not None:
        yield held
