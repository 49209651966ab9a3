"""How far a drafter's own chances are to be trusted: one number that its scores are divided by before the softmax.

A tree keeps the nodes that are likeliest to be taken, and the bandit hears how many a head expects to be taken, so
these chances should be the shares of drafts that really are. Fitted are the scores' "temperature" (Guo et al. 2017, "On
calibration of modern neural networks"), greedy and sampled apart, since a sampled node's chance is about shared noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["CHILDREN", "KEPT", "Spread", "shared_noise"]

KEPT = 64  # columns that a draft is drawn from, as in ``models.proposals``
CHILDREN = 4  # of a node, whose chances count
_SPREADS = torch.logspace(-1, 2, 31, base=2.0)  # 0.5 to 4


class Spread:
    """Finds the divisor that brings chances of the best `CHILDREN` closest to what was taken (least Brier score)."""

    def __init__(self) -> None:
        self._loss = torch.zeros(len(_SPREADS), dtype=torch.float64)

    def add(self, scores: Tensor, taken: Tensor) -> None:
        """Count drafts.

        Args:
            scores: ``[positions, columns]``, logits; a column's chance is their softmax.
            taken: int64 ``[positions]``, the column the target took, -1 = none of them.
        """
        if not len(taken):
            return
        best = scores.topk(min(CHILDREN, scores.shape[1]))
        hit = (best.indices == taken[:, None]).float()
        for at, spread in enumerate(_SPREADS.tolist()):
            shares = (best.values / spread - (scores / spread).logsumexp(-1, keepdim=True)).exp()
            self._loss[at] += (shares - hit).square().sum().double()

    @property
    def value(self) -> float:
        """From 0.5 to 4; 1 where there is nothing to learn from."""
        return float(_SPREADS[int(self._loss.argmin())]) if bool(self._loss.any()) else 1.0


def shared_noise(teacher: Tensor, own: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scores of a drafter and the target's choices under one noise, as in sampling.

    Args:
        teacher: ``[positions, columns]`` log probabilities of the target; what they lack to 1 lies elsewhere.
        own: ``[positions, columns]`` log probabilities of the drafter.
        generator: of the noise.

    Returns:
        ``log q + noise`` of the drafter's `KEPT` likeliest columns, and which of those the target took, -1 = none.
    """
    noise = -torch.empty_like(own).exponential_(generator=generator).log()
    beyond = (1.0 - teacher.exp().sum(-1)).clamp_min(1e-9).log()
    other = beyond - torch.empty_like(beyond).exponential_(generator=generator).log()  # the best of all other columns
    best = (teacher + noise).max(-1)
    chosen = torch.where(best.values > other, best.indices, -1)
    kept = own.topk(min(KEPT, own.shape[1])).indices
    found = kept == chosen[:, None]
    column = torch.where(found.any(-1), found.int().argmax(-1), -1)
    return (own + noise).gather(1, kept), column
