"""Verifiers by hand: which nodes are committed, for chains and trees, and what a round may never do."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.engine.verify import VERIFIERS, agreement, verify_invariant, verify_rejection
from metasd_langchain.values import EMPTY_DRAFT, Draft, Sampling, Verdict

VOCAB = 12


def says(*tokens: int) -> TargetRows:
    """Greedy rows: row i says tokens[i]."""
    logits = torch.zeros(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return TargetRows(logits, Sampling())


class Fixed(Draws):
    """The same uniform everywhere."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self, position: int, stream: int, trial: int = 0) -> float:
        return self.value


@pytest.fixture(params=["invariant", "rejection"])
def verify(request):
    return VERIFIERS[request.param]


@pytest.mark.parametrize(
    ("draft", "target", "verdict"),
    [
        (EMPTY_DRAFT, [4], Verdict((), (4,))),
        (Draft.chain([4]), [4, 7], Verdict((0,), (4, 7))),
        (Draft.chain([4]), [5, 7], Verdict((), (5,))),
        (Draft.chain([4, 7, 1]), [4, 7, 1, 2], Verdict((0, 1, 2), (4, 7, 1, 2))),
        (Draft.chain([4, 7, 1]), [4, 6, 1, 2], Verdict((0,), (4, 6))),
        (Draft.chain([4, 7, 1]), [3, 7, 1, 2], Verdict((), (3,))),
        # two children of the trunk, the second goes on: row 1 + i follows node i
        (Draft((4, 5, 6), (-1, -1, 1)), [5, 9, 6, 8], Verdict((1, 2), (5, 6, 8))),
        (Draft((4, 5, 6, 7), (-1, -1, 0, 1)), [4, 6, 7, 3, 1], Verdict((0, 2), (4, 6, 3))),
        (Draft((4, 5, 6, 7), (-1, -1, 0, 1)), [5, 6, 2, 3, 1], Verdict((1,), (5, 2))),
        (Draft((4, 4, 6), (-1, -1, 1)), [4, 6, 6, 1], Verdict((0,), (4, 6))),  # a twin: the first one is taken
        (Draft((4, 5), (-1, -1)), [6, 4, 5], Verdict((), (6,))),
        (Draft((4, 5, 6), (-1, 0, 0)), [4, 6, 1, 2], Verdict((0, 2), (4, 6, 2))),
    ],
)
def test_greedy_verdicts_by_hand(verify, draft: Draft, target: list[int], verdict: Verdict) -> None:
    assert verify(draft, says(*target), Draws(0), 3) == verdict


def trees(rng: random.Random, size: int) -> Draft:
    parents = [rng.randrange(-1, node) for node in range(size)]
    return Draft(tuple(rng.randrange(VOCAB) for _ in range(size)), tuple(parents))


