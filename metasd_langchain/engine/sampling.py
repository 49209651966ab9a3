"""The target's processed distribution of each scored row, and the draw of a token from it.

A row of logits becomes a distribution by temperature, then top_k, top_p and min_p (the order of transformers). The
token of an answer's position is an exact draw from it that depends on the position's keyed noise alone:

* one uniform decides between the ``HEAD`` most likely tokens and the tail;
* inside the head the token is ``argmax(log p + Gumbel noise keyed by token id)``, so a drafter that draws from its own
  distribution with the same noise lands on the same token nearly as often as rejection sampling would accept it;
* in the tail it is the token at which the cumulative mass reaches a second uniform.

When a filter leaves a finite set, the whole set is the head. Equal logits (common in bfloat16) are ordered by token
id, so neither batch width nor kernel decides a draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from metasd_langchain.engine.draws import Draws
from metasd_langchain.errors import TargetError
from metasd_langchain.values import Sampling

__all__ = ["HEAD", "TargetRows", "best"]

HEAD = 64
_BLOCK = 512  # columns a block: the best tokens of 262k columns are sought in the blocks with the highest maxima


def best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest logits of each row with their ids, highest first, equal ones by lower id.

    Args:
        logits: ``[rows, vocab]``, any float dtype.
        k: at most vocab.

    Returns:
        float32 values and int64 ids, ``[rows, k]``. Exact: a token among the best k lies in one of the k blocks whose
        maxima are highest (ordered by maximum, then by place), so only those blocks are searched.
    """
    rows, vocab = logits.shape
    k = min(k, vocab)
    x = logits.float()
    if vocab % _BLOCK:
        x = F.pad(x, (0, -vocab % _BLOCK), value=-torch.inf)
    blocks = x.view(rows, -1, _BLOCK)
    tops = blocks.amax(-1)
    if k == 1:
        block = tops.argmax(-1)  # argmax takes the first of equal maxima, as transformers does
        inside = blocks[torch.arange(rows, device=x.device), block].argmax(-1)
        return tops.gather(1, block[:, None]), (block * _BLOCK + inside)[:, None]
    if k < tops.shape[1]:
        chosen = _ordered(tops).topk(k, sorted=False).indices.sort(-1).values
    else:
        chosen = torch.arange(tops.shape[1], device=x.device).expand(rows, -1)
    values = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    place = _ordered(values).topk(k).indices
    ids = chosen.gather(1, place // _BLOCK) * _BLOCK + place % _BLOCK
    return values.gather(1, place), ids


def _ordered(values: Tensor) -> Tensor:
    """int64 keys that sort like (value, lower column first)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 the same
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    columns = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (bits.long() << 32) + columns


@dataclass(slots=True)
class _Head:
    """A row's most likely tokens after the filters, on the host, most likely first.

    Attributes:
        ids: token ids.
        logits: their scaled logits, float64.
        mass: probability of all of them together; 1 when a filter removed the rest.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]
    mass: float


