"""The likely part of a row of logits, found without sorting a quarter of a million columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from metasd_langchain.errors import TargetError
from metasd_langchain.values import Sampling

__all__ = ["HEAD", "Head", "best", "blocks_of", "find_heads", "scaled"]

HEAD = 64
_ROWS = 4  # rows worked on at once: their float32 copy stays in the cache, and memory is not fetched anew each round
_BLOCK = 128  # columns a block: high columns are sought only in the blocks with the highest maxima


@dataclass(frozen=True, slots=True)
class Head:
    """A row's most likely tokens after the filters, on the host, most likely first, equal ones by lower id.

    Attributes:
        ids: token ids.
        logits: scaled logits relative to the row's highest, float64.
        mass: probability of all of them together; 1 when a filter removed the rest.
    """

    ids: NDArray[np.int64]
    logits: NDArray[np.float64]
    mass: float


def blocks_of(x: Tensor, fill: float = -torch.inf) -> Tensor:
    """``[rows, vocab] -> [rows, blocks, _BLOCK]``, the last block padded."""
    if x.shape[1] % _BLOCK:
        x = F.pad(x, (0, -x.shape[1] % _BLOCK), value=fill)
    return x.view(x.shape[0], -1, _BLOCK)


def best(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest logits of each row with their ids, highest first, equal ones by lower id; nan comes first.

    Args:
        logits: ``[rows, vocab]``, any float dtype.
        k: a small number.

    Returns:
        float32 values and int64 ids, ``[rows, min(k, vocab)]``. Exact: a token among the best k lies in one of the k
        blocks whose maxima are highest (ordered by maximum, then by place), so only those blocks are searched.
    """
    if len(logits) > _ROWS:
        parts = [best(part, k) for part in logits.split(_ROWS)]
        return torch.cat([values for values, _ in parts]), torch.cat([ids for _, ids in parts])
    k = min(k, logits.shape[1])
    blocks = blocks_of(logits.float())
    tops = blocks.amax(-1)
    if k == 1:
        block = tops.argmax(-1)  # argmax takes the first of equal maxima, as transformers does
        inside = blocks[torch.arange(len(block), device=block.device), block].argmax(-1)
        return tops.gather(1, block[:, None]), (block * _BLOCK + inside)[:, None]
    if k < tops.shape[1]:
        chosen = _ordered(tops).topk(k, sorted=False).indices.sort(-1).values
    else:
        chosen = torch.arange(tops.shape[1], device=tops.device).expand(len(tops), -1)
    values = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    place = _ordered(values).topk(k).indices
    ids = chosen.gather(1, place // _BLOCK) * _BLOCK + place % _BLOCK
    return values.gather(1, place), ids


def _ordered(values: Tensor) -> Tensor:
    """int64 keys that sort like (value, lower column first)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 and 0.0 the same
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = bits.masked_fill(values.isnan(), 0x7FFFFFFF)  # of either sign: first, so that it is seen
    columns = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    return (bits.long() << 32) + columns


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits less each row's highest, over the temperature: exact where it matters however low that is."""
    x = logits.float()
    return (x - x.amax(-1, keepdim=True)).div_(temperature)


def find_heads(logits: Tensor, sampling: Sampling, temperature: float) -> list[Head]:
    """Heads of several rows.

    A head is every token at least as likely as some bound: the k-th highest logit (ties stay, as in transformers'
    top_k), min_p, or what top_p can reach. Sets defined by a bound need no order among equal logits, of which bfloat16
    has many.

    Args:
        logits: ``[rows, vocab]``.
        sampling: filters.
        temperature: above 0.
    """
    z = scaled(logits, temperature)
    blocks = blocks_of(z)
    tops = blocks.amax(-1)
    totals = blocks.exp().sum(-1).sum(-1).log()
    if bool(totals.isnan().any()):
        raise TargetError("the model's logits hold nan")
    if sampling.min_p and not sampling.top_k:
        bound = torch.full_like(totals, math.log(sampling.min_p))
    else:
        bound = _kth(blocks, tops, min(sampling.top_k or HEAD, logits.shape[1]))
    total = totals.cpu().double().numpy()
    found = _at_least(blocks, tops, bound)
    heads = [_filtered(*pair, float(rest), sampling) for pair, rest in zip(found, total, strict=True)]
    for row in [row for row, head in enumerate(heads) if head is None]:  # top_p reaches further than the head
        # Tokens less likely than this have less than 1 - top_p together, so top_p cannot reach them.
        reach = totals[row : row + 1] + math.log((1.0 - (sampling.top_p or 0.0)) / logits.shape[1])
        wider = _at_least(blocks[row : row + 1], tops[row : row + 1], reach)[0]
        heads[row] = _filtered(*wider, float(total[row]), sampling, last=True)
    return [head for head in heads if head is not None]


def _kth(blocks: Tensor, tops: Tensor, k: int) -> Tensor:
    """The k-th highest value of each row, ``[rows]``: it lies in one of the k blocks with the highest maxima."""
    if k < tops.shape[1]:
        chosen = tops.topk(k, sorted=False).indices
        blocks = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK))
    return blocks.flatten(1).topk(k).values[:, -1]


def _at_least(blocks: Tensor, tops: Tensor, bound: Tensor) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Per row the ids and values of all columns that reach the row's bound, highest first, equal ones by id."""
    bound = bound.clamp_min(torch.finfo(bound.dtype).min)  # neither tokens without mass nor the padding
    row, block = (tops >= bound[:, None]).nonzero(as_tuple=True)
    values = blocks[row, block]
    pair, column = (values >= bound[row][:, None]).nonzero(as_tuple=True)
    owner = row[pair].cpu().numpy()
    ids = (block[pair] * _BLOCK + column).cpu().numpy()
    high = values[pair, column].cpu().numpy().astype(np.float64)
    ends = np.searchsorted(owner, np.arange(len(bound) + 1))
    result = []
    for start, end in pairwise(ends.tolist()):
        order = np.lexsort((ids[start:end], -high[start:end]))
        result.append((ids[start:end][order], high[start:end][order]))
    return result


def _filtered(
    ids: NDArray[np.int64], logits: NDArray[np.float64], total: float, sampling: Sampling, last: bool = False
) -> Head | None:
    """Apply the filters to a row's likely tokens; None when top_p may reach beyond them."""
    final = last
    if sampling.top_k:
        total, final = float(np.log(np.exp(logits).sum())), True
    mass = np.exp(logits - total)
    if sampling.top_p is not None and sampling.top_p < 1.0:
        before = np.cumsum(mass) - mass
        kept = int((before < sampling.top_p).sum())
        if kept == len(ids) and not final and not sampling.min_p and float(mass.sum()) < sampling.top_p:
            return None
        ids, logits, final = ids[:kept], logits[:kept], True
    if sampling.min_p:
        kept = int((logits >= math.log(sampling.min_p)).sum())
        ids, logits, final = ids[:kept], logits[:kept], True
    return Head(ids, logits, 1.0 if final else min(1.0, float(mass[: len(ids)].sum())))