@given(st.integers(0, 2**32), st.integers(0, 10), st.sampled_from([0.0, 0.8, 2.0]), st.booleans(), st.booleans())
@settings(max_examples=150)
def test_a_verdict_is_a_path_of_the_draft_and_one_token_more(
    seed: int, size: int, temperature: float, rejection: bool, chain: bool
) -> None:
    rng = random.Random(seed)
    draft = trees(rng, size)
    if chain:
        draft = Draft.chain(draft.tokens)
    logits = torch.randn(size + 1, VOCAB, generator=torch.Generator().manual_seed(seed % 2**31))
    run = verify_rejection if rejection else verify_invariant
    verdict = run(draft, TargetRows(logits, Sampling(temperature)), Draws(seed), 5)
    assert len(verdict.tokens) == len(verdict.path) + 1
    above = -1
    for node, token in zip(verdict.path, verdict.tokens, strict=False):
        assert draft.parents[node] == above
        assert draft.tokens[node] == token
        above = node
    assert all(0 <= token < VOCAB for token in verdict.tokens)
    if not rejection:
        leaf = verdict.path[-1] if verdict.path else -1
        rejected = [draft.tokens[n] for n, parent in enumerate(draft.parents) if parent == leaf]
        assert verdict.tokens[-1] not in rejected  # else it would have been accepted


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_invariant_tokens_do_not_depend_on_the_draft(seed: int) -> None:
    """Rows as of a target whose logits depend on the path alone: any draft gives a beginning of the same answer."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed % 2**31))
    sampling, draws, rng = Sampling(1.0), Draws(seed), random.Random(seed)

    def rows(draft: Draft) -> TargetRows:
        return TargetRows(table[[0, *draft.tokens]], sampling)

    answer: list[int] = []
    while len(answer) < 8:
        answer.append(TargetRows(table[[answer[-1] if answer else 0]], sampling).token(0, len(answer), draws))
    right = Draft.chain(answer[:7])
    assert verify_invariant(right, rows(right), draws, 0).tokens == tuple(answer)
    for size in (0, 1, 3, 9):
        draft = trees(rng, size)
        tokens = verify_invariant(draft, rows(draft), draws, 0).tokens
        assert tokens == tuple(answer[: len(tokens)])


@pytest.mark.parametrize("u", [1e-12, 0.5, 1 - 1e-12])
def test_rejection_with_q_equal_to_p_accepts_all_and_survives_rounding(u: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)
    verdict = verify_rejection(Draft.chain([3, 4], p[:2]), TargetRows(logits, Sampling(1.0)), Fixed(u), 0)
    assert verdict.tokens[-1] in range(VOCAB)
    if u < 0.9:
        assert verdict.path == (0, 1)


def test_a_residual_of_nothing_falls_back_on_the_target() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 3] = 0.0
    q = torch.zeros(1, VOCAB)
    q[0, 3] = 1.0 + 1e-6  # as rounding makes it
    verdict = verify_rejection(Draft((3,), (-1,), q), TargetRows(logits, Sampling(1.0)), Fixed(1 - 1e-9), 0)
    assert verdict == Verdict((), (3,))


@pytest.mark.parametrize("u", [1e-300, 0.25, 0.999999, 1 - 1e-16])
def test_the_correction_is_never_a_token_that_was_rejected_or_that_the_target_excludes(u: float) -> None:
    logits = torch.zeros(3, VOCAB)
    rows = TargetRows(logits, Sampling(1.0, top_k=None))
    logits[0, 6:] = -torch.inf
    draft = Draft((7, 9), (-1, -1))  # p = 0: always rejected
    verdict = verify_rejection(draft, rows, Fixed(u), 0)
    assert verdict.path == ()
    assert verdict.tokens[0] < 6


def test_a_rejected_point_mass_is_not_drawn_again() -> None:
    logits = torch.zeros(2, 3)
    logits[0, 2] = -torch.inf
    for seed in range(60):
        verdict = verify_rejection(Draft.chain([1]), TargetRows(logits, Sampling(1.0)), Draws(seed), 0)
        assert verdict.tokens[0] == (1 if verdict.path else 0)


def test_agreement_of_a_point_mass_is_its_probability_past_a_rejection_too() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    draft = Draft((4, 5, 6), (-1, 0, 0))
    for temperature, sampling in ((1.0, Sampling()), (0.5, Sampling(0.5, top_k=2))):
        p = (logits.double() / temperature).softmax(-1)
        expected = [float(p[0, 4]), float(p[1, 5]), float(p[1, 6])]
        assert agreement(draft, TargetRows(logits, sampling)) == pytest.approx(expected, rel=1e-5)


def test_agreement_with_a_model_is_one_less_the_total_variation() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    q = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(3)).softmax(-1)
    expected = [float(torch.minimum(logits[row].softmax(-1), q[row]).sum()) for row in range(2)]
    assert agreement(Draft.chain([1, 2], q), TargetRows(logits, Sampling(1.0))) == pytest.approx(expected, rel=1e-5)
    assert agreement(EMPTY_DRAFT, TargetRows(logits, Sampling(1.0))) == ()
