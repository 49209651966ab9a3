"""What tests of the D family are made of: a receiver of OTLP, instrumentors, every way of calling, and how backends add
up tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from opentelemetry import metrics, trace
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from wrapt import BaseObjectProxy

from tests.bugs.kit import PROMPT, make
from tests.unit.chatkit import make as make_chat

NAMES = {"text_completion gemma3_text", "chat gemma3_text"}  # of our spans
LONG: dict[str, Any] = {"max_tokens": 400, "speculative": False}  # many rounds, so that there is time to break it off
MODELS: dict[str, Callable[..., Any]] = {"llm": make, "chat": make_chat}


class Sink:
    """An OTLP/HTTP receiver in this process. Also takes what it is told: "ok", "hang" or "slow" (seconds a request)."""

    def __init__(self, manner: str = "ok") -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.manner, self.released = manner, threading.Event()
        sink = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if sink.manner != "ok":
                    sink.released.wait(30 if sink.manner == "hang" else 1.0)
                sink.bodies.append((self.path, body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # a client that gave up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def bytes(self) -> bytes:
        """Everything received."""
        return b"".join(body for _, body in self.bodies)

    def spans(self) -> list[Any]:
        """Spans received."""
        found: list[Any] = []
        for path, body in self.bodies:
            if path == "/v1/traces":
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    found += [span for scope in resource.scope_spans for span in scope.spans]
        return found

    def metrics(self) -> set[str]:
        """Names of the metrics received."""
        names: set[str] = set()
        for path, body in self.bodies:
            if path == "/v1/metrics":
                for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    names |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
        return names


def unset(monkeypatch: Any) -> None:
    """As if no provider had been set in this process, and let the test set some."""
    from metasd_langchain.telemetry import setup

    now: dict[str, Any] = {"tracer": trace.ProxyTracerProvider(), "meter": metrics.get_meter_provider()}
    assert type(now["meter"]).__module__.startswith("opentelemetry.metrics")
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: now["tracer"])
    monkeypatch.setattr(trace, "set_tracer_provider", lambda one: now.update(tracer=one))
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: now["meter"])
    monkeypatch.setattr(metrics, "set_meter_provider", lambda one: now.update(meter=one))
    for name in ("_live", "_outlet", "_meters"):
        monkeypatch.setattr(setup, name, None)


@contextmanager
def instrumented(by: str, provider: Any) -> Iterator[None]:
    """With the spans of an instrumentor, "openinference" or "traceloop", or with none ("nobody")."""
    if by == "nobody":
        yield
        return
    if by == "openinference":
        from openinference.instrumentation.langchain import LangChainInstrumentor as Instrumentor
    else:
        from opentelemetry.instrumentation.langchain import LangchainInstrumentor as Instrumentor
    instrumentor: Any = Instrumentor()
    before = [(thing, name, value) for thing in _patched() for name, value in list(vars(thing).items())]
    instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
    try:
        yield
    finally:
        instrumentor.uninstrument()
        for thing, name, value in before:  # Traceloop's 0.62 leaves its wrappers where they are
            if vars(thing).get(name) is not value and isinstance(vars(thing).get(name), BaseObjectProxy):
                setattr(thing, name, value)


def _patched() -> list[Any]:
    import langchain.agents
    import langchain.agents.factory
    import langgraph.prebuilt
    import langgraph.prebuilt.chat_agent_executor
    from langchain.agents.middleware.types import AgentMiddleware
    from langchain_core.callbacks import BaseCallbackManager
    from langgraph.pregel import Pregel
    from langgraph.types import Command

    modules = (
        langchain.agents,
        langchain.agents.factory,
        langgraph.prebuilt,
        langgraph.prebuilt.chat_agent_executor,
    )
    return [BaseCallbackManager, Pregel, Command, AgentMiddleware, *modules]


def prompt_tokens(llm: Any, prompt: str = PROMPT) -> int:
    """Tokens of a prompt as the model reads it; a chat model's is rendered from its template."""
    if isinstance(llm, BaseChatModel):
        return llm.get_num_tokens_from_messages([HumanMessage(prompt)])
    return int(llm.get_num_tokens(prompt))


def text_of(answer: Any) -> str:
    """The text of an answer, a message or a string."""
    return answer if isinstance(answer, str) else str(answer.text)


async def ended(llm: Any) -> None:
    """Until the engine has ended every call, and with it their spans."""
    while llm._load().live:  # noqa: ASYNC110 - the engine knows no event loop
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


async def _closed_early(llm: Any, target: Any, asked: Any) -> None:
    stream = target.stream(asked)
    next(stream)
    stream.close()


async def _aclosed_early(llm: Any, target: Any, asked: Any) -> None:
    stream = target.astream(asked)
    await anext(stream)
    await stream.aclose()


async def _cancelled(llm: Any, target: Any, asked: Any) -> None:
    engine = llm._load()
    task = asyncio.ensure_future(target.ainvoke(asked))
    begun = engine.rounds + 2
    deadline = time.monotonic() + 10
    while engine.rounds < begun and not task.done() and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _invoke(llm: Any, target: Any, asked: Any) -> None:
    target.invoke(asked)


async def _ainvoke(llm: Any, target: Any, asked: Any) -> None:
    await target.ainvoke(asked)


async def _batch(llm: Any, target: Any, asked: Any) -> None:
    target.batch([asked, asked])


async def _abatch(llm: Any, target: Any, asked: Any) -> None:
    await target.abatch([asked, asked])


async def _stream(llm: Any, target: Any, asked: Any) -> None:
    list(target.stream(asked))


async def _astream(llm: Any, target: Any, asked: Any) -> None:
    [_ async for _ in target.astream(asked)]


Way = Callable[[Any, Any, Any], Awaitable[None]]  # the LLM, what is called, its input
WHOLE: dict[str, Way] = {
    "invoke": _invoke,
    "ainvoke": _ainvoke,
    "batch": _batch,
    "abatch": _abatch,
    "stream": _stream,
    "astream": _astream,
}
BROKEN: dict[str, Way] = {"closed early": _closed_early, "aclosed early": _aclosed_early, "cancelled": _cancelled}
WAYS = {**WHOLE, **BROKEN}
CALLS = {way: 2 if way in ("batch", "abatch") else 1 for way in WAYS}


def counted(spans: Any) -> tuple[int, int]:
    """Tokens as backends add them up: those of all spans that are an LLM's, by their kind or for want of one."""
    total = [0, 0]
    for span in spans:
        told = span.attributes
        if told.get("openinference.span.kind", "LLM") == "LLM":
            for index, keys in enumerate(
                (
                    ("llm.token_count.prompt", "gen_ai.usage.input_tokens"),
                    ("llm.token_count.completion", "gen_ai.usage.output_tokens"),
                )
            ):
                total[index] += next((told[key] for key in keys if key in told), 0)
    return total[0], total[1]


__all__ = [
    "BROKEN",
    "CALLS",
    "LONG",
    "MODELS",
    "NAMES",
    "PROMPT",
    "WAYS",
    "WHOLE",
    "Sink",
    "counted",
    "ended",
    "instrumented",
    "prompt_tokens",
    "text_of",
    "unset",
]
