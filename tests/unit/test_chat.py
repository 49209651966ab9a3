"""Calls of ChatMetaSD: every way gives the same tokens, callbacks hear each piece once, errors leave no trace."""

from __future__ import annotations

import asyncio
import copy
import itertools
import pickle
import threading
import time
from functools import reduce
from operator import add

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableLambda

import metasd_langchain
from metasd_langchain import ChatMetaSD
from metasd_langchain.engine.loop import Engine
from metasd_langchain.errors import (
    BadOption,
    CapTooSmall,
    DeadlineExceeded,
    PromptTooLong,
    UnknownName,
    UnsupportedContent,
    UnsupportedParameter,
)
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter
from metasd_langchain.testing.models import reference_tokens
from tests.bugs import kit
from tests.unit.chatkit import CHATML, HELLO, MODEL, TOKENIZER, WINDOW, make, prompt_ids

BETA = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainBetaWarning")


def tokens(chat, messages, **options) -> tuple[int, ...]:
    """Ids of the answer, from the log-probabilities that come with it."""
    message = chat.invoke(messages, logprobs=True, **options)
    return tuple(entry["id"] for entry in message.response_metadata["logprobs"]["content"])


class Seen(kit.Heard):
    """Also chat models' starts."""

    def on_chat_model_start(self, *args, **kwargs):
        self.events.append("start")


# -- one answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, CHATML])
def test_tokens_are_those_of_plain_forwards(template):
    chat = make(chat_template=template)
    ids = prompt_ids(chat, HELLO)
    assert tokens(chat, HELLO) == tuple(reference_tokens(MODEL, list(ids), 24, kit.EOS))


@pytest.mark.parametrize("drafter", [PerfectDrafter, HostileDrafter, HalfDrafter])
@pytest.mark.parametrize("budget", [1, 4, 16])
def test_no_drafter_shows(drafter, budget):
    chat = make()
    truth = tuple(reference_tokens(MODEL, list(prompt_ids(chat, HELLO)), 40))

    def answers(prompt):
        return truth

    made = {
        PerfectDrafter: lambda: PerfectDrafter(answers, vocab=kit.VOCAB),
        HostileDrafter: lambda: HostileDrafter(kit.VOCAB, answers),
        HalfDrafter: lambda: HalfDrafter(answers, kit.VOCAB),
    }[drafter]()
    scripted = make(drafters=[(made, budget)], policy="fixed")
    assert tokens(scripted, HELLO) == tokens(make(speculative=False), HELLO)


def said(message):
    """Ids of an answer; their log-probabilities differ by rounding, as widths of forwards do."""
    return [entry["id"] for entry in message.response_metadata["logprobs"]["content"]]


async def every_way(chat, messages, **options) -> dict[str, AIMessage]:
    return {
        "invoke": chat.invoke(messages, **options),
        "streaming": chat.model_copy(update={"streaming": True}).invoke(messages, **options),
        "stream": reduce(add, chat.stream(messages, **options)),
        "ainvoke": await chat.ainvoke(messages, **options),
        "astream": reduce(add, [chunk async for chunk in chat.astream(messages, **options)]),
        "batch": chat.batch([messages], **options)[0],
        "abatch": (await chat.abatch([messages], **options))[0],
    }


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}, {"stop": ["a"]}, {"max_tokens": 1}])
async def test_every_way_is_one_answer(options):
    answers = await every_way(make(), HELLO, logprobs=2, **options)
    wanted = answers["invoke"]
    for way, message in answers.items():
        assert message.content == wanted.content, way
        assert message.usage_metadata == wanted.usage_metadata, way
        metadata = message.response_metadata
        assert said(message) == said(wanted), way
        for name in ("finish_reason", "model_name", "model_provider"):
            assert metadata[name] == wanted.response_metadata[name], way
        assert sum(arm["rounds"] for arm in metadata["metasd"]["arms"].values()) == metadata["metasd"]["rounds"]


