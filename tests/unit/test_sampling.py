"""The target's distribution of a row: filters as transformers has them, heads and tails of large vocabularies, ties."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from metasd_langchain.engine import heads as heads_module
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.sampling import HEAD, TargetRows, best
from metasd_langchain.errors import TargetError
from metasd_langchain.values import Sampling
from tests.laws.exact import chi_square, processed


def rows(count: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def tied(count: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 rows with many equal values."""
    return (rows(count, vocab, seed).mul_(4).round_() / 4).to(torch.bfloat16)


def zipf(vocab: int, seed: int = 0) -> torch.Tensor:
    """One row whose mass is spread widely, as a real model's at a high temperature."""
    return rows(1, vocab, seed, 2.0) - torch.arange(vocab).add(3.0).log() * 0.5


def transformers_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    steps: list[Any] = [hf.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(steps)(torch.zeros(1, 1, dtype=torch.long), logits.double()).softmax(-1)


class Fixed(Draws):
    """Draws whose uniforms are given."""

    def __init__(self, **uniforms: float) -> None:
        super().__init__(0)
        self._uniforms = {Draws.SPLIT: uniforms["split"], Draws.TAIL: uniforms["tail"]}

    def uniform(self, position: int, stream: int, trial: int = 0) -> float:
        return self._uniforms[stream]


GRID = [
    Sampling(temperature, top_p, top_k, min_p)
    for temperature, top_p, top_k, min_p in [
        *itertools.product((0.4, 2.0), (None, 0.5, 0.95), (None, 5, 100), (None, 0.05, 0.3)),
        (1.0, 1.0, 0, 0.0),
    ]
]


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [6, 300])
def test_every_combination_of_filters_is_that_of_transformers(vocab: int) -> None:
    logits = rows(2, vocab, vocab)
    for sampling in GRID:
        theirs = transformers_distribution(logits, sampling)
        ours = TargetRows(logits, sampling)
        for row in range(2):
            assert torch.allclose(ours.dense(row), theirs[row], atol=1e-6), sampling
            assert np.allclose(processed(logits[row].double().numpy(), sampling), theirs[row].numpy(), atol=1e-9)


@given(st.integers(0, 2**31), st.integers(2, 700), st.sampled_from(GRID), st.booleans())
@settings(max_examples=150)
def test_filters_by_hand_ties_included(seed: int, vocab: int, sampling: Sampling, ties: bool) -> None:
    logits = tied(1, vocab, seed) if ties else rows(1, vocab, seed)
    ours = TargetRows(logits, sampling).dense(0).numpy()
    assert np.allclose(ours, processed(logits[0].double().numpy(), sampling), atol=1e-6)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, min_p=1e-9),
        Sampling(1.0, top_p=1.0 - 1e-12),
        Sampling(1e4, min_p=0.9),
        Sampling(1e4, top_p=0.999999),
        Sampling(1.0, top_k=10**6),
        Sampling(1.0, top_p=0.999999, top_k=10**6, min_p=1e-9),
    ],
)
@pytest.mark.parametrize("vocab", [6, 64, 65, 512, 513, 5000])
def test_a_filter_that_keeps_the_whole_vocabulary_ends(vocab: int, sampling: Sampling) -> None:
    logits = rows(1, vocab)
    ours = TargetRows(logits, sampling)
    assert 0 <= ours.token(0, 0, Draws(1)) < vocab
    assert np.allclose(ours.dense(0).numpy(), processed(logits[0].double().numpy(), sampling), atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = (
        rows(100, 1000, 3, 5.0) + 200.0
    )  # large logits: over a small temperature they overflow what a float32 tells
    logits[:, 77] += 10.0
    ours = TargetRows(logits, Sampling(temperature))
    drawn = [ours.token(row, row, Draws(row)) for row in range(100)]
    top = logits.argmax(-1)
    gaps = logits.gather(1, top[:, None])[:, 0] - logits.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    assert float(gaps.max()) <= 20 * temperature
    assert all(ours._head(row).mass > 1 - 1e-6 for row in range(100))


def test_a_low_temperature_keeps_its_precision_on_large_logits() -> None:
    logits = rows(1, 1000, 5, 0.004) + 30.0  # 30 / 0.001: steps of a float32 are 0.002 there
    sampling = Sampling(0.001)
    ours = TargetRows(logits, sampling)
    mass = np.sort(processed(logits[0].double().numpy(), sampling))[::-1][:HEAD].sum()
    assert ours._head(0).mass == pytest.approx(mass, abs=1e-5)


def test_greedy_is_a_temperature_of_zero_or_a_top_k_of_one_and_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 1300, dtype=torch.bfloat16)
    logits[0, [700, 1100]] = 2.0
    logits[1, [1299, 513]] = 2.0
    for sampling in (Sampling(), Sampling(0.0, top_p=0.5), Sampling(5.0, top_k=1)):
        ours = TargetRows(logits, sampling)
        assert [ours.token(row, 0, Draws(1)) for row in range(2)] == [700, 513]
        assert ours.dense(1).nonzero().tolist() == [[513]]
        assert logits.argmax(-1).tolist() == [700, 513]


