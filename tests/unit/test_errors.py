"""Errors say what is wrong, what exists and what to do; the tree in the docstring is the tree."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from metasd_langchain import errors
from metasd_langchain.errors import (
    BadOption,
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    MetaSDError,
    MissingExtra,
    PromptTooLong,
    RequestError,
    TargetError,
    UnknownName,
    UnsupportedParameter,
)

CLASSES = [thing for thing in vars(errors).values() if inspect.isclass(thing) and issubclass(thing, MetaSDError)]
EXAMPLES = [
    MetaSDError("went wrong", hint="do that"),
    UnknownName("drafter", "sufix", ["suffix", "lookup"]),
    BadOption("top_p", 2, "a number in (0, 1]"),
    MissingExtra("torch", "demo"),
    PromptTooLong(600, 512),
    UnsupportedParameter("temprature", ["temperature", "top_p"]),
    DeadlineExceeded(1.5, "so far"),
    EngineClosed("closed"),
]


def documented() -> dict[str, str | None]:
    """Class -> parent, read from the indented tree of the module's docstring."""
    tree: dict[str, str | None] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").split("::", 1)[1].splitlines():
        found = re.match(r"( +)([A-Z]\w+)\b", line)
        if not found:
            continue
        depth, name = len(found[1]), found[2]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        tree[name] = stack[-1][1] if stack else None
        stack.append((depth, name))
    return tree


def test_the_tree_in_the_docstring_is_the_real_tree() -> None:
    real = {
        cls.__name__: next((b.__name__ for b in cls.__bases__ if issubclass(b, MetaSDError)), None) for cls in CLASSES
    }
    assert documented() == real


def test_all_names_are_exported() -> None:
    assert errors.__all__ == sorted(cls.__name__ for cls in CLASSES)


def test_old_hands_catch_them_as_builtins() -> None:
    for cls, builtin in {
        ConfigError: ValueError,
        MissingExtra: ImportError,
        RequestError: ValueError,
        UnsupportedParameter: TypeError,
        DeadlineExceeded: TimeoutError,
        EngineClosed: RuntimeError,
        TargetError: RuntimeError,
    }.items():
        assert issubclass(cls, builtin)


def test_an_unknown_name_lists_what_there_is_and_guesses() -> None:
    error = UnknownName("drafter", "sufix", iter(["suffix", "lookup"]))
    assert str(error) == "unknown drafter 'sufix'; there are: lookup, suffix (did you mean 'suffix'?)"
    assert (error.kind, error.name, error.known, error.hint) == (
        "drafter", "sufix", ("lookup", "suffix"), "did you mean 'suffix'?",
    )  # fmt: skip
    assert str(UnknownName("policy", "zzz", ["ucb"])) == "unknown policy 'zzz'; there are: ucb"
    assert str(UnknownName("policy", "zzz", [])).endswith("there are: none")


def test_messages_name_the_option_both_lengths_and_the_extra() -> None:
    assert str(BadOption("top_p", 2, "a number in (0, 1]")) == "top_p=2 is not valid: expected a number in (0, 1]"
    error = PromptTooLong(600, 512)
    assert "600" in str(error)
    assert "512" in str(error)
    assert (error.length, error.limit) == (600, 512)
    assert str(MissingExtra("the embedded model", "demo")).endswith("(pip install 'metasd-langchain[demo]')")
    assert (
        str(UnsupportedParameter("tmp", ["top_p", "temperature"]))
        == "unknown option 'tmp'; there are: temperature, top_p"
    )


def test_a_hint_is_part_of_the_message_and_optional() -> None:
    assert str(MetaSDError("went wrong", hint="do that")) == "went wrong (do that)"
    assert str(MetaSDError("went wrong")) == "went wrong"
    assert MetaSDError("went wrong").hint == ""


def test_a_deadline_carries_the_partial_text_and_does_not_print_it() -> None:
    error = DeadlineExceeded(1.5, "secret text")
    assert error.partial == "secret text"
    assert "secret" not in str(error)
    assert "1.5 s" in str(error)
    assert error.retryable


def test_only_what_may_work_next_time_is_retryable() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {"DeadlineExceeded"}


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling_and_copying(error: MetaSDError) -> None:
    """Process pools, joblib and retry wrappers send errors about."""
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):  # noqa: S301
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
