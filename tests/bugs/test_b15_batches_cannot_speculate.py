"""B15: with several prompts drafting is refused or off, or rows that accept different counts disturb each other.
Every row of a batch drafts, and every answer is the one its prompt gets alone, in order.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
MODEL.lm_head.weight.data[:260] = 0  # neither EOS nor bytes that are no text
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 12
PROMPTS = [
    "<bos>",
    "ABCDEF",
    "0123456789" * 4,
    "ABCABCABC",
    "<bos>",
    *(kit.PROMPT[:n] for n in (30, 8, 9, 20, 1)),
]  # more than run at once; the window is 8


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


WANT = [truth((2,) if prompt == "<bos>" else kit.encode(prompt)) for prompt in PROMPTS]
TEXTS = [kit.decode(answer) for answer in WANT]
DRAFTERS: dict[str, Any] = {
    **{
        f"{quality.__name__} {shape}@{block}": [(quality(shape, truth), block)]
        for quality in (kit.perfect, kit.half, kit.hostile)
        for shape in ("chain", "tree")
        for block in kit.BLOCKS
    },
    "raising": [(RaisingDrafter(at=1), 4), "lookup@8"],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12")},
    "mixed": [(kit.perfect("tree", truth), 7), (kit.hostile("chain", truth), 5), "suffix@6", "plain"],
    "default pool": None,
}


def make(name: str, **options: Any) -> MetaSDLLM:
    policy = {"mixed": "random", "default pool": "hinted_ucb"}.get(name, "fixed")
    return kit.make(model=PAIR, drafters=DRAFTERS[name], policy=policy, max_tokens=COUNT, **options)


def side_by_side(llm: MetaSDLLM, **options: Any) -> list[tuple[int, ...]]:
    started = [llm.steps(prompt, **options) for prompt in PROMPTS]
    return [tuple(token for step in steps for token in step.tokens) for steps in started]


def test_answers_differ_so_that_a_mixed_up_order_shows() -> None:
    assert len(set(TEXTS)) == len(TEXTS) - 1


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_row_is_answered_as_if_alone(name: str) -> None:
    assert side_by_side(make(name)) == WANT


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("name", ["perfect chain@8", "half tree@16", "recycling_tree@12", "mixed"])
async def test_batches_of_langchain_keep_text_and_order(name: str, most: int | None) -> None:
    llm, config = make(name), {"max_concurrency": most}
    assert llm.batch(PROMPTS, config) == TEXTS  # type: ignore[arg-type]
    assert await llm.abatch(PROMPTS, config) == TEXTS  # type: ignore[arg-type]
    assert [row[0].text for row in llm.generate(PROMPTS).generations] == TEXTS
    assert [row[0].text for row in (await llm.agenerate(PROMPTS)).generations] == TEXTS


def test_every_row_of_a_batch_drafts_and_shares_its_forwards() -> None:
    llm = make("perfect chain@8")
    rows = [row[0].generation_info["metasd"] for row in llm.generate(PROMPTS[:8]).generations]
    assert [row["accepted"] for row in rows] == [10] * 8  # 8 and a bonus, 2 and a bonus
    engine = llm._load()
    before = engine.rounds
    assert [row[0].text for row in llm.generate(PROMPTS[:8]).generations] == TEXTS[:8]
    assert engine.rounds - before < 16  # 16 is what they take one after the other


def test_sampled_rows_are_drawn_as_if_alone() -> None:
    hot: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
    plain = kit.make(model=PAIR, drafters=["plain"], max_tokens=COUNT)
    alone = [kit.ids(plain, prompt, **hot) for prompt in PROMPTS]
    assert alone != WANT
    for name in ("perfect chain@8", "half tree@16", "recycling_tree@12", "mixed", "default pool"):
        assert side_by_side(make(name), **hot) == alone


def test_rows_that_end_early_leave_the_rest_alone() -> None:
    stop = TEXTS[2][3:5]
    cut = [text.split(stop, maxsplit=1)[0] for text in TEXTS]
    assert any(short == long for short, long in zip(cut, TEXTS, strict=True))
    for name in ("perfect chain@16", "half tree@8", "default pool"):
        assert make(name).batch(PROMPTS, stop=[stop]) == cut
