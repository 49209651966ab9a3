"""Wrappers with one fault each, beside the tests of the standard suite that must fail on them: callbacks and life."""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from collections import Counter
from queue import SimpleQueue
from typing import Any

from langchain_core.language_models import BaseLLM
from langchain_core.outputs import GenerationChunk
from pydantic import PrivateAttr

from tests.standard.fakes import Words
from tests.standard.faults import fails

# -- callbacks --------------------------------------------------------------------------------------------------------


@fails("test_callbacks_fire_once", way="invoke")
class EndsTwice(Words):
    def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
        result = super()._generate(prompts, stop, run_manager, **kwargs)
        run_manager.on_llm_end(result)
        return result


@fails("test_callbacks_fire_once", way="astream")
class NeverEnds(Words):
    def astream(self, input, config=None, **kwargs):
        return self._quietly(input, kwargs)

    async def _quietly(self, input, kwargs):
        async for chunk in self._astream(input):
            yield chunk.text


@fails("test_run_id", way="invoke")
class DropsConfig(Words):
    def invoke(self, input, config=None, **kwargs):
        return super().invoke(input, {"callbacks": (config or {}).get("callbacks")}, **kwargs)


@fails("test_batch_callbacks", streaming=True)
class AllTokensOnTheFirstRun(Words):
    batch = BaseLLM.batch

    def heard_by(self, run_manager, place):
        return run_manager if self.streaming else None


@fails("test_batch_callbacks_by_prompt")
class FirstConfigForAll(Words):
    def batch(self, inputs, config=None, **kwargs):
        return super().batch(inputs, config[0] if isinstance(config, list) else config, **kwargs)


@fails("test_error_callbacks", way="invoke")
class ErrorsAsText(Words):
    def pieces(self, prompt, stop):
        return (
            super().pieces(prompt, stop)
            if prompt
            else iter([GenerationChunk(text="", generation_info={"usage": Counter()})])
        )


@fails("test_error_callbacks", way="stream")
class ErrorsTwice(Words):
    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        try:
            yield from super()._stream(prompt, stop, run_manager)
        except ValueError as error:
            run_manager.on_llm_error(error)
            raise


@fails("test_streamed_tokens", "test_stream_events_of_a_step")
class TokensTwice(Words):
    async def _astream(self, prompt, stop=None, run_manager=None, **kwargs):
        async for chunk in super()._astream(prompt, stop, run_manager):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


@fails("test_streamed_tokens")
class TokensAfterTheYield(Words):
    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        for chunk in super()._stream(prompt, stop, None):
            yield chunk
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)


@fails("test_streamed_tokens")
@fails("test_streaming_flag", way="invoke")
class TokensWithoutChunk(Words):
    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        for chunk in super()._stream(prompt, stop, None):
            if run_manager:
                run_manager.on_llm_new_token(chunk.text)
            yield chunk


@fails("test_streaming_flag", way="ainvoke")
class InvokesInSilence(Words):
    def heard_by(self, run_manager, place):
        return None


@fails("test_cache", way="invoke")
@fails("test_cache_in_a_batch")
@fails("test_rate_limiter_and_cache", way="abatch")
class AnotherKeyEachTime(Words):
    @property
    def _identifying_params(self):
        return {**super()._identifying_params, "work": self._work[0]}


@fails("test_cache_and_options_of_a_call", way=("invoke", "batch"))
class KeyWithoutOptionsOfACall(Words):
    def generate(self, prompts, stop=None, callbacks=None, **kwargs):
        return BaseLLM.generate(self, prompts, stop, callbacks, **kwargs)


@fails("test_rate_limiter", way="stream")
class AcquiresByToken(Words):
    def words(self, prompt):
        for word in super().words(prompt):
            if self.rate_limiter:
                self.rate_limiter.acquire()
            yield word


@fails("test_rate_limiter_in_a_batch")
class AcquiresByBatch(Words):
    def batch(self, inputs, config=None, **kwargs):
        return super().batch(inputs[:1], config, **kwargs)


@fails("test_rate_limiter_and_cache", way="invoke")
class AcquiresBeforeTheCache(Words):
    def generate(self, prompts, stop=None, callbacks=None, **kwargs):
        if self.rate_limiter:
            self.rate_limiter.acquire()
        return super().generate(prompts, stop, callbacks, **kwargs)


# -- life -------------------------------------------------------------------------------------------------------------


@fails("test_cancel_ainvoke")
class WorksOnWhenCancelled(Words):
    async def _agenerate(self, prompts, stop=None, run_manager=None, **kwargs):
        return await BaseLLM._agenerate(self, prompts, stop, run_manager, **kwargs)


@fails("test_cancel_astream", "test_close_stream", "test_close_astream")
class WorksOnWhenLeft(Words):
    def _queue(self, prompt, stop):
        queue: SimpleQueue[Any] = SimpleQueue()

        def work():
            for chunk in self.pieces(prompt, stop):
                time.sleep(self.pace)
                queue.put(chunk)
            queue.put(None)

        threading.Thread(target=work, daemon=True).start()
        return queue

    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        yield from iter(self._queue(prompt, stop).get, None)

    async def _astream(self, prompt, stop=None, run_manager=None, **kwargs):
        queue = self._queue(prompt, stop)
        while chunk := await asyncio.to_thread(queue.get):
            yield chunk


@fails("test_close_stream", "test_close_astream")
class ForgetsToEnd(Words):
    _held: list[Any] = PrivateAttr(default_factory=list)

    def stream(self, input, config=None, **kwargs):
        return self._quiet(super().stream(input, config, **kwargs))

    def _quiet(self, stream):
        self._held.append(stream)
        yield from iter(lambda: next(stream, None), None)

    async def astream(self, input, config=None, **kwargs):
        stream = super().astream(input, config, **kwargs)
        self._held.append(stream)
        async for piece in stream:
            yield piece


@fails("test_threads")
class OnePromptForAllThreads(Words):
    _now: dict[str, str] = PrivateAttr(default_factory=dict)

    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        self._now["prompt"] = prompt
        time.sleep(0.002)
        yield from super()._stream(self._now["prompt"], stop, run_manager)


@fails("test_tasks")
class OnePromptForAllTasks(Words):
    _now: dict[str, str] = PrivateAttr(default_factory=dict)

    async def _astream(self, prompt, stop=None, run_manager=None, **kwargs):
        self._now["prompt"] = prompt
        await asyncio.sleep(0.002)
        async for chunk in super()._astream(self._now["prompt"], stop, run_manager):
            yield chunk


@fails("test_ainvoke_leaves_the_event_loop_free", "test_astream_leaves_the_event_loop_free")
class BlocksTheLoop(Words):
    async def _astream(self, prompt, stop=None, run_manager=None, **kwargs):
        for chunk in super()._stream(prompt, stop):
            yield chunk


@fails("test_global_state", way="stream")
class SeedsGlobally(Words):
    def words(self, prompt):
        random.seed(prompt)
        return super().words(prompt)


_HELD = contextvars.ContextVar("held", default="")


@fails("test_stream_leaves_its_callers_context", "test_astream_leaves_its_callers_context")
class HoldsAVariableOverYields(Words):
    def pieces(self, prompt, stop):
        token = _HELD.set(prompt)
        yield from super().pieces(prompt, stop)
        _HELD.reset(token)
