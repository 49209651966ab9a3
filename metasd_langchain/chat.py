"""``ChatMetaSD``: a LangChain chat model over our engine, with tools and structured output that are always valid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config, merge_configs
from langchain_core.tools import BaseTool
from pydantic import Field, PrivateAttr, model_validator

from metasd_langchain import lineage  # noqa: F401 - makes itself known to LangChain
from metasd_langchain._version import __version__
from metasd_langchain.constraints import Grammar
from metasd_langchain.control_tokens import encoded, shown
from metasd_langchain.errors import BadOption
from metasd_langchain.local import Asked, LocalModel
from metasd_langchain.prompt import openai_tools, schema_note, tool_choice_of, tools_of, turns_of
from metasd_langchain.structured import METHODS, parsed, response_format, with_raw
from metasd_langchain.talk import Heard, Reply, Talk
from metasd_langchain.templates import check_template, template_for
from metasd_langchain.tool_grammar import closed, reply_grammar
from metasd_langchain.turns import Rendered
from metasd_langchain.values import Step

if TYPE_CHECKING:
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.engine.ticket import Steps

__all__ = ["ChatMetaSD"]

_OF_A_CALL = ("tools", "tool_choice", "parallel_tool_calls", "strict", "stream", "streaming")


class ChatMetaSD(LocalModel, BaseChatModel):
    """A local chat model, sped up without changing its answers.

    Prompts are made with the model's own chat template, or with a plain one where it has none. Tool calls and
    structured output follow a grammar while they are generated, so they are valid JSON of their schema whatever the
    model. Constructing loads nothing. Options are those of `Options` and the ones below; a call may give any of them.

    Example:
        >>> from metasd_langchain import ChatMetaSD
        >>> chat = ChatMetaSD(model="Qwen/Qwen2.5-0.5B-Instruct")  # doctest: +SKIP
        >>> chat.invoke("What is the capital of France?").content  # doctest: +SKIP

    Raises:
        UnknownName, BadOption: at construction, for a value that does not exist.
        UnsupportedParameter: for an option that does not exist.
    """

    _operation: ClassVar[str] = "chat"

    streaming: bool = False
    """``invoke`` streams inside, so that callbacks hear each piece. False, when given: ``stream`` does not stream."""
    chat_template: str | None = None
    """Jinja text instead of the model's own chat template; "plain": turns with labels, as for a model without one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the template, e.g. ``{"enable_thinking": False}``."""
    tool_format: str | None = None
    """How tool calls are written: "hermes", "llama3", "mistral", "gemma". None: what the template's text says."""

    _run: Any = PrivateAttr(default=None)  # of the call that a copy was made for

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    @model_validator(mode="after")
    def _set_metasd_version(self) -> Self:
        self._add_version("metasd-langchain", __version__)
        return self

    # -- tools and structured output ----------------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools it may call.

        Args:
            tools: LangChain tools, functions, pydantic classes, TypedDicts, or mappings in OpenAI's shape.
            tool_choice: None or "auto": the model decides; "any", "required" or True: it calls one; a tool's name or
                OpenAI's mapping: it calls that one; "none": it calls none, though it sees them.
            strict: calls follow their schema in any case.
            parallel_tool_calls: whether one reply may hold several calls. None: yes where the model has a chat template
                of its own; one without has not been taught when to stop.
            kwargs: options for the calls.

        Raises:
            BadTool: what cannot be offered, or two tools of one name.
            UnknownName: ``tool_choice`` names no tool.
        """
        shaped = openai_tools(tools)
        tool_choice_of(tool_choice, tools_of(shaped))
        given = {"tool_choice": tool_choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        bound = {name: value for name, value in given.items() if value is not None}
        return self.bind(tools=shaped, **bound, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model, answering with objects of a schema.

        Args:
            schema: a pydantic class (of either version), a TypedDict, a JSON schema or OpenAI's function; None with
                "json_mode": any JSON object. Classes of pydantic give objects, the others mappings.
            method: "json_schema" and "json_mode": the answer is the JSON; "function_calling": it is a tool call.
            include_raw: a mapping with "raw", "parsed" and "parsing_error" instead of an exception.
            strict: answers follow the schema in any case.
            kwargs: options for the calls.

        Raises:
            BadOption: no such method, or no schema.
        """
        if method not in METHODS:
            raise BadOption("method", method, ", ".join(METHODS))
        if schema is None and method != "json_mode":
            raise BadOption("schema", schema, "a schema; only json_mode does without")
        how = {"method": method} if strict is None else {"method": method, "strict": strict}
        noted = {"kwargs": how, "schema": schema if schema is not None else {}}
        name = ""
        if method == "function_calling":
            shaped = openai_tools([schema or {}])
            name = shaped[0]["function"]["name"]
            model = self.bind_tools(
                shaped,
                tool_choice=name,
                strict=strict,
                parallel_tool_calls=False,
                ls_structured_output_format=noted,
                **kwargs,
            )
        else:
            shape = response_format(schema, strict)
            model = self.bind(response_format=shape, ls_structured_output_format=noted, **kwargs)
        parser = parsed(schema, method, name)
        return with_raw(model, parser) if include_raw else model | parser

    # -- what LangChain asks ------------------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "metasd-chat"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return self._identity()

    def _identity(self) -> dict[str, Any]:
        own = ("chat_template", "chat_template_kwargs", "tool_format")
        return {**super()._identity(), **{name: getattr(self, name) for name in own}}

    @property
    def _serialized(self) -> dict[str, Any]:  # made anew: LangChain keeps it, and it goes stale
        made: dict[str, Any] = dumpd(self)
        return made

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """LangChain's cache key: everything that changes an answer, after the call's own options."""
        rest = {name: kwargs[name] for name in _OF_A_CALL[:3] if name in kwargs}
        bound, _ = self._bound({name: value for name, value in kwargs.items() if name not in _OF_A_CALL})
        return str(sorted({**bound._identity(), **rest, "stop": stop or bound.stop}.items()))  # noqa: SLF001 - a copy

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        params["ls_provider"] = "metasd"
        params.setdefault("ls_model_name", self._model_name)
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        profile = ModelProfile(
            name=self._model_name,
            open_weights=True,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            temperature=True,
        )
        window = self._known_window()
        if window is not None:
            profile["max_input_tokens"] = window - 1  # one is kept for the answer
            profile["max_output_tokens"] = window - 1
        return profile

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Its options describe it; weights are loaded again where it is revived."""
        return True

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text, with the model's own tokenizer. Loads the model when it is not loaded yet."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self._load().target.encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that messages and tools become, exactly as a call counts them."""
        given = {} if not tools else {"tools": openai_tools(tools)}
        bound, talk = self._talk(messages, given)
        return len(bound._asked(bound._load(), talk).ids)  # noqa: SLF001 - a copy of self

    def _should_stream(self, *, async_api: bool, run_manager: Any = None, **kwargs: Any) -> bool:
        """Several answers cannot be streamed: where only a handler would like it, they are not."""
        if kwargs.get("n", self.n) != 1 and not kwargs.get("stream"):
            return False
        return super()._should_stream(async_api=async_api, run_manager=run_manager, **kwargs)

    # -- calls --------------------------------------------------------------------------------------------------------
    # LangChain tells `_generate` no run name and `_stream` nothing of its run, and the bandit remembers by them, spans
    # and traces hang by them. So a copy of self knows them.

    def generate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """Answers to several conversations, one after another; ``batch`` runs them side by side."""
        return BaseChatModel.generate(self._named(kwargs.get("run_name")), messages, *args, **kwargs)

    async def agenerate(self, messages: list[list[BaseMessage]], *args: Any, **kwargs: Any) -> LLMResult:
        """See `generate`; these run side by side."""
        return await BaseChatModel.agenerate(self._named(kwargs.get("run_name")), messages, *args, **kwargs)

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        """Chunks as they become final; leaving the iterator stops the engine."""
        named, told = self._hearing(config)
        return BaseChatModel.stream(named, input, told, **kwargs)

    def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        """Chunks as they become final; a cancelled task stops the engine."""
        named, told = self._hearing(config)
        return BaseChatModel.astream(named, input, told, **kwargs)

    def _generate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        known = self._named(None, run_manager)  # where handlers want to hear each piece, it calls `_stream`
        return BaseChatModel._generate_with_cache(known, messages, stop, run_manager, **kwargs)  # noqa: SLF001

    async def _agenerate_with_cache(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        known = self._named(None, run_manager)
        try:
            return await BaseChatModel._agenerate_with_cache(known, messages, stop, run_manager, **kwargs)  # noqa: SLF001
        except asyncio.CancelledError as error:
            if run_manager is not None:  # langchain-core 1.8 tells handlers nothing of a cancelled chat
                await run_manager.on_llm_error(error, response=LLMResult(generations=[]))
            raise

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        bound, talk = self._talk(messages, kwargs)
        runs: list[Steps] = []
        try:
            for completion in range(bound.n):
                started = bound._start(talk, stop, run_manager, stream=False, completion=completion)  # noqa: SLF001
                runs.append(started)  # at once: closed if the next one fails
            return bound._result(talk, [list(steps) for steps in runs])  # noqa: SLF001 - a copy of self
        finally:
            for steps in runs:
                steps.close()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        bound, talk = self._talk(messages, kwargs)

        async def answer(completion: int) -> list[Step]:
            async with aclosing(
                bound._start_async(talk, stop, run_manager, stream=False, completion=completion)  # noqa: SLF001
            ) as steps:
                return [step async for step in steps]

        tasks = [asyncio.ensure_future(answer(completion)) for completion in range(bound.n)]
        try:
            return bound._result(talk, await asyncio.gather(*tasks))  # noqa: SLF001 - a copy of self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        bound, talk = self._streamed(messages, kwargs)
        reply = bound._reply(talk)  # noqa: SLF001 - a copy of self
        steps = bound._start(talk, stop, run_manager or self._run, stream=True)  # noqa: SLF001 - a copy of self
        try:
            for step in steps:
                self._watch(step)
                for chunk in reply.read(step):
                    if run_manager:  # LangChain gives one only where it does not tell its handlers itself
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            steps.close()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        bound, talk = self._streamed(messages, kwargs)
        reply = bound._reply(talk)  # noqa: SLF001 - a copy of self
        steps = bound._start_async(talk, stop, run_manager or self._run, stream=True)  # noqa: SLF001 - a copy of self
        try:
            async for step in steps:
                self._watch(step)
                for chunk in reply.read(step):
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
        finally:
            await steps.aclose()

    def steps(self, prompt: LanguageModelInput, *, stop: list[str] | None = None, **options: Any) -> Steps:
        """The engine's view of one call: token ids, the arm that played, who guessed which piece of raw text.

        Args:
            prompt: messages, or what LangChain makes messages of.
            stop: strings that end the answer.
            options: as fields, and ``tools``, ``tool_choice`` and the like, for this call.
        """
        bound, talk = self._streamed(self._convert_input(prompt).to_messages(), options)
        return bound._start(talk, stop, None, stream=True)  # noqa: SLF001 - a copy of self

    # -- inside -------------------------------------------------------------------------------------------------------

    @classmethod
    def _per_call(cls) -> tuple[str, ...]:
        return (*super()._per_call(), "chat_template", "chat_template_kwargs", "tool_format")

    def _check(self) -> None:
        super()._check()
        check_template(self.chat_template, self.tool_format)

    def _hearing(self, config: RunnableConfig | None) -> tuple[Self, RunnableConfig]:
        """A copy that hears of the run that begins with a config, and the config that lets it."""
        heard = Heard()
        around = ensure_config(config)  # with the callbacks of the chain or node it is called in
        return self._named(around.get("run_name"), heard), merge_configs(around, {"callbacks": [heard]})

    def _named(self, run_name: object, run: object | None = None) -> Self:
        """Self, or a copy that knows its run: the name, and what stands for LangChain's manager of it."""
        if not isinstance(run_name, str) and run is None:
            return self
        named = self.model_copy()
        if isinstance(run_name, str):
            named._run_name = run_name  # noqa: SLF001 - a copy of self
        if run is not None:
            named._run = run  # noqa: SLF001
        return named

    def _watch(self, step: Step) -> None:
        """Hook for subclasses: every step of a stream, before its text goes down the chain."""

    def _talk(self, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> tuple[Self, Talk]:
        """A copy with the call's options as fields, and what the call is about.

        Raises:
            MetaSDError: for anything wrong about them, before any weight is loaded.
        """
        bound, _ = self._bound({name: value for name, value in kwargs.items() if name not in _OF_A_CALL})
        tools = tools_of(openai_tools(kwargs.get("tools") or ()))
        choice, allowed = tool_choice_of(kwargs.get("tool_choice"), tools)
        answer = bound.wanted_schema()
        if choice != "none" and answer is None and bound.wanted_grammar() is not None:
            raise BadOption("tools", [tool.name for tool in tools], "none beside regex, choices or grammar")
        several = kwargs.get("parallel_tool_calls")
        if not isinstance(several, bool | None):
            raise BadOption("parallel_tool_calls", several, "True or False")
        return bound, Talk(turns_of(messages), tools, allowed, choice, several, answer)

    def _streamed(self, messages: Sequence[BaseMessage], kwargs: Mapping[str, Any]) -> tuple[Self, Talk]:
        bound, talk = self._talk(messages, kwargs)
        if bound.n != 1:
            raise BadOption("n", bound.n, "1 when the answer is streamed")
        return bound, talk

    def _check_prompt(self, prompt: Any) -> None:
        """The conversation was checked when it was made."""

    def _asked(self, engine: Engine, prompt: Talk) -> Asked:
        target = engine.target
        template = template_for(target, self.chat_template, self.tool_format, self.chat_template_kwargs)
        note = "" if prompt.answer is None else schema_note(prompt.answer)
        rendered = template.render(prompt.turns, prompt.tools, prompt.choice, note)
        prompt.rendered = rendered
        with target.lock:
            ids = encoded(target.tokenizer, rendered.text)
        return Asked(tuple(ids), shown(rendered.text), rendered.stop, self._grammar(prompt, rendered))

    def _grammar(self, talk: Talk, rendered: Rendered) -> Grammar | None:
        if talk.choice == "none" and talk.answer is None:
            return self.wanted_grammar()
        several = rendered.taught if talk.several is None else talk.several
        return reply_grammar(
            rendered,
            talk.callable,
            choice=talk.choice,
            several=several,
            answer=None if talk.answer is None else closed(talk.answer),
        )

    def _reply(self, talk: Talk) -> Reply:
        return Reply(talk, self._model_name, self._logprobs)

    def _result(self, talk: Talk, answers: Sequence[Sequence[Step]]) -> ChatResult:
        generations: list[ChatGeneration] = []
        for steps in answers:
            reply = self._reply(talk)
            message = reply.message(steps)
            info = {name: message.response_metadata[name] for name in ("finish_reason", "model_name")}
            generations.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(generations=generations)
