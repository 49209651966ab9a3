"""The standard suite can fail: each of its tests fails on a wrapper with one fault, and all pass on a correct one."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections import Counter
from typing import Any

import pytest

from metasd_langchain.testing.llm_standard import LLMIntegrationTests, LLMTests, LLMUnitTests
from tests.standard import faults_life
from tests.standard.fakes import Bare, WordsTests
from tests.standard.faults import FAULTS, Fault, Whole

assert faults_life  # its faults are in the list once it is imported
GUARD = "test_no_overrides_DO_NOT_OVERRIDE"
TESTS = sorted(name for name in dir(Whole) if name.startswith("test_") and name != GUARD)


class TestWordsUnit(WordsTests, LLMUnitTests):
    pass


class TestWordsIntegration(WordsTests, LLMIntegrationTests):
    pass


def play(suite: LLMTests, test: str, arguments: dict[str, Any]) -> None:
    """Run a test method as pytest would, in a context of its own."""
    method = getattr(suite, test)
    given = {"llm": suite.make()} if "llm" in inspect.signature(method).parameters else {}
    result = contextvars.copy_context().run(method, **given, **arguments)
    if inspect.isawaitable(result):
        asyncio.run(result)


def cases(test: str) -> list[dict[str, Any]]:
    """The arguments pytest would call a test with."""
    found: list[dict[str, Any]] = [{"way": way} for way in getattr(getattr(Whole, test), "ways", ())] or [{}]
    for mark in getattr(getattr(Whole, test), "pytestmark", []):
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        rows = [dict(zip(names, value if len(names) > 1 else [value], strict=True)) for value in values]
        found = [{**case, **row} for case in found for row in rows]
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.wrapper.__name__}-{fault.test}")
def test_the_suite_catches(fault: Fault) -> None:
    suite = type("Suite", (WordsTests, Whole), {"llm_class": fault.wrapper, "init_time_s": 0.5})()
    try:
        play(suite, fault.test, fault.arguments)
    except pytest.skip.Exception:
        pytest.fail("the test skipped itself")
    except (AssertionError, pytest.fail.Exception):
        return
    except TypeError as error:
        assert "cannot pickle" in str(error)  # noqa: PT017 - one of three ways to fail
        return
    pytest.fail(f"{fault.test} does not notice {fault.wrapper.__name__}")


def test_each_test_of_the_suite_catches_something() -> None:
    assert [test for test in TESTS if test not in {fault.test for fault in FAULTS}] == []


def test_each_test_of_the_suite_says_how_to_mend_a_failure() -> None:
    for test in [GUARD, *TESTS]:
        assert "\n        Fix: " in (getattr(Whole, test).__doc__ or ""), test


def test_the_guard_knows_a_reason_from_none() -> None:
    class Kept(WordsTests, Whole):
        @pytest.mark.xfail(reason="words have no seeds")
        def test_seed(self):
            pass

    class Lost(Kept):
        def test_chain(self):
            pass

    class Deleted(Kept):
        test_chain = None

    getattr(Kept(), GUARD)()
    for suite in (Lost(), Deleted()):
        with pytest.raises(AssertionError, match="test_chain"):
            getattr(suite, GUARD)()


def test_a_bare_wrapper_passes_with_everything_switched_off() -> None:
    switches = [name for name in dir(LLMTests) if name.startswith(("is_", "has_", "supports_", "returns_", "counts_"))]
    off = dict.fromkeys([*switches, "keeps_global_state"], False)
    suite = type("Suite", (Whole,), {"llm_class": Bare, "bad_prompt": None, **off})()
    ended: Counter[str] = Counter()
    for test in TESTS:
        for arguments in cases(test):
            try:
                play(suite, test, arguments)
            except pytest.skip.Exception:
                ended["skipped"] += 1
            else:
                ended["passed"] += 1
    assert ended["passed"] > 25
    assert ended["skipped"] > 80