def test_chunks():
    chunks = list(make().stream(HELLO))
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert [bool(chunk.usage_metadata) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(not chunk.response_metadata for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_output_version_v1():
    chat = make(output_version="v1")
    (block,) = chat.invoke(HELLO).content
    assert block["type"] == "text"
    total = reduce(add, chat.stream(HELLO))
    assert [one["text"] for one in total.content if one["type"] == "text"] == [block["text"]]


def test_several_answers():
    chat = make(temperature=0.9, seed=3, n=3)
    (answers,) = chat.generate([[HumanMessage(HELLO)]]).generations
    assert len(answers) == 3
    assert len({one.message.content for one in answers}) > 1
    assert answers[0].message.content == make(temperature=0.9, seed=3).invoke(HELLO).content
    assert len({one.message.id for one in answers}) == 3
    with pytest.raises(BadOption, match="n=3"):
        next(chat.stream(HELLO))


async def test_several_answers_beside_a_handler_that_would_like_a_stream():
    chain = RunnableLambda(make(n=2).ainvoke)
    events = [event["event"] async for event in chain.astream_events(HELLO, version="v2")]
    assert "on_chat_model_end" in events
    assert "on_chat_model_stream" not in events


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.8, "seed": 1}, {"max_tokens": 3}, {"stop": ["e"]}, {"top_k": 1, "temperature": 1.0}, {"n": 1}],
)
def test_options_of_a_call_are_as_those_of_the_object(options):
    assert make().invoke(HELLO, **options).content == make(**options).invoke(HELLO).content
    assert make().bind(**options).invoke(HELLO).content == make(**options).invoke(HELLO).content


def test_the_calls_stop_replaces_the_objects():
    text = make(speculative=False).invoke(HELLO).content
    early, late = text[2:4], text[8:10]
    chat = make(stop=[early])
    assert chat.invoke(HELLO).content == text[: text.index(early)].strip()
    assert chat.invoke(HELLO, stop=[late]).content == text[: text.index(late)].strip()
    assert chat.invoke(HELLO).response_metadata["finish_reason"] == "stop"


def test_model_of_a_call():
    other = (MODEL, TOKENIZER)
    message = make().invoke(HELLO, model=other)
    assert message.content == make().invoke(HELLO).content
    assert make()._get_ls_params(model="another")["ls_model_name"] == "another"


def test_constraints():
    chat = make(max_tokens=40)
    assert chat.invoke(HELLO, choices=["yes", "no"]).content in ("yes", "no")
    assert chat.invoke(HELLO, regex="[0-9]{3}").content.isdigit()
    assert chat.invoke(HELLO, grammar='start: "a" "b"').content == "ab"


# -- tokens and prompts -----------------------------------------------------------------------------------------------


def look_up(word: str) -> str:
    """Look a word up."""
    return word


TALK = [
    SystemMessage("Be kind."),
    HumanMessage("the cat"),
    AIMessage("", tool_calls=[{"name": "look_up", "args": {"word": "cat"}, "id": "call_1"}]),
    ToolMessage("An animal.", tool_call_id="call_1"),
]


@pytest.mark.parametrize("tools", [None, [look_up]])
@pytest.mark.parametrize("template", [None, CHATML])
def test_token_counts_are_what_a_call_counts(tools, template):
    chat = make(chat_template=template)
    bound = chat.bind_tools(tools) if tools else chat
    counted = chat.get_num_tokens_from_messages(TALK, tools)
    assert bound.invoke(TALK, max_tokens=30).usage_metadata["input_tokens"] == counted
    assert counted == len(prompt_ids(chat, TALK, **({"tools": [look_up]} if tools else {})))
    assert prompt_ids(chat, TALK).count(2) == 1


