"""A4: the answer holds the prompt, or was made by cutting the prompt's length off a decoded whole, which eats or leaves
characters whenever the prompt does not decode to itself (odd spacing, special tokens, several prompts in a batch).
"""

from __future__ import annotations

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate

from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, Heard, encode, every_way, ids, make, ref
from tests.bugs.test_a1_stop_ignored_in_invoke import DRAFTERS, playing, speaker

ODD = [
    "a ,  b \n",
    "  two spaces , and one at the end ",
    "\n\n\ttab\r\n",
    "x",
    " ",
    "é \U0001fae9 naïve",  # byte tokens
    "the <eos> and <pad><bos> are special",  # ids that decode to nothing
    "<bos>already there",
    "don 't you ' ve it . Do n't !",  # what clean_up_tokenization_spaces changes
]


def engine_ids(prompt: str) -> tuple[int, ...]:
    """What the model reads: one BOS, also where the prompt brings one."""
    found = encode(prompt)
    return found[1:] if found[:2] == (2, 2) else found


@pytest.mark.parametrize("prompt", ODD)
async def test_the_answer_is_the_new_tokens_and_no_more_in_every_mode(prompt: str) -> None:
    want = kit.ref_of(engine_ids(prompt), 12)
    for answer in (await every_way(make(max_tokens=12), prompt)).values():
        assert answer.text == kit.decode(want)
        assert answer.usage == {
            "prompt_tokens": len(engine_ids(prompt)),
            "completion_tokens": 12,
            "total_tokens": len(engine_ids(prompt)) + 12,
        }


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_whoever_drafts(block: int, shape: str) -> None:
    for prompt in ODD:
        for drafter in DRAFTERS.values():
            llm = kit.scripted(drafter(shape), block, max_tokens=6)
            assert ids(llm, prompt) == kit.ref_of(engine_ids(prompt), 6), prompt


async def test_an_answer_that_repeats_the_prompt_is_not_cut() -> None:
    said = (*encode(PROMPT)[1:], *encode(PROMPT)[1:9])
    whole = kit.decode(said)
    assert whole == PROMPT + PROMPT[: len(whole) - len(PROMPT)]
    for setup in (("perfect", "chain", 16), ("half", "tree", 4)):
        llm = playing(speaker(said), said, setup)
        assert ids(llm) == said
        assert {answer.text for answer in (await every_way(llm)).values()} == {whole}


async def test_an_answer_shorter_than_the_prompt_or_beginning_with_a_space_is_whole() -> None:
    for text in (" ", "\n", " the", "  \n  ,", "t"):
        said = encode(text)[1:]
        llm = make(model=(speaker(said), kit.TOKENIZER), max_tokens=len(said))
        assert {answer.text for answer in (await every_way(llm)).values()} == {text}


async def test_batches_of_different_lengths_and_chains() -> None:
    llm = make(max_tokens=8)
    want = [kit.decode(kit.ref_of(engine_ids(prompt), 8)) for prompt in ODD]
    assert llm.batch(ODD) == await llm.abatch(ODD) == want
    assert [row[0].text for row in llm.generate(ODD).generations] == want
    chain = PromptTemplate.from_template("{prompt}") | llm | StrOutputParser()
    assert chain.batch([{"prompt": prompt} for prompt in ODD]) == want
    for prompt, text in zip(ODD, want, strict=True):
        assert "".join(chain.stream({"prompt": prompt})) == text


def test_callbacks_are_told_the_answer_only() -> None:
    heard = Heard()
    make(max_tokens=8).invoke(ODD[0], {"callbacks": [heard]})
    list(make(max_tokens=8).stream(ODD[0], {"callbacks": [heard]}))
    for response in heard.responses:
        assert response.generations[0][0].text == kit.decode(ref(ODD[0], 8))
