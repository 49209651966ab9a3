"""How stored states are joined: those of two writers, and a stored one with a warm start.

A state is *additive* when it is nothing but sums by arm: ``count`` and ``sum`` as ``statistics.Means`` dumps them, with
or without ``squares`` and ``regrets`` (`ucb`, `ucbspec`, `fixed`, `random`, `thompson`, `exp3`, `exp3spec`,
`normalhedge`). What a writer has learned since it last loaded or saved is then added to what is stored, so no round is
lost and none counts twice.

A policy with a method ``join`` (see `Joining`) says itself how its states come together: `hinted_ucb` lets what is
stored live through the writer's rounds, discounts included.

Any other state, and any whose counts shrank meanwhile (`discounted_ucb`, `sliding_ucb`, `etc`, `halving`, `hedge`,
`linucb`, `routed` with a prior), cannot be added up: the one learned from more rounds stays, its writer's latest.

Old evidence does not outweigh new for ever: of an additive state a file keeps the weight of 10,000 rounds, and a
process starts with that of 400. The others bound themselves or have decided for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

from metasd_langchain.bandits import State

__all__ = ["FILE_ROUNDS", "START_ROUNDS", "Join", "Joining", "Learned", "evidence", "joined", "started"]

Join = Callable[[State | None, State, State], State]

FILE_ROUNDS, START_ROUNDS = 10_000.0, 400.0
_TABLES = frozenset({"arms", "regrets", "squares"})
_ROW = frozenset({"count", "sum"})
_Sums = dict[tuple[str, ...], float]  # (table, arm) or ("arms", arm, field) -> number


class Learned(NamedTuple):
    """A policy's state, and the rounds it was learned from."""

    state: State
    rounds: int


@runtime_checkable
class Joining(Protocol):
    """What a policy offers, besides Policy, whose states are no plain sums and can be joined all the same."""

    def join(self, stored: State | None, now: State, since: State) -> State:
        """`stored`, or nothing, with what `now` has learned since `since`. The policy's own state does not matter."""
        ...


def joined(stored: Learned | None, now: Learned, since: Learned, join: Join | None = None) -> Learned:
    """What to store: by the rule in the module's docstring.

    A key that is gone although its writer loaded or saved it was reset: only the new comes back, where states
    can be joined.

    Args:
        stored: what is there; another writer's rounds may be in it.
        now: a writer's state.
        since: that state when its writer last loaded or saved it, or began.
        join: the policy's own.
    """
    if join is not None:
        rounds = now.rounds - since.rounds + (0 if stored is None else stored.rounds)
        return Learned(join(None if stored is None else stored.state, now.state, since.state), rounds)
    mine, before = _sums(now.state), _sums(since.state)
    theirs: _Sums | None = {} if stored is None else _sums(stored.state)
    if mine is None or before is None or theirs is None or _shrank(before, mine):
        return now if stored is None or now.rounds >= stored.rounds else stored
    new = {path: number - before.get(path, 0.0) for path, number in mine.items()}
    theirs = _capped(theirs, max(0.0, FILE_ROUNDS - _weight(new)))
    rounds = now.rounds - since.rounds + (0 if stored is None else stored.rounds)
    return Learned(_state(now.state, _added(theirs, new)), rounds)


def started(warm: State, learned: State) -> State:
    """The state a policy begins with: what is stored for it, on top of its warm start where both are additive."""
    stored = _sums(learned)
    if stored is None:
        return learned
    return _state(learned, _added(_capped(stored, START_ROUNDS), _sums(warm) or {}))


def evidence(state: State) -> float:
    """Rounds that a state's arms weigh together; 0 when it does not say."""
    arms = state.get("arms")
    rows = arms.values() if isinstance(arms, Mapping) else ()
    counts = [row.get("count") for row in rows if isinstance(row, Mapping)]
    return math.fsum(count for count in counts if _is_number(count))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _sums(state: State) -> _Sums | None:
    """The numbers of an additive state; None for another."""
    if not state.keys() <= {"policy", *_TABLES} or not {"policy", "arms"} <= state.keys():
        return None
    sums: _Sums = {}
    for name in state.keys() & _TABLES:
        table = state[name]
        if not isinstance(table, Mapping):
            return None
        for arm, row in table.items():
            if name != "arms":
                sums[name, arm] = row
            elif isinstance(row, Mapping) and row.keys() == _ROW:
                sums.update({(name, arm, field): row[field] for field in _ROW})
            else:
                return None
    return sums if all(_is_number(number) for number in sums.values()) else None


def _state(like: State, sums: _Sums) -> State:
    """The additive state of these numbers; an arm nobody played has no row."""
    arms = sorted(path[1] for path, number in sums.items() if path[2:] == ("count",) and number > 0.0)
    rows: dict[str, object] = {}
    for arm in arms:
        rows[arm] = {"count": sums["arms", arm, "count"], "sum": max(0.0, sums["arms", arm, "sum"])}
    tables: State = {"policy": like["policy"], "arms": rows}
    for name in sorted((like.keys() & _TABLES) - {"arms"}):
        tables[name] = {path[1]: number for path, number in sorted(sums.items()) if path[0] == name}
    return tables


def _shrank(before: _Sums, after: _Sums) -> bool:
    return any(after.get(path, 0.0) < count for path, count in before.items() if path[2:] == ("count",))


def _added(one: _Sums, other: _Sums) -> _Sums:
    return {path: one.get(path, 0.0) + other.get(path, 0.0) for path in one.keys() | other.keys()}


def _weight(sums: _Sums) -> float:
    return math.fsum(number for path, number in sums.items() if path[2:] == ("count",))


def _capped(sums: _Sums, most: float) -> _Sums:
    """The same means with the weight of at most `most` rounds."""
    weight = _weight(sums)
    return sums if weight <= most else {path: number * most / weight for path, number in sums.items()}