def test_trim_messages_counts_with_the_model():
    chat = make()
    # LangChain counts a leading system message apart
    room = sum(chat.get_num_tokens_from_messages([one]) for one in (TALK[0], HumanMessage("hello")))
    kept = trim_messages(
        [*TALK[:2], AIMessage("cat " * 40), HumanMessage("hello")],
        max_tokens=room,
        token_counter=chat,
        include_system=True,
        start_on="human",
    )
    assert [message.content for message in kept] == ["Be kind.", "hello"]
    assert chat.get_num_tokens_from_messages(kept) <= room


def test_summaries_by_langchains_middleware():
    from langchain.agents.middleware import SummarizationMiddleware

    chat = make(max_tokens=5)
    count = chat.get_num_tokens_from_messages
    middleware = SummarizationMiddleware(chat, trigger=("fraction", 0.1), keep=("messages", 1), token_counter=count)
    long = [HumanMessage("cat " * 100, id="1"), AIMessage("dog " * 100, id="2"), HumanMessage("the end", id="3")]
    update = middleware.before_model({"messages": long}, None)
    assert update is not None
    assert update["messages"][-1].content == "the end"
    assert middleware.before_model({"messages": long[2:]}, None) is None


def test_profile():
    profile = make().profile
    assert profile["max_input_tokens"] == WINDOW - 1
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert make(max_model_len=64).profile["max_input_tokens"] == 63
    assert ChatMetaSD().profile["max_input_tokens"] == 32767  # the embedded model, not loaded
    assert "max_input_tokens" not in ChatMetaSD(model="nobody/nothing").profile


def test_ls_params():
    params = make(stop=["x"], max_tokens=7)._get_ls_params()
    assert params["ls_provider"] == "metasd"
    assert params["ls_model_type"] == "chat"
    assert params["ls_max_tokens"] == 7
    assert params["ls_stop"] == ["x"]
    assert ChatMetaSD()._get_ls_params()["ls_model_name"] == "gemma-3-270m"


# -- callbacks --------------------------------------------------------------------------------------------------------


@BETA
async def test_callbacks_hear_each_piece_once():
    chat = make()
    text = chat.invoke(HELLO).content
    for way in ("stream", "astream", "streaming", "v3", "av3"):
        heard = Seen()
        config = {"callbacks": [heard]}
        if way == "stream":
            list(chat.stream(HELLO, config))
        elif way == "astream":
            [chunk async for chunk in chat.astream(HELLO, config)]
        elif way == "streaming":
            make(streaming=True).invoke(HELLO, config)
        elif way == "v3":
            list(chat.stream_events(HELLO, config, version="v3"))
        else:
            stream = await chat.astream_events(HELLO, config, version="v3")
            assert (await stream.output).text == text
            while "end" not in heard.events:  # noqa: ASYNC110 - LangChain's own task tells it, after the output is there
                await asyncio.sleep(0.001)
        assert "".join(heard.tokens) == text, way
        assert heard.events[0] == "start", way
        assert heard.events.count("end") == 1, way
        assert "error" not in heard.events, way


def test_invoke_tells_no_tokens():
    heard = Seen()
    make().invoke(HELLO, {"callbacks": [heard]})
    assert heard.events == ["start", "end"]


def test_a_callback_comes_before_the_chunk():
    heard = Seen()
    for number, _ in enumerate(make().stream(HELLO, {"callbacks": [heard]}), start=1):
        assert heard.events.count("token") == number


async def test_usage_is_counted_once():
    counts = []
    for way in ("invoke", "stream", "ainvoke", "astream"):
        handler = UsageMetadataCallbackHandler()
        config = {"callbacks": [handler]}
        chat = make()
        if way == "invoke":
            chat.invoke(HELLO, config)
        elif way == "stream":
            list(chat.stream(HELLO, config))
        elif way == "ainvoke":
            await chat.ainvoke(HELLO, config)
        else:
            [chunk async for chunk in chat.astream(HELLO, config)]
        counts.append(handler.usage_metadata)
    assert all(count == counts[0] for count in counts)
    (usage,) = counts[0].values()
    assert usage["input_tokens"] == len(prompt_ids(make(), HELLO))
    assert usage["output_tokens"] == 24


