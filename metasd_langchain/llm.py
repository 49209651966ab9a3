"""``MetaSDLLM``: a LangChain LLM over our engine. Every way of calling it gives the same answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.base import Runnable
from pydantic import ConfigDict, Field, PrivateAttr

from metasd_langchain.assemble import DEFAULT_ARMS, close_engine, make_pool, shared_engine
from metasd_langchain.errors import BadOption, LoadError, MissingExtra, RequestError, UnsupportedParameter
from metasd_langchain.runtime import Runtime, finish_info, run, run_async
from metasd_langchain.telemetry.otel import CallSpan
from metasd_langchain.values import Request, Sampling, Step, VerifyMode

if TYPE_CHECKING:
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.engine.pool import Pool
    from metasd_langchain.engine.ticket import Steps

__all__ = ["MetaSDLLM"]

_EMBEDDED = "gemma-3-270m"
_PER_CALL = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "verify", "timeout", "memory_key", "scope")
_ALIASES = {
    "model_id": "model",
    "model_name": "model",
    "model_path": "model",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
}
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"auto|(cpu|cuda|mps|xpu)(:\d+)?")
_SETTINGS = ("drafters", "policy", "reward", "memory")
_PREFIX_TOKENS = 32  # of a prompt, to tell one unnamed pipeline step from another


class MetaSDLLM(BaseLLM):
    """A local causal language model, sped up without changing its answers.

    Constructing it loads nothing; weights are loaded at the first call and shared by every object of the process that
    names the same model.

    Example:
        >>> from metasd_langchain import MetaSDLLM
        >>> llm = MetaSDLLM(model="Qwen/Qwen2.5-0.5B-Instruct", max_tokens=64)  # doctest: +SKIP
        >>> llm.invoke("The capital of France is")  # doctest: +SKIP

    Raises:
        UnknownName, BadOption: at construction, for a drafter, policy, reward or value that does not exist.
        UnsupportedParameter: for an option that does not exist.
    """

    model_config = ConfigDict(protected_namespaces=(), arbitrary_types_allowed=True)

    model: Any = None
    """Folder, hub id, ``.gguf`` file, "gemma-3-270m" (embedded), or a live ``(model, tokenizer)``. None: what the
    environment variable METASD_MODEL names, else the embedded model."""
    revision: str | None = None
    """Revision of a hub id."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed through to ``from_pretrained``: ``device_map``, ``quantization_config``, ..."""
    device: str = "auto"
    """"auto", "cpu", "cuda", "cuda:1" or "mps"."""
    dtype: str = "auto"
    """"auto", "float32", "bfloat16" or "float16"."""
    compile: bool = False
    """Hand the target's forward to ``torch.compile``."""

    drafters: Any = None
    """Arms of the bandit: names with budgets (``["suffix@16", "lookup", "plain"]``), drafter objects, or pairs (object,
    budget). None: the default pool."""
    policy: Any = "hinted_ucb"
    """Name of the bandit policy, or a policy object that each pipeline step starts from a copy of."""
    reward: str = "throughput"
    """Name of the reward."""
    memory: str = "process"
    """"process": each pipeline step goes on learning; "request": every call starts fresh."""
    memory_key: str | None = None
    """Name of the pipeline step. None: the LangGraph node, the run's name, or step tags and the prompt's start."""
    scope: str | None = None
    """Keeps users of one object apart: text indexes and bandit memory of one scope never show in another."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float | None = None
    """Nucleus sampling; None or 1 is off."""
    top_k: int | None = None
    """Keep the k most likely tokens; None or 0 is off."""
    min_p: float | None = None
    """Keep tokens at least this likely relative to the most likely one; None or 0 is off."""
    seed: int | None = None
    """The same seed gives the same answer. None draws one for each call."""
    max_tokens: int = 256
    """Most tokens of an answer."""
    stop: list[str] | None = None
    """Strings that end an answer; a call's own ``stop`` replaces them."""
    timeout: float | None = None
    """Seconds after which a call fails with DeadlineExceeded."""
    verify: VerifyMode = "invariant"
    """"invariant": the answer depends on prompt, seed and options alone. "rejection": Leviathan et al.'s speculative
    sampling, for measuring papers' claims."""

    settings: Any = Field(default=None, exclude=True)
    """Mapping or JSON file with any of drafters, policy, reward, memory; options given here win."""
    engine: Any = Field(default=None, exclude=True)
    """A running engine to use instead of loading ``model``."""

    _runtime: Any = PrivateAttr(default=None)
    _run_name: str | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        named = {_ALIASES.get(name, name): value for name, value in options.items()}
        known = {*type(self).model_fields, *_ALIASES}
        for name in named:
            if name not in known:
                raise UnsupportedParameter(name, known)
        super().__init__(**{**_read_settings(named.get("settings"), named), **named})
        self._check()

    # -- what LangChain asks ----------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "metasd"

    @property
    def _model_name(self) -> str:
        """The model's name for metadata; known without loading it."""
        if self.engine is not None:
            return str(self.engine.target.name)
        model = self._named_model
        if isinstance(model, tuple):
            config = getattr(model[0], "config", None)
            return str(getattr(config, "_name_or_path", "") or getattr(config, "model_type", "model"))
        text = str(model)
        return Path(text).stem if text.endswith(".gguf") else Path(text).name if Path(text).is_dir() else text

    @property
    def _model_id(self) -> object:
        """Tells models of one name apart: the place of a folder or file, the identity of live objects."""
        if self.engine is not None:
            return id(self.engine.target)
        model = self._named_model
        if isinstance(model, tuple):
            return id(model[0])
        path = Path(model)
        return str(path.resolve()) if path.exists() else str(model)

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """Everything that changes an answer or says how it was made; JSON-able."""
        return {
            "model": self._model_name,
            # Which model exactly: LangChain's cache keeps answers by these parameters, and names repeat.
            "model_id": self._model_id,
            "model_kwargs": repr(sorted(self.model_kwargs.items())),
            "compile": self.compile,
            "revision": self.revision,
            "dtype": self.dtype,
            "device": self.device,
            **{name: getattr(self, name) for name in _PER_CALL},
            "stop": self.stop,
            "drafters": [str(getattr(spec, "name", spec)) for spec in self._arms],
            "policy": self.policy if isinstance(self.policy, str) else type(self.policy).__name__,
            "reward": self.reward,
            "memory": self.memory,
        }

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
        return await BaseLLM.agenerate(bound, prompts, stop or bound.stop, callbacks, **rest)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[str]:
        """Text as it becomes final."""
        bound, rest = self._bound(kwargs, config)
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
        bound, rest = self._bound(kwargs, config)
        return BaseLLM.astream(bound, input, config, stop=stop or bound.stop, **rest)

    # One call a prompt: each has its own callbacks and its own error, and the engine packs what runs at the same time.
    batch = Runnable.batch
    abatch = Runnable.abatch

    def steps(self, prompt: str, *, stop: list[str] | None = None, **options: Any) -> Iterator[Step]:
        """The engine's view of one call: token ids, the arm that played, who guessed which piece of text.

        Args:
            prompt: text.
            stop: strings that end the answer.
            options: as fields, for this call.
        """
        bound, rest = self._bound(options)
        if rest:
            raise UnsupportedParameter(next(iter(rest)), _PER_CALL)
        return bound._start(prompt, stop, None, stream=True)  # noqa: SLF001 - a copy of self

    def forget(self) -> None:
        """Drop shared text indexes and what the bandit learned, as if the object were new."""
        self._shared.forget()

    def close(self) -> None:
        """Stop the engine, for every object that shares it, and let go of its weights; the next call loads again."""
        engine = self._shared.take()
        if engine is not None:
            close_engine(engine)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        runs: list[Steps] = []
        answers: list[list[Step]] = []
        try:
            for prompt in prompts:
                runs.append(self._start(prompt, stop, run_manager, stream=False))  # noqa: PERF401 - closed if one fails
            answers = [list(started) for started in runs]
        finally:
            for started in runs[len(answers) :]:
                started.close()
        return self._result(answers)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        async def answer(prompt: str) -> list[Step]:
            return [step async for step in self._start_async(prompt, stop, run_manager, stream=False)]

        tasks = [asyncio.ensure_future(answer(prompt)) for prompt in prompts]
        try:
            return self._result(await asyncio.gather(*tasks))
        finally:
            for task in tasks:  # when one failed or we were cancelled, the others stop too
                task.cancel()

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        steps = self._start(prompt, stop, run_manager, stream=True)
        try:
            for step in steps:
                self._watch(step)
                chunk = self._chunk(step)
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
    ) -> AsyncIterator[GenerationChunk]:
        steps = self._start_async(prompt, stop, run_manager, stream=True)
        try:
            async for step in steps:
                self._watch(step)
                chunk = self._chunk(step)
                if chunk is not None:
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            await steps.aclose()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise for wrong options. Loads nothing."""
        self._sampling()
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise BadOption("max_tokens", self.max_tokens, "a whole number of at least 1")
        if self.dtype not in _DTYPES:
            raise BadOption("dtype", self.dtype, ", ".join(_DTYPES))
        if not _DEVICE.fullmatch(self.device):
            raise BadOption("device", self.device, "auto, cpu, cuda, cuda:1, mps ...")
        if self.verify not in ("invariant", "rejection"):
            raise BadOption("verify", self.verify, "'invariant' or 'rejection'")
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise BadOption("timeout", self.timeout, "a positive number of seconds")
        if self._runtime is None:
            self._runtime = Runtime()
        self._pool()

    @property
    def _shared(self) -> Runtime:
        if self._runtime is None:  # an object revived without its constructor
            self._runtime = Runtime()
        runtime: Runtime = self._runtime
        return runtime

    @property
    def _named_model(self) -> Any:
        return self.model if self.model is not None else os.environ.get("METASD_MODEL") or _EMBEDDED

    @property
    def _arms(self) -> list[Any]:
        if isinstance(self.drafters, str):
            raise BadOption("drafters", self.drafters, "a list of arms")
        return list(DEFAULT_ARMS) if self.drafters is None else list(self.drafters)

    def _sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p, self.seed)

    def _pool(self) -> Pool:
        arms = self._arms
        key = (
            tuple(arm if isinstance(arm, str) else id(arm) for arm in arms),
            _key(self.policy),
            _key(self.reward),
            self.memory,
        )
        return self._shared.pool(key, lambda: make_pool(arms, self.policy, self.reward, memory=self.memory))

    def _load(self) -> Engine:
        if self.engine is not None:
            given: Engine = self.engine
            return given
        model = self._named_model
        key = (model if isinstance(model, str) else id(model), self.revision, self.dtype, self.device, self.compile)
        return self._shared.engine(key, lambda: self._open(model))

    def _open(self, model: Any) -> Engine:
        try:
            return shared_engine(
                model,
                revision=self.revision,
                dtype=self.dtype,
                device=self.device,
                compile=self.compile,
                model_kwargs=self.model_kwargs,
            )
        except MissingExtra as error:
            if self.model is None and model == _EMBEDDED:
                raise LoadError(
                    "no model was named and the embedded one is not installed",
                    hint="MetaSDLLM(model=...), or set METASD_MODEL, or pip install 'metasd-langchain[demo]'",
                ) from error
            raise

    def _bound(
        self, kwargs: Mapping[str, Any], config: RunnableConfig | None = None
    ) -> tuple[MetaSDLLM, dict[str, Any]]:
        """A copy of self with a call's options as fields, and the arguments that are LangChain's own."""
        named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
        rest: dict[str, Any] = {
            name: named.pop(name) for name in ("tags", "metadata", "run_name", "run_id") if name in named
        }
        for name in named:
            if name not in (*_PER_CALL, "stop"):
                raise UnsupportedParameter(name, (*_PER_CALL, "stop"))
        run_name = (config or {}).get("run_name") or rest.get("run_name")
        if not named and run_name is None:
            return self, rest
        bound = self.model_copy(update=named)
        bound.__dict__.pop("_serialized", None)  # LangChain memoises it, and a copy's options differ
        bound._run_name = run_name if isinstance(run_name, str) else None  # noqa: SLF001
        if named:
            bound._check()  # noqa: SLF001
        return bound, rest

    def _request(self, engine: Engine, prompt: str, stop: list[str] | None, run_manager: Any) -> Request:
        ids = tuple(engine.target.encode(prompt))
        request = Request(
            prompt=ids,
            sampling=self._sampling(),
            max_tokens=self.max_tokens,
            stop_ids=engine.target.stop_ids,
            stop=_strings(stop or self.stop),
            verify=self.verify,
            step=self.memory_key or _step_of(run_manager, self._run_name, ids),
            scope=self.scope or self._shared.scope,
            deadline_s=self.timeout,
        )
        engine.check(request)
        return request

    def _span(self, run_manager: Any, stream: bool) -> CallSpan:
        return CallSpan.start(
            operation="text_completion",
            model=self._model_name,
            sampling=self._sampling(),
            max_tokens=self.max_tokens,
            stream=stream,
            policy=self._pool().selector.policy_name,
            arms=[arm.name for arm in self._pool().selector.arms],
            run_id=getattr(run_manager, "run_id", None),
        )

    def _start(self, prompt: str, stop: list[str] | None, run_manager: Any, stream: bool) -> Steps:
        span = self._span(run_manager, stream)
        try:
            _check_prompt(prompt)
            engine = self._load()
            request = self._request(engine, prompt, stop, run_manager)
        except BaseException as error:
            span.end(None, error=error)
            raise
        return run(engine, request, self._pool(), span, prompt)

    async def _start_async(
        self, prompt: str, stop: list[str] | None, run_manager: Any, stream: bool
    ) -> AsyncGenerator[Step, None]:
        span = self._span(run_manager, stream)
        try:
            _check_prompt(prompt)
            # Weights may have to be loaded, and a long prompt takes milliseconds to encode: off the event loop.
            engine = await asyncio.to_thread(self._load)
            request = await asyncio.to_thread(self._request, engine, prompt, stop, run_manager)
        except BaseException as error:
            span.end(None, error=error)
            raise
        steps = run_async(engine, request, self._pool(), span, prompt)
        try:
            async for step in steps:
                yield step
        finally:
            await steps.aclose()

    def _watch(self, step: Step) -> None:
        """Hook for subclasses: every step of a stream, before its text goes down the chain."""

    def _chunk(self, step: Step) -> GenerationChunk | None:
        """A step as a chunk; facts about the call are on the last one only, since LangChain adds chunks up."""
        if step.summary is None:
            return GenerationChunk(text=step.text) if step.text else None
        return GenerationChunk(text=step.text, generation_info=finish_info(self._model_name, step.summary))

    def _result(self, answers: Sequence[Sequence[Step]]) -> LLMResult:
        generations: list[list[Generation]] = []
        total = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        for steps in answers:
            summary = steps[-1].summary
            info = finish_info(self._model_name, summary) if summary is not None else {}
            for name in total:
                total[name] += info.get("usage", {}).get(name, 0)
            generations.append([Generation(text="".join(step.text for step in steps), generation_info=info)])
        return LLMResult(generations=generations, llm_output={"token_usage": total, "model_name": self._model_name})

    def __getstate__(self) -> dict[str, Any]:
        if self.engine is not None and self.model is None:
            raise BadOption("engine", "a running engine", "a model's name too, when the object is to be pickled")
        state = super().__getstate__()
        private = dict(state.get("__pydantic_private__") or {})
        private["_runtime"] = None  # engine and locks stay here; the copy loads its own
        return {**state, "__pydantic_private__": private, "__dict__": {**state["__dict__"], "engine": None}}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> MetaSDLLM:
        """A copy that shares the engine: weights are not duplicated."""
        return self.model_copy()


def _key(thing: object) -> object:
    return thing if isinstance(thing, str) else id(thing)


def _strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = [stop]
    if any(not isinstance(string, str) for string in stop or ()):
        raise BadOption("stop", stop, "a list of strings")
    return tuple(string for string in stop or () if string)


def _check_prompt(prompt: object) -> None:
    """Raise for what can be no prompt, before any weight is loaded."""
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("the prompt is empty or no string", hint="a prompt has at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as cause:
        raise RequestError("the prompt holds half a character (a lone surrogate)") from cause


def _step_of(run_manager: Any, run_name: str | None, prompt: Sequence[int]) -> str:
    """Name of the pipeline step behind a call, so that each step learns its own drafter."""
    node = (getattr(run_manager, "metadata", None) or {}).get("langgraph_node") or run_name
    if node:
        return str(node)
    tags = sorted(tag for tag in getattr(run_manager, "tags", None) or () if tag.startswith(("seq:", "map:")))
    start = hashlib.blake2s(json.dumps(prompt[:_PREFIX_TOKENS]).encode(), digest_size=6).hexdigest()
    return ":".join([*tags, start])


def _read_settings(settings: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options from a settings mapping or file, less those given to the constructor."""
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        try:
            settings = json.loads(Path(settings).read_text())
        except (OSError, ValueError, TypeError) as cause:
            raise BadOption("settings", str(settings), "a mapping or a readable JSON file") from cause
        if not isinstance(settings, Mapping):
            raise BadOption("settings", type(settings).__name__, "a JSON object")
    for name in settings:
        if name not in _SETTINGS:
            raise UnsupportedParameter(name, _SETTINGS)
    return {name: value for name, value in settings.items() if name not in given}
