"""A6: an error on the generating thread is lost: the consumer waits for a minute and gets an unrelated one, or waits
for ever, or takes the cut answer for a whole one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import EngineClosed, TargetError
from metasd_langchain.testing.drafters import PerfectDrafter, RaisingDrafter
from metasd_langchain.testing.models import tiny_tokenizer
from metasd_langchain.values import Choice
from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, Heard, encode, every_way, ids, make, scripted
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, Speaker, playing, speaker, spell

ANSWER = spell("the cat is on the mat in the end")
TEXT = kit.decode(ANSWER)
MODES = ["invoke", "stream", "ainvoke", "astream", "batch", "abatch"]
SOON = 10.0  # seconds; a lost error costs a minute or never comes


class Fault:
    """What goes wrong, and at which token of the answer."""

    error: BaseException | None = None
    at = 3

    def strike(self, place: int) -> None:
        if self.error is not None and place >= len(encode(PROMPT)) - 1 + self.at:
            raise self.error


class Failing(Speaker):
    fault: Fault

    def forward(self, input_ids: Any = None, position_ids: Any = None, **options: Any) -> Any:
        self.fault.strike(-1 if position_ids is None else int(position_ids.max()))
        return super().forward(input_ids, position_ids=position_ids, **options)


FAULT = Fault()
Failing.fault = FAULT
MODEL = speaker(ANSWER, kind=Failing)


async def ask(llm: MetaSDLLM, mode: str, heard: Heard) -> None:
    config: Any = {"callbacks": [heard]}
    if mode == "stream":
        list(llm.stream(PROMPT, config))
    elif mode == "astream":
        [chunk async for chunk in llm.astream(PROMPT, config)]
    else:
        answer = getattr(llm, mode)([PROMPT] if "batch" in mode else PROMPT, config)
        await answer if isinstance(answer, Awaitable) else None


async def fails(llm: MetaSDLLM, mode: str, kind: type[BaseException], fault: Fault, at: int = 3) -> tuple[Any, str]:
    """The error of a call, and its text so far. The callbacks are told once, at once; the next call is as ever."""
    heard, started = Heard(), time.perf_counter()
    fault.error, fault.at = ValueError("boom") if kind is not EngineClosed else SystemExit(3), at
    with pytest.raises(kind) as caught:
        await ask(llm, mode, heard)
    assert time.perf_counter() - started < SOON
    fault.error = None
    assert [event for event in heard.events if event != "token"] == ["start", "error"]
    assert heard.failures == [caught.value]
    text = "".join(heard.tokens)
    assert TEXT.startswith(text)
    assert llm._load().live == 0
    assert ids(llm) == ANSWER
    return caught.value, text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at", [0, 1, 3, len(ANSWER) - 1])
async def test_an_error_of_the_target_reaches_every_mode_after_the_text_so_far(mode: str, at: int) -> None:
    llm = make(model=(MODEL, TOKENIZER), drafters=["plain"], max_tokens=len(ANSWER))
    error, text = await fails(llm, mode, TargetError, FAULT, at)
    assert (type(error.__cause__), str(error.__cause__)) == (ValueError, "boom")
    if "stream" in mode:
        assert text == kit.decode(ANSWER[:at])


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_whoever_drafts(setup: tuple[str, str, int]) -> None:
    turn = SETUPS.index(setup)
    await fails(playing(MODEL, ANSWER, setup), MODES[turn % 4], TargetError, FAULT, 4 + turn % 5)


@pytest.mark.parametrize("mode", MODES)
async def test_even_what_ends_the_thread_is_told_and_the_next_call_has_a_new_one(mode: str) -> None:
    llm = make(model=(speaker(ANSWER, kind=Failing), TOKENIZER), max_tokens=len(ANSWER))
    await fails(llm, mode, EngineClosed, FAULT)


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_of_the_tokenizer_or_of_the_policy_is_told(mode: str) -> None:
    tokenizer, fault = tiny_tokenizer(), Fault()

    def decode(given: Any, **options: Any) -> str:
        fault.strike(10**6)
        return str(TOKENIZER.decode(given, **options))

    class Policy:
        name, full_information = "broken", False

        def select(self, situation: Any, rng: Any) -> Any:
            fault.strike(10**6)
            return Choice("plain")

        update = dump = load = values = lambda self, *args: {}

    tokenizer.decode = decode
    await fails(make(model=(MODEL, tokenizer), max_tokens=len(ANSWER)), mode, ValueError, fault)
    broken = make(model=(MODEL, TOKENIZER), max_tokens=len(ANSWER), policy=Policy(), drafters=["lookup@2", "plain"])
    await fails(broken, mode, ValueError, fault)


async def test_in_a_batch_only_the_prompt_that_fails_fails() -> None:
    llm = make(model=(MODEL, TOKENIZER), max_tokens=8)
    short = llm.invoke("the cat")  # never comes as far as the fault
    prompts = ["the cat", PROMPT, "the cat"]
    FAULT.error, FAULT.at = ValueError("boom"), 3
    answers = [*llm.batch(prompts, return_exceptions=True), *await llm.abatch(prompts, return_exceptions=True)]
    FAULT.error = None
    assert [answer if isinstance(answer, str) else type(answer) for answer in answers] == [
        short,
        TargetError,
        short,
    ] * 2


@pytest.mark.parametrize("block", BLOCKS)
async def test_an_error_of_a_drafter_costs_no_answer(block: int) -> None:
    for at, times in ((0, 1), (3, 1), (1, 99)):
        llm = scripted(RaisingDrafter(at, times=times, inner=kit.half()), block)
        assert ids(llm) == kit.ref()
    assert {answer.text for answer in (await every_way(llm)).values()} == {kit.decode(kit.ref())}


@pytest.mark.parametrize("method", ["open", "hint", "propose", "observe", "close"])
def test_wherever_in_the_drafter(method: str) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("boom")

    class Broken(PerfectDrafter):
        def open(self, request: Any) -> Any:
            session: Any = super().open(request) if method != "open" else fail()
            setattr(session, method, fail)
            return session

    for shape in ("chain", "tree"):
        llm = scripted(Broken(kit.truth, shape=shape, vocab=kit.VOCAB), 4)
        assert ids(llm) == kit.ref()
        assert llm.invoke(PROMPT) == "".join(llm.stream(PROMPT)) == kit.decode(kit.ref())
