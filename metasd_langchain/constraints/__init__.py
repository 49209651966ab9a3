"""What an answer may be: a JSON schema, a regular expression, one of several strings, or a grammar of one's own.

A `Grammar` is a value: text in llguidance's Lark dialect, in which JSON schemas stand as ``%json {...}``. Compiled for
a tokenizer (`metasd_langchain.constraints.compiled`) it becomes a `Constraint`, which opens one session for each
answer. A session is asked, never told: everything it says is a function of the answer's tokens and of how many may
still come. So nothing that was drafted and rejected can leave a trace in it, and drafts cannot change an answer.

Importing this loads neither llguidance nor torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from metasd_langchain.errors import BadOption

if TYPE_CHECKING:
    from metasd_langchain.constraints.legal import Legal
    from metasd_langchain.values import Draft

__all__ = ["Constraint", "ConstraintSession", "Grammar", "choice", "json_rule", "json_schema", "lark", "regex"]

# Written as json.dumps does. Free whitespace is not offered: a small model can go on with it for ever.
_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be.

    Args:
        lark: rules in llguidance's Lark dialect; the answer is a ``start``.
        label: the option it was made from, for error messages.
    """

    lark: str
    label: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.lark, str) or not self.lark.strip():
            raise BadOption(self.label or "grammar", self.lark, "a grammar with a rule named start")


class ConstraintSession(Protocol):
    """One answer under a constraint. Called on the engine's thread only.

    ``answer`` is always the whole answer up to a place: committed tokens, and for a drafted node the path to it too.

    Raises:
        ConstraintFailed: the answer is none of the grammar's, or the parser gave up.
    """

    def legal(self, answer: Sequence[int]) -> Legal:
        """Tokens that may come next. Never empty."""
        ...

    def allows(self, answer: Sequence[int], token: int) -> bool:
        """Whether a legal token still lets the answer be completed within its cap. Asked of every token before it is
        committed.
        """
        ...

    def tight(self, answer: Sequence[int]) -> bool:
        """Whether the end is so near that a single token may use up the room it needs."""
        ...

    def closing(self, answer: Sequence[int]) -> tuple[int, ...]:
        """What may come next on a short way to the end, where `allows` refuses what the target would rather say."""
        ...

    def ended(self, answer: Sequence[int]) -> bool:
        """Whether nothing can come any more: the answer is complete without a stop id."""
        ...

    def forced(self, answer: Sequence[int], limit: int) -> tuple[int, ...]:
        """The tokens, at most `limit`, that the grammar leaves no choice about: a free draft."""
        ...

    def pruned(self, answer: Sequence[int], draft: Draft) -> Draft:
        """The draft without its illegal nodes and what hangs on them."""
        ...


class Constraint(Protocol):
    """A grammar compiled for one tokenizer; shared by any number of answers."""

    def open(self, stop_ids: frozenset[int] = frozenset(), cap: int | None = None) -> ConstraintSession:
        """Begin an answer.

        Args:
            stop_ids: legal where the grammar may end, and nowhere else.
            cap: tokens within which the answer is to be complete; None: however many.
        """
        ...

    def shortest(self) -> int | None:
        """Tokens of the shortest answer that was found; None: none was."""
        ...


def json_schema(schema: Mapping[str, Any], *, label: str = "response_format") -> Grammar:
    """JSON that a schema allows, written as ``json.dumps`` does; keys in the order of ``properties``.

    Raises:
        BadOption: the schema is no JSON object.
    """
    return Grammar(f"start: {json_rule(schema, label=label)}", label)


def json_rule(schema: Mapping[str, Any], *, label: str = "response_format") -> str:
    """A schema as the right-hand side of a Lark rule, ``%json {...}``, to be put into grammars of one's own."""
    if not isinstance(schema, Mapping):
        raise BadOption(label, type(schema).__name__, "a JSON schema, which is a mapping")
    own = schema.get("x-guidance")
    guidance = {**(own if isinstance(own, Mapping) else {}), **_JSON}
    try:
        return "%json " + json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise BadOption(label, type(schema).__name__, "a schema of JSON values only") from cause


def regex(pattern: str, *, label: str = "regex") -> Grammar:
    """Text that a regular expression matches as a whole (Rust's syntax: no look-around, no back-references)."""
    if not isinstance(pattern, str) or not pattern:
        raise BadOption(label, pattern, "a regular expression")
    # "/" ends a Lark expression and a line break is none of its characters; what is escaped already stays.
    escaped = re.sub(
        r"\\.|/|\n|\r", lambda m: {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(m[0], m[0]), pattern, flags=re.DOTALL
    )
    return Grammar(f"start: /{escaped}/", label)


def choice(options: Sequence[str], *, label: str = "choices") -> Grammar:
    """One of several strings."""
    if isinstance(options, str) or not isinstance(options, Sequence) or not options:
        raise BadOption(label, options, "a list of at least one string")
    if any(not isinstance(option, str) or not option for option in options):
        raise BadOption(label, options, "strings that are not empty")
    texts = (json.dumps(option, ensure_ascii=False) for option in dict.fromkeys(options))
    return Grammar("start: " + " | ".join(texts), label)


def lark(text: str, *, label: str = "grammar") -> Grammar:
    """A grammar in llguidance's Lark dialect, whose ``start`` is the answer."""
    return Grammar(text, label)