# -- best --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 511, 512, 513, 1000, 5000])
@pytest.mark.parametrize("kind", ["random", "ties", "constant", "infinite"])
def test_best_is_the_beginning_of_a_full_stable_sort(vocab: int, kind: str) -> None:
    logits = {
        "random": rows(3, vocab),
        "ties": tied(3, vocab),
        "constant": torch.zeros(3, vocab, dtype=torch.bfloat16),
        "infinite": rows(3, vocab).masked_fill(rows(3, vocab, 1) > -4, -torch.inf),
    }[kind]
    logits[2] = -logits[2].abs()  # negative values only, zeros of both signs
    values, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 7, 64, 700):
        ours, names = best(logits, k)
        assert torch.equal(names, ids[:, :k]), k
        assert torch.equal(ours, values[:, :k])


@pytest.mark.parametrize("k", [1, 3, 64])
def test_best_of_a_very_large_vocabulary_with_ties_across_blocks(k: int) -> None:
    logits = tied(2, 262_144)
    logits[0, ::4099] = 30.0  # 64 equal ones, all over the place
    _, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best(logits, k)[1], ids[:, :k])


@given(st.integers(0, 2**31), st.integers(1, 3000), st.integers(1, 80), st.integers(1, 6))
@settings(max_examples=80)
def test_best_with_few_distinct_values(seed: int, vocab: int, k: int, distinct: int) -> None:
    logits = torch.randint(distinct, (2, vocab), generator=torch.Generator().manual_seed(seed)) - 2.0
    _, ids = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(best(logits, k)[1], ids[:, :k])


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -1.0, -0.0]])
    assert best(logits, 3)[1].tolist() == [[0, 1, 3]]
    assert best(logits, 1)[1].tolist() == [[0]]


@pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
@pytest.mark.parametrize("candidates", [0, 1, 4])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=5)])
def test_a_single_nan_anywhere_is_an_error(nan: float, candidates: int, sampling: Sampling) -> None:
    logits = rows(2, 2000)
    logits[1, 1234] = torch.copysign(torch.tensor(float("nan")), torch.tensor(-1.0)) if nan != nan else nan  # noqa: PLR0124
    with pytest.raises(TargetError, match="nan"):
        TargetRows(logits, sampling, candidates).token(1, 0, Draws(1))


def test_rows_of_minus_infinity_alone_are_an_error_too() -> None:
    with pytest.raises(TargetError):
        TargetRows(torch.full((1, 600), -torch.inf), Sampling(1.0)).token(0, 0, Draws(1))


