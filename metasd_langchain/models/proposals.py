"""Drawing a draft's next token from a drafter's logits with the noise that the verifier will use.

A drafted token is accepted iff it is the token the target draws at its position, by ``argmax(log p + noise)`` with
noise keyed by position and token id. A drafter that adds the same noise to its own ``log q`` lands on the same token
nearly as often as rejection sampling would accept one (Gumbel coupling). Greedy: both take the most likely token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metasd_langchain.values import Sampling

__all__ = ["Noise", "Proposal", "Proposer"]

_FRESH = 32  # bits of a position; above them counts the draft
_LIKELY = 64  # columns looked at when sampling: what lies below is drawn too rarely to be worth a guess


class Noise(Protocol):
    """The part of a request's draws that is needed; see ``drafters.Draws``."""

    def gumbel(self, position: int, tokens: Any) -> NDArray[np.float64]:
        """Gumbel noise of the given target ids at a position of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafted token.

    Attributes:
        token: target id.
        confidence: chance that the target takes it, by the drafter's account. From `draw`: the probability of its most
            likely token at the request's temperature (1 when greedy), whatever was drawn.
        q: ``[target_size]`` float32 distribution the token was drawn from; None unless asked for.
    """

    token: int
    confidence: float
    q: Tensor | None = None


class Proposer:
    """Draws tokens for one request.

    Args:
        sampling: the request's temperature and filters, applied to the drafter's distribution too.
        ids: ``[columns]`` target id of each column, or None when a column is a target id.
        size: columns of the target's logits.
        exact: give `q`, and draw from the whole distribution: needed for rejection sampling.
        spread: what scores are divided by to give chances, greedy and sampled; changes no token.
    """

    def __init__(
        self,
        sampling: Sampling,
        ids: NDArray[np.int64] | None,
        size: int,
        *,
        exact: bool = False,
        spread: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._spread = spread[0] if sampling.greedy else spread[1]
        self._sampling, self._ids, self._size = sampling, ids, size
        self._exact = exact and not sampling.greedy  # a greedy draft is a point mass
        self._temperature = 1.0 if sampling.greedy else max(sampling.temperature, 1e-30)
        self._columns: NDArray[np.int64] | None = None  # of target ids, -1 for those that are in no column

    def probabilities(self, logits: Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """The drafter's probability of a token after each of several nodes, and how many columns it likes better.

        At the request's temperature (1 when greedy), before filters: what the target's own ``1 - TV`` is taken of. A
        token that the drafter has no column for has probability 0.

        Args:
            logits: ``[nodes, columns]``.
            tokens: target ids, one a node.
        """
        places = self._places(tokens, logits.shape[-1])
        with torch.inference_mode():
            scores = logits.float()
            scores = (scores - scores.amax(-1, keepdim=True)).div_(self._temperature)
            own = scores.gather(1, torch.from_numpy(np.maximum(places, 0)).to(scores.device)[:, None])
            chances = (own[:, 0] - scores.logsumexp(-1)).exp()
            before = (scores > own).sum(-1)
            both = torch.stack([chances.double(), before.double()]).cpu().numpy()
        there = places >= 0
        ranks = np.where(there, both[1], logits.shape[-1]).astype(np.int64)
        return np.where(there, both[0], 0.0).tolist(), ranks.tolist()

    def _places(self, tokens: Sequence[int], columns: int) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        if self._ids is None:
            return np.where(ids < columns, ids, -1)
        if self._columns is None:
            self._columns = np.full(self._size, -1, dtype=np.int64)
            self._columns[self._ids] = np.arange(len(self._ids))
        return self._columns[ids]

    def guess(self, logits: Tensor, noise: Noise, position: int, drafts: int) -> Proposal:
        """The token of a chain: what the target most likely takes, or with `exact` a draw from the distribution.

        Args:
            logits: ``[columns]``.
            noise: the request's draws.
            position: of the token in the answer.
            drafts: drafts made before in this answer. A draw is from fresh noise each time: what a rejected draft
                showed of it may have moved the choice of the arm.
        """
        if self._exact:
            return self.draw(logits, noise, position + (drafts << _FRESH))
        ids, chances = self.likely(logits[None], noise, position, 1)
        return Proposal(ids[0][0], chances[0][0])

    def draw(self, logits: Tensor, noise: Noise, position: int) -> Proposal:
        """The drafter's token for a position of the answer.

        Args:
            logits: ``[columns]`` of the drafter; nothing beyond the columns that stand for target ids.
            noise: the request's draws.
            position: 0 is the answer's first token.
        """
        with torch.inference_mode():
            scores = logits.float()
            scores = (scores - scores.max()).div_(self._temperature)  # shifted first: exact at any temperature
            total = float(scores.logsumexp(-1))
            if self._sampling.greedy:
                column = int(scores.argmax())
                return Proposal(self._id(column), float(np.exp(-total)))
            likely = len(scores) if self._exact else min(_LIKELY, len(scores))
            values, columns = scores.topk(likely)
        kept = self._kept(values.cpu().numpy().astype(np.float64), total)
        places = columns.cpu().numpy()[: len(kept)]
        ids = places if self._ids is None else self._ids[places]
        best = int(np.argmax(np.add(kept, noise.gumbel(position, ids))))
        q = self._dense(kept, ids) if self._exact else None
        return Proposal(int(ids[best]), float(np.exp(-total)), q)

    def likely(
        self, logits: Tensor, noise: Noise, position: int, width: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens that the target most likely takes after each of several nodes of one depth.

        Args:
            logits: ``[nodes, columns]``.
            noise: the request's draws.
            position: of the tokens in the answer.
            width: how many of each node.

        Returns:
            For each node target ids, best first, and the chance of each that the target takes it. Greedy, that is the
            drafter's own probability. When sampling, the noise is known, and how far the target's probabilities are
            from the drafter's is not. Taken as Gumbel noise once more, the chance is the softmax of ``log q + noise``.
            Both are of scores divided by `spread`.
        """
        with torch.inference_mode():
            scores = logits.float()
            scores = (scores - scores.amax(-1, keepdim=True)).div_(self._temperature)
            spread = self._spread if self._sampling.greedy else 1.0
            totals = (scores / spread).logsumexp(-1).cpu().numpy().astype(np.float64)
            high = scores.topk(min(width if self._sampling.greedy else _LIKELY, scores.shape[-1]))
        values, columns = high.values.cpu().numpy().astype(np.float64), high.indices.cpu().numpy()
        ids = columns if self._ids is None else self._ids[columns]
        if self._sampling.greedy:
            return ids.tolist(), np.exp(values / spread - totals[:, None]).tolist()
        noisy = values + np.reshape(noise.gumbel(position, ids.ravel()), ids.shape)
        for row, total in enumerate(totals.tolist()):
            noisy[row, len(self._kept(values[row], total)) :] = -np.inf
        order = np.argsort(-noisy, axis=1, kind="stable")[:, :width]
        shares = np.exp((noisy - noisy.max(1, keepdims=True)) / self._spread)
        shares /= shares.sum(1, keepdims=True)
        return np.take_along_axis(ids, order, 1).tolist(), np.take_along_axis(shares, order, 1).tolist()

    def _id(self, column: int) -> int:
        return column if self._ids is None else int(self._ids[column])

    def _kept(self, scores: NDArray[np.float64], total: float) -> NDArray[np.float64]:
        """What the filters leave of scores in descending order; top_k, top_p, min_p, each on what the last one left."""
        sampling = self._sampling
        if sampling.top_k:
            scores = scores[: sampling.top_k]
            total = float(np.log(np.exp(scores).sum()))
        if sampling.top_p is not None and sampling.top_p < 1.0:
            mass = np.exp(scores - total)
            scores = scores[: max(1, int((np.cumsum(mass) - mass < sampling.top_p).sum()))]
        if sampling.min_p:
            scores = scores[: max(1, int((scores >= np.log(sampling.min_p)).sum()))]
        return scores

    def _dense(self, scores: NDArray[np.float64], ids: NDArray[np.int64]) -> Tensor:
        mass = np.exp(scores - scores.max())
        q = torch.zeros(self._size)
        q[torch.from_numpy(ids)] = torch.from_numpy(mass / mass.sum()).float()
        return q
