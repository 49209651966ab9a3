"""Batched decoding for teacher data says what the model itself says, row by row and whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.models.load import load_target
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.training.decode import CandidateHead, decode, sample

PROMPTS = [[2, 5, 300, 17], [2, *range(260, 300)], [2, 270, 271]]  # on both sides of the window of 8


def run(target: Any, prompts: list[list[int]], **changes: Any) -> Any:
    options = {"new_tokens": 16, "temperature": 0.0, "layers": (1,), "generator": torch.Generator().manual_seed(3)}
    return decode(target.lm, prompts, **{**options, **changes})


def own_states(model: Any, tokens: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states


@pytest.mark.parametrize("family", ["gemma3", "gemma2", "llama", "qwen3"])
@pytest.mark.parametrize("likely", [False, True])
def test_greedy_answers_and_hidden_states_are_the_models_own(family: str, likely: bool) -> None:
    model = tiny_model(family)
    target = load_target((model, tiny_tokenizer()))
    softcap = getattr(target.lm.config, "final_logit_softcapping", None)
    head = CandidateHead(target.lm.head_rows(), torch.arange(512), softcap) if likely else None
    for prompt, row in zip(PROMPTS, run(target, PROMPTS, head=head), strict=True):
        assert row.tokens == prompt + reference_tokens(model, prompt, 16)
        states = own_states(model, row.tokens[:-1])
        for layer in (1, 3):
            assert row.hidden[layer].shape == states[layer][0].shape
            assert float((row.hidden[layer] - states[layer][0]).abs().max()) < 1e-4


def test_rows_that_end_are_taken_out_and_the_others_go_on() -> None:
    model = tiny_model()
    target = load_target((model, tiny_tokenizer()))
    prompts = [[2, 260 + n, 300 - n] for n in range(9)]
    whole = run(target, prompts)
    stops = frozenset(row.tokens[3 + 2 * (place % 5)] for place, row in enumerate(whole) if place % 3)
    for prompt, row in zip(prompts, run(target, prompts, stop_ids=stops), strict=True):
        wanted = reference_tokens(model, prompt, 16, stops)
        assert row.tokens == prompt + wanted
        assert len(row.hidden[3]) == len(row.tokens) - 1  # the last token was not read
    assert any(len(row.tokens) < 16 for row in run(target, prompts, stop_ids=stops))


def test_a_prompt_alone_has_states_of_every_token() -> None:
    target = load_target((tiny_model(), tiny_tokenizer()))
    for prompt, row in zip(PROMPTS, run(target, PROMPTS, new_tokens=0), strict=True):
        assert row.tokens == prompt
        assert len(row.hidden[1]) == len(prompt)


def test_unlikely_columns_are_never_drawn() -> None:
    target = load_target((tiny_model(), tiny_tokenizer()))
    ids = torch.arange(100, 300, 2)
    rows = run(target, PROMPTS, temperature=1.0, head=CandidateHead(target.lm.head_rows(), ids))
    drawn = {token for prompt, row in zip(PROMPTS, rows, strict=True) for token in row.tokens[len(prompt) :]}
    assert drawn <= set(ids.tolist())
    assert len(drawn) > 5


def test_normalisers_and_expected_counts_are_those_of_the_whole_vocabulary() -> None:
    model = tiny_model()
    target = load_target((model, tiny_tokenizer()))
    mass = torch.zeros(512, dtype=torch.float64)
    rows = run(target, PROMPTS, temperature=0.7, mass=mass)
    expected = torch.zeros(512, dtype=torch.float64)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([row.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
        assert torch.allclose(row.normalisers, logits.logsumexp(-1), atol=1e-4)
        expected += logits[::4].softmax(-1).sum(0).double()  # of four steps one is added up
    assert torch.allclose(mass, expected, atol=1e-4)


@pytest.mark.parametrize("columns", [7, 512, 1300])
def test_draws_follow_the_distribution(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, columns, generator=generator) * 2
    logits[0, 3] = -torch.inf
    count = 20_000
    drawn, mass = sample(logits.expand(count, -1), 0.7, generator)
    expected = (logits[0] / 0.7).softmax(-1) * count
    seen = torch.bincount(drawn, minlength=columns).float()
    assert seen[3] == 0
    common = expected > 20
    chi = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert chi < freedom + 5 * (2 * freedom) ** 0.5
    assert torch.allclose(mass[:3], (logits[0] / 0.7).logsumexp(-1).expand(3), atol=1e-4)


def test_draws_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    target = load_target((tiny_model(), tiny_tokenizer()))

    def drawn(seed: int) -> list[list[int]]:
        rows = run(target, PROMPTS, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        return [row.tokens for row in rows]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_live_model_and_the_engines_twin_capture_hidden_states_apart() -> None:
    model = tiny_model()
    target = load_target((model, tiny_tokenizer()))
    before = [layer.clone() for layer in own_states(model, PROMPTS[0])]
    scores = target.lm.score([Feed(Slot(), tuple(PROMPTS[0]))], (1, 3))
    after = own_states(model, PROMPTS[0])
    assert len(after) == len(before) == 4  # embeddings and three layers, each once
    for layer in (1, 3):
        assert float((scores.hidden[layer][-1] - before[layer][0, -1]).abs().max()) < 1e-4
        assert torch.equal(after[layer], before[layer])
