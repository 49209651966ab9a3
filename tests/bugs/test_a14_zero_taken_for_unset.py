"""A14: ``temperature=0`` raises, divides by zero, or is taken for "not set" and replaced by a default, the field or the
model's own setting. So are other values that are false: ``seed=0``, ``top_k=0``, ``min_p=0``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from langchain_core.caches import InMemoryCache

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import tiny_model
from tests.bugs import kit
from tests.bugs.kit import PROMPT, TOKENIZER, every_way, ids, make
from tests.bugs.test_a1_stop_ignored_in_invoke import DRAFTERS, SETUPS

REF = kit.ref()
TEXT = kit.decode(REF)


def hot_model() -> Any:
    """The same weights in a checkpoint that asks for sampling."""
    model = tiny_model()
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.9
    model.generation_config.top_k = 50
    return model


HOT_MODEL = hot_model()


def test_the_hot_answer_is_another_one() -> None:
    assert len(set(REF)) > 10
    assert len({ids(make(temperature=0.9, seed=seed)) for seed in range(4)} | {REF}) == 5


@pytest.mark.parametrize("value", [0, 0.0, -0.0, np.float64(0.0), 1e-6], ids=repr)
async def test_zero_is_greedy_however_it_is_given_in_every_mode(value: float) -> None:
    ways: list[tuple[MetaSDLLM, dict[str, Any]]] = [
        (make(temperature=value), {}),
        (make(temperature=0.9), {"temperature": value}),
        (make(temperature=0.9, seed=3, top_p=0.5, top_k=7, min_p=0.1), {"temperature": value}),
        (make(model=(HOT_MODEL, TOKENIZER), temperature=value), {}),
    ]
    for llm, options in ways:
        assert ids(llm, **options) == REF
        if isinstance(value, int) or value == 1e-6:
            assert {answer.text for answer in (await every_way(llm, **options)).values()} == {TEXT}
    bound: Any = make(temperature=0.9).bind(temperature=value)
    assert bound.invoke(PROMPT) == "".join(bound.stream(PROMPT)) == await bound.ainvoke(PROMPT) == TEXT
    assert bound.batch([PROMPT, PROMPT]) == [TEXT, TEXT]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@pytest.mark.parametrize("verify", ["invariant", "rejection"])
def test_whoever_drafts_and_whatever_verifies(setup: tuple[str, str, int], verify: str) -> None:
    name, shape, block = setup
    llm = kit.scripted(DRAFTERS[name](shape), block, temperature=0.9, verify=verify)
    for options in [{"temperature": 0}, {"temperature": 1e-6, "seed": 1}, {"top_k": 1, "seed": 1}][block % 2 :: 2]:
        assert ids(llm, **options) == REF


def test_the_default_is_greedy_also_of_a_model_that_asks_for_sampling() -> None:
    assert MetaSDLLM(model=(HOT_MODEL, TOKENIZER), max_tokens=24).invoke(PROMPT) == TEXT


def test_the_cache_does_not_take_zero_for_unset() -> None:
    llm = make(temperature=0.9, seed=1, cache=InMemoryCache())
    hot = llm.invoke(PROMPT)
    assert llm.invoke(PROMPT, temperature=0) == TEXT != hot
    assert llm.invoke(PROMPT) == hot


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ({"seed": 7}, {"seed": 0}),
        ({"top_k": 1}, {"top_k": 0}),
        ({"min_p": 1.0}, {"min_p": 0}),
        ({"min_p": 1.0, "top_k": 1, "seed": 7}, {"min_p": 0.0, "top_k": 0, "seed": 0}),
    ],
)
async def test_other_zeros_replace_the_field_too(field: dict[str, Any], call: dict[str, Any]) -> None:
    base: dict[str, Any] = {"temperature": 0.9, "seed": 5}
    want = ids(make(**{**base, **field, **call}))
    assert want != ids(make(**{**base, **field}))
    assert ids(make(**{**base, **field}), **call) == want
    answers = await every_way(make(**{**base, **field}), **call)
    assert {answer.text for answer in answers.values()} == {kit.decode(want)}


def test_seed_zero_is_a_seed() -> None:
    assert (
        ids(make(temperature=0.9, seed=0)) == ids(make(temperature=0.9, seed=0)) != ids(make(temperature=0.9, seed=1))
    )


@pytest.mark.parametrize("value", [-1, -1e-9, float("nan"), float("inf"), "hot", True])
async def test_what_is_no_temperature_is_refused_before_anything_is_loaded_or_run(value: Any) -> None:
    llm = make()
    before = llm._load().rounds
    with pytest.raises(ValueError, match="temperature"):
        MetaSDLLM(model="no/such-model", temperature=value)
    for asked in (llm.invoke, lambda prompt, **options: list(llm.stream(prompt, **options))):
        with pytest.raises(ValueError, match="temperature"):
            asked(PROMPT, temperature=value)
    with pytest.raises(ValueError, match="temperature"):
        await llm.ainvoke(PROMPT, temperature=value)
    with pytest.raises(ValueError, match="temperature"):
        _ = [chunk async for chunk in llm.astream(PROMPT, temperature=value)]
    assert llm._load().rounds == before
