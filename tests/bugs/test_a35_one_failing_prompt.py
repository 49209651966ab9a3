"""A35: one prompt that cannot be answered fails the whole batch, all prompts with the same exception; or it fails alone
but the others run on unheard, or are answered a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import DeadlineExceeded, MetaSDError, PromptTooLong, RequestError, TargetError
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import tiny_model
from tests.bugs import kit

COUNT = 10
POISON = "poison ~"  # the model's forward fails on "~"
TILDE = kit.encode("~")[-1]
OK = [kit.PROMPT, "0123", kit.PROMPT[5:], "the"]
BAD: dict[str, tuple[str, type[Exception]]] = {
    "too long": ("x" * 600, PromptTooLong),
    "empty": ("", RequestError),
    "half a character": ("a\ud800", RequestError),
    "poison": (POISON, TargetError),
}
MODEL = tiny_model()


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    def look(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        if (given[0] == TILDE).any():
            raise ValueError("the device fell over")

    handle = MODEL.model.embed_tokens.register_forward_pre_hook(look)
    yield
    handle.remove()


WANT = {prompt: kit.decode(kit.ref(prompt, COUNT)) for prompt in OK}
PLAYERS: list[dict[str, Any]] = [
    {},
    {"drafters": ["plain"]},
    {"drafters": [(kit.perfect("tree"), 8)], "policy": "fixed"},
    {"drafters": [(kit.half(), 4), (kit.hostile("tree"), 2)]},
    {"drafters": [(RaisingDrafter(1, times=9), 4)], "policy": "fixed"},  # costs its drafts, fails nobody
]


def make(**options: Any) -> MetaSDLLM:
    return MetaSDLLM(model=(MODEL, kit.TOKENIZER), **{"max_tokens": COUNT, **options})


def mixed(bad: str) -> list[str]:
    return [OK[0], bad, OK[1], OK[2], bad, OK[3]]


def check(answers: Any, prompts: list[str], kind: type[Exception]) -> None:
    """Each prompt its own answer or its own error, in order."""
    assert len(answers) == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        if prompt in WANT:
            assert answer == WANT[prompt]
        else:
            assert type(answer) is kind
    failures = [answer for answer in answers if isinstance(answer, Exception)]
    assert len({id(failure) for failure in failures}) == len(failures)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("player", range(len(PLAYERS)))
async def test_the_others_are_answered_and_the_failing_ones_have_errors_of_their_own(name: str, player: int) -> None:
    bad, kind = BAD[name]
    llm, prompts = make(**PLAYERS[player]), mixed(bad)
    for most in (None, 2):
        config: Any = {"max_concurrency": most}
        check(llm.batch(prompts, config, return_exceptions=True), prompts, kind)
        check(await llm.abatch(prompts, config, return_exceptions=True), prompts, kind)
    done = dict(llm.batch_as_completed(prompts, return_exceptions=True))
    check([done[n] for n in range(len(prompts))], prompts, kind)
    done = dict([pair async for pair in llm.abatch_as_completed(prompts, return_exceptions=True)])
    check([done[n] for n in range(len(prompts))], prompts, kind)
    chain = PromptTemplate.from_template("{x}") | llm
    check(chain.batch([{"x": x} for x in prompts], return_exceptions=True), prompts, kind)
    check(await chain.abatch([{"x": x} for x in prompts], return_exceptions=True), prompts, kind)
    assert llm.batch(OK) == [WANT[prompt] for prompt in OK]
    assert llm._load().live == 0


async def test_errors_of_different_kinds_stay_with_their_prompts() -> None:
    llm = make()
    prompts = [OK[0], *(bad for bad, _ in BAD.values()), OK[1]]
    kinds = [str, *(kind for _, kind in BAD.values()), str]
    for answers in (llm.batch(prompts, return_exceptions=True), await llm.abatch(prompts, return_exceptions=True)):
        assert [type(answer) for answer in answers] == kinds
        assert answers[::5] == [WANT[OK[0]], WANT[OK[1]]]


async def test_each_prompt_may_have_options_that_fail_it() -> None:
    llm = make(drafters=["plain"])
    answers: Any = await llm.abatch([OK[0]] * 3, [{}, {"callbacks": [Raising()]}, {}], return_exceptions=True)
    assert answers == [WANT[OK[0]], answers[1], WANT[OK[0]]]
    assert type(answers[1]) is KeyError
    late = llm.batch([OK[0], OK[1]], return_exceptions=True, timeout=1e-9)
    assert [type(answer) for answer in late] == [DeadlineExceeded] * 2
    assert late[0] is not late[1]


class Raising(BaseCallbackHandler):
    raise_error = True

    def on_llm_start(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("tracer broke")


@pytest.mark.parametrize("name", BAD)
async def test_asked_to_raise_a_batch_raises_the_failing_prompts_error_and_stops(name: str) -> None:
    bad, kind = BAD[name]
    llm = make()
    for prompts in ([OK[0], bad, OK[1]], [bad, OK[0]], [OK[0], bad]):
        for call in (llm.batch, llm.generate):
            with pytest.raises(kind):
                call(prompts)
        for acall in (llm.abatch, llm.agenerate):
            with pytest.raises(kind):
                await acall(prompts)
    assert llm.batch(OK, max_tokens=COUNT) == [WANT[prompt] for prompt in OK]
    assert llm._load().live == 0


async def test_callbacks_hear_one_error_for_the_failing_prompt_and_one_end_for_each_other() -> None:
    llm = make()
    for name, (bad, kind) in BAD.items():
        for run in (llm.batch, llm.abatch):
            heard = [kit.Heard() for _ in range(3)]
            answers = run([OK[0], bad, OK[1]], [{"callbacks": [one]} for one in heard], return_exceptions=True)
            answers = answers if isinstance(answers, list) else await answers
            assert isinstance(answers[1], MetaSDError)
            assert [one.events for one in heard] == [["start", "end"], ["start", "error"], ["start", "end"]], name
            assert type(heard[1].failures[0]) is kind
