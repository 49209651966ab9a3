"""What the LLM suites watch with: a handler that keeps all it hears, a limiter that counts, each way of asking."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import pytest
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models import BaseLLM
from langchain_core.outputs import LLMResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableConfig

__all__ = [
    "WAYS",
    "Answer",
    "Begun",
    "CountingLimiter",
    "Heard",
    "Run",
    "ambient_state",
    "ask",
    "call",
    "global_state",
    "over",
    "stop_in",
]

WAYS = ("invoke", "ainvoke", "stream", "astream", "batch", "abatch")
"""The ways of asking a model."""
_Test = TypeVar("_Test", bound=Callable[..., Any])


@dataclass
class Run:
    """What a handler heard of one run."""

    prompts: list[str] = field(default_factory=list)
    name: str | None = None
    tags: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """"start", "token", "end" and "error", as they came."""
    tokens: list[str] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)
    results: list[LLMResult] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    @property
    def ends(self) -> list[str]:
        """The events less the tokens."""
        return [event for event in self.order if event != "token"]

    @property
    def generation(self) -> Any:
        """The run's answer as its end reported it."""
        assert self.ends == ["start", "end"], f"a run that succeeds starts once and ends once, heard: {self.ends}"
        return self.results[0].generations[0][0]


class Heard(BaseCallbackHandler):
    """Keeps every event by run."""

    def __init__(self) -> None:
        self.runs: dict[UUID, Run] = {}

    def of(self, run_id: UUID) -> Run:
        """The run, which may be one that never started."""
        return self.runs.setdefault(run_id, Run())

    def only(self) -> Run:
        """The one run that was heard."""
        assert len(self.runs) == 1, f"one call of a model is one run, heard {len(self.runs)}"
        return next(iter(self.runs.values()))

    def by_prompt(self) -> dict[str, Run]:
        """The runs by their prompt."""
        found = {run.prompts[0]: run for run in self.runs.values() if run.prompts}
        assert len(found) == len(self.runs), "each prompt of a batch is one run of its own"
        return found

    @property
    def starts(self) -> int:
        """How many runs started."""
        return sum(run.order.count("start") for run in self.runs.values())

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        run = self.of(run_id)
        run.order.append("start")
        run.prompts = prompts
        run.name = kwargs.get("name")
        run.tags = kwargs.get("tags") or []
        run.metadata = kwargs.get("metadata") or {}

    def on_llm_new_token(self, token: Any, *, chunk: Any = None, run_id: UUID, **kwargs: Any) -> None:
        run = self.of(run_id)
        run.order.append("token")
        run.tokens.append(token)
        run.chunks.append(chunk)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        run = self.of(run_id)
        run.order.append("end")
        run.results.append(response)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        run = self.of(run_id)
        run.order.append("error")
        run.errors.append(error)


class Begun(AsyncCallbackHandler):
    """An event that is set when a run has started."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    async def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        self.event.set()


class CountingLimiter(BaseRateLimiter):
    """Lets everything through at once and counts."""

    def __init__(self) -> None:
        self.acquired = 0
        self._lock = threading.Lock()

    def acquire(self, *, blocking: bool = True) -> bool:
        with self._lock:
            self.acquired += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire(blocking=blocking)


class Answer(NamedTuple):
    """A text and the run that made it."""

    text: str
    run: Run


def over(*ways: str) -> Callable[[_Test], _Test]:
    """Mark a test to be run for each of the ways, as far as the suite has them (see ``LLMTests.ways``)."""

    def note(test: _Test) -> _Test:
        test.ways = ways  # type: ignore[attr-defined]
        return test

    return note


async def call(way: str, llm: BaseLLM, prompt: str, config: RunnableConfig | None = None, **options: Any) -> str:
    """The answer to a prompt, asked for in one of the ways."""
    if way == "invoke":
        return llm.invoke(prompt, config, **options)
    if way == "ainvoke":
        return await llm.ainvoke(prompt, config, **options)
    if way == "stream":
        return "".join(llm.stream(prompt, config, **options))
    if way == "astream":
        return "".join([piece async for piece in llm.astream(prompt, config, **options)])
    if way == "batch":
        return llm.batch([prompt], config, **options)[0]
    return (await llm.abatch([prompt], config, **options))[0]


async def ask(way: str, llm: BaseLLM, prompt: str, **options: Any) -> Answer:
    """The answer to a prompt, asked for in one of the ways, and what its callbacks heard."""
    heard = Heard()
    text = await call(way, llm, prompt, {"callbacks": [heard]}, **options)
    return Answer(text, heard.only())


def stop_in(text: str) -> str:
    """A string from the middle of an answer, across tokens where it can be."""
    for size in (3, 2, 1):
        for start in range(len(text) // 2, len(text) - size + 1):
            stop = text[start : start + size]
            if text.index(stop) > 0 and "\ufffd" not in stop:
                return stop
    pytest.fail(f"choose prompts with longer answers; nothing in {text!r} can serve as a stop string")


def global_state() -> dict[str, object]:
    """State of the process that no call may change: random generators and torch's modes, as far as they are loaded."""
    state: dict[str, object] = {"random": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        state["numpy.random"] = pickle.dumps(numpy.random.get_state())
    if torch is not None:
        state["torch.random"] = torch.random.get_rng_state().tolist()
        state["torch.get_default_dtype"] = torch.get_default_dtype()
        state["torch.are_deterministic_algorithms_enabled"] = torch.are_deterministic_algorithms_enabled()
        if torch.cuda.is_initialized():
            state["torch.cuda.random"] = [device.tolist() for device in torch.cuda.get_rng_state_all()]
    return state


def ambient_state() -> dict[str, object]:
    """State of the calling thread and context: what a generator that is paused may not leave behind."""
    state: dict[str, object] = {
        f"context variable {variable.name}": id(value) for variable, value in contextvars.copy_context().items()
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["torch.is_grad_enabled"] = torch.is_grad_enabled()
        state["torch.is_inference_mode_enabled"] = torch.is_inference_mode_enabled()
        state["torch.is_autocast_enabled"] = torch.is_autocast_enabled("cpu")
    return state
