"""Reading a drafter's options, each wrong one named.

Not a drafter: this module has no ``create``.
"""

from __future__ import annotations

from collections.abc import Iterable

from metasd_langchain.drafters import Options
from metasd_langchain.errors import BadOption

__all__ = ["choice", "flag", "only", "text", "whole"]


def only(options: Options, known: Iterable[str]) -> None:
    """Refuse options that do not exist."""
    names = sorted(known)
    for name, value in options.items():
        if name not in names:
            raise BadOption(name, value, f"one of the options {', '.join(names)}")


def whole(options: Options, name: str, default: int, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadOption(name, value, f"a whole number from {low} to {high}")
    return value


def flag(options: Options, name: str, default: bool) -> bool:
    """True or False."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise BadOption(name, value, "True or False")
    return value


def choice(options: Options, name: str, known: tuple[str, ...]) -> str:
    """One of the known words; the first is the default."""
    value = options.get(name, known[0])
    if not isinstance(value, str) or value not in known:
        raise BadOption(name, value, f"one of {', '.join(known)}")
    return value


def text(options: Options, name: str, default: str) -> str:
    """A word that is not empty."""
    value = options.get(name, default)
    if not isinstance(value, str) or not value or "@" in value:
        raise BadOption(name, value, "a name without @")
    return value
