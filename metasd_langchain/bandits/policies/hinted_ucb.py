"""Default policy: what each arm earned when its drafter gave a hint like the present one, discounted, with a prior.

Law: hints fall into buckets. ``argmax_i m_i + c * s * sqrt(ln(1 + T) / (1 + n_cell + n_arm / 4))``, where

- ``m_i``, the posterior mean of cell (arm, bucket), is ``(k * prior + sum_cell) / (k + n_cell)``;
- ``prior = miss + level_i * (table - miss)``, where ``miss`` is what a draft that fails is worth, and ``level_i`` the
  gain over ``miss`` of the arm's rounds as a share of the gain the table promised for them, shrunk to the same share
  over all arms, shrunk to 1. So hard text lowers arms not yet tried, too, and one bucket teaches the others. Arms of
  one kind (``eagle-math``, ``eagle-code``: the name up to the first "-") are shrunk to their kind first;
- ``s`` is the mean absolute surprise, so that exploring follows the reward's own scale; ``T`` is capped.

Forgetting has two parts. All evidence fades a little every round, so that an arm long unused drifts back to its prior
and is tried again. And each round of an arm discounts the arm's older rounds, the more the longer its errors have one
sign (Trigg and Leach 1967, "Exponential smoothing with an adaptive response rate"): a steady arm is averaged over some
25 rounds, one that turned hostile is forgotten in ten. Counts are capped by both.

With ``compare`` each bucket is three: drafts whose first three tokens another near-free drafter guesses, too, drafts
that stand alone, and those not compared. It makes all near-free drafts before each choice, and is off by default: a
draft's worth it foretells well, the gain in a replay is within noise (DECISIONS 46).

An arm whose hint is 0 would draft nothing, so it is worth what ``plain`` is: it is neither explored nor credited.
References: Garivier and Moulines 2011 (discounted UCB); Audibert et al. 2009 (bonus by spread).
Prefer it when drafters can say how well they would do, rewards are ``throughput``, and answers are short (40 rounds):
there, plain UCB loses most of its rounds to trying. With no hints it is a discounted UCB with frugal exploration.
Deterministic: the generator is not used.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from metasd_langchain.bandits import State
from metasd_langchain.bandits.statistics import read_number, read_owner, read_table
from metasd_langchain.errors import BadOption, BanditMemoryError, UnknownName
from metasd_langchain.registry import known_options, number
from metasd_langchain.values import PLAIN, Choice, Situation

__all__ = ["BUCKETS", "DEFAULT_PRIOR", "HintedUCB", "bucket_of", "create"]

BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+", "nan")
_EDGES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
_NOTHING, _NO_IDEA = 0, 7
_TABLE_COLUMNS = ("miss", *BUCKETS[1:])

# Expected reward by bucket, in units of the rescaled throughput: 1/16 = 0.0625 is a plain step; "miss" is a round whose
# draft fails. Keyed by arm, else by drafter, else by kind, else "default". Measured on 12 Spec-Bench prompts with the
# embedded model, greedy and at temperature 0.8 counting alike (evaluators: priors), smoothed to rise with the match.
# "eagle": heads ofa and qa of five-domains on 12 prompts unknown to them; "9-16" and "17+" go on from there; "nan" is
# near the mean over hints (0.088), since the measured one (0.066 to 0.071) is of answers' first rounds alone.
DEFAULT_PRIOR: Mapping[str, Mapping[str, float]] = {
    "default": {
        "miss": 0.05, "1": 0.08, "2": 0.11, "3-4": 0.16, "5-8": 0.22, "9-16": 0.30, "17+": 0.40, "nan": 0.08,
    },
    "suffix": {"miss": 0.055, "1": 0.11, "2": 0.12, "3-4": 0.165, "5-8": 0.25, "9-16": 0.32, "17+": 0.38},
    "suffix@16": {"miss": 0.048, "1": 0.108, "2": 0.125, "3-4": 0.17, "5-8": 0.24, "9-16": 0.43, "17+": 0.51},
    "lookup": {"miss": 0.055, "1": 0.11, "2": 0.12, "3-4": 0.165},
    "recycling": {"miss": 0.055, "1": 0.075, "2": 0.115, "3-4": 0.20},
    "recycling_tree": {"miss": 0.05, "1": 0.075, "2": 0.115, "3-4": 0.23},
    "eagle": {
        "miss": 0.052, "1": 0.085, "2": 0.10, "3-4": 0.13, "5-8": 0.20, "9-16": 0.25, "17+": 0.30, "nan": 0.085,
    },
    PLAIN: {"nan": 0.0625},
}  # fmt: skip
_DEFAULTS: Mapping[str, object] = {
    "c": 0.5, "prior": {}, "prior_weight": 3.0, "keep": 0.99, "forget": 0.02, "compare": False,
}  # fmt: skip
# Of a bucket: not compared, seconded, alone. Marks in stored states, and what becomes of a promised gain (evaluators:
# record, 18 held-out prompts at temperature 0.8: 1.2 to 1.4 and 0.5 to 0.6 by drafter and bucket).
_MARKS = ("", "+", "-")
_MARKED_GAIN = (1.0, 1.3, 0.5)
_AGREED = 3  # tokens that make a draft seconded
_TYPICAL = 0.05  # size of a gain; turns the rounds below into gains
_LEAST_GAIN = 0.005  # a promise of no gain at all would say nothing when it is broken
_SHARED_WEIGHT = 2.0  # rounds that "all arms are as the table says" counts
_KIND_WEIGHT = 1.0  # rounds that "this kind is like the others" counts
_LEVEL_WEIGHT = 1.0  # rounds that "this arm is like the others" counts
_SIBLING = 0.25  # what a round in another bucket counts towards certainty
_SIGNAL_RATE, _MOST_FORGOTTEN = 0.25, 0.3  # of the errors' averages; of an arm's evidence, by one round
_PLAIN_MEMORY = 20.0
_FIRST_SURPRISE = 0.05


_LABELS = tuple(bucket + mark for mark in _MARKS for bucket in BUCKETS)  # of cells


def bucket_of(hint: float) -> int:
    """Index into `BUCKETS`."""
    return _NO_IDEA if math.isnan(hint) else bisect_left(_EDGES, hint)


def _cell_of(situation: Situation, name: str) -> int:
    """An arm's cell: the bucket of its hint, and how its draft compares."""
    bucket = bucket_of(situation.hints.get(name, math.nan))
    agreed = situation.seconded.get(name)
    if agreed is None or bucket == _NOTHING:
        return bucket
    return bucket + len(BUCKETS) * (1 if agreed >= _AGREED else 2)


