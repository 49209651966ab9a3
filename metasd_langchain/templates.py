"""Conversations as text: a model's own chat template, whatever it can and cannot say, or a plain default.

A template is asked once what it shows (system messages, tools, calls, results ...); what it would drop or refuse is put
where it is shown. Text of users, tools and documents never becomes a control token: where it holds the name of one, it
is cut inside the name before tokens are made.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metasd_langchain.control_tokens import control_tokens, neutral, neutral_value
from metasd_langchain.errors import BadOption, MissingExtra, TemplateFailed
from metasd_langchain.plain_template import PlainTemplate
from metasd_langchain.tool_formats import Call, Tool, ToolFormat, format_of
from metasd_langchain.turns import Rendered, Template, Turn, leading, merged

__all__ = ["ModelTemplate", "check_template", "template_for"]

_PLAIN = "plain"
_THINK = ("<think>", "</think>")

_known: weakref.WeakKeyDictionary[Any, dict[object, Template]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def check_template(template: Any, tool_format: Any) -> None:
    """Raise for what can be no template or no format."""
    if template is not None and (not isinstance(template, str) or not template.strip()):
        raise BadOption("chat_template", type(template).__name__, "Jinja text, or 'plain'")
    if template not in (None, _PLAIN) and "{" not in template:
        raise BadOption("chat_template", template[:40], "Jinja text, which has {{ }} or {% %}, or 'plain'")
    format_of("", tool_format)


def template_for(
    target: Any, template: str | None, tool_format: str | None, kwargs: Mapping[str, Any] | None = None
) -> Template:
    """The template for a target; made once for each set of options.

    Args:
        target: `metasd_langchain.models.load.Target`, or what has its ``lm`` and ``tokenizer``.
        template: Jinja text, "plain", or None for the model's own.
        tool_format: see `ModelTemplate`.
        kwargs: see `ModelTemplate`.
    """
    key = (template, tool_format, json.dumps(dict(kwargs or {}), sort_keys=True, default=repr))
    with _lock:
        known = _known.setdefault(target.lm, {})
        found = known.get(key)
        if found is None:
            plain = template == _PLAIN or (template is None and not _source(target.tokenizer))
            found = known[key] = (
                PlainTemplate(control_tokens(target.tokenizer, ""))
                if plain
                else ModelTemplate(target.tokenizer, template, tool_format, kwargs)
            )
        return found


# -- a model's own template -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shows:
    """What a template shows when it is given it; False: it drops or refuses it."""

    system: bool
    later_system: bool
    tools: bool
    calls: bool
    assistant_first: bool
    user_needed: bool


class ModelTemplate(Template):
    """The model's own chat template.

    Args:
        tokenizer: transformers tokenizer.
        template: Jinja text instead of the tokenizer's, or None.
        tool_format: how calls are written, or None for what the template says.
        kwargs: variables for the template, such as ``enable_thinking``.
    """

    def __init__(
        self, tokenizer: Any, template: str | None, tool_format: str | None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer, self._template, self._kwargs = tokenizer, template, dict(kwargs or {})
        self.source = template if template is not None else _source(tokenizer)
        form = format_of(self.source, tool_format)
        self._special = _special(tokenizer, form)
        self.form = _visible(form, self._special)
        self.names = control_tokens(tokenizer, self.source)
        self._think = _THINK if _THINK[1] in self.source else None
        self._known: _Shows | None = None

    def render(
        self, turns: Sequence[Turn], tools: Sequence[Tool] = (), choice: str = "none", note: str = ""
    ) -> Rendered:
        """See `Template.render`."""
        shows = self._shows
        clean = functools.partial(neutral, names=self.names)
        turns = [_neutral_turn(turn, clean) for turn in turns]
        tools = [Tool(*neutral_value([tool.name, tool.description, tool.parameters], clean)) for tool in tools]
        extra = [note] if note else []
        if tools and not (shows.tools and shows.calls):
            extra.insert(0, self.form.described(tools))
        given = [tool.openai for tool in tools] if shows.tools and shows.calls else None
        turns = self._shown([*(Turn("system", text) for text in extra), *turns], shows)
        prefill = choice == "none" and turns[-1].role == "assistant" and not turns[-1].calls
        text = self._jinja(turns, given, prefill)
        opened = "think" if self._think and not prefill and text.rstrip().endswith(self._think[0]) else ""
        return Rendered(text, self.form, opened=opened, think=self._think, special=self._special)

    def _shown(self, turns: Sequence[Turn], shows: _Shows) -> list[Turn]:
        """The conversation in words that the template has."""
        if not shows.calls:
            turns = [self._without_calls(turn) for turn in turns]
        turns = merged(turns)
        start = sum(1 for _ in leading(turns, "system"))
        if not shows.later_system:
            turns = merged(
                [*turns[:start], *(replace(t, role="user") if t.role == "system" else t for t in turns[start:])]
            )
        if not shows.system or not any(turn.role == "user" for turn in turns):
            turns = merged([replace(turn, role="user") if turn.role == "system" else turn for turn in turns])
        first = next((place for place, turn in enumerate(turns) if turn.role != "system"), len(turns))
        lacks_user = shows.user_needed and not any(turn.role == "user" for turn in turns)
        if lacks_user or (first < len(turns) and turns[first].role != "user" and not shows.assistant_first):
            turns = [*turns[:first], Turn("user", "..."), *turns[first:]]
        return turns

    def _without_calls(self, turn: Turn) -> Turn:
        if turn.role == "tool":
            return Turn("user", self.form.result(turn.name, turn.text))
        if not turn.calls:
            return turn
        return Turn(turn.role, "\n".join(part for part in (turn.text, self.form.written(turn.calls)) if part))

    # what the template shows

    @property
    def _shows(self) -> _Shows:
        if self._known is None:
            self._known = self._probed()
        return self._known

    def _probed(self) -> _Shows:
        user, said, system = Turn("user", "PROBEUSER"), Turn("assistant", "PROBESAID"), Turn("system", "PROBESYSTEM")
        call = Turn("assistant", "", (Call("probetool", {"probekey": "PROBEVALUE"}, "abcdefgh1"),))
        result = Turn("tool", "PROBERESULT", call_id="abcdefgh1", name="probetool")
        tools = [Tool("probetool", "probe", {"type": "object", "properties": {}}).openai]
        probe = self._probe
        return _Shows(
            system=probe([system, user], system.text),
            later_system=probe([user, said, system, user], system.text),
            tools=probe([user], "probetool", tools),
            calls=probe([user, call, result], "PROBEVALUE", tools) and probe([user, call, result], result.text, tools),
            assistant_first=probe([said, user], said.text),
            user_needed=not probe([system], system.text) and probe([system, user], system.text),
        )

    def _probe(self, turns: Sequence[Turn], shown: str, tools: Any = None) -> bool:
        try:
            return shown in self._jinja(turns, tools, False)
        except TemplateFailed:
            return False

    def _jinja(self, turns: Sequence[Turn], tools: Any, prefill: bool) -> str:
        messages = [self._message(turn) for turn in turns]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=not prefill,
                continue_final_message=prefill,
                **self._kwargs,
            )
        except ImportError as cause:
            raise MissingExtra("Jinja, which chat templates are written in,", "chat") from cause
        except Exception as cause:
            # Jinja quotes neither messages nor values; but a template may raise what it likes, so only the kind shows.
            raise TemplateFailed(type(cause).__name__, [turn.role for turn in turns]) from cause
        return text

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "id": self._id(call.id), "function": {"name": call.name, "arguments": call.args}}
                for call in turn.calls
            ]
        if turn.role == "tool":
            message |= {"tool_call_id": self._id(turn.call_id)}
        if turn.name:
            message["name"] = turn.name
        return message

    def _id(self, given: str) -> str:
        """An id as the template takes it; Mistral's want exactly nine letters and digits."""
        if self.form.name != "mistral" or (len(given) == 9 and given.isalnum()):
            return given
        return hashlib.blake2s(given.encode(), digest_size=8).hexdigest()[:9]


def _special(tokenizer: Any, form: ToolFormat) -> dict[str, int]:
    """Markers of a format that are control tokens of the tokenizer, whose text nobody sees."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {token.content: number for number, token in added.items() if token.special}
    marks = {mark.strip() for mark in (form.opener, form.closer)}
    return {mark: ids[mark] for mark in marks if mark in ids}


def _visible(form: ToolFormat, special: Mapping[str, int]) -> ToolFormat:
    """The format as it looks where its opener is no text: what follows it begins the calls."""
    start = '[{"name"' if form.listed else '{"name"'
    if form.opener.strip() not in special or start in form.starts:
        return form
    return replace(form, starts=(*form.starts, start))


def _source(tokenizer: Any) -> str:
    """Text of a tokenizer's template; of several, all of them."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template or "")


def _neutral_turn(turn: Turn, clean: Callable[[str], str]) -> Turn:
    calls = tuple(Call(clean(call.name), neutral_value(call.args, clean), clean(call.id)) for call in turn.calls)
    return Turn(turn.role, clean(turn.text), calls, clean(turn.call_id), clean(turn.name))
