"""Figures as PNG or SVG: what the file's name ends with decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evaluators.errors import EvaluatorError
from evaluators.figures import Cell

__all__ = ["draw_lines", "draw_stream"]

# Okabe and Ito's palette: told apart with any colour vision
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
_BLOCK = 25  # rounds that one point of the choices counts


def draw_stream(cells: Sequence[Cell], file: str) -> None:
    """Left: tokens so far over seconds so far of every method, prompt by prompt. Right: shares of the policy's choices.

    Raises:
        EvaluatorError: no matplotlib, or the file cannot be written.
    """
    pyplot = _pyplot()
    figure, (speed, shares) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    methods = list(dict.fromkeys(cell.method for cell in cells))
    for i, method in enumerate(methods):
        own = sorted((c for c in cells if c.method == method and c.repetition == 0), key=lambda c: c.prompt)
        rate = np.cumsum([len(c.ids) for c in own]) / np.cumsum([c.seconds for c in own])
        style = {"linewidth": 2.5} if method == "policy" else {"linewidth": 1.0, "alpha": 0.8}
        speed.plot(np.arange(1, len(own) + 1), rate, label=method, color=_COLOURS[i % len(_COLOURS)], **style)
    speed.set(xlabel="prompts", ylabel="tokens a second so far", title="Policy and single arms")
    speed.legend(fontsize=8)
    rounds = [r.arm for c in sorted(cells, key=lambda c: c.prompt) if (c.method, c.repetition) == ("policy", 0)
              for r in c.rounds]  # fmt: skip
    arms = [arm for arm, _ in Counter(rounds).most_common()]
    blocks = [rounds[i : i + _BLOCK] for i in range(0, len(rounds), _BLOCK)]
    parts = [[block.count(arm) / len(block) for block in blocks] for arm in arms]
    at = np.arange(len(blocks)) * _BLOCK
    shares.stackplot(at, parts, labels=arms, colors=[_COLOURS[i % len(_COLOURS)] for i in range(len(arms))])
    shares.set(xlabel="rounds", ylabel="share of rounds", title="What the policy played", ylim=(0, 1))
    shares.legend(fontsize=8, loc="lower left")
    _save(figure, file)


def draw_lines(
    file: str, x: Sequence[float], lines: Mapping[str, NDArray[np.float64]], labels: tuple[str, str], title: str
) -> None:
    """Lines over a common x, which is drawn on a logarithmic scale.

    Raises:
        EvaluatorError: no matplotlib, or the file cannot be written.
    """
    figure, axes = _pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for i, (name, values) in enumerate(lines.items()):
        axes.plot(x, values, label=name, color=_COLOURS[i % len(_COLOURS)], marker="o", markersize=3)
    axes.set(xscale="log", xlabel=labels[0], ylabel=labels[1], title=title)
    axes.legend(fontsize=8)
    _save(figure, file)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as cause:
        raise EvaluatorError("figures need matplotlib: pip install 'metasd-langchain[train]'") from cause
    mpl.use("agg")
    from matplotlib import pyplot as plt

    return plt


def _save(figure: Any, file: str) -> None:
    try:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as cause:  # ValueError: an ending that matplotlib does not know
        raise EvaluatorError(f"cannot draw {Path(file).name}: {cause}") from cause
    finally:
        _pyplot().close(figure)