class _Cell:
    """Discounted rounds of an arm in one bucket; `clock` is the arm's clock when they were last brought up to date."""

    __slots__ = ("clock", "count", "total")

    def __init__(self, count: float = 0.0, total: float = 0.0, clock: float = 0.0) -> None:
        self.count, self.total, self.clock = count, total, clock


class _Arm:
    """Discounted rounds of an arm. `clock` is the log of all discounts so far, `seen` the round of the last."""

    __slots__ = (
        "cells", "clock", "count", "error", "expected", "gain", "kind", "miss", "promise", "seen", "surprise", "total",
    )  # fmt: skip

    def __init__(self, miss: float, promise: tuple[float, ...], kind: str = "") -> None:
        self.kind = kind
        self.miss, self.promise = miss, promise  # promised gains over miss, by cell
        self.count = self.total = self.gain = self.expected = self.clock = self.error = 0.0
        self.seen = 0.0
        self.surprise = _FIRST_SURPRISE
        self.cells: dict[int, _Cell] = {}


class HintedUCB:
    """See the module. Constants: `c` exploration, `prior_weight` rounds the prior counts in a cell, `keep` what a round
    leaves of all evidence, `forget` the least an arm forgets by a round of its own. `compare`: see the module.
    """

    name = "hinted_ucb"
    full_information: ClassVar[bool] = False

    def __init__(
        self,
        c: float = 0.5,
        prior: Mapping[str, Mapping[str, float]] | None = None,
        prior_weight: float = 3.0,
        keep: float = 0.99,
        forget: float = 0.02,
        compare: bool = False,
    ) -> None:
        self.compares = compare
        self._c, self._weight, self._log_keep, self._forget = c, prior_weight, math.log(keep), forget
        self._horizon = 1.0 / (1.0 - keep) if keep < 1.0 else math.inf
        self._table = {**DEFAULT_PRIOR, **(prior or {})}
        self._arms: dict[str, _Arm] = {}
        self._rounds = 0.0
        self._surprise = _FIRST_SURPRISE
        self._plain = _Cell(1.0, self._table[PLAIN]["nan"])

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """The arm of highest index; plain carries no bonus, since it is known."""
        levels = self._levels()
        reach = self._c * self._surprise * math.sqrt(math.log1p(min(self._rounds, self._horizon)))
        best, best_index = "", -math.inf
        idle_plain = self._plain.total / self._plain.count
        plain_offered = PLAIN in situation.arms
        for name in situation.arms:
            at = _cell_of(situation, name)
            if name == PLAIN or (at == _NOTHING and not plain_offered):
                index = idle_plain
            elif at == _NOTHING:
                continue  # plain is the same, and honest about it
            else:
                mean, certainty = self._belief(self._arms.get(name) or self._fresh_arm(name), at, levels)
                index = mean + reach / math.sqrt(certainty)
            if index > best_index:
                best, best_index = name, index
        return Choice(best)

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Credit the cell that was played; what acted as plain is credited to plain."""
        reward = rewards[choice.arm]
        at = _cell_of(situation, choice.arm)
        if choice.arm == PLAIN or at == _NOTHING:
            fade = min(1.0, _PLAIN_MEMORY / (self._plain.count + 1.0))
            self._plain.count = (self._plain.count + 1.0) * fade
            self._plain.total = (self._plain.total + reward) * fade
        else:
            arm = self._arm(choice.arm)
            mean, _ = self._belief(arm, at, self._levels())
            self._learn(arm, at, reward, reward - mean)
        self._rounds += 1.0

    def values(self) -> Mapping[str, float]:
        """Discounted mean reward of every arm played so far."""
        means = {name: arm.total / arm.count for name, arm in self._arms.items() if arm.count > 0.0}
        return {PLAIN: self._plain.total / self._plain.count, **means}

    def fade(self, keep: float) -> None:
        """Keep the means, with `keep` times the evidence (in (0, 1])."""
        self._plain = _Cell(self._plain.count * keep, self._plain.total * keep)
        for arm in self._arms.values():
            _discount(arm, keep)

    def dump(self) -> State:
        """All statistics; cells by their labels."""
        arms: dict[str, object] = {}
        for name, arm in self._arms.items():
            if arm.count > 0.0:
                arms[name] = _arm_row(arm)
        own = {field: getattr(self, "_" + field) for field in _OWN_FIELDS}
        return {"policy": self.name, **own, "plain": _row(self._plain, ("count", "total")), "arms": arms}

    def load(self, state: State) -> None:
        """Replace the statistics by dumped ones; on a BanditMemoryError nothing has changed."""
        read_owner(self.name, state)
        own = {field: _read(state, field) for field in _OWN_FIELDS}
        idle = state.get("plain")
        if not isinstance(idle, Mapping):
            raise BanditMemoryError(f"state of policy {self.name!r}: plain is not a mapping")
        plain = _Cell(read_number(self.name, idle, "count", 1e-12), read_number(self.name, idle, "total"))
        arms = {name: self._read_arm(name, row) for name, row in read_table(self.name, state, "arms").items()}
        self._plain, self._arms = plain, arms
        for field, value in own.items():
            setattr(self, "_" + field, value)

    def join(self, stored: State | None, now: State, since: State) -> State:
        """Stored evidence, discounted as `now` discounted its own since then, and what `now` has seen besides.

        So the rounds of writers that take turns count as if they were played one after another. What is no sum (errors,
        surprise, the short memory of plain) is the latest writer's, for arms that it played.
        """
        mine, before = (read_table(self.name, state, "arms") for state in (now, since))
        others = {} if stored is None else read_table(self.name, stored, "arms")
        passed = _read(now, "rounds") - _read(since, "rounds")
        rounds = passed if stored is None else passed + _read(stored, "rounds")
        arms: dict[str, object] = dict(others)
        for name, row in mine.items():
            arm, base = self._read_arm(name, row), self._read_arm(name, before.get(name, _NEVER))
            if (arm.count, arm.clock) == (base.count, base.clock):
                continue
            joint = self._read_arm(name, others.get(name, _NEVER))
            _live_through(joint, base, arm)
            joint.seen = rounds - (_read(now, "rounds") - arm.seen)
            arms[name] = _arm_row(joint)
        return {**(now if passed or stored is None else stored), "rounds": rounds, "arms": arms}

    def _read_arm(self, name: str, row: Mapping[str, object]) -> _Arm:
        arm = self._new_arm(name)
        for field in _ARM_FIELDS:
            setattr(arm, field, _read(row, field))
        for label, cell in read_table(self.name, row, "cells").items():
            if label not in _LABELS:
                raise BanditMemoryError(f"state of policy {self.name!r}: there is no bucket {label!r}")
            count, total = _read(cell, "count"), _read(cell, "total")
            arm.cells[_LABELS.index(label)] = _Cell(count, total, _read(cell, "clock"))
        return arm

    def _levels(self) -> Mapping[str, float]:
        """Gain of all arms (key "") as a share of the promised gain, shrunk to 1; of each kind, shrunk to that."""
        gain = expected = _SHARED_WEIGHT * _TYPICAL
        kinds: dict[str, list[float]] = {}
        for arm in self._arms.values():
            fade = math.exp(self._log_keep * (self._rounds - arm.seen))
            gain += arm.gain * fade
            expected += arm.expected * fade
            if arm.kind:
                sums = kinds.setdefault(arm.kind, [0.0, 0.0])
                sums[0] += arm.gain * fade
                sums[1] += arm.expected * fade
        shared = max(0.0, gain / expected)
        pull = _KIND_WEIGHT * _TYPICAL
        return {"": shared} | {kind: max(0.0, (pull * shared + a) / (pull + b)) for kind, (a, b) in kinds.items()}

    def _belief(self, arm: _Arm, at: int, levels: Mapping[str, float]) -> tuple[float, float]:
        """Posterior mean of a cell, and the rounds its certainty is worth (at least 1)."""
        shared = levels.get(arm.kind, levels[""])
        fade = math.exp(self._log_keep * (self._rounds - arm.seen))
        pull = _LEVEL_WEIGHT * _TYPICAL
        level = max(0.0, (pull * shared + arm.gain * fade) / (pull + arm.expected * fade))
        guess = arm.miss + level * arm.promise[at]
        cell = arm.cells.get(at)
        if cell is None:
            return guess, 1.0 + _SIBLING * arm.count * fade
        fresh = fade * math.exp(arm.clock - cell.clock)
        count = cell.count * fresh
        mean = (self._weight * guess + cell.total * fresh) / (self._weight + count)
        return mean, 1.0 + count + _SIBLING * arm.count * fade

    def _learn(self, arm: _Arm, at: int, reward: float, error: float) -> None:
        arm.error += _SIGNAL_RATE * (error - arm.error)
        arm.surprise += _SIGNAL_RATE * (abs(error) - arm.surprise)
        self._surprise += 0.1 * (abs(error) - self._surprise)
        signal = arm.error / arm.surprise if arm.surprise > 0.0 else 0.0
        forget = min(_MOST_FORGOTTEN, max(self._forget, _MOST_FORGOTTEN * signal * signal))
        _discount(arm, (1.0 - forget) * math.exp(self._log_keep * (self._rounds - arm.seen)))
        arm.seen = self._rounds
        arm.count += 1.0
        arm.total += reward
        arm.gain += reward - arm.miss
        arm.expected += arm.promise[at]
        cell = arm.cells.setdefault(at, _Cell(clock=arm.clock))
        fresh = math.exp(arm.clock - cell.clock)
        cell.count, cell.total, cell.clock = cell.count * fresh + 1.0, cell.total * fresh + reward, arm.clock

    def _arm(self, name: str) -> _Arm:
        arm = self._arms.get(name)
        if arm is None:
            arm = self._arms[name] = self._fresh_arm(name)
        return arm

    def _fresh_arm(self, name: str) -> _Arm:
        """An arm before its first round; `select` keeps none, since another thread may be saving those there are."""
        arm = self._new_arm(name)
        arm.seen = self._rounds
        return arm

    def _new_arm(self, name: str) -> _Arm:
        drafter = name.partition("@")[0]
        kind = drafter.partition("-")[0] if "-" in drafter else ""
        row = self._table.get(name) or self._table.get(drafter) or self._table.get(kind) or {}
        row = {**self._table["default"], **row}
        miss = row["miss"]
        gains = [max(_LEAST_GAIN, row.get(bucket, miss) - miss) for bucket in BUCKETS]
        return _Arm(miss, tuple(share * gain for share in _MARKED_GAIN for gain in gains), kind)


_ARM_FIELDS = ("count", "total", "gain", "expected", "clock", "error", "surprise", "seen")
_OWN_FIELDS = ("rounds", "surprise")
_SIGNED = ("gain", "clock", "error")
_NEVER: Mapping[str, object] = {**dict.fromkeys(_ARM_FIELDS, 0.0), "cells": {}}  # an arm before its first round


def _read(row: Mapping[str, object], field: str) -> float:
    return read_number(HintedUCB.name, row, field, -math.inf if field in _SIGNED else 0.0)


def _row(statistics: object, fields: tuple[str, ...]) -> dict[str, float]:
    return {field: getattr(statistics, field) for field in fields}


def _arm_row(arm: _Arm) -> dict[str, object]:
    cells = {_LABELS[at]: _row(cell, ("count", "total", "clock")) for at, cell in arm.cells.items()}
    return {**_row(arm, _ARM_FIELDS), "cells": cells}


def _live_through(arm: _Arm, since: _Arm, now: _Arm) -> None:
    """Let an arm's evidence pass through the rounds that lie between two states of another writer's."""
    left = math.exp(now.clock - since.clock)
    for field in ("count", "total", "gain", "expected"):
        new = getattr(now, field) - left * getattr(since, field)
        setattr(arm, field, left * getattr(arm, field) + (new if field == "gain" else max(0.0, new)))
    clock = arm.clock + now.clock - since.clock
    for at in arm.cells.keys() | now.cells.keys():
        old, base, latest = _fresh(arm, at), _fresh(since, at), _fresh(now, at)
        count, total = (
            left * one + max(0.0, two - left * three) for one, two, three in zip(old, latest, base, strict=True)
        )
        arm.cells[at] = _Cell(count, total, clock)
    arm.clock, arm.error, arm.surprise = clock, now.error, now.surprise


def _fresh(arm: _Arm, bucket: int) -> tuple[float, float]:
    """Count and total of a cell, discounted up to the arm's clock."""
    cell = arm.cells.get(bucket)
    if cell is None:
        return 0.0, 0.0
    left = math.exp(arm.clock - cell.clock)
    return cell.count * left, cell.total * left


