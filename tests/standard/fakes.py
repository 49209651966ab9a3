"""A correct LLM without a model: words drawn from a hash of the prompt. What the standard suite asks of any wrapper."""

from __future__ import annotations

import asyncio
import random
import time
from itertools import islice
from typing import Any, ClassVar

from langchain_core.language_models import LLM, BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables.base import Runnable
from pydantic import Field, PrivateAttr, SecretStr

from metasd_langchain.testing.llm_standard import LLMTests

OPTIONS = ("temperature", "max_tokens", "seed", "pace")


class Words(BaseLLM):
    """Everything the suite asks for, in pure Python."""

    model: str = "words"
    temperature: float = 0.0
    max_tokens: int = 100
    timeout: float | None = None
    stop: list[str] | None = None
    max_retries: int = 0
    api_key: SecretStr | None = None
    streaming: bool = False
    seed: int | None = None
    pace: float = 0.0  # seconds a word
    rate_limiter: BaseRateLimiter | None = Field(default=None, exclude=True)
    _work: list[int] = PrivateAttr(default_factory=lambda: [0])

    @property
    def _llm_type(self):
        return "words"

    @property
    def _identifying_params(self):
        return {name: getattr(self, name) for name in ("model", "stop", *OPTIONS)}

    @classmethod
    def is_lc_serializable(cls):
        return True

    @property
    def lc_secrets(self):
        return {"api_key": "WORDS_KEY"}

    def _get_ls_params(self, stop=None, **kwargs):
        return super()._get_ls_params(stop=stop or self.stop, **kwargs)

    def get_token_ids(self, text):
        return self.custom_get_token_ids(text) if self.custom_get_token_ids else [len(word) for word in text.split()]

    def bound(self, kwargs):
        """A copy with the options of a call as fields, and what is not one of them."""
        return (
            self.model_copy(update={name: value for name, value in kwargs.items() if name in OPTIONS}),
            {name: value for name, value in kwargs.items() if name not in OPTIONS},
        )

    def generate(self, prompts, stop=None, callbacks=None, **kwargs):
        me, rest = self.bound(kwargs)
        return BaseLLM.generate(me, prompts, stop or self.stop, callbacks, **rest)

    async def agenerate(self, prompts, stop=None, callbacks=None, **kwargs):
        me, rest = self.bound(kwargs)
        return await BaseLLM.agenerate(me, prompts, stop or self.stop, callbacks, **rest)

    def stream(self, input, config=None, *, stop=None, **kwargs):
        me, rest = self.bound(kwargs)
        return BaseLLM.stream(me, input, config, stop=stop or self.stop, **rest)

    def astream(self, input, config=None, *, stop=None, **kwargs):
        me, rest = self.bound(kwargs)
        return BaseLLM.astream(me, input, config, stop=stop or self.stop, **rest)

    batch = Runnable.batch
    abatch = Runnable.abatch

    def words(self, prompt):
        if self.temperature > 0:
            draw = random.Random() if self.seed is None else random.Random(f"{prompt} {self.seed}")
        else:
            draw = random.Random(f"{prompt} {self.model}")
        while True:
            yield "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 3)))

    def pieces(self, prompt, stop):
        """The answer as chunks; what may become a stop string is held back, facts are on the last chunk."""
        if not prompt:
            raise ValueError("an empty prompt")
        stops = [string for string in stop or self.stop or () if string]
        held, count, reason = "", 0, "length"
        for word in islice(self.words(prompt), self.max_tokens):
            count += 1
            self._work[0] += 1
            held += word
            found = [held.index(string) for string in stops if string in held]
            if found:
                held, reason = held[: min(found)], "stop"
                break
            keep = max(
                (k for k in range(len(held)) if any(s.startswith(held[len(held) - k :]) for s in stops)), default=0
            )
            yield GenerationChunk(text=held[: len(held) - keep])
            held = held[len(held) - keep :]
        yield GenerationChunk(text=held, generation_info=self.facts(prompt, count, reason))

    def facts(self, prompt, count, reason):
        size = len(prompt.split())
        usage = {"prompt_tokens": size, "completion_tokens": count, "total_tokens": size + count}
        return {"finish_reason": reason, "usage": usage}

    def result(self, answers):
        generations, total = [], {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for chunks in answers:
            info = chunks[-1].generation_info
            total = {name: total[name] + info["usage"][name] for name in total}
            generations.append([Generation(text="".join(chunk.text for chunk in chunks), generation_info=info)])
        return LLMResult(generations=generations, llm_output={"token_usage": total})

    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        if self.rate_limiter:
            self.rate_limiter.acquire()
        for chunk in self.pieces(prompt, stop):
            time.sleep(self.pace)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(self, prompt, stop=None, run_manager=None, **kwargs):
        if self.rate_limiter:
            await self.rate_limiter.aacquire()
        for chunk in self.pieces(prompt, stop):
            await asyncio.sleep(self.pace)
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def heard_by(self, run_manager, place):
        """LangChain gives the first prompt's manager only."""
        return run_manager if self.streaming and place == 0 else None

    def _generate(self, prompts, stop=None, run_manager=None, **kwargs):
        me, _ = self.bound(kwargs)
        return self.result(
            [list(me._stream(prompt, stop, me.heard_by(run_manager, place))) for place, prompt in enumerate(prompts)]
        )

    async def _agenerate(self, prompts, stop=None, run_manager=None, **kwargs):
        me, _ = self.bound(kwargs)
        streams = [me._astream(prompt, stop, me.heard_by(run_manager, place)) for place, prompt in enumerate(prompts)]
        return self.result([[chunk async for chunk in stream] for stream in streams])


class Bare(LLM):
    """As little as LangChain allows."""

    model: str = "bare"
    temperature: float = 0.0

    @property
    def _llm_type(self):
        return "bare"

    @property
    def _identifying_params(self):
        return {"model": self.model, "temperature": self.temperature}

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        return prompt[::-1]


class WordsTests(LLMTests):
    """How `Words` is configured."""

    llm_class: ClassVar[Any] = Words
    long_params: ClassVar[Any] = {"max_tokens": 400, "pace": 0.002}

    def work_done(self, llm):
        return llm._work[0]
