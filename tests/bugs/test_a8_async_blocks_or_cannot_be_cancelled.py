"""A8: async calls block the event loop (while loading, tokenising, waiting for a round), or a cancelled task leaves the
engine generating, swallows the CancelledError, or leaves a lock behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import RequestError
from metasd_langchain.testing.models import tiny_tokenizer
from tests.bugs import kit
from tests.bugs.kit import PROMPT, Heard, ids, make
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, playing, speaker
from tests.bugs.test_a7_broken_off_stream_runs_on import LONG, MODEL, PLAIN, SAID, Gate, Gated, stops

TEXT = kit.decode(SAID[:20])


def chain(llm: MetaSDLLM, **options: Any) -> Any:
    return PromptTemplate.from_template("{p}") | llm.bind(**options) | StrOutputParser()


async def collect(stream: Any) -> str:
    return "".join([chunk async for chunk in stream])


Way = Callable[..., Coroutine[Any, Any, Any]]
WAYS: dict[str, Way] = {
    "ainvoke": lambda llm, **options: llm.ainvoke(PROMPT, **options),
    "sampled": lambda llm, **options: llm.ainvoke(PROMPT, temperature=0.7, seed=1, **options),
    "astream": lambda llm, **options: collect(llm.astream(PROMPT, **options)),
    "abatch": lambda llm, **options: llm.abatch([PROMPT, PROMPT], **options),
    "agenerate": lambda llm, **options: llm.agenerate([PROMPT, PROMPT], **options),
    "chain": lambda llm, **options: chain(llm, **options).ainvoke({"p": PROMPT}),
    "streamed chain": lambda llm, **options: collect(chain(llm, **options).astream({"p": PROMPT})),
}


@pytest.fixture(autouse=True)
def gate() -> Iterator[Gate]:
    Gated.gate.open()
    assert ids(PLAIN, max_tokens=3) == SAID[:3]  # loaded
    yield Gated.gate
    Gated.gate.open()


async def loop_goes_on_while(task: asyncio.Task[Any]) -> None:
    """The loop runs other things while the task waits for what only we can give it."""
    for _ in range(50):
        await asyncio.sleep(0.001)
    assert not task.done()


async def after(rounds: int, gate: Gate, call: Coroutine[Any, Any, Any], llm: MetaSDLLM = PLAIN) -> asyncio.Task[Any]:
    """A task whose engine has run so many rounds and stands in the next one."""
    before, started = llm._load().rounds, time.perf_counter()
    gate.let(rounds)
    task = asyncio.ensure_future(call)
    while llm._load().rounds <= before + rounds and time.perf_counter() - started < 10.0:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not task.done()
    return task


@pytest.mark.parametrize("way", WAYS)
async def test_the_loop_is_free_while_a_round_runs(gate: Gate, way: str) -> None:
    task = await after(3, gate, WAYS[way](PLAIN, max_tokens=20))
    await loop_goes_on_while(task)
    gate.open()
    answer = await task
    if isinstance(answer, str | list):
        assert answer in (TEXT, [TEXT, TEXT])


@pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch"])
async def test_the_loop_is_free_while_the_model_is_loaded_and_the_prompt_is_read(gate: Gate, way: str) -> None:
    model: Any = speaker(SAID, kind=Gated)
    tokenizer, reading, called = tiny_tokenizer(), Gate(), []

    class Slow:
        """A tokenizer that takes as long as the gate says to read a prompt."""

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            called.append(args)
            reading.wait()
            return tokenizer(*args, **options)

    gate.let(0)
    reading.let(0)
    task = asyncio.ensure_future(WAYS[way](make(model=(model, Slow())), max_tokens=20))
    await loop_goes_on_while(task)
    assert not called
    gate.open()
    while not called:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await loop_goes_on_while(task)
    reading.open()
    assert await task in (TEXT, [TEXT, TEXT])


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS)
async def test_a_cancelled_task_stops_the_engine(gate: Gate, way: str, rounds: int) -> None:
    task = await after(rounds, gate, WAYS[way](PLAIN, max_tokens=LONG))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):  # while the engine still stands in its round
        await asyncio.wait_for(task, 5.0)
    assert task.cancelled()
    await stops(gate)


@pytest.mark.parametrize("setup", SETUPS[::2], ids=str)
async def test_whoever_drafts(gate: Gate, setup: tuple[str, str, int]) -> None:
    llm = playing(MODEL, SAID, setup, max_tokens=LONG)
    assert ids(llm, max_tokens=2) == SAID[:2]
    task = await after(2, gate, llm.ainvoke(PROMPT), llm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stops(gate, llm)


@pytest.mark.parametrize("way", ["ainvoke", "astream", "abatch"])
async def test_a_time_limit_of_asyncio_works_too_and_callbacks_hear_no_end(gate: Gate, way: str) -> None:
    heard = Heard()
    gate.let(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(WAYS[way](PLAIN, max_tokens=LONG, config={"callbacks": [heard]}), 0.05)
    assert heard.events.count("end") == 0
    assert heard.events.count("error") == heard.events.count("start")
    await stops(gate)


async def test_cancelled_before_its_turn_or_at_once_it_costs_no_round_and_disturbs_nobody(gate: Gate) -> None:
    gate.let(2)
    others = [asyncio.ensure_future(PLAIN.ainvoke(PROMPT, max_tokens=20)) for _ in range(8)]
    while PLAIN._load().live < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    waiting = [asyncio.ensure_future(PLAIN.ainvoke(PROMPT, max_tokens=LONG)) for _ in range(3)]
    waiting[2].cancel()  # not even begun
    while PLAIN._load().live < 10:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    before = PLAIN._load().rounds
    for task in waiting:
        task.cancel()
    assert [type(end) for end in await asyncio.gather(*waiting, return_exceptions=True)] == [asyncio.CancelledError] * 3
    gate.open()
    assert await asyncio.gather(*others) == [TEXT] * 8
    assert PLAIN._load().rounds <= before + 20
    await stops(gate)


@pytest.mark.parametrize("way", ["abatch", "agenerate"])
async def test_when_one_prompt_fails_the_others_are_not_left_running_for_nobody(gate: Gate, way: str) -> None:
    gate.let(0)
    with pytest.raises(RequestError):
        await getattr(PLAIN, way)([PROMPT, "", PROMPT], max_tokens=LONG)
    await stops(gate)