# -- large vocabularies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [5000, 262_144])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(2.0, top_p=0.97), Sampling(1.5, top_k=300), Sampling(3.0, min_p=0.01), Sampling(0.7, 0.9)],
)
def test_a_token_is_the_same_whether_its_row_is_computed_alone_or_with_others(vocab: int, sampling: Sampling) -> None:
    logits = torch.cat([rows(1, vocab, 1, 2.0), tied(1, vocab, 2).float(), zipf(vocab)])
    together = TargetRows(logits, sampling)
    together.prepare([0, 1, 2])
    positions = range(12 if vocab == 5000 else 3)
    for row in range(3):
        alone = TargetRows(logits[row : row + 1], sampling)
        later = TargetRows(logits, sampling, candidates=3, origin=row)
        for position in positions:
            token = together.token(row, position, Draws(8))
            assert token == alone.token(0, position, Draws(8)) == later.token(0, position, Draws(8))


@pytest.mark.parametrize(
    ("vocab", "sampling", "least"),
    [
        (5000, Sampling(1.5, top_p=0.9), HEAD + 1),
        (5000, Sampling(1.5, top_p=0.5), HEAD + 1),
        (5001, Sampling(2.0, top_p=0.99), 8 * HEAD + 1),
        (5000, Sampling(3.0, min_p=0.01), HEAD + 1),
        (5000, Sampling(2.0, top_k=700), 700),
        (262_144, Sampling(1.0, top_p=0.6), HEAD + 1),
    ],
)
def test_a_set_larger_than_the_head_is_sought_to_its_end(vocab: int, sampling: Sampling, least: int) -> None:
    logits = zipf(vocab)
    ours = TargetRows(logits, sampling)
    kept = processed(logits[0].double().numpy(), sampling)
    assert (kept > 0).sum() >= least
    size = int((ours.dense(0) > 0).sum())
    assert abs(size - int((kept > 0).sum())) <= 1  # the token on the border is a matter of rounding
    assert np.abs(ours.dense(0).numpy() - kept).sum() < 1e-4


@pytest.mark.parametrize("top_k", [65, 200, 512, 1000])
def test_top_k_beyond_the_head(top_k: int) -> None:
    logits = tied(1, 5000)
    values = logits[0].float()
    expected = (values >= values.topk(top_k).values[-1]).nonzero()[:, 0]  # equal ones stay, as in transformers
    kept = TargetRows(logits, Sampling(1.0, top_k=top_k)).dense(0).nonzero()[:, 0]
    assert kept.tolist() == expected.tolist()


