"""``MetaSDLLM``: a LangChain LLM over our engine. Every way of calling it gives the same answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import Runnable
from langchain_core.runnables.config import get_config_list
from pydantic import Field, PrivateAttr

from metasd_langchain import lineage  # noqa: F401 - makes itself known to LangChain
from metasd_langchain.errors import Abandoned, BadOption
from metasd_langchain.local import LocalModel
from metasd_langchain.runtime import finish_info
from metasd_langchain.values import Step

if TYPE_CHECKING:
    from metasd_langchain.engine.ticket import Steps

__all__ = ["MetaSDLLM"]


class MetaSDLLM(LocalModel, BaseLLM):
    """A local causal language model, sped up without changing its answers.

    Constructing it loads nothing; weights are loaded at the first call and shared by every object of the process that
    names the same model. Options are those of `Options`; a call may give any of them too.

    Example:
        >>> from metasd_langchain import MetaSDLLM
        >>> llm = MetaSDLLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_tokens=64)  # doctest: +SKIP
        >>> llm.invoke("The capital of France is")  # doctest: +SKIP

    Raises:
        UnknownName, BadOption: at construction, for a drafter, policy, reward or value that does not exist.
        UnsupportedParameter: for an option that does not exist.
    """

    streaming: bool = False
    """``invoke`` also fires ``on_llm_new_token`` for each piece of text."""
    rate_limiter: BaseRateLimiter | None = Field(default=None, exclude=True)
    """Asked before each prompt is run; an answer from LangChain's cache asks nobody."""

    _failures: list[BaseException] | None = PrivateAttr(default=None)  # of the prompts of this batch, first come first

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @classmethod
    def from_model_id(
        cls,
        model_id: str,
        task: str = "text-generation",
        *,
        device: int | str | None = None,
        device_map: Any = None,
        model_kwargs: Mapping[str, Any] | None = None,
        pipeline_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """As `HuggingFacePipeline.from_model_id`, for a change of one line.

        Args:
            model_id: folder or hub id.
            task: "text-generation"; nothing else is served.
            device: as there: -1 is the CPU, other numbers are CUDA devices; or one of our names.
            device_map: passed through to ``from_pretrained``.
            model_kwargs: passed through to ``from_pretrained``.
            pipeline_kwargs: generation options by transformers' names, e.g. ``max_new_tokens``, ``do_sample``.
            options: fields.
        """
        if task != "text-generation":
            raise BadOption("task", task, "'text-generation'")
        kwargs = dict(model_kwargs or {})
        if device_map is not None:
            kwargs["device_map"] = device_map
        if isinstance(device, int):
            device = "cpu" if device < 0 else f"cuda:{device}"
        if device is not None:
            options["device"] = device
        return cls(model=model_id, model_kwargs=kwargs, pipeline_kwargs=dict(pipeline_kwargs or {}), **options)

    # -- what LangChain asks ----------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "metasd"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "metasd"
        params.setdefault("ls_model_name", self._model_name)
        return params

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Its options describe it; weights are loaded again where it is revived."""
        return True

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text as a prompt, with the model's own tokenizer. Loads the model when it is not loaded yet."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._load().target.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that messages become when this LLM is called with them; it has no use for tools."""
        return self.get_num_tokens(get_buffer_string(messages))

    # -- calls --------------------------------------------------------------------------------------------------------
    # LangChain's cache key, traces and metadata are made from an object's fields. So options of a call become fields of
    # a copy (which shares the engine) before LangChain's own code runs.

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """Answers to several prompts; they run side by side in the engine."""
        bound, rest = self._bound(kwargs)
        return BaseLLM.generate(bound, prompts, stop or bound.stop, callbacks, **rest)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, **kwargs: Any
    ) -> LLMResult:
        """See `generate`."""
        bound, rest = self._bound(kwargs)
        # `or None`: langchain-core 1.8.3 takes an empty list for one list a prompt
        return await BaseLLM.agenerate(bound, prompts, stop or bound.stop, callbacks or None, **rest)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Text as it becomes final."""
        bound, rest = self._bound(kwargs, (config or {}).get("run_name"))
        return BaseLLM.stream(bound, input, config, stop=stop or bound.stop, **rest)

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        """Text as it becomes final; a cancelled task stops the engine."""
        bound, rest = self._bound(kwargs, (config or {}).get("run_name"))
        return BaseLLM.astream(bound, input, config, stop=stop or bound.stop, **rest)

    # One call a prompt: each has its own callbacks and its own error, and the engine packs what runs at the same time.
    # When one fails and its error is raised, the others' answers are lost, so they stop too.

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answers in the order of the prompts."""
        if return_exceptions:
            return Runnable.batch(self, inputs, config, return_exceptions=True, **kwargs)
        bound, failures = self.model_copy(), list[BaseException]()
        bound._failures = failures  # noqa: SLF001 - a copy of self
        try:
            return Runnable.batch(bound, inputs, config, **kwargs)
        except Abandoned:
            raise failures[0] from None

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Answers in the order of the prompts."""
        if not inputs:
            return []
        configs = get_config_list(config, len(inputs))
        limit = configs[0].get("max_concurrency")
        turn = asyncio.Semaphore(limit) if limit else nullcontext()

        async def answer(prompt: LanguageModelInput, own: RunnableConfig) -> str:
            async with turn:
                return await self.ainvoke(prompt, own, **kwargs)

        tasks = [asyncio.ensure_future(answer(*pair)) for pair in zip(inputs, configs, strict=True)]
        try:
            answers: list[str] = await asyncio.gather(*tasks, return_exceptions=return_exceptions)  # type: ignore[assignment]
            return answers
        finally:
            await _ended(tasks)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        heard = run_manager if self.streaming and len(prompts) == self.n == 1 else None
        runs: list[Steps] = []
        answers: list[list[Step]] = []
        try:
            for prompt in prompts:
                self._go_on()
                if self.rate_limiter is not None:
                    self.rate_limiter.acquire(blocking=True)
                for completion in range(self.n):
                    started = self._start(prompt, stop, run_manager, stream=heard is not None, completion=completion)
                    runs.append(started)  # at once: closed if the next one fails
            for started in runs:
                steps: list[Step] = []
                answers.append(steps)
                for step in started:
                    self._go_on()
                    steps.append(step)
                    if heard is not None and step.text:
                        heard.on_llm_new_token(step.text, chunk=GenerationChunk(text=step.text))
        except BaseException as error:
            if self._failures is not None:
                self._failures.append(error)
            raise
        finally:
            for started in runs:
                started.close()
        return self._result(answers)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        heard = run_manager if self.streaming and len(prompts) == self.n == 1 else None

        async def answer(prompt: str, completion: int) -> list[Step]:
            steps: list[Step] = []
            started = self._start_async(prompt, stop, run_manager, stream=heard is not None, completion=completion)
            async with aclosing(started):
                async for step in started:
                    steps.append(step)
                    if heard is not None and step.text:
                        await heard.on_llm_new_token(step.text, chunk=GenerationChunk(text=step.text))
            return steps

        tasks: list[asyncio.Task[list[Step]]] = []
        try:
            for prompt in prompts:
                if self.rate_limiter is not None:
                    await self.rate_limiter.aacquire(blocking=True)
                tasks += [asyncio.ensure_future(answer(prompt, completion)) for completion in range(self.n)]
            return self._result(await asyncio.gather(*tasks))
        finally:
            await _ended(tasks)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        self._streams_one()
        if self.rate_limiter is not None:
            self.rate_limiter.acquire(blocking=True)
        steps = self._start(prompt, stop, run_manager, stream=True, told=False)
        seen: list[Step] = []
        try:
            for step in steps:
                self._watch(step)
                chunk = self._chunk(step, seen)
                if chunk is not None:
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            steps.close()

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[GenerationChunk, None]:
        self._streams_one()
        if self.rate_limiter is not None:
            await self.rate_limiter.aacquire(blocking=True)
        steps = self._start_async(prompt, stop, run_manager, stream=True, told=False)
        seen: list[Step] = []
        try:
            async for step in steps:
                self._watch(step)
                chunk = self._chunk(step, seen)
                if chunk is not None:
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            await steps.aclose()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Raise when another prompt of the same batch failed, and nobody will read this one's answer."""
        if self._failures:
            raise Abandoned("another prompt of the batch failed")

    def _streams_one(self) -> None:
        if self.n != 1:
            raise BadOption("n", self.n, "1 when the answer is streamed")

    def _watch(self, step: Step) -> None:
        """Hook for subclasses: every step of a stream, before its text goes down the chain."""

    def _chunk(self, step: Step, seen: list[Step]) -> GenerationChunk | None:
        """A step as a chunk; facts about the call are on the last one only, since LangChain adds chunks up.

        Args:
            step: the step.
            seen: the stream's steps that hold log-probabilities, gathered for the last chunk.
        """
        if step.logprobs:
            seen.append(step)
        if step.summary is None:
            return GenerationChunk(text=step.text) if step.text else None
        info = self._info([step], seen)
        # a stream has no llm_output, which tracers read tokens from; some look here instead, under LangChain's names
        info["usage_metadata"] = {
            "input_tokens": step.summary.prompt_tokens,
            "output_tokens": step.summary.completion_tokens,
            "total_tokens": step.summary.prompt_tokens + step.summary.completion_tokens,
        }
        return GenerationChunk(text=step.text, generation_info=info)

    def _info(self, steps: Sequence[Step], with_logprobs: Sequence[Step]) -> dict[str, Any]:
        summary = steps[-1].summary
        info = finish_info(self._model_name, summary) if summary is not None else {}
        logprobs = self._logprobs(with_logprobs)
        return info if logprobs is None else {**info, "logprobs": logprobs}

    def _result(self, answers: Sequence[Sequence[Step]]) -> LLMResult:
        """Answers as LangChain wants them: ``n`` in a row belong to one prompt, which is counted once."""
        generations: list[list[Generation]] = []
        total = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for index, steps in enumerate(answers):
            info = self._info(steps, steps)
            usage = info.get("usage", {})
            prompt = 0 if index % self.n else usage.get("prompt_tokens", 0)
            completion = usage.get("completion_tokens", 0)
            for name, count in zip(total, (prompt, completion, prompt + completion), strict=True):
                total[name] += count
            if index % self.n == 0:
                generations.append([])
            generations[-1].append(Generation(text="".join(step.text for step in steps), generation_info=info))
        return LLMResult(generations=generations, llm_output={"token_usage": total, "model_name": self._model_name})


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """When one failed or we were cancelled, the others stop too, and their callbacks have heard of it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
