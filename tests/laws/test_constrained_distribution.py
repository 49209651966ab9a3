"""Under a grammar a token is drawn from the target's own distribution among the legal ones, whatever is drafted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.constraints import legal as legal_module
from metasd_langchain.constraints.legal import Legal
from metasd_langchain.engine import heads as heads_module
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.guide import Guide, RowMasks
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.engine.verify import VERIFIERS
from metasd_langchain.values import Draft, Sampling, VerifyMode
from tests.laws.exact import chi_square, processed

VOCAB = 512
SMALL, LENGTH, N = 6, 3, 2500
_rng = np.random.default_rng(5)
TABLE = _rng.normal(0.0, 1.3, (SMALL + 1, SMALL)).astype(np.float32)  # row: the last token, or START
START = SMALL
ALLOWED = {START: (0, 2, 3, 5), 0: (1, 2, 3), 1: (4,), 2: (0, 1, 2, 3, 4, 5), 3: (0, 5), 4: (2, 3, 4), 5: (0, 1, 4)}


class Neighbours:
    """A constraint session by hand: which token may follow which."""

    def legal(self, answer: Sequence[int]) -> Legal:
        return Legal.of(ALLOWED[answer[-1] if answer else START], SMALL)

    def allows(self, answer: Sequence[int], token: int) -> bool:
        return True

    def tight(self, answer: Sequence[int]) -> bool:
        return False

    def closing(self, answer: Sequence[int]) -> tuple[int, ...]:
        return ()

    def ended(self, answer: Sequence[int]) -> bool:
        return False

    def forced(self, answer: Sequence[int], limit: int) -> tuple[int, ...]:
        return ()

    def pruned(self, answer: Sequence[int], draft: Draft) -> Draft:
        kept: dict[int, int] = {-1: answer[-1] if answer else START}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            if parent in kept and token in ALLOWED[kept[parent]]:
                kept[node] = token
        return draft.only([node for node in kept if node >= 0])


def exact(sampling: Sampling) -> Any:
    p = np.zeros((SMALL + 1, SMALL))
    for last, allowed in ALLOWED.items():
        p[last, list(allowed)] = processed(TABLE[last][list(allowed)], sampling)
    return p[START][:, None, None] * p[:SMALL][:, :, None] * p[:SMALL][None, :, :]


def joint(sampling: Sampling, mode: VerifyMode, shape: str, n: int = N) -> Any:
    """Counts of three tokens, drafted by somebody who knows neither the table nor what is legal."""
    guide = Guide(Neighbours(), SMALL, forces=True)
    counts = np.zeros((SMALL,) * LENGTH, dtype=np.int64)
    rng = random.Random(2)
    for seed in range(n):
        answer: list[int] = []
        while len(answer) < LENGTH:
            room = LENGTH - len(answer) - 1
            parents = {"chain": (-1, 0), "tree": (-1, -1, 0, 1, 1)}[shape][: (room and 2) if shape == "chain" else None]
            draft = Draft(tuple(rng.randrange(SMALL) for _ in parents), parents).cut(8, room)
            draft = guide.hung(answer, (), draft)
            last = answer[-1] if answer else START
            contexts = [last, *draft.tokens]
            rows = TargetRows(torch.from_numpy(TABLE[contexts]), sampling, masks=guide.masks(answer, draft))
            answer += VERIFIERS[mode](draft, rows, Draws(seed), len(answer)).tokens
        counts[tuple(answer[:LENGTH])] += 1
    return counts


@pytest.mark.parametrize("sampling", [Sampling(0.8), Sampling(1.3, top_k=4, top_p=0.9, min_p=0.1)])
@pytest.mark.parametrize(("mode", "shape"), [("invariant", "chain"), ("invariant", "tree"), ("rejection", "tree")])
def test_the_joint_is_the_targets_among_legal_tokens(mode: VerifyMode, shape: str, sampling: Sampling) -> None:
    assert chi_square(joint(sampling, mode, shape), exact(sampling) * N) > 1e-3


def test_the_joint_is_the_targets_when_the_tail_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads of two tokens, and no row that counts as few, much goes through the tail."""
    monkeypatch.setattr(heads_module, "HEAD", 2)
    monkeypatch.setattr(legal_module, "FEW", 1)
    assert chi_square(joint(Sampling(1.0), "invariant", "chain"), exact(Sampling(1.0)) * N) > 1e-3


def test_found_masking_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: legal tokens taken as if they were equally likely."""
    monkeypatch.setattr(TargetRows, "_picked", lambda self, row, few: torch.zeros(1, len(few)))
    assert chi_square(joint(Sampling(0.8), "invariant", "chain"), exact(Sampling(0.8)) * N) < 1e-6


def test_few_legal_tokens_and_many_are_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, VOCAB) * 4
    session: Any = type("Fixed", (Neighbours,), {"legal": lambda self, answer: Legal.of(range(7, 60, 3), VOCAB)})()
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=30)):
        few = [
            TargetRows(logits, sampling, masks=RowMasks(session, VOCAB, [], Draft())).token(0, i, Draws(i))
            for i in range(200)
        ]
        with monkeypatch.context() as patch:
            patch.setattr(legal_module, "FEW", 1)
            many = [
                TargetRows(logits, sampling, masks=RowMasks(session, VOCAB, [], Draft())).token(0, i, Draws(i))
                for i in range(200)
            ]
        assert few == many
        assert set(few) <= set(range(7, 60, 3))
