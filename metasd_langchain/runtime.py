"""What a LangChain object and its copies share: the engine, the pools, and how a call runs with a span around it."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metasd_langchain.engine.pool import Pool
from metasd_langchain.engine.ticket import Failure, Steps
from metasd_langchain.events import Observer
from metasd_langchain.telemetry.attributes import plain_pace
from metasd_langchain.telemetry.otel import CallSpan
from metasd_langchain.values import Request, RoundRecord, Step, Summary

if TYPE_CHECKING:
    from metasd_langchain.engine.loop import Engine

__all__ = ["Runtime", "arms_played", "finish_info", "run", "run_async"]


_POOLS = 16  # configurations of arms, policy, reward and memory that one object and its copies keep


class Runtime:
    """Engine and pools of one model object and its copies. Everything is made when it is first needed."""

    def __init__(self) -> None:
        self.scope = uuid.uuid4().hex  # who shares nothing else shares no text indexes and no bandit memory either
        self._loading = threading.Lock()  # held for as long as weights take to load, so pools have a lock of their own
        self._lock = threading.Lock()
        self._engines: dict[object, Engine] = {}
        self._pools: dict[object, Pool] = {}

    def engine(self, key: object, make: Callable[[], Engine]) -> Engine:
        """The engine for a set of loading options, kept alive as long as this object."""
        with self._loading:
            engine = self._engines.get(key)
            if engine is None or engine.closed:
                engine = self._engines[key] = make()
            return engine

    def pool(self, key: object, make: Callable[[], Pool]) -> Pool:
        """The pool for a set of arms, policy, reward and memory."""
        with self._lock:
            pool = self._pools.pop(key, None)
            self._pools[key] = pool = make() if pool is None else pool
            while len(self._pools) > _POOLS:
                del self._pools[next(iter(self._pools))]  # the one longest not asked for; calls that use it go on
            return pool

    def forget(self) -> None:
        """Drop shared text indexes and what the bandits learned."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.forget()

    def take(self) -> list[Engine]:
        """Give up the engines there are."""
        with self._loading:
            engines = list(self._engines.values())
            self._engines.clear()
        return engines


class _SpanEnd:
    """Ends a call's span with the call's last message, on the engine's thread, before the caller sees that message."""

    def __init__(self, span: CallSpan, prompt: str) -> None:
        self._span, self._prompt = span, prompt
        self._text: list[str] = []

    def __call__(self, message: Step | Failure) -> None:
        if isinstance(message, Failure):
            self._span.content(self._prompt, "".join(self._text))
            self._span.end(message.summary, error=message.error)
            return
        if message.record is not None:
            self._span.round(message.record)
        if self._span.captures:
            self._text.append(message.text)
        if message.summary is not None:
            self._span.content(self._prompt, "".join(self._text))
            self._span.end(message.summary, cancelled=message.summary.finish_reason == "cancelled")


def run(
    engine: Engine, request: Request, pool: Pool, span: CallSpan, prompt: str, observers: Sequence[Observer] = ()
) -> Steps:
    """Start a call; its span ends with it, however it ends."""
    try:
        return engine.generate(request, pool, _SpanEnd(span, prompt), observers)
    except BaseException as error:
        span.end(None, error=error)
        raise


async def run_async(
    engine: Engine, request: Request, pool: Pool, span: CallSpan, prompt: str, observers: Sequence[Observer] = ()
) -> AsyncGenerator[Step, None]:
    """Steps of a call without blocking the event loop; a cancelled task or a closed iterator cancels the request."""
    loop = asyncio.get_running_loop()
    messages: asyncio.Queue[Step | Failure] = asyncio.Queue()
    end = _SpanEnd(span, prompt)

    def sink(message: Step | Failure) -> None:
        try:
            end(message)
        finally:  # whatever a span processor does, the caller must not wait for ever
            loop.call_soon_threadsafe(messages.put_nowait, message)

    try:
        ticket = engine.submit(request, pool, sink, observers)
    except BaseException as error:
        span.end(None, error=error)
        raise
    try:
        while True:
            message = await messages.get()
            if isinstance(message, Failure):
                raise message.error
            yield message
            if message.summary is not None:
                return
    finally:
        ticket.cancel()


def arms_played(rounds: tuple[RoundRecord, ...]) -> dict[str, dict[str, int]]:
    """Rounds, drafted and accepted tokens by arm."""
    played: dict[str, dict[str, int]] = {}
    for record in rounds:
        sums = played.setdefault(record.arm, {"rounds": 0, "drafted": 0, "accepted": 0})
        sums["rounds"] += 1
        sums["drafted"] += record.drafted
        sums["accepted"] += record.accepted
    return played


def finish_info(model: str, summary: Summary) -> dict[str, Any]:
    """What a caller learns about a finished call: usage, finish reason, and how the engine got there."""
    rounds = len(summary.rounds)
    accepted = sum(record.accepted for record in summary.rounds)
    pace = plain_pace(summary.rounds)
    usage: Mapping[str, int] = {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
    return {
        "finish_reason": summary.finish_reason,
        "model_name": model,
        "usage": dict(usage),
        "metasd": {
            "policy": summary.policy,
            "step": summary.step,
            "rounds": rounds,
            "drafted": sum(record.drafted for record in summary.rounds),
            "accepted": accepted,
            "accepted_length": 1 + accepted / rounds if rounds else 0.0,  # 1 for the token the target adds each round
            "arms": arms_played(summary.rounds),
            "first_token_s": summary.first_token_s,
            "total_s": summary.total_s,
            # what a speed-up is worked out from (evaluation.py), where there were enough undrafted rounds
            **({} if pace is None else dict(zip(("plain_round_s", "decode_tokens", "decode_s"), pace, strict=True))),
        },
    }
