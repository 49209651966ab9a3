"""What the numbers of ``metasd tune`` mean: which arms are kept, and a verdict in plain words. Nothing is measured.

*Pace* is seconds a token. Ratios of paces are compared as logarithms: twice as fast and half as fast cancel out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Literal

from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.values import PLAIN

__all__ = [
    "ARMS",
    "CHOSEN",
    "POOL",
    "Kept",
    "Run",
    "Score",
    "Speedup",
    "Verdict",
    "cheapness",
    "propose",
    "reason",
    "score",
    "settle",
    "speedup",
    "verdict",
]

ARMS = ("suffix@6", "suffix@16", "lookup@8", "recycling@4", "recycling_tree@6", "recycling_tree@12")
POOL = "default pool"
CHOSEN = "the best together"  # the proposed arms as a bandit, measured afresh
HELPS, HARDLY = 1.2, 1.05  # geometric mean over prompts; below the second nothing is gained that a user would notice
_MARGIN = 0.03  # log ratio below which two candidates are equally fast: timings of one prompt differ by as much
_ONE_PROMPT = 0.10  # the same where a single prompt was measured, so that its spread is unknown
_MOST_ARMS = 3
_READING = 0.5  # share of a call that goes into reading the prompt
_NOTHING = 1.2  # accepted length: not even one token in five rounds
_CHEAP, _DEAR = 1.3, 2.0  # a forward of eight tokens, times one of one
_CHECKED = 8  # tokens of a usual round
_LOW = 0.3  # share of the drafted tokens that are accepted

Kind = Literal["helps", "hardly", "not"]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer of one candidate.

    Attributes:
        candidate: plain, an arm, POOL or CHOSEN.
        prompt: index of the prompt.
        ids: tokens of the answer, at least one.
        seconds: from submission to the end.
        reading_s: seconds of it that read the prompt.
        rounds, drafted, accepted: forwards, drafted tokens, accepted ones.
    """

    candidate: str
    prompt: int
    ids: tuple[int, ...]
    seconds: float
    reading_s: float = 0.0
    rounds: int = 1
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate over all prompts.

    Attributes:
        paces: seconds a token of each prompt, the median of its runs.
        tokens_per_s: all tokens over all seconds, each prompt with its median pace.
        accepted_length: tokens a forward gives: 1 and the accepted ones.
        ceiling: the same, as geometric mean over prompts. A forward of several tokens is never quicker than one of one,
            so that a speed-up above it was measured on a busy machine.
        acceptance: share of the drafted tokens that were accepted; 0 when none was drafted.
        reading: share of the time that reads prompts.
        different: prompts whose answer is not plain's in some run.
    """

    paces: Mapping[int, float]
    tokens_per_s: float
    accepted_length: float
    ceiling: float
    acceptance: float
    reading: float
    different: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times faster than plain: geometric mean over prompts, the slowest and the fastest of them."""

    mean: float
    low: float
    high: float

    def on(self, prompts: str, digits: int) -> str:
        """Such as "2.1x on your prompts [1.4, 3.0]"."""
        return f"{self.mean:.{digits}f}x on {prompts} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Kept:
    """What goes into the settings.

    Attributes:
        drafters: arms.
        speedup: measured with them; None for plain alone.
        worth: how much of it can be believed.
    """

    drafters: tuple[str, ...]
    speedup: Speedup | None = None
    worth: float = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it is worth while, in a word and in words; why not, where it is not."""

    kind: Kind
    words: str
    reason: str = ""


def score(runs: Sequence[Run]) -> dict[str, Score]:
    """Scores by candidate, in the order of `runs`. Answers are compared with plain's first one to the same prompt."""
    truth: dict[int, tuple[int, ...]] = {}
    by_candidate: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_candidate[run.candidate].append(run)
        if run.candidate == PLAIN:
            truth.setdefault(run.prompt, run.ids)
    return {name: _score(own, truth) for name, own in by_candidate.items()}


def _score(runs: Sequence[Run], truth: Mapping[int, tuple[int, ...]]) -> Score:
    by_prompt: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        by_prompt[run.prompt].append(run)
    paces = {prompt: median(run.seconds / len(run.ids) for run in own) for prompt, own in sorted(by_prompt.items())}
    tokens = {prompt: fmean(len(run.ids) for run in own) for prompt, own in by_prompt.items()}
    drafted, accepted = sum(run.drafted for run in runs), sum(run.accepted for run in runs)
    different = {run.prompt for run in runs if run.ids != truth.get(run.prompt, run.ids)}
    return Score(
        paces=paces,
        tokens_per_s=sum(tokens.values()) / sum(tokens[prompt] * pace for prompt, pace in paces.items()),
        accepted_length=_length(runs),
        ceiling=math.exp(fmean(math.log(_length(own)) for own in by_prompt.values())),
        acceptance=accepted / drafted if drafted else 0.0,
        reading=sum(run.reading_s for run in runs) / sum(run.seconds for run in runs),
        different=tuple(sorted(different)),
    )


def _length(runs: Sequence[Run]) -> float:
    return 1.0 + sum(run.accepted for run in runs) / sum(run.rounds for run in runs)


def speedup(own: Score, plain: Score) -> Speedup:
    """Of a candidate over plain."""
    ratios = [math.exp(gain) for gain in _gains(own.paces, plain.paces)]
    return Speedup(math.exp(fmean(math.log(ratio) for ratio in ratios)), min(ratios), max(ratios))