def test_errors_are_told_once_and_the_next_call_works():
    chat = make()
    wanted = chat.invoke(HELLO).content
    image = [HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])]
    for messages, options, error in (
        (image, {}, UnsupportedContent),
        (HELLO * 400, {}, PromptTooLong),
        (HELLO, {"no_such": 1}, UnsupportedParameter),
        (HELLO, {"temperature": -1}, BadOption),
        (HELLO, {"response_format": {"type": "json_schema"}}, BadOption),
        (HELLO, {"tools": [look_up], "tool_choice": "nothing"}, UnknownName),
        (HELLO, {"tools": [look_up], "choices": ["a"]}, BadOption),
        (HELLO, {"tools": [look_up], "parallel_tool_calls": 2}, BadOption),
        (HELLO, {"tools": [look_up], "tool_choice": "any", "max_tokens": 3}, CapTooSmall),
        (HELLO, {"timeout": 1e-6}, DeadlineExceeded),
        ([], {}, ValueError),
    ):
        for call in (chat.invoke, lambda *args, **given: list(chat.stream(*args, **given))):
            heard = Seen()
            with pytest.raises(error):
                call(messages, {"callbacks": [heard]}, **options)
            assert heard.events.count("error") == 1
    assert chat.invoke(HELLO).content == wanted
    with pytest.raises(PromptTooLong, match=f"window holds {WINDOW}"):
        chat.invoke(HELLO * 400)


# -- life -------------------------------------------------------------------------------------------------------------


def test_threads():
    chat = make(temperature=0.7, seed=1)
    prompts = [f"the cat {number}" for number in range(6)]
    wanted = [chat.invoke(prompt).content for prompt in prompts]
    found: dict[tuple[int, int], str] = {}

    def work(thread):
        for place, prompt in enumerate(prompts):
            text = chat.invoke(prompt).content if thread % 2 else reduce(add, chat.stream(prompt)).content
            found[thread, place] = text

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(thread, place): wanted[place] for thread, place in itertools.product(range(4), range(6))}


