"""What callbacks, the cache and a rate limiter see of an LLM's calls."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseLLM
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda

from metasd_langchain.testing.llm_base import LLMTests
from metasd_langchain.testing.llm_watch import WAYS, CountingLimiter, Heard, ask, call, over, stop_in

__all__ = ["LLMCallbackTests"]

SINGLE = ("invoke", "ainvoke", "stream", "astream")
FEW = 5  # tokens


class LLMCallbackTests(LLMTests):
    """Who is told what, and how often."""

    @over(*WAYS)
    async def test_callbacks_fire_once(self, llm: BaseLLM, way: str) -> None:
        """A call starts once and ends once, with the prompt and the answer.
        Fix: fire no ``on_llm_start`` or ``on_llm_end`` yourself; LangChain does.
        """
        text, run = await ask(way, llm, self.prompt)
        assert run.ends == ["start", "end"]
        assert (run.order[0], run.order[-1]) == ("start", "end")
        assert run.prompts == [self.prompt]
        assert run.generation.text == text

    @over(*SINGLE)
    async def test_run_id(self, llm: BaseLLM, way: str) -> None:
        """A run has the id, name, tags and metadata it was given.
        Fix: pass ``config`` on when you override ``invoke`` or ``stream``.
        """
        heard, run_id = Heard(), uuid.uuid4()
        config: RunnableConfig = {
            "run_id": run_id,
            "run_name": "standard",
            "tags": ["here"],
            "metadata": {"who": "me"},
            "callbacks": [heard],
        }
        await call(way, llm, self.prompt, config)
        assert list(heard.runs) == [run_id]
        run = heard.only()
        assert (run.name, "here" in run.tags, run.metadata.get("who")) == ("standard", True, "me")

    @over(*WAYS)
    async def test_traced_options(self, llm: BaseLLM, way: str) -> None:
        """Metadata of a run say the options of the call, not those of the object.
        Fix: do not take options out of the keyword arguments before LangChain has seen them.
        """
        self.needs("supports_max_tokens", "supports_stop")
        run = (await ask(way, llm, self.prompt, max_tokens=FEW, stop=["\x00never"])).run
        assert run.metadata.get("ls_max_tokens") == FEW
        assert run.metadata.get("ls_stop") == ["\x00never"]
        assert run.metadata.get("ls_model_type") == "llm"

    @pytest.mark.parametrize("streaming", [False, True])
    async def test_batch_callbacks(self, llm: BaseLLM, streaming: bool) -> None:
        """Each prompt of a batch is one run, which hears its own answer and its own tokens.
        Fix: LangChain hands ``_generate`` the first prompt's manager only; fire on it for the first prompt only.
        """
        if streaming:
            self.needs("supports_streaming_flag")
            llm = self.make(streaming=True)
        heard, aheard = Heard(), Heard()
        prompts: list[Any] = list(self.prompts)
        answers = llm.batch(prompts, {"callbacks": [heard]})
        found = await llm.abatch(prompts, {"callbacks": [aheard]})
        for runs, texts in ((heard.by_prompt(), answers), (aheard.by_prompt(), found)):
            assert set(runs) == set(prompts)
            for prompt, text in zip(prompts, texts, strict=True):
                run = runs[prompt]
                assert run.generation.text == text
                assert "".join(run.tokens) in {"", text}, "tokens were heard on another prompt's run"

    async def test_batch_callbacks_by_prompt(self, llm: BaseLLM) -> None:
        """With a config for each prompt, each handler hears its prompt alone.
        Fix: hand each config to its own call.
        """
        handlers = [Heard() for _ in self.prompts]
        ahandlers = [Heard() for _ in self.prompts]
        llm.batch(list(self.prompts), [{"callbacks": [heard]} for heard in handlers])
        await llm.abatch(list(self.prompts), [{"callbacks": [heard]} for heard in ahandlers])
        for heard in (handlers, ahandlers):
            assert [handler.only().prompts for handler in heard] == [[prompt] for prompt in self.prompts]
            assert all(handler.only().ends == ["start", "end"] for handler in heard)

    @over(*WAYS)
    async def test_error_callbacks(self, llm: BaseLLM, way: str) -> None:
        """A call that fails says so once, with the error that is raised, and does not end as well.
        Fix: raise from ``_generate`` and ``_stream``; return no error as text.
        """
        if self.bad_prompt is None:
            pytest.skip("no prompt is bad")
        heard = Heard()
        with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the wrapper's own affair
            await call(way, llm, self.bad_prompt, {"callbacks": [heard]})
        run = heard.only()
        assert run.ends == ["start", "error"]
        assert run.errors[0] is caught.value

    # -- tokens -------------------------------------------------------------------------------------------------------

    async def test_streamed_tokens(self, llm: BaseLLM) -> None:
        """Each piece of a stream is heard once, as text and as chunk, before the consumer has it.
        Fix: call ``run_manager.on_llm_new_token(chunk.text, chunk=chunk)`` right before each ``yield``.
        """
        self.needs("has_streaming")
        heard, seen = Heard(), ""
        for piece in llm.stream(self.prompt, {"callbacks": [heard]}):
            seen += piece
            assert "".join(heard.only().tokens).startswith(seen), "the consumer saw a piece before it was heard"
        self._tokens_are(heard, seen)
        heard, seen = Heard(), ""
        async for piece in llm.astream(self.prompt, {"callbacks": [heard]}):
            seen += piece
            assert "".join(heard.only().tokens).startswith(seen), "the consumer saw a piece before it was heard"
        self._tokens_are(heard, seen)

    @over("invoke", "ainvoke")
    async def test_streaming_flag(self, way: str) -> None:
        """With ``streaming=True`` the tokens of an answer are heard while it is made, each once.
        Fix: let ``_generate`` consume ``_stream`` with its run manager when ``streaming`` is set.
        """
        self.needs("supports_streaming_flag")
        heard = Heard()
        self._tokens_are(heard, await call(way, self.make(streaming=True), self.prompt, {"callbacks": [heard]}))

    def _tokens_are(self, heard: Heard, text: str) -> None:
        run = heard.only()
        assert "".join(run.tokens) == text
        assert [getattr(chunk, "text", None) for chunk in run.chunks] == run.tokens, "a token comes with its chunk"
        assert run.generation.text == text

    async def test_stream_events(self, llm: BaseLLM) -> None:
        """``astream_events`` gives each piece of the model's answer once, between one start and one end.
        Fix: leave ``astream`` to LangChain, and see `test_answer` and `test_streamed_tokens`.
        """
        self.needs("has_streaming", "is_deterministic")
        assert await self._events_of(llm) == llm.invoke(self.prompt)

    async def test_stream_events_of_a_step(self, llm: BaseLLM) -> None:
        """``astream_events`` gives each piece once too when a step inside calls ``ainvoke`` with ``streaming=True``.
        Fix: pieces come from ``on_llm_new_token`` there; see `test_streaming_flag`.
        """
        self.needs("supports_streaming_flag", "is_deterministic")
        assert await self._events_of(RunnableLambda(self.make(streaming=True).ainvoke)) == llm.invoke(self.prompt)

    async def _events_of(self, chain: Runnable[Any, str]) -> str:
        events = [event async for event in chain.astream_events(self.prompt, version="v2")]
        events = [event for event in events if event["event"].startswith("on_llm")]
        kinds = [event["event"] for event in events]
        assert (kinds[0], kinds[-1]) == ("on_llm_start", "on_llm_end")
        assert set(kinds[1:-1]) == {"on_llm_stream"}
        pieces = [event["data"]["chunk"] for event in events[1:-1]]
        return "".join(getattr(piece, "text", piece) for piece in pieces)

    # -- cache --------------------------------------------------------------------------------------------------------

    @over("invoke", "ainvoke", "batch", "abatch")
    async def test_cache(self, llm: BaseLLM, way: str) -> None:
        """A prompt that was answered is answered again from the cache, without a call of the model.
        Fix: leave ``generate`` to LangChain, and keep ``_identifying_params`` the same from call to call.
        """
        self.needs("has_cache")
        cached, heard = self.make(cache=InMemoryCache()), Heard()
        first = await call(way, cached, self.prompt, {"callbacks": [heard]})
        work = self.work_done(cached)
        assert heard.starts == 1
        assert await call(way, cached, self.prompt, {"callbacks": [heard]}) == first
        assert heard.starts == 1, "a hit calls no model"
        assert self.work_done(cached) == work
        if self.is_deterministic:
            assert first == llm.invoke(self.prompt)

    @over("invoke", "ainvoke", "batch", "abatch")
    async def test_cache_and_options_of_a_call(self, llm: BaseLLM, way: str) -> None:
        """Answers to one prompt under other options are other answers, each with a place of its own in the cache.
        Fix: LangChain's key has no keyword arguments; make them fields of a copy before ``generate`` runs.
        """
        self.needs("has_cache", "supports_max_tokens", "is_deterministic")
        cached, heard = self.make(cache=InMemoryCache()), Heard()
        want = [llm.invoke(self.prompt, max_tokens=cap) for cap in (1, FEW)] + [llm.invoke(self.prompt)]
        assert len(set(want)) == 3
        for _ in range(2):
            got = [await call(way, cached, self.prompt, {"callbacks": [heard]}, max_tokens=cap) for cap in (1, FEW)]
            got.append(await call(way, cached, self.prompt, {"callbacks": [heard]}))
            assert got == want
        assert heard.starts == 3, "the second time all of them are hits"

    def test_cache_of_two_objects(self, llm: BaseLLM) -> None:
        """Objects with other options that share a cache do not share answers.
        Fix: name every option that changes an answer in ``_identifying_params``.
        """
        self.needs("has_cache", "supports_stop", "is_deterministic")
        cache = InMemoryCache()
        want = llm.invoke(self.prompt)
        assert self.make(cache=cache).invoke(self.prompt) == want
        stop = stop_in(want)
        assert self.make(cache=cache, stop=[stop]).invoke(self.prompt) == want[: want.index(stop)]
        assert self.make(cache=cache, max_tokens=1).invoke(self.prompt) != want
        assert self.make(cache=cache).invoke(self.prompt) == want

    async def test_cache_in_a_batch(self, llm: BaseLLM) -> None:
        """In a batch only those prompts are answered that were not, and answers keep their places.
        Fix: leave ``generate`` to LangChain.
        """
        self.needs("has_cache", "is_deterministic")
        prompts: list[Any] = list(self.prompts)
        want = [llm.invoke(prompt) for prompt in prompts]
        cached, heard = self.make(cache=InMemoryCache()), Heard()
        cached.invoke(prompts[1])
        assert cached.batch(prompts, {"callbacks": [heard]}) == want
        assert set(heard.by_prompt()) == {*prompts} - {prompts[1]}
        assert await cached.abatch(prompts, {"callbacks": [heard]}) == want
        assert heard.starts == len(prompts) - 1

    # -- rate limiter -------------------------------------------------------------------------------------------------

    @over(*WAYS)
    async def test_rate_limiter(self, way: str) -> None:
        """A rate limiter is asked once a call.
        Fix: ``acquire(blocking=True)`` at the start of ``_generate`` and ``_stream``, ``aacquire`` in the async ones.
        """
        self.needs("supports_rate_limiter")
        limiter = CountingLimiter()
        llm = self.make(rate_limiter=limiter)
        for calls in (1, 2):
            await call(way, llm, self.prompt)
            assert limiter.acquired == calls

    async def test_rate_limiter_in_a_batch(self) -> None:
        """A rate limiter is asked once a prompt.
        Fix: acquire by prompt, not by batch.
        """
        self.needs("supports_rate_limiter")
        limiter = CountingLimiter()
        llm = self.make(rate_limiter=limiter)
        llm.batch(list(self.prompts))
        assert limiter.acquired == len(self.prompts)
        await llm.abatch(list(self.prompts))
        assert limiter.acquired == 2 * len(self.prompts)

    @over("invoke", "ainvoke", "batch", "abatch")
    async def test_rate_limiter_and_cache(self, way: str) -> None:
        """A hit of the cache costs nothing of the rate.
        Fix: acquire in ``_generate``, behind the cache, not in ``generate`` or ``invoke``.
        """
        self.needs("supports_rate_limiter", "has_cache")
        limiter = CountingLimiter()
        llm = self.make(rate_limiter=limiter, cache=InMemoryCache())
        for _ in range(3):
            await call(way, llm, self.prompt)
        assert limiter.acquired == 1
