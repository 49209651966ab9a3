"""D8: prompts, answers, stop strings, tool arguments and error messages leave the machine with spans and metrics though
nobody asked for it. Held on the bytes that real OTLP exporters send.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import PromptTemplate
from langchain_core.tools import tool

from metasd_langchain.errors import UnknownName
from metasd_langchain.telemetry import setup_telemetry
from tests.bugs.watching import LONG, MODELS, PROMPT, Sink, ended, text_of, unset
from tests.unit.calls import CAPTURE, start, summary

pytestmark = pytest.mark.enable_socket

CANARY = "zebra crossing"
TOOL = 'Action: search\nAction Input: {"query": "zebra crossing"}\nObservation:'
OFF = [None, "NO_CONTENT", "EVENT_ONLY", "false"]


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    unset(monkeypatch)
    with Sink() as sink, setup_telemetry(sink.endpoint, interval=600, timeout=10):
        yield sink


def sent(sink: Sink) -> bytes:
    """Everything that left, once all has."""
    from metasd_langchain.telemetry import setup

    assert setup._live is not None
    assert setup._live.flush(20)
    assert sink.spans()
    assert "gen_ai.client.operation.duration" in sink.metrics()
    return sink.bytes


def fails(ids: Any, logits: Any) -> Any:
    raise ValueError(f"a prompt of {CANARY}", {"stop": CANARY}) from KeyError(f"inner {CANARY}")


async def everything(llm: Any, long: Any) -> None:
    """A call of each kind that knows the canary."""
    for prompt in (f"{PROMPT} {CANARY}", TOOL):
        llm.invoke(prompt, stop=[CANARY, "\nObservation: zebra crossing"])
        list((PromptTemplate.from_template("{p}") | llm).stream({"p": prompt}))
        await llm.ainvoke(prompt, logit_bias={3: 1.0}, logprobs=2)
        for wrong in ({"timeout": 1e-9}, {"logits_processors": [fails]}, {"max_model_len": 4}):
            with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is
                llm.invoke(prompt, **wrong)
        with pytest.raises(Exception):  # noqa: B017, PT011
            [_ async for _ in llm.astream(prompt, logits_processors=[fails])]
        stream = long.stream(prompt, scope=CANARY)
        next(stream)
        stream.close()
        task = asyncio.ensure_future(long.ainvoke(prompt))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await ended(llm)


@pytest.mark.parametrize("rounds", ["off", "summary", "arrays", "events", "spans"])
@pytest.mark.parametrize("model", MODELS)
async def test_nothing_by_default(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rounds: str, model: str
) -> None:
    monkeypatch.setenv("METASD_TRACE_ROUNDS", rounds)
    answer = text_of(MODELS[model](max_tokens=24).invoke(PROMPT))
    with caplog.at_level(logging.DEBUG):
        await everything(MODELS[model](max_tokens=24), MODELS[model](**LONG))
    data = sent(sink)
    errors = {attribute.value.string_value for span in sink.spans() for attribute in span.attributes}
    assert {"DeadlineExceeded", "ValueError", "PromptTooLong"} <= errors  # they went that way
    for text in ("zebra", "crossing", PROMPT[:16], "Observation", answer[:12], answer[-12:]):
        assert text.encode() not in data
        ours = [record for record in caplog.records if record.name.startswith("metasd")]
        assert not [record for record in ours if text in record.getMessage()]


@tool
def search(query: Literal["zebra crossing"]) -> str:
    """Search for a zebra crossing."""
    return CANARY


async def test_tools_of_a_chat_and_what_they_are_called_with(sink: Sink, caplog: pytest.LogCaptureFixture) -> None:
    chat = MODELS["chat"](max_tokens=64)
    calling = chat.bind_tools([search], tool_choice="search")
    with caplog.at_level(logging.DEBUG):
        called = calling.invoke(PROMPT)
        assert called.tool_calls[0]["args"] == {"query": CANARY}
        list(calling.stream(PROMPT))
        answered = [called, ToolMessage(CANARY, tool_call_id=called.tool_calls[0]["id"])]
        await chat.bind_tools([search]).ainvoke([HumanMessage(PROMPT), *answered])
        with pytest.raises(UnknownName):
            chat.bind_tools([search]).invoke(PROMPT, tool_choice=CANARY)
    await ended(chat)
    data = sent(sink)
    for text in ("zebra", "crossing", PROMPT[:16]):
        assert text.encode() not in data
        ours = [record for record in caplog.records if record.name.startswith("metasd")]
        assert not [record for record in ours if text in record.getMessage()]


@pytest.mark.parametrize("switch", OFF)
async def test_whatever_the_switch_says_short_of_on(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    if switch is not None:
        monkeypatch.setenv(CAPTURE, switch)
    llm = MODELS["llm"](max_tokens=8)
    llm.invoke(f"{PROMPT} {CANARY}")
    monkeypatch.setenv(CAPTURE, "SPAN_ONLY")
    MODELS["llm"](max_tokens=8, capture_content=False).invoke(f"{PROMPT} {CANARY}")
    llm.invoke(f"{PROMPT} {CANARY}", capture_content=False)
    assert CANARY.encode() not in sent(sink)


@pytest.mark.parametrize("model", MODELS)
async def test_on_request_by_variable_object_or_call(sink: Sink, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    llm = MODELS[model](max_tokens=8)
    answer = text_of(llm.invoke(f"{PROMPT} {CANARY}", capture_content=True))
    MODELS[model](max_tokens=8, capture_content=True).invoke(f"{PROMPT} {CANARY}")
    monkeypatch.setenv(CAPTURE, "SPAN_ONLY")  # read when a call begins
    list(llm.stream(f"{PROMPT} {CANARY}"))
    monkeypatch.delenv(CAPTURE)
    llm.invoke(f"{PROMPT} {CANARY}")
    sent(sink)
    told = [{one.key: one.value.string_value for one in span.attributes} for span in sink.spans()]
    assert [(one.get("output.value") or "").strip() for one in told].count(answer.strip()) == 3
    assert sum(f"{PROMPT} {CANARY}" in (one.get("input.value") or "") for one in told) == 3


async def test_on_request_it_is_cut(sink: Sink) -> None:
    long = "the cat sat. " * 30 + CANARY
    MODELS["llm"](max_tokens=8, capture_content=True).invoke(long)
    call = start(capture_content=True)
    call.content("x" * 8192 + "yonder", "é" * 9000)
    call.end(summary())
    data = sent(sink)
    assert CANARY.encode() in data
    assert b"yonder" not in data
    assert ("é" * 4096).encode() in data
    assert ("é" * 4097).encode() not in data


def test_messages_and_tool_arguments(sink: Sink) -> None:
    asked = [
        {"role": "system", "parts": [{"type": "text", "content": "old " * 3000}]},
        {"role": "user", "parts": [{"type": "text", "content": CANARY}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "1", "name": "f", "arguments": {"q": "zulu"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "1", "result": "yankee", "n": 3}]},
    ]
    answered = [{"role": "assistant", "parts": [{"type": "text", "content": "xray"}], "finish_reason": "stop"}]
    for capture in (None, True):
        call = start(operation="chat", capture_content=capture)
        call.content(asked, answered)
        call.end(summary())
        data = sent(sink)
        for text in (CANARY, "zulu", "yankee", "xray"):
            assert (text.encode() in data) is (capture is True)
    (told,) = [
        {one.key: one.value.string_value for one in span.attributes}
        for span in sink.spans()
        if any(one.key == "input.value" for one in span.attributes)
    ]
    shown = json.loads(told["gen_ai.input.messages"])
    assert shown[1:] == asked[1:]  # the newest are kept whole
    assert 7000 < len(told["gen_ai.input.messages"]) < 8192 + 400
    assert json.loads(told["gen_ai.output.messages"]) == answered
    assert json.loads(told["input.value"]) == shown
    assert told["input.mime_type"] == "application/json"