def _rest(engine, seconds=10.0):
    """Wait until the engine plays no more rounds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = engine.rounds
        time.sleep(0.05)
        if engine.rounds == before:
            return before
    raise AssertionError("the engine goes on")


async def test_whoever_leaves_stops_the_engine():
    chat = make(max_tokens=400, speculative=False)
    engine = chat._load()
    _rest(engine)
    before = engine.rounds
    for number, _ in enumerate(chat.stream(HELLO)):
        if number == 3:
            break
    assert _rest(engine) - before < 200
    before = engine.rounds
    stream = chat.astream(HELLO)
    async for _ in stream:
        break
    await stream.aclose()
    assert _rest(engine) - before < 200
    before = engine.rounds
    task = asyncio.create_task(chat.ainvoke(HELLO))
    while engine.rounds < before + 3:  # noqa: ASYNC110 - the engine counts on its own thread
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _rest(engine) - before < 200


@BETA
def test_pickle_copies_and_serialisation(tmp_path):
    chat = ChatMetaSD(model=str(tmp_path), max_tokens=5, api_key="secret", chat_template=CHATML, stop=["x"])
    revived = load(dumpd(chat), valid_namespaces=["metasd_langchain"], allowed_objects=[ChatMetaSD])
    assert revived.asdict() == chat.asdict()
    assert "secret" not in str(dumpd(chat))
    assert pickle.loads(pickle.dumps(chat)).asdict() == chat.asdict()  # noqa: S301 - our own
    live = make()
    assert copy.deepcopy(live)._load() is live._load()
    assert copy.deepcopy(live).invoke(HELLO).content == live.invoke(HELLO).content
    assert (live | (lambda message: message.content)).invoke(HELLO) == live.invoke(HELLO).content


def test_configurable_fields():
    chat = make().configurable_fields(max_tokens=ConfigurableField(id="cap"))
    message = chat.with_config(configurable={"cap": 3}).invoke(HELLO)
    assert message.usage_metadata["output_tokens"] == 3
    assert chat.invoke(HELLO).usage_metadata["output_tokens"] == 24


def test_rate_limiter_is_asked_once_a_call_and_not_for_cached_answers():
    class Limiter(InMemoryRateLimiter):
        asked = 0

        def acquire(self, *, blocking=True):
            self.asked += 1
            return True

    limiter = Limiter(requests_per_second=1000)
    chat = make(rate_limiter=limiter, cache=InMemoryCache())
    chat.invoke(HELLO)
    chat.invoke(HELLO)
    assert limiter.asked == 1
    list(chat.stream(HELLO))
    assert limiter.asked == 2


def test_the_step_that_remembers():
    chat = make()
    assert chat.invoke(HELLO, {"run_name": "rewrite"}).response_metadata["metasd"]["step"] == "rewrite"
    assert reduce(add, chat.stream(HELLO, {"run_name": "rewrite"})).response_metadata["metasd"]["step"] == "rewrite"
    assert chat.invoke(HELLO, {"metadata": {"langgraph_node": "agent"}}).response_metadata["metasd"]["step"] == "agent"
    assert make(memory_key="mine").invoke(HELLO).response_metadata["metasd"]["step"] == "mine"


def test_a_span_a_call(spans):
    make().invoke(HELLO)
    (span,) = spans.get_finished_spans()
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.usage.output_tokens"] == 24
    spans.clear()
    with pytest.raises(PromptTooLong):
        make().invoke(HELLO * 400)
    (span,) = spans.get_finished_spans()
    assert span.status.status_code.name == "ERROR"


def test_options_and_names():
    assert "ChatMetaSD" in metasd_langchain.__all__
    with pytest.raises(UnsupportedParameter, match="no_such"):
        ChatMetaSD(no_such=1)
    for options in ({"chat_template": "x"}, {"tool_format": "x"}, {"temperature": -1}):
        with pytest.raises(BadOption):
            ChatMetaSD(**options)
    assert ChatMetaSD(max_retries=2, timeout=3, base_url="x", streaming=True).timeout == 3
    assert "metasd-langchain" in make().metadata["lc_versions"]


# -- what a call knows of its run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_tokens": 3}], ids=["plain", "bound"])
@pytest.mark.parametrize("maker", [make, kit.make], ids=["chat", "llm"])
async def test_the_bandit_remembers_by_the_runs_name_in_every_way(maker, options, monkeypatch):
    steps = []
    kept = Engine.check
    monkeypatch.setattr(Engine, "check", lambda self, request: (steps.append(request.step), kept(self, request))[1])
    named = maker(max_tokens=4).bind(**options).with_config(run_name="condense")
    named.invoke(HELLO)
    await named.ainvoke(HELLO)
    named.batch([HELLO])
    list(named.stream(HELLO))
    [_ async for _ in named.astream(HELLO)]
    assert len(steps) >= 5
    assert set(steps) == {"condense"}


async def test_handlers_hear_once_that_a_call_was_cancelled():
    class Told(AsyncCallbackHandler):
        def __init__(self):
            self.events = []

        async def on_chat_model_start(self, *args, **kwargs):
            self.events.append("start")

        async def on_llm_error(self, error, **kwargs):
            self.events.append(type(error).__name__)

    told = Told()
    chat = make(max_tokens=2000, speculative=False)
    engine = chat._load()
    before = engine.rounds
    task = asyncio.create_task(chat.ainvoke(HELLO, {"callbacks": [told]}))
    while engine.rounds < before + 3:  # noqa: ASYNC110 - the engine counts on its own thread
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told.events == ["start", "CancelledError"]
