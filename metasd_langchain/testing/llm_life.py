"""How an LLM lives beside others: cancelled, left, shared by threads and tasks, copied; and what it leaves alone."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import pickle
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from langchain_core.language_models import BaseLLM

from metasd_langchain.testing.llm_base import LLMTests
from metasd_langchain.testing.llm_watch import Begun, Heard, ambient_state, ask, call, global_state, over

__all__ = ["LLMLifeTests"]

_MINE = contextvars.ContextVar("mine", default="nobody's")
_LATE = 3  # forwards that may still be made after a call was given up
_THREADS = 4


class LLMLifeTests(LLMTests):
    """Ends, neighbours and surroundings of calls."""

    # -- given up -----------------------------------------------------------------------------------------------------

    async def _reach(self, llm: BaseLLM, work: int | None, task: asyncio.Task[Any]) -> None:
        """Wait until the model works on a call."""
        end = time.monotonic() + self.patience_s
        while work is not None and (self.work_done(llm) or 0) <= work:
            assert not task.done(), "the call ended before it could be cancelled: give it more to do in long_params"
            assert time.monotonic() < end, "the model does not begin to work"
            await asyncio.sleep(0.001)

    async def _rests(self, llm: BaseLLM) -> None:
        """Assert that the model stops working, now that nobody wants the answer."""
        mark = count = self.work_done(llm)
        while mark is not None and count is not None:
            await asyncio.sleep(self.settle_s)
            now = self.work_done(llm) or 0
            if now == count:
                break
            count = now
            assert count <= mark + _LATE, "the model works on for nobody"

    async def _cancel(self, llm: BaseLLM, start: Callable[[Any], Awaitable[Any]]) -> None:
        """Assert that a call ends at once when its task is cancelled, and leaves the model free."""
        begun, heard, work = Begun(), Heard(), self.work_done(llm)
        task = asyncio.ensure_future(start({"callbacks": [begun, heard]}))
        await asyncio.wait_for(begun.event.wait(), self.patience_s)
        await self._reach(llm, work, task)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=self.patience_s)
        assert done, "the cancelled call does not end"
        assert task.cancelled(), "the call must end with CancelledError, and may not have ended before: see long_params"
        assert heard.only().ends == ["start", "error"]
        await self._rests(llm)

    async def test_cancel_ainvoke(self, llm: BaseLLM) -> None:
        """A cancelled ``ainvoke`` ends at once, stops the model, and the next call is right.
        Fix: override ``_agenerate``: the inherited one leaves a thread working to the end.
        """
        self.needs("has_native_async")
        want = await llm.ainvoke(self.prompt)
        await self._cancel(llm, lambda config: llm.ainvoke(self.prompt, config, **self.long_params))
        after = await asyncio.wait_for(llm.ainvoke(self.prompt), self.patience_s)
        assert after == want or not self.is_deterministic

    async def test_cancel_astream(self, llm: BaseLLM) -> None:
        """A task that is cancelled inside an ``astream`` stops the model, and the next call is right.
        Fix: override ``_astream``, and cancel the request in ``finally``.
        """
        self.needs("has_native_async", "has_streaming")
        want = await llm.ainvoke(self.prompt)

        async def consume(config: Any) -> None:
            async for _ in llm.astream(self.prompt, config, **self.long_params):
                pass

        await self._cancel(llm, consume)
        after = await asyncio.wait_for(llm.ainvoke(self.prompt), self.patience_s)
        assert after == want or not self.is_deterministic

    async def test_close_stream(self, llm: BaseLLM) -> None:
        """A stream that is closed in its middle has ended for its callbacks, stops the model; the next call is right.
        Fix: cancel the request in the ``finally`` of ``_stream``.
        """
        self.needs("has_streaming")
        want = llm.invoke(self.prompt)
        heard = Heard()
        stream: Any = llm.stream(self.prompt, {"callbacks": [heard]}, **self.long_params)
        next(stream)
        stream.close()
        assert list(stream) == []
        assert heard.only().ends in (["start", "error"], ["start", "end"])
        await self._rests(llm)
        after = await asyncio.wait_for(asyncio.to_thread(llm.invoke, self.prompt), self.patience_s)
        assert after == want or not self.is_deterministic

    async def test_close_astream(self, llm: BaseLLM) -> None:
        """An async stream that is closed in its middle has ended for its callbacks, stops the model; the next is right.
        Fix: close what ``_astream`` iterates over in its ``finally``; the inherited one does not.
        """
        self.needs("has_streaming", "has_native_async")
        want = await llm.ainvoke(self.prompt)
        heard = Heard()
        stream: Any = llm.astream(self.prompt, {"callbacks": [heard]}, **self.long_params)
        await anext(stream)
        await stream.aclose()
        assert [piece async for piece in stream] == []
        assert heard.only().ends in (["start", "error"], ["start", "end"])
        await self._rests(llm)
        after = await asyncio.wait_for(llm.ainvoke(self.prompt), self.patience_s)
        assert after == want or not self.is_deterministic

    # -- neighbours ---------------------------------------------------------------------------------------------------

    def test_threads(self, llm: BaseLLM) -> None:
        """Threads that share an object each get their own answers.
        Fix: keep the state of a call in the call, and lock or queue what is shared.
        """
        self.needs("is_deterministic")
        want = [llm.invoke(prompt) for prompt in self.prompts]
        assert len(set(want)) > 1, "choose prompts with different answers"
        gate = threading.Barrier(_THREADS)
        found: list[list[str]] = []
        failed: list[BaseException] = []

        def work(shift: int) -> None:
            order = [(place + shift) % len(want) for place in range(len(want))]
            try:
                gate.wait()
                answers = {place: llm.invoke(self.prompts[place]) for place in order}
                streamed = {place: "".join(llm.stream(self.prompts[place])) for place in order}
            except BaseException as error:  # noqa: BLE001 - reported below
                failed.append(error)
            else:
                found.extend([answers[place] for place in sorted(order)] for answers in (answers, streamed))

        threads = [threading.Thread(target=work, args=(shift,), daemon=True) for shift in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(6 * self.patience_s)
        assert not failed, failed
        assert found == [want] * 2 * _THREADS

    async def test_tasks(self, llm: BaseLLM) -> None:
        """Tasks of one event loop that share an object each get their own answers.
        Fix: as for threads.
        """
        self.needs("is_deterministic")
        want = [llm.invoke(prompt) for prompt in self.prompts]
        ways = ("ainvoke", "astream") * 2
        calls = [call(way, llm, prompt) for way in ways for prompt in self.prompts]
        assert await asyncio.gather(*calls) == want * len(ways)

    async def _longest_gap(self, work: Awaitable[Any]) -> tuple[float, float]:
        """Run a call for a second or to its end beside a ticker.

        Returns:
            The longest time between two ticks, and the time of them all, in seconds.
        """
        task = asyncio.ensure_future(work)
        start = last = time.perf_counter()
        longest = 0.0
        while not task.done() and last - start < 1.0:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        if self.has_native_async:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return longest, last - start

    async def test_ainvoke_leaves_the_event_loop_free(self, llm: BaseLLM) -> None:
        """While ``ainvoke`` waits for the model, other tasks run.
        Fix: wait for an event or a thread; compute nothing in ``_agenerate``.
        """
        longest, total = await self._longest_gap(llm.ainvoke(self.prompt, **self.long_params))
        assert longest < max(total / 2, 0.25), f"the event loop stood still for {longest:.2f} of {total:.2f} s"

    async def test_astream_leaves_the_event_loop_free(self, llm: BaseLLM) -> None:
        """While ``astream`` waits for the model, other tasks run.
        Fix: as for ``ainvoke``, in ``_astream``.
        """
        longest, total = await self._longest_gap(call("astream", llm, self.prompt, **self.long_params))
        assert longest < max(total / 2, 0.25), f"the event loop stood still for {longest:.2f} of {total:.2f} s"

    # -- surroundings -------------------------------------------------------------------------------------------------

    @over("invoke", "ainvoke", "stream", "astream")
    async def test_global_state(self, llm: BaseLLM, way: str) -> None:
        """A call leaves the global random generators and torch's modes as they were, also when it draws.
        Fix: draw from a generator of the call; seed nothing global.
        """
        self.needs("keeps_global_state")
        before = global_state()
        await call(way, llm, self.prompt)
        await call(way, llm, self.prompt, **self.sampling_params)
        after = global_state()
        assert [name for name in before if after[name] != before[name]] == []

    def test_stream_leaves_its_callers_context(self, llm: BaseLLM) -> None:
        """Between the pieces of a stream the caller finds its grad mode and context variables as it left them.
        Fix: hold no ``with torch.inference_mode()``, span or variable over a ``yield``; enter and leave it by step.
        """
        self.needs("has_streaming")
        _MINE.set("the caller's")
        before = ambient_state()
        for _ in llm.stream(self.prompt):
            self._same(before)
        self._same(before)
        stream: Any = llm.stream(self.prompt)
        next(stream)
        stream.close()
        self._same(before)

    async def test_astream_leaves_its_callers_context(self, llm: BaseLLM) -> None:
        """Between the pieces of an async stream the caller finds its grad mode and context variables as it left them.
        Fix: as for ``stream``, in ``_astream``.
        """
        self.needs("has_streaming")
        _MINE.set("the caller's")
        before = ambient_state()
        stream: AsyncIterator[str] = llm.astream(self.prompt)
        async for _ in stream:
            self._same(before)
        self._same(before)

    def _same(self, before: dict[str, object]) -> None:
        now = ambient_state()
        assert [name for name in {*before, *now} if now.get(name) != before.get(name)] == []

    # -- copies -------------------------------------------------------------------------------------------------------

    def test_pickled_answers(self, llm: BaseLLM) -> None:
        """An object that was used can be pickled, and the revived one gives the same answers.
        Fix: leave engine and locks out in ``__getstate__``; load at the first call.
        """
        self.needs("supports_pickle", "is_deterministic")
        want = llm.invoke(self.prompt)
        assert pickle.loads(pickle.dumps(llm)).invoke(self.prompt) == want  # noqa: S301 - our own bytes

    @pytest.mark.parametrize("copied", ["deepcopy", "copy", "model_copy"])
    async def test_copied_answers(self, llm: BaseLLM, copied: str) -> None:
        """A copy of an object that was used gives the same answers, and its own options do not touch the original.
        Fix: share the engine between copies, and nothing else.
        """
        self.needs("supports_deepcopy", "supports_max_tokens", "is_deterministic")
        want = llm.invoke(self.prompt)
        twin: Any = llm.model_copy() if copied == "model_copy" else getattr(copy, copied)(llm)
        assert twin.invoke(self.prompt) == want
        twin.max_tokens = 1
        assert twin.invoke(self.prompt) == llm.invoke(self.prompt, max_tokens=1) != want
        assert (await ask("invoke", twin, self.prompt)).run.metadata.get("ls_max_tokens") == 1
        assert llm.invoke(self.prompt) == want
