"""A12: the prompt brings a BOS and the tokenizer adds another (or neither does), so the model reads what it was never
trained on, and counts disagree.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.prompts import PromptTemplate
from tokenizers import processors

from metasd_langchain.testing.models import tiny_tokenizer
from metasd_langchain.values import Request
from tests.bugs import kit
from tests.bugs.kit import MODEL, TOKENIZER, every_way, ids, make

BOS = 2
TEXTS = ["hi", "the cat sat on the mat", " hi", "\nhi", "a" * 40, "é"]
COUNT = 6


def silent_tokenizer() -> Any:
    """One that has a BOS and never adds it."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


SILENT = silent_tokenizer()


class Reader:
    """A drafter that notes what the engine reads, and drafts nothing."""

    name, candidates, prompt_rows, hidden_layers = "reader", 0, 0, ()

    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []

    def open(self, request: Request) -> Any:
        self.prompts.append(request.prompt)
        return kit.perfect("chain", lambda prompt: ()).open(request)

    def forget(self, scope: str | None = None) -> None:
        """Nothing is kept."""


async def reads(prompt: str, want: tuple[int, ...], tokenizer: Any = TOKENIZER) -> None:
    """In every mode the engine reads these ids, says so, and answers them."""
    reader = Reader()
    llm = make(model=(MODEL, tokenizer), drafters=[(reader, 4)], policy="fixed", max_tokens=COUNT)
    answers = await every_way(llm, prompt)
    assert ids(llm, prompt) == kit.ref_of(want, COUNT)
    assert reader.prompts == [want] * 7
    for answer in answers.values():
        assert answer.usage["prompt_tokens"] == len(want)
        assert answer.text == kit.decode(kit.ref_of(want, COUNT))
    assert llm.get_num_tokens(prompt) == len(want)
    assert tuple(llm.get_token_ids(prompt)) == want


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("typed", [0, 1, 2])
async def test_exactly_one_bos_whether_the_prompt_brings_it_or_not(text: str, typed: int) -> None:
    body = tuple(SILENT(text)["input_ids"])
    assert BOS not in body
    await reads("<bos>" * typed + text, (BOS, *body))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("typed", [0, 1])
async def test_a_tokenizer_that_adds_none_is_taken_at_its_word(text: str, typed: int) -> None:
    body = tuple(SILENT(text)["input_ids"])
    await reads("<bos>" * typed + text, (BOS,) * typed + body, SILENT)


async def test_a_tokenizer_without_a_bos_and_one_that_calls_another_token_so() -> None:
    nameless, other = silent_tokenizer(), silent_tokenizer()
    nameless.bos_token = None
    await reads("hi", tuple(SILENT("hi")["input_ids"]), nameless)
    other.bos_token = "h"  # noqa: S105 - e.g. GPT-2's BOS is its EOS
    await reads("hi", tuple(SILENT("hi")["input_ids"]), other)


async def test_a_bos_within_the_text_is_the_users_own() -> None:
    body = tuple(SILENT("a<bos>b")["input_ids"])
    assert body.count(BOS) == 1
    await reads("a<bos>b", (BOS, *body))
    await reads("<bos>a<bos>b", (BOS, *body))


async def test_only_a_bos_is_one_token() -> None:
    await reads("<bos>", (BOS,))
    await reads("<bos><bos>", (BOS,))


def test_batches_and_templates_are_read_like_single_prompts() -> None:
    reader = Reader()
    llm = make(drafters=[(reader, 4)], policy="fixed", max_tokens=2)
    prompts = [mark + text for text in TEXTS[:3] for mark in ("", "<bos>")]
    answers = llm.batch(prompts)
    assert answers[::2] == answers[1::2]
    chain: Any = PromptTemplate.from_template("<bos>{text}") | llm
    assert chain.batch([{"text": text} for text in TEXTS[:3]]) == answers[::2]
    assert sorted(reader.prompts) == sorted([kit.encode(text) for text in TEXTS[:3]] * 3)


@pytest.mark.parametrize("block", kit.BLOCKS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_with_and_without_the_answer_is_one_whoever_drafts(block: int, shape: str) -> None:
    for hot in ({}, {"temperature": 0.9, "seed": 4}):
        plain = ids(make(max_tokens=COUNT, drafters=["plain"], **hot), "the cat")
        for drafter in (kit.perfect, kit.half, kit.hostile):
            llm = kit.scripted(drafter(shape), block, max_tokens=COUNT, **hot)
            assert ids(llm, "<bos>the cat") == ids(llm, "the cat") == plain
