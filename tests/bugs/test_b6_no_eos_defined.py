"""B6: a model without an end-of-sequence token makes drafting fail, because something compares with None.
Such a model answers up to the cap, whoever drafts, and ends at nothing it was not told to end at.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from tests.bugs import kit

COUNT = 24


def endless(how: str) -> tuple[Any, Any]:
    """A pair that defines no end, in one of the ways there are."""
    # Tied to its embeddings the model would say one token for ever.
    model = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5, eos_token_id=None, pad_token_id=None)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    if how == "empty lists":
        model.config.eos_token_id = model.generation_config.eos_token_id = []
    elif how == "no generation config":
        model.generation_config = None
    elif how == "no attribute of generation config":
        del model.generation_config.eos_token_id
    elif how == "no bos either":
        model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token = None
    return model, tokenizer


HOWS = ("None", "empty lists", "no generation config", "no attribute of generation config", "no bos either")
MODEL, TOKENIZER = endless("None")


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), 40))


ANSWER = truth(kit.encode(kit.PROMPT))
DRAFTERS: dict[str, Any] = {
    **{
        f"{quality.__name__} {shape}@{block}": [(quality(shape, truth), block)]
        for quality in (kit.perfect, kit.half, kit.hostile)
        for shape in ("chain", "tree")
        for block in kit.BLOCKS
    },
    "raising": [(RaisingDrafter(at=1), 4), "lookup@8"],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


@pytest.mark.parametrize("how", HOWS)
def test_however_no_end_is_defined_the_answer_runs_to_the_cap(how: str) -> None:
    pair = endless(how)
    for drafters in (["lookup@8"], [(kit.perfect("tree", truth), 8)], None):
        llm = MetaSDLLM(model=pair, drafters=drafters, max_tokens=COUNT)
        steps = list(llm.steps(kit.PROMPT))
        summary = steps[-1].summary
        assert summary is not None
        assert tuple(token for step in steps for token in step.tokens) == ANSWER[:COUNT]
        assert (summary.finish_reason, summary.completion_tokens) == ("length", COUNT)
        assert llm._load().target.stop_ids == frozenset()


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_runs_to_the_cap(name: str) -> None:
    llm = MetaSDLLM(model=(MODEL, TOKENIZER), drafters=DRAFTERS[name], max_tokens=COUNT)
    assert kit.ids(llm) == ANSWER[:COUNT]
    assert len(kit.ids(llm, temperature=0.9, seed=2)) == COUNT


def test_a_drafter_that_finds_its_match_drafts_and_is_accepted() -> None:
    repeating = "ABCABCABCABCABC"
    llm = MetaSDLLM(model=(MODEL, TOKENIZER), drafters=["lookup@8"], policy="fixed", max_tokens=COUNT)
    assert kit.ids(llm, repeating) == truth(kit.encode(repeating))[:COUNT]
    assert kit.rounds(llm, repeating)[0].drafted > 0


def test_what_is_an_end_elsewhere_is_a_token_like_others_here() -> None:
    # A prompt whose answer holds the id that is EOS in the same tokenizer when it has one.
    prompt = next(p for p in map(str, range(1000, 1200)) if 1 in truth(kit.encode(p))[:COUNT])
    for drafters in (["plain"], [(kit.perfect("chain", truth), 8)], None):
        llm = MetaSDLLM(model=(MODEL, TOKENIZER), drafters=drafters, max_tokens=COUNT)
        assert kit.ids(llm, prompt) == truth(kit.encode(prompt))[:COUNT]
        assert "".join(llm.stream(prompt)) == llm.invoke(prompt)


async def test_stop_strings_still_end_it() -> None:
    text = kit.decode(ANSWER[:COUNT])
    stop = next(text[at : at + 2] for at in range(8, len(text)) if text[at : at + 2].isascii())
    llm = MetaSDLLM(model=(MODEL, TOKENIZER), drafters=[(kit.perfect("chain", truth), 8)], max_tokens=COUNT)
    for answer in (await kit.every_way(llm, stop=[stop])).values():
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