class TargetRows:
    """Processed distributions of the rows of one generation's round.

    Args:
        logits: ``[rows, vocab]``.
        sampling: temperature and filters.
        candidates: how many of the best next tokens each row must report in `candidates`.
        origin: row of `logits` that follows the last committed token; rows are numbered from it. Rows before it (of the
            prompt) only report candidates.
    """

    def __init__(self, logits: Tensor, sampling: Sampling, candidates: int = 0, origin: int = 0) -> None:
        self._logits = logits[origin:]
        self._origin = origin
        self._sampling = sampling
        self._heads: dict[int, _Head] = {}
        self._temperature = 1.0 if sampling.greedy else sampling.temperature
        self.candidates: NDArray[np.int64] | None = None
        if sampling.greedy or candidates:
            with torch.inference_mode():
                values, ids = best(logits, max(1, candidates))
                if bool(values[:, 0].isnan().any()):
                    raise TargetError("the model's logits hold nan")
                self.candidates = ids.cpu().numpy()

    def __len__(self) -> int:
        return self._logits.shape[0]

    def token(self, row: int, position: int, draws: Draws) -> int:
        """The target's token after a row, at a position of the answer."""
        if self._sampling.greedy and self.candidates is not None:
            return int(self.candidates[self._origin + row, 0])
        head = self._head(row)
        if head.mass < 1.0 and draws.uniform(position, Draws.SPLIT) >= head.mass:
            return self._tail(row, head, draws.uniform(position, Draws.TAIL))
        return int(head.ids[int(np.argmax(head.logits + draws.gumbel(position, head.ids)))])

    def probability(self, row: int, token: int) -> float:
        """p(token) of a row under the temperature alone (1 when greedy): ``1 - TV`` against a point mass."""
        with torch.inference_mode():
            scaled = self._logits[row].float() / self._temperature
            return float((scaled[token] - scaled.logsumexp(-1)).exp())

    def dense(self, row: int) -> Tensor:
        """The whole processed distribution of a row: float64 ``[vocab]``, sums to 1. Slow at a large vocabulary."""
        with torch.inference_mode():
            if self._sampling.greedy:
                result = torch.zeros(self._logits.shape[1], dtype=torch.float64)
                result[int(best(self._logits[row : row + 1], 1)[1])] = 1.0
                return result
            head = self._head(row)
            if head.mass < 1.0:
                return (self._logits[row].double() / self._temperature).softmax(-1).cpu()
            result = torch.zeros(self._logits.shape[1], dtype=torch.float64)
            weights = np.exp(head.logits - head.logits.max())
            result[torch.from_numpy(head.ids)] = torch.from_numpy(weights / weights.sum())
            return result

    def soft(self, row: int) -> Tensor:
        """Softmax of a row at the temperature (1 when greedy), before filters: what drafters are compared with."""
        with torch.inference_mode():
            return (self._logits[row].double() / self._temperature).softmax(-1).cpu()

    def prepare(self, rows: list[int]) -> None:
        """Compute several rows at once; the draw then works on the host."""
        missing = [row for row in rows if row not in self._heads]
        if self._sampling.greedy or not missing:
            return
        with torch.inference_mode():
            for row, head in zip(missing, self._compute(self._logits[missing], HEAD), strict=True):
                self._heads[row] = head

    def _head(self, row: int) -> _Head:
        self.prepare([row])
        return self._heads[row]

    def _compute(self, logits: Tensor, k: int) -> list[_Head]:
        k = min(max(k, self._sampling.top_k or 0), logits.shape[1])
        values, ids = best(logits, k)
        total = torch.logsumexp(_blocked(logits.float() / self._temperature), -1).double()
        host = torch.cat([values.double() / self._temperature, total[:, None]], 1).cpu().numpy()
        if np.isnan(host).any():
            raise TargetError("the model's logits hold nan")
        names = ids.cpu().numpy()
        heads = [_filter(names[i], host[i, :-1], float(host[i, -1]), self._sampling) for i in range(len(names))]
        for i, head in enumerate(heads):
            if head is None:  # the filter's set is larger than k: look further
                wider = logits.shape[1] if k >= 8 * HEAD else 8 * k
                heads[i] = self._compute(logits[i : i + 1], wider)[0]
        return [head for head in heads if head is not None]

    def _tail(self, row: int, head: _Head, u: float) -> int:
        """The token outside the head at which the cumulative mass, in order of ids, reaches u."""
        with torch.inference_mode():
            mass = (self._logits[row].float() / self._temperature).softmax(-1)
            mass[torch.from_numpy(head.ids).to(mass.device)] = 0.0
            if mass.shape[0] % _BLOCK:
                mass = F.pad(mass, (0, -mass.shape[0] % _BLOCK))
            blocks = mass.view(-1, _BLOCK)
            reached = blocks.sum(-1, dtype=torch.float64).cumsum(0)
            goal = u * float(reached[-1])
            block = min(int((reached < goal).sum()), blocks.shape[0] - 1)
            inside = blocks[block].double().cumsum(0) + (float(reached[block - 1]) if block else 0.0)
            place = int((inside < goal).sum())
            if place >= _BLOCK:  # rounding at a block's end: its last token with mass
                place = int(blocks[block].nonzero()[-1])
            return block * _BLOCK + place


def _blocked(scaled: Tensor) -> Tensor:
    """Log-sum-exp in two stages: blocks of columns first, the blocks' sums afterwards. One pass at memory speed."""
    rows, vocab = scaled.shape
    if vocab % _BLOCK:
        scaled = F.pad(scaled, (0, -vocab % _BLOCK), value=-torch.inf)
    peak = scaled.amax(-1, keepdim=True)
    return (scaled - peak).exp_().view(rows, -1, _BLOCK).sum(-1).log() + peak


def _filter(ids: NDArray[np.int64], logits: NDArray[np.float64], total: float, sampling: Sampling) -> _Head | None:
    """Apply top_k, top_p and min_p to a row's best tokens; None when the set may go beyond them."""
    vocabulary_cut = False
    if sampling.top_k and sampling.top_k <= len(ids):
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
        vocabulary_cut = True
        total = float(np.log(np.exp(logits - logits[0]).sum()) + logits[0])
    mass = np.exp(logits - total)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
        kept = int((before < sampling.top_p).sum())
        if kept == len(ids) and not vocabulary_cut and mass.sum() < sampling.top_p:
            return None
        ids, logits, vocabulary_cut = ids[:kept], logits[:kept], True
    if sampling.min_p:
        kept = int((logits >= logits[0] + np.log(sampling.min_p)).sum())
        if kept == len(ids) and not vocabulary_cut:
            return None
        ids, logits, vocabulary_cut = ids[:kept], logits[:kept], True
    return _Head(ids, logits, 1.0 if vocabulary_cut else min(1.0, float(np.exp(logits - total).sum())))
