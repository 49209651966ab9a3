"""C7: temperature 0 divides by zero in the sampling path, or drafting breaks at exactly 0.
Whatever leaves one token to choose (0, a tiny temperature, top_k=1, a tiny top_p, min_p=1) gives the greedy answer.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 12
PROMPTS = (kit.PROMPT, "AB", "ABCDEFG", "ABCDEFGH", "0123456789" * 2)
COLD: dict[str, dict[str, Any]] = {
    "0": {"temperature": 0},
    "0.0": {"temperature": 0.0},
    "-0.0": {"temperature": -0.0},
    "1e-6": {"temperature": 1e-6},
    "1e-12": {"temperature": 1e-12},
    "1e-30": {"temperature": 1e-30},
    "below float32": {"temperature": 1e-45},
    "least float": {"temperature": 5e-324},
    "top_k=1": {"temperature": 1.0, "top_k": 1},
    "top_k=1, hot": {"temperature": 100.0, "top_k": 1},
    "top_k=1, cold": {"temperature": 1e-6, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 1e-9},
    "min_p": {"temperature": 1.0, "min_p": 1.0},
    "all filters": {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
}


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT, kit.EOS))


WANT = [truth(kit.encode(prompt)) for prompt in PROMPTS]
DRAFTERS: dict[str, Any] = {
    **{
        f"{quality.__name__} {shape}@{block}": [(quality(shape, truth), block)]
        for quality in (kit.perfect, kit.half, kit.hostile)
        for shape in ("chain", "tree")
        for block in (1, 8)
    },
    "raising": [(RaisingDrafter(at=1), 4), "lookup@8"],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


def make(name: str, **options: Any) -> MetaSDLLM:
    return kit.make(model=PAIR, drafters=DRAFTERS[name], max_tokens=COUNT, **options)


def side_by_side(llm: MetaSDLLM, **options: Any) -> list[tuple[int, ...]]:
    started = [llm.steps(prompt, **options) for prompt in PROMPTS]
    return [tuple(token for step in steps for token in step.tokens) for steps in started]


@pytest.mark.parametrize("verify", ["invariant", "rejection"])
@pytest.mark.parametrize("cold", COLD)
def test_one_token_to_choose_is_greedy_for_every_drafter(cold: str, verify: str) -> None:
    for name in list(DRAFTERS)[list(COLD).index(cold) % 3 :: 3]:
        llm = make(name, verify=verify, seed=3, **COLD[cold])
        assert side_by_side(llm) == WANT, name


@pytest.mark.parametrize("cold", ["0", "1e-6", "top_k=1"])
async def test_every_way_of_calling_is_greedy_by_field_and_by_call(cold: str) -> None:
    want = kit.decode(WANT[0])
    for answers in (
        await kit.every_way(make("perfect chain@8", **COLD[cold])),
        await kit.every_way(make("half tree@8", temperature=0.9), **{"seed": None, **COLD[cold]}),
    ):
        assert {answer.text for answer in answers.values()} == {want}


@pytest.mark.parametrize("block", kit.BLOCKS)
def test_drafts_are_accepted_at_zero_as_anywhere(block: int) -> None:
    for options in (COLD["0"], COLD["1e-6"], COLD["top_k=1"]):
        llm = kit.scripted(kit.perfect("chain", truth), block, model=PAIR, max_tokens=COUNT, **options)
        records = kit.rounds(llm)
        assert all(record.accepted == record.drafted for record in records)
        assert len(records) == -(-COUNT // (block + 1))


@pytest.mark.parametrize("reward", ["throughput", "bd", "be"])
def test_rewards_that_compare_distributions_work_at_zero(reward: str) -> None:
    for cold in ("0", "1e-6", "below float32", "top_k=1"):
        llm = make("half chain@8", reward=reward, policy="ucb", **COLD[cold])
        assert side_by_side(llm) == WANT
        summary = list(llm.steps(kit.PROMPT))[-1].summary
        assert summary is not None
        assert all(math.isfinite(value) for value in summary.values.values())


@pytest.mark.parametrize("cold", COLD)
def test_extreme_logits_give_no_nan_either(cold: str) -> None:
    loud = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)
    with torch.no_grad():
        loud.lm_head.weight *= 1e4
    llm = kit.make(model=(loud, kit.TOKENIZER), max_tokens=COUNT, seed=3, **COLD[cold])
    want = tuple(reference_tokens(loud, list(kit.encode(kit.PROMPT)), COUNT, kit.EOS))
    assert kit.ids(llm) == want
