"""A13: an answer ends after a length nobody asked for (20 by default, the model's own ``max_length``, a cap that counts
the prompt), and ``max_tokens=0`` means anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.models import tiny_tokenizer
from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, every_way, ids, make
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, playing, speaker, spell

SAID = (spell("the cat sat on the mat and in the end it is so. ") * 40)[:482]  # as much as the window holds
MODEL = speaker(SAID)
DEFAULT = 256  # as documented


def own_limits(model: Any) -> Any:
    """The model with limits of its own, as checkpoints have them."""
    config = model.generation_config
    config.max_length, config.max_new_tokens, config.min_new_tokens = 20, 5, 3
    config.max_time, config.do_sample = 0.001, True
    return model


def short_tokenizer() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 16
    return tokenizer


LIMITED: Any = (own_limits(speaker(SAID)), short_tokenizer())


@pytest.mark.parametrize("model", [(MODEL, TOKENIZER), LIMITED], ids=["plain", "with limits of its own"])
async def test_the_default_is_the_documented_one_in_every_mode(model: Any) -> None:
    llm = MetaSDLLM(model=model)
    before = str(model[0].generation_config)
    for answer in (await every_way(llm)).values():
        assert (answer.text, answer.finish_reason) == (kit.decode(SAID[:DEFAULT]), "length")
        assert answer.usage["prompt_tokens"] == len(kit.encode(PROMPT))
        assert answer.usage["completion_tokens"] == DEFAULT
    assert ids(llm) == SAID[:DEFAULT]
    assert str(model[0].generation_config) == before


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_a_cap_is_exact_whoever_drafts(setup: tuple[str, str, int]) -> None:
    turn = SETUPS.index(setup)
    warm = {} if turn % 2 else {"temperature": 0.8, "seed": turn}
    llm = playing(MODEL, SAID, setup, **warm)
    for cap in {1, 2, 7, setup[2], setup[2] + 1, setup[2] + 2, 10 + turn % 8}:
        assert ids(llm, max_tokens=cap) == SAID[:cap]
    if turn % 3 == 0:
        for answer in (await every_way(llm, max_tokens=7)).values():
            assert (answer.text, answer.finish_reason) == (kit.decode(SAID[:7]), "length")
            assert answer.usage["completion_tokens"] == 7


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens", "max_completion_tokens", "num_predict"])
async def test_every_way_of_saying_it(name: str) -> None:
    want = kit.decode(SAID[:7])
    plain: dict[str, Any] = {"model": LIMITED, "max_tokens": 30}
    assert {answer.text for answer in (await every_way(make(**{**plain, "max_tokens": 7}))).values()} == {want}
    assert {answer.text for answer in (await every_way(make(**plain), **{name: 7})).values()} == {want}
    assert MetaSDLLM(model=LIMITED, **{name: 7}).invoke(PROMPT) == want
    assert make(**plain).bind(**{name: 7}).invoke(PROMPT) == want
    assert make(**plain).bind(**{name: 7}).batch([PROMPT] * 3) == [want] * 3


@pytest.mark.parametrize("block", BLOCKS)
def test_more_than_the_window_holds_ends_with_the_window(block: int) -> None:
    llm = playing(MODEL, SAID, ("perfect", "chain", block), max_tokens=2000 if block != 4 else None)
    steps = list(llm.steps(PROMPT))
    assert tuple(token for step in steps for token in step.tokens) == SAID[: 512 - len(kit.encode(PROMPT))]
    assert steps[-1].summary is not None
    assert steps[-1].summary.finish_reason == "length"


def test_an_end_at_the_cap_is_an_end_and_one_behind_it_is_none() -> None:
    said = (*SAID[:6], 1, *SAID[:8])
    model = speaker(said)
    for block in BLOCKS:
        llm = playing(model, said, ("perfect", "tree", block))
        for cap in (5, 6, 7, 8):
            summary = list(llm.steps(PROMPT, max_tokens=cap))[-1].summary
            assert summary is not None
            want = (cap, "length") if cap < 7 else (7, "stop")
            assert (summary.completion_tokens, summary.finish_reason) == want


ASKED: dict[str, Callable[..., Any]] = {
    "invoke": lambda llm, **options: llm.invoke(PROMPT, **options),
    "stream": lambda llm, **options: list(llm.stream(PROMPT, **options)),
    "batch": lambda llm, **options: llm.batch([PROMPT], **options),
    "generate": lambda llm, **options: llm.generate([PROMPT], **options),
    "bind": lambda llm, **options: llm.bind(**options).invoke(PROMPT),
    "steps": lambda llm, **options: list(llm.steps(PROMPT, **options)),
}


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "7"])
async def test_no_length_is_an_error_before_any_compute_in_every_mode(value: Any) -> None:
    llm = make(model=(MODEL, TOKENIZER))
    before = llm._load().rounds
    if not isinstance(value, str):  # a constructor takes numbers from settings and the environment as strings
        with pytest.raises(ValueError, match="max_tokens"):
            MetaSDLLM(model="no/such-model", max_tokens=value)
    for asked in ASKED.values():
        with pytest.raises(BadOption, match="max_tokens"):
            asked(llm, max_tokens=value)
        with pytest.raises(BadOption, match="max_tokens"):
            asked(MetaSDLLM(model="no/such-model"), max_new_tokens=value)  # found out before anything is loaded
    with pytest.raises(BadOption, match="max_tokens"):
        await llm.ainvoke(PROMPT, max_tokens=value)
    with pytest.raises(BadOption, match="max_tokens"):
        _ = [chunk async for chunk in llm.astream(PROMPT, max_tokens=value)]
    with pytest.raises(BadOption, match="max_tokens"):
        await llm.abatch([PROMPT], max_tokens=value)
    assert (llm._load().rounds, llm._load().live) == (before, 0)
