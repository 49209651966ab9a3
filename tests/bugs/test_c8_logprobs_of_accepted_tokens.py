"""Log-probabilities are zero, missing or the drafter's for tokens that came out of a draft.

They are the target's own: log-softmax of its logits at temperature 1, whatever was drafted, sampled or penalised.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.bugs.kit import BLOCKS, MODEL, PROMPT, TOKENIZER, Heard, encode, half, hostile, make, perfect, scripted


def teacher_forced(answer: tuple[int, ...]) -> torch.Tensor:
    """Log-softmax before each token of an answer, by one cache-free forward: ``[len(answer), vocab]``."""
    prompt = encode(PROMPT)
    with torch.inference_mode():
        logits = MODEL(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def content(llm: Any, **options: Any) -> list[dict[str, Any]]:
    info = llm.generate([PROMPT], **options).generations[0][0].generation_info
    entries: list[dict[str, Any]] = info["logprobs"]["content"]
    assert len(entries) == info["usage"]["completion_tokens"]
    return entries


def check(entries: list[dict[str, Any]], top: int) -> None:
    answer = tuple(entry["id"] for entry in entries)
    expected = teacher_forced(answer)
    for place, entry in enumerate(entries):
        assert entry["logprob"] == pytest.approx(float(expected[place, entry["id"]]), abs=1e-4)
        assert entry["logprob"] < 0.0
        likely = entry["top_logprobs"]
        assert len(likely) == top
        values = [one["logprob"] for one in likely]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(expected[place].topk(top).values.tolist() if top else [], abs=1e-4)


@pytest.mark.parametrize("drafter", [perfect, half, hostile])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("block", BLOCKS)
def test_accepted_and_bonus_tokens_have_the_targets_own(drafter: Any, shape: str, block: int) -> None:
    check(content(scripted(drafter(shape), block, logprobs=True, top_logprobs=3)), 3)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "seed": 3},
        {"temperature": 1.0, "top_p": 0.8, "seed": 4},
        {"repetition_penalty": 1.4},
        {"temperature": 0.9, "seed": 1, "verify": "rejection"},
    ],
)
def test_they_do_not_depend_on_how_the_token_was_chosen(options: dict[str, Any]) -> None:
    check(content(make(logprobs=5, **options)), 5)


def test_a_stop_inside_a_block_leaves_as_many_as_tokens() -> None:
    plain = content(make(logprobs=True, speculative=False))
    for block in BLOCKS:
        stopped = content(scripted(perfect(), block, logprobs=True, stop_token_ids=[plain[5]["id"]]))
        assert [entry["id"] for entry in stopped] == [entry["id"] for entry in plain][:6]
        check(stopped, 0)


async def test_a_stream_has_them_once_on_its_last_chunk_equal_to_invoke() -> None:
    llm = make(logprobs=True, top_logprobs=2)
    expected = content(llm)
    heard = Heard()
    list(llm.stream(PROMPT, {"callbacks": [heard]}))
    async_heard = Heard()
    [piece async for piece in llm.astream(PROMPT, {"callbacks": [async_heard]})]
    for one in (heard, async_heard):
        streamed = one.responses[0].generations[0][0].generation_info["logprobs"]["content"]
        check(streamed, 2)
        assert [entry["id"] for entry in streamed] == [entry["id"] for entry in expected]


def test_tokens_are_named_with_their_bytes() -> None:
    entries = content(make(logprobs=True))
    whole = [entry for entry in entries if not entry["token"].startswith("<0x")]
    assert whole
    for entry in whole:
        assert bytes(entry["bytes"]).decode() == entry["token"] == TOKENIZER.decode([entry["id"]])


def test_a_byte_of_a_character_is_named_by_its_byte() -> None:
    byte = TOKENIZER.convert_tokens_to_ids("<0xF0>")
    entry = content(make(logprobs=True, logit_bias={byte: 1000.0}, max_tokens=2))[0]
    assert (entry["token"], entry["bytes"]) == ("<0xF0>", [0xF0])


def test_none_are_reported_unasked_and_wrong_counts_are_refused() -> None:
    assert "logprobs" not in make().generate([PROMPT]).generations[0][0].generation_info
    assert "logprobs" not in make(logprobs=False).generate([PROMPT]).generations[0][0].generation_info
    for wrong in (-1, 1.5, 10**6):
        with pytest.raises(ValueError, match="logprobs"):
            make(logprobs=wrong)
