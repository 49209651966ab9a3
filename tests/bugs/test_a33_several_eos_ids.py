"""Only one of several EOS ids ends an answer, or one list of them replaces another instead of joining it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import tiny_model
from tests.bugs.kit import BLOCKS, TOKENIZER, every_way, half, hostile, ids, make, perfect, ref, scripted

PLACES = (0, 3, 8, 15)


def declared(config: Any, generation: Any, tokenizer: int) -> MetaSDLLM:
    """The tiny model with EOS ids said in its three places."""
    model = tiny_model()
    model.config.eos_token_id = config
    model.generation_config.eos_token_id = generation
    own = copy.deepcopy(TOKENIZER)
    own.eos_token = own.convert_ids_to_tokens(tokenizer)
    return MetaSDLLM(model=(model, own), max_tokens=24)


def until(place: int) -> tuple[int, ...]:
    """The plain answer up to the first occurrence of its token at a place."""
    answer = ref()
    return answer[: answer.index(answer[place]) + 1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["config", "generation", "generation list", "tokenizer"])
def test_an_id_said_in_any_place_ends_the_answer(place: int, where: str) -> None:
    token = ref()[place]
    llm = declared(
        token if where == "config" else 1,
        {"generation": token, "generation list": [1, token]}.get(where, 1),
        token if where == "tokenizer" else 1,
    )
    try:
        assert ids(llm) == until(place)
    finally:
        llm.close()


def test_the_places_join() -> None:
    first, second, third = 300, ref()[8], ref()[3]
    llm = declared([1, first], [1, second], third)
    try:
        assert llm._load().target.stop_ids >= {1, first, second, third}
        assert ids(llm) == min(until(8), until(3), key=len)
    finally:
        llm.close()


@pytest.mark.parametrize("place", PLACES)
async def test_a_calls_own_ids_join_the_models_in_every_mode(place: int) -> None:
    llm = make(stop_token_ids=[ref()[place]])
    for answer in (await every_way(llm)).values():
        assert answer.finish_reason == "stop"
        assert answer.usage["completion_tokens"] == len(until(place))
    assert ids(make(), stop_token_ids=[ref()[place], 400]) == until(place)
    assert {1} <= make()._load().target.stop_ids


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drafter", [perfect, half, hostile])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_inside_a_block_too(place: int, drafter: Any, shape: str) -> None:
    for block in BLOCKS:
        assert ids(scripted(drafter(shape), block, stop_token_ids=[ref()[place]])) == until(place)
