"""What the LLM suites are configured with, and the guard that no test is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from langchain_core.language_models import BaseLLM

from metasd_langchain.testing.llm_watch import WAYS

__all__ = ["LLMTests"]


class LLMTests:
    """The common part: which class, with which parameters, and what it can do.

    Give ``llm_class`` and, as far as the defaults do not fit, the other properties. A capability that is False skips
    the tests that need it.
    """

    # -- which model --------------------------------------------------------------------------------------------------

    @property
    def llm_class(self) -> type[BaseLLM]:
        """The class under test."""
        raise NotImplementedError

    @property
    def llm_params(self) -> Mapping[str, Any]:
        """What its constructor needs: a model's name, a folder ..."""
        return {}

    @property
    def standard_llm_params(self) -> Mapping[str, Any]:
        """Parameters by the names that LangChain's integrations share. `llm_params` win."""
        return {"temperature": 0.0, "max_tokens": 16, "timeout": 60, "stop": [], "max_retries": 2}

    @property
    def serdes_params(self) -> Mapping[str, Any]:
        """`llm_params` for the object that is written as JSON and read back: names instead of live objects."""
        return self.llm_params

    # -- what it is asked ---------------------------------------------------------------------------------------------

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompts of different length, at least three, with different answers of at least some characters."""
        return (
            "The cat sat on the mat and the dog",
            "One, two, three, four, five,",
            "Question: What is the capital of France, and which river runs through it?\nAnswer:",
        )

    @property
    def ways(self) -> Sequence[str]:
        """Ways of asking that tests go through; fewer for a slow model, "invoke" at least."""
        return WAYS

    @property
    def bad_prompt(self) -> str | None:
        """A prompt that is refused with an exception; None when there is none."""
        return ""

    @property
    def long_params(self) -> Mapping[str, Any]:
        """Options of a call that runs for a second or more, so that there is time to cancel it."""
        return {"max_tokens": 400}

    @property
    def sampling_params(self) -> Mapping[str, Any]:
        """Options of a call that draws tokens at random."""
        return {"temperature": 1.0}

    @property
    def patience_s(self) -> float:
        """Seconds within which what happens at once must have happened, on a busy machine."""
        return 10.0

    @property
    def settle_s(self) -> float:
        """Seconds in which a model at work surely counts on in `work_done`."""
        return 0.2

    def work_done(self, llm: BaseLLM) -> int | None:
        """How many forwards (or requests) the model has made so far; None when it cannot be known."""
        return None

    # -- what it can do -----------------------------------------------------------------------------------------------

    @property
    def is_deterministic(self) -> bool:
        """The standard parameters give the same answer every time."""
        return True

    @property
    def has_streaming(self) -> bool:
        """``_stream`` is its own, and fires ``on_llm_new_token``."""
        return True

    @property
    def has_cache(self) -> bool:
        """It takes part in LangChain's cache."""
        return True

    @property
    def has_native_async(self) -> bool:
        """A cancelled task stops the model, not only the waiting for it."""
        return True

    @property
    def supports_stop(self) -> bool:
        """It has a field ``stop`` and takes ``stop`` in calls."""
        return True

    @property
    def supports_max_tokens(self) -> bool:
        """Calls take ``max_tokens``."""
        return True

    @property
    def supports_seed(self) -> bool:
        """Calls take ``seed``."""
        return True

    @property
    def supports_usage(self) -> bool:
        """It reports tokens used, where `usage_of` looks."""
        return True

    @property
    def returns_finish_reason(self) -> bool:
        """``generation_info["finish_reason"]`` is "stop" or "length"."""
        return True

    @property
    def counts_tokens(self) -> bool:
        """``get_num_tokens`` is exact."""
        return True

    @property
    def supports_streaming_flag(self) -> bool:
        """With ``streaming=True`` an ``invoke`` fires ``on_llm_new_token``."""
        return True

    @property
    def supports_rate_limiter(self) -> bool:
        """It has a field ``rate_limiter``."""
        return True

    @property
    def supports_api_key(self) -> bool:
        """Its constructor takes ``api_key``."""
        return True

    @property
    def supports_pickle(self) -> bool:
        """It can be pickled."""
        return True

    @property
    def supports_deepcopy(self) -> bool:
        """It can be copied."""
        return True

    @property
    def keeps_global_state(self) -> bool:
        """It draws from generators of its own."""
        return True

    def usage_of(self, info: Mapping[str, Any]) -> Mapping[str, int]:
        """``prompt_tokens``, ``completion_tokens`` and ``total_tokens`` out of a ``generation_info``."""
        usage: Mapping[str, int] = info["usage"]
        return usage

    # -- for the tests ------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that is marked with `over` once for each of the ways."""
        ways = getattr(metafunc.function, "ways", ())
        if ways:
            metafunc.parametrize("way", [way for way in ways if way in self.ways])

    @property
    def prompt(self) -> str:
        """The first of `prompts`."""
        return self.prompts[0]

    def make(self, **options: Any) -> BaseLLM:
        """An object with the standard parameters, those of the class, and more."""
        return self.llm_class(**{**self.standard_llm_params, **self.llm_params, **options})

    @pytest.fixture
    def llm(self) -> BaseLLM:
        """The object under test; override it to make a costly one only once."""
        return self.make()

    def needs(self, *capabilities: str) -> None:
        """Skip the test unless the class can do all of them."""
        for capability in capabilities:
            if not getattr(self, capability):
                pytest.skip(f"{capability} is off")

    def test_no_overrides_DO_NOT_OVERRIDE(self) -> None:  # noqa: N802 - as in langchain-tests
        """No test of the suite is replaced or deleted, unless it says why.
        Fix: switch a capability off, or mark your version with ``@pytest.mark.xfail(reason=...)``.
        """
        suite = [c for c in type(self).__mro__ if c.__module__.startswith("metasd_langchain.testing.llm_")]
        tests = {name: test for c in reversed(suite) for name, test in vars(c).items() if name.startswith("test_")}
        lost = []
        for name, test in tests.items():
            found = getattr(type(self), name, None)
            marks = getattr(found, "pytestmark", [])
            if found is not test and not any(m.name == "xfail" and m.kwargs.get("reason") for m in marks):
                lost.append(name)
        assert not lost, f"tests of the suite are overridden or deleted without a reason: {lost}"
