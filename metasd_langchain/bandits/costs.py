"""What a forward and a draft cost on this machine, from what rounds took. Robust against a machine that is busy.

Choices hang on ratios (a forward of 9 tokens against one of 1), and the two were measured at different times. So a
sample is divided by the machine's current *load*: how much longer than usual its last few forwards took, whatever
their width, once that is more than a fifth. Of what is left the median of a short window counts, so that single
outliers change nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

from metasd_langchain.errors import BadOption

__all__ = ["CostModel"]

_EXACT = 16  # widths up to here have a window of their own; above, four windows an octave
_WINDOW = 15
_LOAD_WINDOW = 7
_KNOWN_AFTER = 3  # samples after which a window's median is "usual"
_DEADBAND = 1.2  # noise below it stays in the windows; else noise would wander between load and windows
_FIRST_GUESS_S = 0.05


class _Window:
    """The last samples and their median. Adding costs two bisections."""

    __slots__ = ("_order", "_sorted", "_width")

    def __init__(self, width: int = _WINDOW) -> None:
        self._width = width
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        if len(self._order) == self._width:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(value)
        insort(self._sorted, value)

    @property
    def median(self) -> float:
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return 0.5 * (self._sorted[middle - 1] + self._sorted[middle])

    def __len__(self) -> int:
        return len(self._sorted)


class CostModel:
    """Running costs, in seconds. One engine, one thread.

    Args:
        slope: share of a one-token forward that each further token costs, where nothing is measured yet (0.034
            measured for Gemma-3 270M in bfloat16 on two cores).
    """

    def __init__(self, slope: float = 0.03) -> None:
        if not 0.0 <= slope < math.inf:
            raise BadOption("slope", slope, "a finite number of at least 0")
        self._slope = slope
        self._forwards: dict[int, _Window] = {}
        self._drafts: dict[str, _Window] = {}
        self._recent = _Window(_LOAD_WINDOW)
        self._load = 1.0
        self._last = (0, 0.0)
        self._curve: tuple[list[float], list[float]] | None = None

    def note_forward(self, width: int, seconds: float) -> None:
        """A packed forward of `width` new tokens took `seconds`.

        Rows of one forward report the same pair one after the other; it counts once.
        """
        seconds = _seconds("forward", seconds)
        if (width, seconds) == self._last:
            return
        self._last = (width, seconds)
        bucket = _bucket(width)
        window = self._forwards.get(bucket)
        if window is None:
            window = self._forwards[bucket] = _Window()
        if len(window) >= _KNOWN_AFTER:
            self._recent.add(seconds / window.median)
            ratio = self._recent.median if len(self._recent) >= _KNOWN_AFTER else 1.0
            self._load = ratio if not 1.0 / _DEADBAND < ratio < _DEADBAND else 1.0
        window.add(seconds / self._load)
        self._curve = None

    def note_draft(self, arm: str, seconds: float) -> None:
        """A draft of `arm` took `seconds`."""
        window = self._drafts.get(arm)
        if window is None:
            window = self._drafts[arm] = _Window()
        window.add(_seconds("draft", seconds) / self._load)

    def forward(self, width: int) -> float:
        """Seconds a forward of `width` new tokens takes now; never less for more tokens.

        Linear between known widths; beyond them, the nearest known one times the assumed shape.
        """
        if self._curve is None:
            self._curve = self._fit()
        widths, seconds = self._curve
        width = max(1, width)
        if not widths:
            return _FIRST_GUESS_S * self._shape(width)
        at = bisect_left(widths, width)
        if at == len(widths) or at == 0:
            near = min(at, len(widths) - 1)
            return self._load * seconds[near] * self._shape(width) / self._shape(widths[near])
        share = (width - widths[at - 1]) / (widths[at] - widths[at - 1])
        return self._load * (seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))

    def draft(self, arm: str) -> float:
        """Seconds a draft of `arm` takes now; 0 before the first."""
        window = self._drafts.get(arm)
        return 0.0 if window is None else self._load * window.median

    def _shape(self, width: float) -> float:
        return 1.0 + self._slope * (width - 1.0)

    def _fit(self) -> tuple[list[float], list[float]]:
        """Medians by width, made non-decreasing by pooling neighbours that violate it (isotonic regression)."""
        widths = sorted(self._forwards)
        blocks: list[tuple[float, float, int]] = []  # mean, weight, members
        for width in widths:
            window = self._forwards[width]
            mean, weight, members = window.median, float(len(window)), 1
            while blocks and blocks[-1][0] > mean:
                before, heavy, count = blocks.pop()
                mean = (before * heavy + mean * weight) / (heavy + weight)
                weight, members = weight + heavy, members + count
            blocks.append((mean, weight, members))
        return [float(width) for width in widths], [mean for mean, _, members in blocks for _ in range(members)]


def _bucket(width: int) -> int:
    """The width itself, or the middle of its quarter octave."""
    if width <= _EXACT:
        return max(1, width)
    return round(_EXACT * math.pow(2.0, round(4.0 * math.log2(width / _EXACT)) / 4.0))


def _seconds(what: str, seconds: float) -> float:
    if not 0.0 <= seconds < math.inf:
        raise BadOption(f"seconds of a {what}", seconds, "a finite number of at least 0")
    return max(seconds, 1e-9)  # a clock too coarse to see it
