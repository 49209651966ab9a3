"""The error tree. Everything we raise on purpose is a ``MetaSDError``.

::

    MetaSDError (hint, retryable)
      ConfigError                 wrong set-up; raised before any weight is loaded
        UnknownName               a drafter, policy, reward or option that does not exist (lists what does)
        BadOption                 an option outside its range or of the wrong type
          BadGrammar              a schema, expression or grammar that cannot be compiled; says why
        MissingExtra              an optional dependency is not installed (names the extra)
        CorpusError               texts to train on are missing, damaged or too few
        BadTool                   a tool that cannot be offered, or two of one name
      LoadError                   a model could not be loaded
        UnsupportedModel          loaded, but its layers cannot be verified in one packed forward
        BadCheckpoint             a drafter's checkpoint is truncated, foreign or does not fit (names file and field)
        BadRouter                 a router's file is truncated, foreign or of a newer format (names file and field)
        BadDatastore              a datastore is empty, truncated or of a newer format
        IncompatibleVocabulary    a drafter or datastore was made for another tokenizer
      RequestError                wrong request; raised before any compute
        PromptTooLong             names the prompt's length and the limit
        UnsupportedParameter      a per-call option that does not exist
        UnsupportedContent        a message with an image, sound or file; names the block's type
        UnknownRole               a message of a role that no prompt has a place for
        TemplateFailed            the chat template refuses the conversation
        CapTooSmall               not even the shortest answer that a grammar allows fits; names both numbers
      EngineClosed                the engine was closed while the request was waiting or running
      Abandoned                   nobody will read the answer: another prompt of its batch failed
      DeadlineExceeded            the request's deadline passed; carries the partial text
      TargetError                 the target model's forward failed
      ConstraintFailed            a grammar's parser gave up in the middle of an answer
      DrafterError                a drafter drafted nonsense; costs its draft, never reaches the caller
      BanditMemoryError           a stored bandit state cannot be read
      TrainingError               training cannot go on (disk full, another run's files); what was saved stays
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "Abandoned",
    "BadCheckpoint",
    "BadDatastore",
    "BadGrammar",
    "BadOption",
    "BadRouter",
    "BadTool",
    "BanditMemoryError",
    "CapTooSmall",
    "ConfigError",
    "ConstraintFailed",
    "CorpusError",
    "DeadlineExceeded",
    "DrafterError",
    "EngineClosed",
    "IncompatibleVocabulary",
    "LoadError",
    "MetaSDError",
    "MissingExtra",
    "PromptTooLong",
    "RequestError",
    "TargetError",
    "TemplateFailed",
    "TrainingError",
    "UnknownName",
    "UnknownRole",
    "UnsupportedContent",
    "UnsupportedModel",
    "UnsupportedParameter",
]


class MetaSDError(Exception):
    """Base of all our errors.

    Args:
        message: what went wrong, for a person. Never holds prompt or answer text.
        hint: what to do about it, or "".
    """

    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.hint = hint
        super().__init__(f"{message} ({hint})" if hint else message)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by state: subclasses take other arguments than the message."""
        return _rebuild, (type(self), self.args, vars(self))


def _rebuild(kind: type[MetaSDError], args: tuple[Any, ...], state: dict[str, Any]) -> MetaSDError:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


class ConfigError(MetaSDError, ValueError):
    """The set-up is wrong; nothing was loaded."""


class UnknownName(ConfigError):
    """A name that nobody registered. The message lists every name that exists."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        near = difflib.get_close_matches(name, self.known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else ""
        super().__init__(f"unknown {kind} {name!r}; there are: {', '.join(self.known) or 'none'}", hint=hint)


class BadOption(ConfigError):
    """An option's value is outside its range or of the wrong type."""

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option, self.value, self.expected = option, value, expected
        super().__init__(f"{option}={value!r} is not valid: expected {expected}")


class BadGrammar(BadOption):
    """A JSON schema, regular expression or grammar that cannot be compiled.

    Attributes:
        option: what it was given as.
        reason: what the compiler says.
    """

    def __init__(self, option: str, reason: str) -> None:
        self.option, self.value, self.expected = option or "grammar", None, "what llguidance can compile"
        self.reason = reason
        ConfigError.__init__(self, f"{self.option} cannot be compiled: {reason}")


class MissingExtra(ConfigError, ImportError):
    """An optional dependency is missing; names the extra that brings it."""

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f"{what} is not installed", hint=f"pip install 'metasd-langchain[{extra}]'")


class CorpusError(ConfigError):
    """Texts to train on are missing, damaged or too few."""


class BadTool(ConfigError):
    """A tool that cannot be offered.

    Attributes:
        tool: its name, or its type where it has none.
    """

    def __init__(self, tool: str, reason: str) -> None:
        self.tool = tool
        super().__init__(f"tool {tool!r} cannot be offered: {reason}")


