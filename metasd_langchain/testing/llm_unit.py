"""What every LLM object must do before it answers anything."""

from __future__ import annotations

import copy
import json
import pickle
import time
import warnings
from typing import Any

import pytest
from langchain_core.language_models import BaseLLM
from langchain_core.load import dumpd, load

from metasd_langchain.testing.llm_base import LLMTests
from metasd_langchain.testing.llm_watch import CountingLimiter

__all__ = ["LLMUnitTests"]

_KEY = "sk-standard-test-0123456789"


def settings(llm: BaseLLM) -> dict[str, Any]:
    """What LangChain's ``dict()`` says of an object; newer versions call it ``asdict``."""
    found: dict[str, Any] = llm.asdict() if hasattr(llm, "asdict") else llm.dict()
    return found


class LLMUnitTests(LLMTests):
    """Construction, names, copies. No test asks the model anything; no weights and no network are needed."""

    @property
    def init_time_s(self) -> float:
        """Seconds in which ten objects are made, on a busy machine."""
        return 3.0

    def test_init(self) -> None:
        """The constructor takes the standard parameters and keeps them.
        Fix: declare fields of these names, or aliases; a name you need not is a field that does nothing.
        """
        more: dict[str, Any] = {"api_key": "test"} if self.supports_api_key else {}
        if self.supports_streaming_flag:
            more["streaming"] = True
        llm = self.make(**more)
        assert isinstance(llm, BaseLLM)
        for name, value in self.standard_llm_params.items():
            kept = getattr(llm, name, value)
            assert kept == value or not (kept or value), f"{name}={value!r} became {kept!r}"

    def test_init_streaming(self) -> None:
        """The constructor takes ``streaming=True``.
        Fix: declare ``streaming: bool = False``.
        """
        self.needs("supports_streaming_flag")
        assert getattr(self.make(streaming=True), "streaming", None) is True

    def test_init_time(self) -> None:
        """Making an object loads no weights and asks no network.
        Fix: load at the first call, and share what is loaded.
        """
        start = time.perf_counter()
        for _ in range(10):
            self.make()
        took = time.perf_counter() - start
        assert took < self.init_time_s, f"ten objects took {took:.1f} s"

    def test_api_key_is_not_shown(self) -> None:
        """A key shows in no representation, trace or cache key.
        Fix: make it a ``SecretStr``, name it in ``lc_secrets`` and keep it out of ``_identifying_params``.
        """
        self.needs("supports_api_key")
        llm = self.make(api_key=_KEY)
        shown = [repr(llm), str(llm), repr(settings(llm))]
        if self.llm_class.is_lc_serializable():
            shown.append(repr(dumpd(llm)))
        assert not any(_KEY in text for text in shown)

    def test_llm_type(self, llm: BaseLLM) -> None:
        """``_llm_type`` names the kind of model.
        Fix: return a short constant word.
        """
        kind = llm._llm_type  # noqa: SLF001 - LangChain's own hook
        assert isinstance(kind, str)
        assert kind

    @pytest.mark.parametrize(("name", "value"), [("temperature", 0.75), ("max_tokens", 3), ("stop", ["standard"])])
    def test_identifying_params(self, llm: BaseLLM, name: str, value: object) -> None:
        """What changes an answer is in ``_identifying_params``, which JSON can hold: it is the cache's key.
        Fix: return every such field, under string keys.
        """
        if name != "temperature":
            self.needs(f"supports_{name}")
        params = dict(llm._identifying_params)  # noqa: SLF001
        assert all(isinstance(key, str) for key in params)
        json.dumps(params)
        assert dict(self.make(**{name: value})._identifying_params) != params  # noqa: SLF001
        assert dict(self.make()._identifying_params) == params  # noqa: SLF001

    def test_serdes(self) -> None:
        """An object written as JSON and read back is the same object.
        Fix: keep live objects out of the fields (``exclude=True``) and secrets in ``lc_secrets``.
        """
        if not self.llm_class.is_lc_serializable():
            pytest.skip("is_lc_serializable() is False")
        llm = self.llm_class(**{**self.standard_llm_params, "stop": ["\n"], **self.serdes_params})
        dumped = json.loads(json.dumps(dumpd(llm)))
        assert dumped["type"] == "constructor", dumped.get("repr")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in beta"
            revived = load(
                dumped,
                allowed_objects=[self.llm_class],
                valid_namespaces=[self.llm_class.get_lc_namespace()[0]],
                secrets_map=dict.fromkeys(llm.lc_secrets.values(), "test"),
            )
        assert type(revived) is self.llm_class
        assert settings(revived) == settings(llm)

    def test_ls_params(self, llm: BaseLLM) -> None:
        """Traces are told provider, model, temperature, cap and stop of the object.
        Fix: override ``_get_ls_params``; the inherited one looks for ``model``, ``temperature`` and ``max_tokens``.
        """
        params = llm._get_ls_params()  # noqa: SLF001
        provider = params.get("ls_provider", "")
        assert provider
        assert provider == provider.lower()
        assert params.get("ls_model_type") == "llm"
        assert params.get("ls_model_name")
        assert params.get("ls_temperature") == self.standard_llm_params["temperature"]
        if self.supports_max_tokens:
            assert params.get("ls_max_tokens") == self.standard_llm_params["max_tokens"]
        if self.supports_stop:
            assert self.make(stop=["a", "b"])._get_ls_params().get("ls_stop") == ["a", "b"]  # noqa: SLF001

    def test_ls_params_of_a_call(self, llm: BaseLLM) -> None:
        """Options of a call win over the object's in what traces are told.
        Fix: let the keyword arguments of ``_get_ls_params`` replace the fields.
        """
        params = llm._get_ls_params(stop=["c"], temperature=0.5, max_tokens=3, model="another")  # noqa: SLF001
        assert params.get("ls_stop") == ["c"]
        assert params.get("ls_temperature") == 0.5
        assert params.get("ls_max_tokens") == 3
        assert params.get("ls_model_name") == "another"

    def test_custom_token_count(self) -> None:
        """``custom_get_token_ids`` has the first word on counting.
        Fix: ask it at the start of ``get_token_ids``.
        """
        assert self.make(custom_get_token_ids=lambda text: [7, 8, 9]).get_num_tokens("anything") == 3

    def test_rate_limiter_field(self) -> None:
        """The constructor takes a rate limiter, and does not show it in JSON.
        Fix: declare ``rate_limiter: BaseRateLimiter | None = Field(default=None, exclude=True)``.
        """
        self.needs("supports_rate_limiter")
        limiter = CountingLimiter()
        llm = self.make(rate_limiter=limiter)
        assert getattr(llm, "rate_limiter", None) is limiter
        assert limiter.acquired == 0
        assert "CountingLimiter" not in json.dumps(settings(llm))

    def test_pickle(self, llm: BaseLLM) -> None:
        """A pickled object keeps its fields.
        Fix: leave locks, threads and engines out in ``__getstate__`` and make them when they are needed.
        """
        self.needs("supports_pickle")
        revived = pickle.loads(pickle.dumps(llm))  # noqa: S301 - our own bytes
        assert type(revived) is self.llm_class
        for name in self.standard_llm_params:
            assert getattr(revived, name, None) == getattr(llm, name, None)

    def test_deepcopy(self, llm: BaseLLM) -> None:
        """A deep copy is the same object again, without weights copied; a changed copy changes nothing else.
        Fix: share the engine in ``__deepcopy__``.
        """
        self.needs("supports_deepcopy")
        before = settings(llm)
        twin: Any = copy.deepcopy(llm)
        assert settings(twin) == before
        twin.max_tokens = 3
        assert settings(llm) == before