@pytest.mark.parametrize("vocab", [1000, 5000, 5120])
def test_head_and_tail_together_are_the_distribution(vocab: int) -> None:
    """Chi-square over the head's tokens one by one and the tail in bins of ids."""
    logits = zipf(vocab, 4)
    ours = TargetRows(logits, Sampling(1.0))
    p = processed(logits[0].double().numpy(), Sampling(1.0))
    head = ours._head(0)
    assert 0.2 < head.mass < 0.9
    assert head.mass == pytest.approx(p[head.ids].sum(), abs=1e-6)
    n = 4000
    counts = np.bincount([ours.token(0, position, Draws(3)) for position in range(n)], minlength=vocab)
    inside = np.zeros(vocab, dtype=bool)
    inside[head.ids] = True
    bins = np.where(inside, 0, np.arange(vocab) * 20 // vocab)
    tail_counts = np.bincount(bins[~inside], weights=counts[~inside], minlength=20)
    tail_mass = np.bincount(bins[~inside], weights=p[~inside], minlength=20)
    observed = np.concatenate([counts[head.ids], tail_counts])
    assert chi_square(observed, np.concatenate([p[head.ids], tail_mass]) * n) > 1e-3
    assert abs(tail_counts.sum() / n - (1 - head.mass)) < 4 * np.sqrt(0.25 / n)


def test_the_tail_is_the_cumulative_mass_in_order_of_ids() -> None:
    logits = zipf(1500, 2)
    ours = TargetRows(logits, Sampling(1.0))
    p = processed(logits[0].double().numpy(), Sampling(1.0))
    head = ours._head(0)
    p[head.ids] = 0.0
    reach = np.cumsum(p) / p.sum()
    for u in (1e-9, 0.1, 0.37, 0.5, 0.9, 1 - 1e-6, 1 - 1e-16):
        token = ours.token(0, 0, Fixed(split=1 - 1e-12, tail=u))
        assert token not in head.ids
        assert token < 1500  # never in the padding of the last block
        assert abs(token - int((reach < u).sum())) <= 1
        assert p[token] > 0


def test_nothing_is_drawn_from_a_tail_without_mass() -> None:
    logits = torch.full((1, 2000), -torch.inf)
    logits[0, [1999, 40, 700]] = torch.tensor([3.0, 2.9, -20.0])
    ours = TargetRows(logits, Sampling(1.0))
    for u in (1e-12, 0.5, 1 - 1e-12):
        assert ours.token(0, 0, Fixed(split=1 - 1e-16, tail=u)) in {1999, 40, 700}


def test_the_head_holds_64_tokens_and_draws_by_the_noise_of_its_ids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = rows(1, 5000, 9, 6.0)
    ours = TargetRows(logits, Sampling(0.5))
    head = ours._head(0)
    assert len(head.ids) == HEAD == 64
    draws = Draws(4)
    for position in range(20):
        if draws.uniform(position, Draws.SPLIT) < head.mass:
            scores = logits[0].double().numpy() / 0.5
            noisy = scores[head.ids] + draws.gumbel(position, head.ids)
            assert ours.token(0, position, draws) == head.ids[noisy.argmax()]
    monkeypatch.setattr(heads_module, "HEAD", 8)
    assert len(TargetRows(logits, Sampling(0.5))._head(0).ids) == 8


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_numbered_from_the_last_committed_token_and_candidates_are_not() -> None:
    logits = rows(5, 700)
    for sampling in (Sampling(), Sampling(1.0, seed=1)):
        whole, later = TargetRows(logits, sampling, 4), TargetRows(logits, sampling, 4, origin=2)
        assert (len(whole), len(later)) == (5, 3)
        assert [later.token(row, 7, Draws(1)) for row in range(3)] == [
            whole.token(row + 2, 7, Draws(1)) for row in range(3)
        ]
        assert later.candidates is not None
        assert later.candidates.tolist() == logits.sort(-1, descending=True).indices[:, :4].tolist()
        assert later.probability(0, 5) == whole.probability(2, 5)
    assert TargetRows(logits, Sampling(1.0)).candidates is None


@pytest.mark.parametrize(
    ("sampling", "temperature"), [(Sampling(), 1.0), (Sampling(0.5, top_k=2), 0.5), (Sampling(2.0), 2.0)]
)
def test_probability_and_soft_are_the_softmax_before_filters(sampling: Sampling, temperature: float) -> None:
    logits = rows(2, 900)
    ours = TargetRows(logits, sampling)
    expected = (logits.double() / temperature).softmax(-1)
    assert torch.allclose(ours.soft(1), expected[1], atol=1e-9)
    assert [ours.probability(1, token) for token in range(5)] == pytest.approx(expected[1, :5].tolist(), rel=1e-4)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 0.9), Sampling(0.2, top_k=3)])
def test_dense_sums_to_one(sampling: Sampling) -> None:
    for logits in (rows(1, 40), rows(1, 3000), tied(1, 3000)):
        dense = TargetRows(logits, sampling).dense(0)
        assert dense.dtype == torch.float64
        assert float(dense.sum()) == pytest.approx(1.0, abs=1e-9)


def test_the_logits_are_not_changed() -> None:
    logits = rows(2, 600)
    before = logits.clone()
    ours = TargetRows(logits, Sampling(0.7, seed=1), 3)
    for row in range(2):
        ours.token(row, 0, Fixed(split=1 - 1e-12, tail=0.5))
        ours.dense(row), ours.soft(row), ours.probability(row, 3)
    assert torch.equal(logits, before)