def _discount(arm: _Arm, keep: float) -> None:
    """Leave `keep` of the arm's evidence; cells follow when they are read, by the clock."""
    arm.count *= keep
    arm.total *= keep
    arm.gain *= keep
    arm.expected *= keep
    arm.clock += math.log(keep)


def create(options: Mapping[str, object]) -> HintedUCB:
    """Options: ``c``, ``prior`` (arm or drafter -> bucket -> expected reward in [0, 1]), ``prior_weight``, ``keep``,
    ``forget``, ``compare``.
    """
    known = known_options("policy hinted_ucb", options, _DEFAULTS)
    prior = known["prior"]
    if not isinstance(prior, Mapping) or not all(isinstance(row, Mapping) for row in prior.values()):
        raise BadOption("prior", prior, "a mapping from arms or drafters to mappings from buckets to rewards")
    if not isinstance(known["compare"], bool):
        raise BadOption("compare", known["compare"], "True or False")
    for row in prior.values():
        for bucket, value in row.items():
            if bucket not in _TABLE_COLUMNS:
                raise UnknownName("bucket of prior", str(bucket), _TABLE_COLUMNS)
            number(f"prior of bucket {bucket}", value, 0.0, 1.0)
    return HintedUCB(
        c=number("c", known["c"], 0.0, 1e6),
        prior={name: {**DEFAULT_PRIOR.get(name, {}), **row} for name, row in prior.items()},
        prior_weight=number("prior_weight", known["prior_weight"], 1e-3, 1e6),
        keep=number("keep", known["keep"], 0.5, 1.0),
        forget=number("forget", known["forget"], 0.0, 0.5),
        compare=known["compare"],
    )
