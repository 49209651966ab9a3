"""Penalties and logits processors are skipped past a block's first token, or see tokens that were drafted and rejected.

The truth is transformers' own ``generate`` with the same options; a processor must be asked once for each position of
the answer, in order, with exactly the tokens committed before it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from metasd_langchain.errors import TargetError
from tests.bugs.kit import (
    BLOCKS,
    MODEL,
    PROMPT,
    encode,
    half,
    hostile,
    ids,
    make,
    perfect,
    ref,
    scripted,
)

COUNT = 24
REAL: Any = (["lookup@8"], ["suffix@16"], ["recycling@4"], ["recycling_tree@12"], None)


class Grumpy:
    """A user's processor whose effect depends on everything before: the last token is banned, the one before favoured.

    Remembers what it was asked with.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.asked.append(tuple(input_ids[0].tolist()))
        scores = scores.clone()
        scores[0, input_ids[0, -1]] = -torch.inf
        scores[0, input_ids[0, -2]] += 1.0 + input_ids.shape[1] % 3
        return scores


CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "min_tokens": {"min_tokens": 9},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_tokens": 5},
}


def truth(**options: Any) -> tuple[int, ...]:
    """transformers' answer; EOS is a token of the plain answer, so that a least length has something to forbid."""
    options = dict(options)
    if "min_tokens" in options:
        options["min_new_tokens"] = options.pop("min_tokens")
    processors = LogitsProcessorList(options.pop("logits_processors", []))
    prompt = torch.tensor([encode(PROMPT)])
    with torch.inference_mode():
        out = MODEL.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=COUNT,
            do_sample=False,
            eos_token_id=[1, ref()[4]],
            pad_token_id=0,
            logits_processor=processors,
            **options,
        )
    return tuple(out[0, prompt.shape[1] :].tolist())


def ends(**options: Any) -> dict[str, Any]:
    return {"stop_token_ids": [ref()[4]], "max_tokens": COUNT, **options}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_penalties_give_what_transformers_gives_whatever_is_drafted(case: str, shape: str) -> None:
    expected = truth(**CASES[case])
    known = {encode(PROMPT): expected + ref()}
    for drafter in (perfect, half, hostile):
        for block in BLOCKS:
            assert ids(scripted(drafter(shape, known), block, **ends(**CASES[case]))) == expected
    for arms in REAL:
        assert ids(make(drafters=arms, **ends(**CASES[case]))) == expected
    assert ids(make(speculative=False, **ends(**CASES[case]))) == expected


@pytest.mark.parametrize("case", CASES)
def test_each_case_changes_the_answer(case: str) -> None:
    assert truth(**CASES[case]) != truth() == ref(stop=frozenset({1, ref()[4]}))


@pytest.mark.parametrize("drafter", [perfect, half, hostile])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}, {"verify": "rejection", "temperature": 0.8}])
def test_a_processor_is_asked_once_a_position_with_committed_tokens_only(
    drafter: Any, block: int, options: dict[str, Any]
) -> None:
    processor = Grumpy()
    known = {encode(PROMPT): truth(logits_processors=[Grumpy()])}
    answer = ids(scripted(drafter("chain", known), block, **ends(logits_processors=[processor], **options)))
    assert processor.asked == [encode(PROMPT) + answer[:place] for place in range(len(answer))]
    if not options:
        assert answer == truth(logits_processors=[Grumpy()])


def test_a_processor_is_not_asked_past_a_stop_string_inside_a_block() -> None:
    processor = Grumpy()
    plain = ids(make(logits_processors=[Grumpy()], speculative=False, max_tokens=COUNT))
    text = "".join(step.text for step in make(logits_processors=[Grumpy()], speculative=False).steps(PROMPT))
    stop = text[5:7]
    llm = scripted(perfect(answers={encode(PROMPT): plain}), 16, logits_processors=[processor], stop=[stop])
    answer = ids(llm)
    assert len(answer) < COUNT
    assert len(processor.asked) == len(answer)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt() -> None:
    options = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    tokens = list(encode(PROMPT))
    for _ in range(COUNT):
        with torch.inference_mode():
            logits = MODEL(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        logits = logits.clone()
        answer = tokens[len(encode(PROMPT)) :]
        for token in set(answer):
            logits[token] -= 1.5 + 0.5 * answer.count(token)
        tokens.append(int(logits.argmax()))
    expected = tuple(tokens[len(encode(PROMPT)) :])
    assert expected != ref()
    for drafter in (perfect, half, hostile):
        for block in (1, 4, 16):
            llm = scripted(drafter("tree", {encode(PROMPT): expected}), block, max_tokens=COUNT, **options)
            assert ids(llm) == expected


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_bias_bans_and_forces_tokens(place: int) -> None:
    token = ref()[place]
    before = ref().index(token)
    banned = ids(make(logit_bias={token: -100}))
    assert banned[:before] == ref()[:before]
    assert token not in banned
    assert ids(make(logit_bias={str(token): 1000.0}, max_tokens=5)) == (token,) * 5


def test_a_processor_that_fails_fails_its_own_call_only() -> None:
    def boom(ids: Any, scores: Any) -> Any:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        make(logits_processors=[boom]).invoke(PROMPT)
    with pytest.raises(TargetError, match="no logits of the same shape"):
        make(logits_processors=[lambda ids, scores: scores[0]]).invoke(PROMPT)
    with pytest.raises(TargetError, match="nan"):
        make(logits_processors=[lambda ids, scores: scores * float("nan")]).invoke(PROMPT)
    assert ids(make()) == ref()
