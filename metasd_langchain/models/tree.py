"""Pure functions on draft trees: positions and visibility. Parents are indices, -1 hangs a node on the row's trunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["offsets", "visible"]


def offsets(pending: int, parents: Sequence[int]) -> list[int]:
    """Position of each new token relative to the row's cached length.

    Args:
        pending: committed tokens fed by this forward, at least 1; they form the trunk.
        parents: the draft's parents.

    Returns:
        ``pending + len(parents)`` offsets: 0, 1, ... on the trunk, then trunk's end plus depth.
    """
    result = list(range(pending))
    for parent in parents:
        result.append((result[pending + parent] if parent >= 0 else pending - 1) + 1)
    return result


def visible(pending: int, parents: Sequence[int]) -> torch.Tensor:
    """Which new token sees which: itself, its ancestors and the trunk before it.

    Returns:
        bool ``[n, n]`` with ``n = pending + len(parents)``; row = query, column = key.
    """
    n = pending + len(parents)
    sees = torch.ones(n, n, dtype=torch.bool).tril_()
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return sees
    sees[pending:, pending:] = False
    for node, parent in enumerate(parents):
        row = pending + node
        if parent >= 0:
            sees[row, pending:] = sees[pending + parent, pending:]
        sees[row, row] = True
    return sees