class LoadError(MetaSDError):
    """A model, tokenizer or checkpoint could not be loaded."""


class UnsupportedModel(LoadError):
    """The model has layers that packed verification cannot serve (recurrent, hybrid, encoder-decoder ...)."""


class BadCheckpoint(LoadError):
    """A drafter's checkpoint is truncated, foreign, or does not fit the target.

    Attributes:
        file: which file is wrong.
        field: which field or tensor in it, or "".
    """

    def __init__(self, file: str, field: str, problem: str, *, hint: str = "") -> None:
        self.file, self.field = file, field
        super().__init__(f"{file}{f', {field}' if field else ''}: {problem}", hint=hint)


class BadRouter(LoadError):
    """A router cannot be read or written, or does not fit the target.

    Attributes:
        file: which file is wrong, or "".
        field: which field or array in it, or "".
    """

    def __init__(self, file: str, field: str, problem: str, *, hint: str = "") -> None:
        self.file, self.field = file, field
        super().__init__(f"router {file}{f', {field}' if field else ''}: {problem}", hint=hint)


class BadDatastore(LoadError):
    """A datastore file cannot be read or built: nothing in it, truncated, foreign, or of a newer format."""


class IncompatibleVocabulary(LoadError):
    """A drafter or datastore speaks other token ids than the target."""


class RequestError(MetaSDError, ValueError):
    """The request is wrong; nothing was computed."""


class PromptTooLong(RequestError):
    """The prompt does not fit the model's window.

    Attributes:
        length: tokens in the prompt.
        limit: tokens that fit.
    """

    def __init__(self, length: int, limit: int) -> None:
        self.length, self.limit = length, limit
        super().__init__(
            f"the prompt has {length} tokens, the model's window holds {limit} and must keep one for the answer",
            hint="shorten the prompt or use a model with a longer window; nothing is cut silently",
        )


class UnsupportedParameter(RequestError, TypeError):
    """A per-call option that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(f"unknown option {name!r}; there are: {', '.join(sorted(known))}")


class UnsupportedContent(RequestError):
    """A message holds something that a text model cannot read.

    Attributes:
        kind: the content block's type, e.g. "image_url".
        role: of the message.
    """

    def __init__(self, kind: str, role: str) -> None:
        self.kind, self.role = kind, role
        super().__init__(
            f"content block of type {kind!r} in a {role} message: the model reads text only",
            hint="describe it in a text block, or leave it out",
        )


class UnknownRole(RequestError):
    """A message of a role that no prompt has a place for."""

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__(f"unknown role {role!r} of a message; there are: assistant, system, tool, user")


class TemplateFailed(RequestError):
    """The chat template refuses the conversation.

    Attributes:
        roles: of the messages, as the template was given them.
    """

    def __init__(self, reason: str, roles: Iterable[str]) -> None:
        self.roles = tuple(roles)
        super().__init__(
            f"the chat template fails ({reason}) for messages of the roles {', '.join(self.roles)}",
            hint="another chat_template=, or 'plain' for one that takes any conversation",
        )


class CapTooSmall(RequestError):
    """Not even the shortest answer that the grammar allows fits.

    Attributes:
        shortest: tokens of the shortest answer that was found.
        cap: tokens that an answer may have here.
    """

    def __init__(self, shortest: int, cap: int) -> None:
        self.shortest, self.cap = shortest, cap
        super().__init__(
            f"the shortest answer that the grammar allows has {shortest} tokens, and {cap} may be generated",
            hint="raise max_tokens or shorten the prompt; an answer is never cut where it would be invalid",
        )


class EngineClosed(MetaSDError, RuntimeError):
    """The engine was closed before the answer was complete."""


class Abandoned(MetaSDError, RuntimeError):
    """The answer was not finished because nobody will read it: another prompt of its batch failed."""


class DeadlineExceeded(MetaSDError, TimeoutError):
    """The deadline passed.

    Attributes:
        partial: the text generated so far.
    """

    retryable = True

    def __init__(self, seconds: float, partial: str) -> None:
        self.seconds, self.partial = seconds, partial
        super().__init__(f"no complete answer within {seconds:g} s")


class TargetError(MetaSDError, RuntimeError):
    """The target model's forward failed; the cause is chained."""


class ConstraintFailed(MetaSDError, RuntimeError):
    """A grammar's parser gave up in the middle of an answer: its limits were reached, or no token was legal.

    Attributes:
        reason: what the parser says, without any text.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the answer cannot go on under its grammar: {reason}")


class DrafterError(MetaSDError, RuntimeError):
    """A drafter drafted nonsense. The engine drops the draft and goes on."""


class BanditMemoryError(MetaSDError, RuntimeError):
    """A stored bandit state could not be read."""


class TrainingError(MetaSDError, RuntimeError):
    """Training cannot go on. What was saved before stays as it was."""
