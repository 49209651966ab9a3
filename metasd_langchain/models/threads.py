"""Idle OpenMP teams of other threads, which make every forward slower.

Each thread that runs a parallel torch operation keeps a team of OpenMP workers. GNU's runtime lets a team spin between
operations only while all teams together have no more threads than the machine has processors; with a second, idle team
around, the workers of the busy one sleep and are woken some four hundred times a forward (measured here: a plain step
of the embedded model takes 47 ms instead of 35). Giving an idle team back is cheap: it is made anew when needed.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

__all__ = ["release_team"]

_SOFT = 1  # omp_pause_soft: free threads, keep settings (OpenMP 5.0, section 3.2.44)


def release_team() -> None:
    """Give back the calling thread's team. Call it outside torch operations; does nothing where there is none."""
    for pause in _pauses():
        pause(_SOFT)


@functools.cache
def _pauses() -> list[Callable[[int], int]]:
    """``omp_pause_resource_all`` of every GNU runtime in the process (torch brings one, scikit-learn another). Empty
    elsewhere: other runtimes spin by other rules.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        loaded = {line.split()[-1] for line in lines if "libgomp" in line and "/" in line}
        return [ctypes.CDLL(path).omp_pause_resource_all for path in sorted(loaded)]
    except (OSError, AttributeError):
        return []
