"""Rows of teacher data in padded batches, in an order that depends on seed and pass alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metasd_langchain.training.shards import Row

__all__ = ["Batch", "batches", "padded"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Several rows, padded on the right.

    Attributes:
        tokens: ``[rows, n]`` int64.
        hidden: ``[rows, n, layers * width]``, states after each token.
        answer: ``[rows, n]`` bool: a token was drawn after this position, or would have been.
        real: ``[rows, n]`` bool: no padding.
        normalisers: ``[rows, n]`` float32, nan where not known.
        greedy: ``[rows]`` bool.
        temperatures: ``[rows]`` float32.
    """

    tokens: Tensor
    hidden: Tensor
    answer: Tensor
    real: Tensor
    normalisers: Tensor
    greedy: Tensor
    temperatures: Tensor


def batches(rows: Sequence[Row], tokens: int, seed: int) -> list[list[Row]]:
    """All rows in groups of like length, the groups in random order.

    Args:
        rows: the rows; ones too short to learn from are left out.
        tokens: most of a group, padding included; a longer row is a group of its own.
        seed: of the order.
    """
    rng = random.Random(seed)
    order = sorted((row for row in rows if len(row.tokens) > 2), key=lambda row: (len(row.tokens), rng.random()))
    groups: list[list[Row]] = []
    for row in order:
        if groups and (len(groups[-1]) + 1) * len(row.tokens) <= tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    rng.shuffle(groups)
    return groups


def padded(rows: Sequence[Row]) -> Batch:
    """Rows as one batch."""
    n, count = max(len(row.tokens) for row in rows), len(rows)
    first = rows[0].hidden
    batch = Batch(
        torch.zeros(count, n, dtype=torch.int64),
        torch.zeros(count, n, first.shape[1], dtype=first.dtype),
        torch.zeros(count, n, dtype=torch.bool),
        torch.zeros(count, n, dtype=torch.bool),
        torch.full((count, n), torch.nan),
        torch.tensor([row.temperature == 0.0 for row in rows]),
        torch.tensor([row.temperature for row in rows]),
    )
    for place, row in enumerate(rows):
        length = len(row.tokens)
        batch.tokens[place, :length] = row.tokens
        batch.hidden[place, :length] = row.hidden
        batch.answer[place, row.prompt - 1 : length] = True
        batch.real[place, :length] = True
        if row.normalisers is not None:
            batch.normalisers[place, :length] = row.normalisers
    return batch
