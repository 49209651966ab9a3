"""What the engine's draws are compared with: distributions written down again, without any of the engine's code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from metasd_langchain.values import Sampling

Floats = NDArray[np.float64]

__all__ = ["chi_square", "processed"]


def processed(logits: Floats, sampling: Sampling) -> Floats:
    """The distribution of one row: temperature, top_k, top_p, min_p, in this order.

    Ties at the k-th place all stay, as in transformers; where top_p has to choose among equal ones, lower ids stay.
    """
    if sampling.temperature == 0.0 or sampling.top_k == 1:
        p = np.zeros(len(logits))
        p[int(np.argmax(logits))] = 1.0
        return p
    scores = np.asarray(logits, dtype=np.float64) / sampling.temperature
    order = np.argsort(-scores, kind="stable")
    keep = np.ones(len(scores), dtype=bool)
    if sampling.top_k:
        keep = scores >= np.sort(scores)[-min(sampling.top_k, len(scores))]
    if sampling.top_p is not None and sampling.top_p < 1.0:
        ranked = _softmax(np.where(keep, scores, -np.inf))[order]
        keep[order[np.cumsum(ranked) - ranked >= sampling.top_p]] = False
    if sampling.min_p:
        p = _softmax(np.where(keep, scores, -np.inf))
        keep &= p >= sampling.min_p * p.max()
    return _softmax(np.where(keep, scores, -np.inf))


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max())
    total: Floats = weights / weights.sum()
    return total


def chi_square(counts: Floats, expected: Floats, least: float = 5.0) -> float:
    """p-value of observed counts against expected ones. Cells below `least` are pooled; any count where nothing is
    expected is a certain rejection.
    """
    counts, expected = np.ravel(counts).astype(float), np.ravel(expected)
    if counts[expected == 0.0].any():
        return 0.0
    counts, expected = counts[expected > 0.0], expected[expected > 0.0]
    small = expected < least
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if len(expected) < 2:
        return 1.0
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(stats.chi2.sf(statistic, len(expected) - 1))