def propose(scores: Mapping[str, Score]) -> tuple[str, ...]:
    """Arms worth keeping.

    Plain alone when nothing is faster. The default pool unless the best single arm beats it by more than noise. Else
    the best arm and up to two more, each only if it is so much faster on some prompts that choosing well between them
    would pay; and plain.
    """
    plain = scores[PLAIN]
    if max(_worth(own, plain) for name, own in scores.items() if name != PLAIN) < HARDLY:
        return (PLAIN,)
    arms = [name for name in scores if name not in (PLAIN, POOL)]
    best = max(arms, key=lambda name: _worth(scores[name], plain))
    if not _beats(scores[best], scores[POOL]):
        return DEFAULT_ARMS
    kept, paces = [best], dict(scores[best].paces)
    while len(kept) < _MOST_ARMS:
        others = {name: _fastest(paces, scores[name].paces) for name in arms}
        name = max(others, key=lambda name: fmean(_gains(others[name], paces)))
        if fmean(_gains(others[name], paces)) < _MARGIN:
            break
        kept.append(name)
        paces = others[name]
    return (*kept, PLAIN)


def settle(proposed: tuple[str, ...], first: Mapping[str, Score], fresh: Mapping[str, Score] | None) -> Kept:
    """What is kept in the end.

    Args:
        proposed: by `propose`.
        first: the scores it was proposed from.
        fresh: scores of plain, the default pool and CHOSEN, measured afterwards: the best of six looks better than it
            is, so it has to win once more. None where the proposal needs no such proof.
    """
    if proposed == (PLAIN,):
        return Kept((PLAIN,))
    scores = first if fresh is None else fresh
    drafters, own = DEFAULT_ARMS, scores[POOL]
    if fresh is not None and _beats(fresh[CHOSEN], fresh[POOL]):
        drafters, own = proposed, fresh[CHOSEN]
    worth = _worth(own, scores[PLAIN])
    return Kept(drafters, speedup(own, scores[PLAIN]), worth) if worth >= HARDLY else Kept((PLAIN,))


def verdict(kept: Kept, why_not: str, whose: str) -> Verdict:
    """In plain words.

    Args:
        kept: by `settle`.
        why_not: by `reason`.
        whose: prompts, such as "your prompts".
    """
    gained = kept.speedup
    if gained is None:
        words = "It will not help on these prompts: leave drafting off, speculative=False."
        return Verdict("not", f"{words} {why_not}", why_not)
    if kept.worth >= HELPS:
        return Verdict("helps", f"This will help you: {gained.on(whose, 1)}.")
    return Verdict("hardly", f"It will hardly help: {gained.on(whose, 2)}. {why_not}", why_not)


def reason(scores: Mapping[str, Score], cost: Mapping[int, float]) -> str:
    """Why drafting gains little, the first that applies.

    Args:
        scores: by candidate.
        cost: width -> a forward of so many tokens, times one of one.
    """
    plain = scores[PLAIN]
    if plain.reading > _READING:
        return f"{plain.reading:.0%} of the time goes into reading the prompts, which drafting cannot shorten."
    others = [own for name, own in scores.items() if name != PLAIN]
    longest = max(own.accepted_length for own in others)
    if longest < _NOTHING:
        return f"There is nothing to copy in these prompts: {longest:.2f} tokens a forward at best."
    width = _usual(cost)
    if cost[width] >= _DEAR:
        return f"Verification costs too much here: a forward of {width} tokens takes {cost[width]:.1f} times one of 1."
    best = max(others, key=lambda own: _worth(own, plain))
    if best.acceptance < _LOW:
        return f"Few guesses are right: {best.acceptance:.0%} of the drafted tokens are accepted."
    return "Forwards are so short here that drafting takes about as long as it saves."


def cheapness(cost: Mapping[int, float]) -> str:
    """What the cost of a forward by width, times one of one, means for drafting."""
    width = _usual(cost)
    word = "cheap" if cost[width] < _CHEAP else "affordable" if cost[width] < _DEAR else "dear"
    return f"Verifying is {word} here: a forward of {width} tokens takes {cost[width]:.2f} times one of 1."


def _usual(cost: Mapping[int, float]) -> int:
    """The measured width nearest below a usual round's; a small window may not have room for that."""
    return max(width for width in cost if width <= _CHECKED)


def _gains(own: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Logarithms of how many times faster, prompt by prompt, over the prompts of both."""
    return [math.log(base[prompt] / pace) for prompt, pace in own.items() if prompt in base]


def _worth(own: Score, plain: Score) -> float:
    """The mean speed-up, as far as accepted tokens account for it."""
    return min(speedup(own, plain).mean, own.ceiling)


def _beats(own: Score, other: Score) -> bool:
    """Whether it is faster by more than chance explains: two standard errors over the prompts, and never less than
    timings of one prompt differ by.
    """
    gains = _gains(own.paces, other.paces)
    noise = _ONE_PROMPT if len(gains) < 2 else max(_MARGIN, 2.0 * stdev(gains) / math.sqrt(len(gains)))
    return fmean(gains) > noise


def _fastest(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {prompt: min(pace, other.get(prompt, pace)) for prompt, pace in one.items()}
