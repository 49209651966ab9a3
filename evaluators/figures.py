"""From timings to figures.

*Pace* of a method on a prompt: median over its repetitions of seconds per kept new token. Where every repetition gives
the same number of tokens (greedy, or ``--ignore-eos``) its inverse is tokens / median seconds. *Speed-up* on a prompt:
pace of the base / pace of the method; of a group: geometric mean over its prompts; the headline ``geomean``: geometric
mean over groups, so that each task counts once; ``min``: the slowest group.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.values import RoundRecord

__all__ = ["Cell", "arm_table", "even", "speedup", "throughput"]

_EVEN = 1.25  # longest answer to a prompt over the shortest
_DRAWS = 2000  # of the bootstrap; its own noise is then well below the interval's width


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured call.

    Attributes:
        prompt: index among the run's prompts.
        group: the prompt's task.
        method: who answered.
        repetition: from 0.
        ids: kept new tokens, EOS included.
        seconds: wall clock of the whole call, the reading of the prompt included.
        forwards: forwards of the target, those that read the prompt included; 0 when not known.
        rounds: our engine's rounds; empty for others.
    """

    prompt: int
    group: str
    method: str
    repetition: int
    ids: tuple[int, ...]
    seconds: float
    forwards: int
    rounds: tuple[RoundRecord, ...] = field(default=(), repr=False)

    @property
    def pace(self) -> float:
        """Seconds per token."""
        return self.seconds / len(self.ids)


def even(cells: Sequence[Cell]) -> tuple[list[Cell], list[int]]:
    """Cells of prompts that all methods answered at about the same length, and the prompts that are left out.

    In half precision a near-tie can end one method's answer after ten tokens and another's at the limit. The reading of
    the prompt, the same for both, then weighs so differently that their paces compare lengths, not drafters. Where
    every prompt is such, none is left out.
    """
    lengths: dict[int, list[int]] = defaultdict(list)
    for cell in cells:
        lengths[cell.prompt].append(len(cell.ids))
    uneven = sorted(prompt for prompt, own in lengths.items() if max(own) > _EVEN * min(own))
    if len(uneven) == len(lengths):
        return list(cells), []
    return [cell for cell in cells if cell.prompt not in uneven], uneven


def speedup(cells: Iterable[Cell], method: str, base: str, seed: int) -> dict[str, Any] | None:
    """``{geomean, low, high, min, tasks}`` of a method against a base; None when they share no prompt.

    ``low`` and ``high``: 95% interval of the geomean from a bootstrap that draws each group's prompts anew and, for
    each prompt, its repetitions; a repetition of the method and of the base ran one after the other and stay together.
    """
    paces = _paired(cells, method, base)
    if not paces:
        return None
    rng = np.random.default_rng(seed)
    groups: dict[str, list[tuple[float, NDArray[np.float64]]]] = defaultdict(list)
    for group, own, other in paces:
        exact = float(np.log(np.median(other)) - np.log(np.median(own)))
        take = rng.integers(0, len(own), (_DRAWS, len(own)))
        drawn = np.log(np.median(other[take], axis=1)) - np.log(np.median(own[take], axis=1))
        groups[group].append((exact, drawn))
    tasks = {group: math.exp(float(np.mean([exact for exact, _ in ratios]))) for group, ratios in groups.items()}
    means = []
    for ratios in groups.values():
        drawn = np.stack([draws for _, draws in ratios])
        chosen = rng.integers(0, len(ratios), (len(ratios), _DRAWS))
        means.append(np.take_along_axis(drawn, chosen, axis=0).mean(axis=0))
    low, high = np.exp(np.quantile(np.mean(means, axis=0), [0.025, 0.975]))
    return {
        "geomean": math.exp(float(np.mean(np.log(list(tasks.values()))))),
        "low": float(low),
        "high": float(high),
        "min": min(tasks.values()),
        "tasks": tasks,
    }


def throughput(cells: Sequence[Cell]) -> tuple[float | None, float | None]:
    """Tokens a second and tokens a forward of one method's cells.

    Tokens a second: all tokens over all seconds, each prompt with its median pace and mean number of tokens, so that a
    single slow repetition does not count. Tokens a forward: all tokens over all forwards of the target.
    """
    by_prompt: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_prompt[cell.prompt].append(cell)
    tokens = seconds = 0.0
    for own in by_prompt.values():
        mean = float(np.mean([len(cell.ids) for cell in own]))
        tokens += mean
        seconds += mean * float(np.median([cell.pace for cell in own]))
    forwards = sum(cell.forwards for cell in cells)
    per_forward = sum(len(cell.ids) for cell in cells) / forwards if forwards else None
    return (tokens / seconds if seconds else None), per_forward


def arm_table(cells: Iterable[Cell]) -> dict[str, Any]:
    """What each arm did: rounds, tokens, acceptance and its share of the rounds, over all and by group.

    ``plain`` holds every round without a draft, also where an arm was chosen that had nothing to say.
    """
    sums: dict[str, dict[str, float]] = {}
    shares: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for cell in cells:
        for record in cell.rounds:
            own = sums.setdefault(record.arm, dict.fromkeys(("rounds", "drafted", "accepted", "committed"), 0))
            own["rounds"] += 1
            own["drafted"] += record.drafted
            own["accepted"] += record.accepted
            own["committed"] += record.committed
            shares[cell.group][record.arm] += 1
    total = sum(own["rounds"] for own in sums.values())
    for own in sums.values():
        own["share"] = own["rounds"] / total
        own["accepted_per_round"] = own["accepted"] / own["rounds"]
        own["acceptance"] = own["accepted"] / own["drafted"] if own["drafted"] else 0.0
    by_group = {
        group: {arm: count / sum(counts.values()) for arm, count in counts.items()} for group, counts in shares.items()
    }
    return {"arms": sums, "shares": by_group}


def _paired(
    cells: Iterable[Cell], method: str, base: str
) -> list[tuple[str, NDArray[np.float64], NDArray[np.float64]]]:
    """Per prompt that both answered: group, paces of the method, paces of the base, by repetition."""
    own: dict[tuple[int, int], Cell] = {}
    other: dict[tuple[int, int], Cell] = {}
    for cell in cells:
        if cell.method == method:
            own[cell.prompt, cell.repetition] = cell
        if cell.method == base:
            other[cell.prompt, cell.repetition] = cell
    pairs: dict[int, list[tuple[Cell, Cell]]] = defaultdict(list)
    for key in sorted(own.keys() & other.keys()):
        pairs[key[0]].append((own[key], other[key]))
    return [
        (both[0][0].group, np.array([mine.pace for mine, _ in both]), np.array([yours.pace for _, yours in both]))
        for both in pairs.values()
    ]
