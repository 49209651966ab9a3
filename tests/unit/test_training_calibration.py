"""Chances that a drafter gives its tokens are the shares that are taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from metasd_langchain.errors import BadCheckpoint, BadOption
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import CONFIG, load_eagle, save_eagle
from metasd_langchain.models.load import load_target
from metasd_langchain.models.proposals import Proposer
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.training.calibration import KEPT, Spread, shared_noise
from metasd_langchain.values import Sampling


def drawn(scores: torch.Tensor, spread: float, generator: torch.Generator) -> torch.Tensor:
    return torch.multinomial((scores / spread).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 4.0])
def test_the_divisor_that_made_the_choices_is_found(spread: float) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = 4.0 * torch.randn(20_000, 12, generator=generator)
    taken, found = drawn(scores, spread, generator), Spread()
    for first in range(0, 20_000, 7000):
        found.add(scores[first : first + 7000], taken[first : first + 7000])
    assert found.value == pytest.approx(spread, rel=0.16)


def test_nothing_to_learn_from_leaves_chances_as_they_are() -> None:
    nothing = Spread()
    assert nothing.value == 1.0
    nothing.add(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert nothing.value == 1.0


def test_a_drafter_that_equals_the_target_drafts_what_it_takes() -> None:
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(3000, 200, generator=generator).log_softmax(-1)
    scores, taken = shared_noise(whole, whole, generator)
    assert scores.shape == (3000, KEPT)
    found = taken >= 0
    assert torch.equal(scores.argmax(-1)[found], taken[found])
    mass = whole.topk(KEPT).values.exp().sum(-1).mean()  # what is drawn from the columns that are looked at
    assert float(found.float().mean()) == pytest.approx(float(mass), abs=0.03)


def test_what_the_target_takes_from_elsewhere_counts_as_missed() -> None:
    generator = torch.Generator().manual_seed(3)
    quarter = torch.full((4000, 8), 0.25 / 8).log()
    _, taken = shared_noise(quarter, torch.full((4000, 8), 1 / 8).log(), generator)
    assert float((taken >= 0).float().mean()) == pytest.approx(0.25, abs=0.03)


class Noise:
    """Noise that is a function of the token."""

    def gumbel(self, position: int, tokens: np.ndarray) -> np.ndarray:
        return -np.log(-np.log((np.asarray(tokens) * 0.37 + 0.11 * position) % 0.9 + 0.05))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=1)])
def test_the_divisor_changes_chances_and_no_token(sampling: Sampling) -> None:
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(4)) * 3
    ids, chances = Proposer(sampling, None, 90).likely(logits, Noise(), 2, 4)
    other, flatter = Proposer(sampling, None, 90, spread=(2.0, 2.0)).likely(logits, Noise(), 2, 4)
    assert other == ids
    assert all(two[0] < one[0] for one, two in zip(chances, flatter, strict=True))
    assert all(sum(row) <= 1.0 + 1e-9 for row in flatter)
    if sampling.greedy:
        assert np.allclose(flatter, (logits / 2).softmax(-1).topk(4).values.tolist(), atol=1e-5)


def test_a_checkpoint_keeps_it_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    target = load_target((tiny_model("llama"), tiny_tokenizer()))
    parts = TargetParts.of(target.lm, target.name)
    head = EagleHead.initialised(EagleConfig.of_target(parts), parts)
    head.config = replace(head.config, spread=(1.25, 2.0))
    assert load_eagle(save_eagle(head, tmp_path), parts).config.spread == (1.25, 2.0)
    text = (tmp_path / CONFIG).read_text()
    start = text.index('"spread": [')
    end = text.index("]", start) + 1
    for wrong in ('"spread": [1.0]', '"spread": "2"', '"spread": [0, 1]', '"spread": [1.0, true]'):
        (tmp_path / CONFIG).write_text(text[:start] + wrong + text[end:])
        with pytest.raises(BadCheckpoint, match="spread"):
            load_eagle(tmp_path, parts)
    with pytest.raises(BadOption, match="spread"):
        replace(head.config, spread=(1.0, float("inf")))
