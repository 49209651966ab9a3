"""What a drafter would have got accepted in an answer that is known, without asking the target again.

Drafts cannot change an answer, so its tokens and the target's hidden states can be taken down once and every drafter
be played through it: its rounds are those it would have had in the engine, at a fifth of the time. Only the draft is
timed; what a round's forward costs is measured beside (`forward_seconds`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metasd_langchain import Draft, Engine, Request, Sampling, make_pool
from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.bandits.selector import Seat
from metasd_langchain.drafters import Drafter, DraftSession, Draws
from metasd_langchain.engine.draws import Draws as Noise
from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.values import EMPTY_DRAFT, Arm, Choice, Round

__all__ = ["Played", "Record", "forward_seconds", "record", "replay", "replay_pool"]

_WIDEST = 2**20  # hidden states of every token are wanted


@dataclass(frozen=True, slots=True)
class Record:
    """An answer, with the target's hidden states.

    Attributes:
        request: what was asked.
        answer: its tokens.
        hidden: layer -> ``[n, width]`` of prompt and answer, without the last token.
    """

    request: Request
    answer: tuple[int, ...]
    hidden: Mapping[int, torch.Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Played:
    """A drafter's rounds through a record, after the one that read the prompt.

    Attributes:
        committed: tokens, by round.
        drafted: nodes drafted, by round.
        draft_s: seconds of drafting, by round.
    """

    committed: tuple[int, ...]
    drafted: tuple[int, ...]
    draft_s: tuple[float, ...]


class _Recorder:
    """Drafts nothing; keeps what it is told."""

    name, candidates, prompt_rows, hidden_window = "recorder", 0, 0, _WIDEST

    def __init__(self, layers: Sequence[int]) -> None:
        self.hidden_layers = tuple(layers)
        self.rounds: list[Round] = []

    def open(self, request: Request) -> _Recorder:
        self.rounds = []
        return self

    def hint(self) -> float:
        return 0.0

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        return EMPTY_DRAFT

    def observe(self, round: Round) -> None:
        self.rounds.append(round)

    def close(self) -> None: ...

    def forget(self, scope: str | None = None) -> None: ...


def record(engine: Engine, prompt: Sequence[int], sampling: Sampling, limits: Any, layers: Sequence[int]) -> Record:
    """Have a prompt answered and take it down.

    Args:
        engine: who answers, with the default arms.
        prompt: its tokens.
        sampling: with a seed, unless greedy.
        limits: `max_tokens` and `stop_ids`.
        layers: whose hidden states are kept.
    """
    recorder = _Recorder(layers)
    pool = make_pool([(recorder, 1), *DEFAULT_ARMS])
    request = Request(tuple(prompt), sampling, limits.max_tokens, limits.stop_ids)
    answer = tuple(token for step in engine.generate(request, pool) for token in step.tokens)
    told = [said for said in recorder.rounds if said.hidden]
    hidden = {layer: torch.cat([said.hidden[layer] for said in told]) for layer in recorder.hidden_layers}
    return Record(request, answer, hidden)


def replay(drafter: Drafter, taken: Record, budget: int) -> Played:
    """Play a bound drafter, alone, through a record."""
    sessions = {"alone": drafter.open(taken.request)}
    return _play(sessions, taken, budget, lambda hints, position: "alone", lambda *counts: None)


def replay_pool(
    drafters: Mapping[str, Drafter],
    taken: Record,
    arms: Sequence[Arm],
    seat: Seat,
    vector: NDArray[np.float64] | None = None,
) -> Played:
    """Play bound drafters through a record, the one of each round chosen by a bandit that learns.

    Args:
        drafters: by name.
        taken: the answer.
        arms: over those drafters, of one budget.
        seat: of a selector over these arms whose reward counts tokens; seconds are not known here.
        vector: of the prompt, for policies that want one.
    """
    sessions = {arm.drafter: drafters[arm.drafter].open(taken.request) for arm in arms}
    by_name = {arm.name: arm.drafter for arm in arms}
    last: list[Choice] = []
    prompt = float(len(taken.request.prompt))

    def choose(hints: Mapping[str, float], position: int) -> str:
        told = {"position": float(position), "batch": 1.0, "prompt": prompt}
        last[:] = [seat.choose({arm.name: hints[arm.drafter] for arm in arms}, told, vector=vector)]
        return by_name[last[0].arm]

    def learn(drafted: int, accepted: int, committed: int) -> None:
        seat.learn(
            last[0],
            drafted=drafted,
            accepted=accepted,
            committed=committed,
            draft_s=0.0,
            score_s=1.0,
            width=1 + drafted,
        )

    return _play(sessions, taken, arms[0].budget, choose, learn)


def _play(
    sessions: Mapping[str, DraftSession],
    taken: Record,
    budget: int,
    choose: Callable[[Mapping[str, float], int], str],
    learn: Callable[[int, int, int], None],
) -> Played:
    """Rounds through a record: `choose` is told hints and position, `learn` what was drafted, accepted, committed."""
    request = taken.request
    prompt, tokens = len(request.prompt), [*request.prompt, *taken.answer]
    noise = Noise(request.sampling.seed or 0)
    committed, drafted, seconds = [], [], []
    read, known = 0, prompt + 1  # tokens in the target's slot; tokens committed
    for session in sessions.values():
        _tell(session, taken, read, prompt, tokens[prompt:known])
    read = prompt
    while known < len(tokens):
        session = sessions[choose({name: own.hint() for name, own in sessions.items()}, known - prompt)]
        started = time.perf_counter()
        room = min(budget, request.max_tokens - (known - prompt) - 1)  # as in the engine: the target adds one
        draft = session.propose(tokens[:known], room, noise).cut(room, room) if room > 0 else EMPTY_DRAFT
        seconds.append(time.perf_counter() - started)
        accepted = _accepted(draft, tokens[known:])
        fresh = tokens[known : known + accepted + 1]
        for told in sessions.values():
            _tell(told, taken, read, known + accepted, fresh)
        read, known = known + accepted, known + len(fresh)
        learn(len(draft), accepted, len(fresh))
        committed.append(len(fresh))
        drafted.append(len(draft))
    for session in sessions.values():
        session.close()
    return Played(tuple(committed), tuple(drafted), tuple(seconds))


def _tell(session: DraftSession, taken: Record, start: int, stop: int, committed: Sequence[int]) -> None:
    hidden = {layer: states[start:stop] for layer, states in taken.hidden.items()}
    session.observe(Round(tuple(committed), hidden=hidden, hidden_start=start))


def _accepted(draft: Draft, truth: Sequence[int]) -> int:
    node, count = -1, 0
    for token in truth:
        above = node
        node = next((n for n, parent in enumerate(draft.parents) if parent == above and draft.tokens[n] == token), -1)
        if node < 0:
            break
        count += 1
    return count


def forward_seconds(engine: Engine, widths: Sequence[int], context: int, repetitions: int) -> dict[int, float]:
    """Median seconds of a target's forward over so many new tokens behind a context; widths in turn, repeated."""
    lm = engine.target.lm
    slot = Slot()
    for at in range(0, context, 512):
        feed = Feed(slot, (5,) * min(512, context - at), scored=0)
        lm.score([feed])
        lm.keep(feed)
    taken: dict[int, list[float]] = {width: [] for width in widths}
    for _ in range(repetitions + 1):
        for width in widths:
            feed = Feed(slot, (5,), Draft.chain((6,) * (width - 1)))
            started = time.perf_counter()
            lm.score([feed])
            lm.synchronize()
            taken[width].append(time.perf_counter() - started)
    return {width: float(np.median(values[1:])) for width, values in taken.items()}  # the first warms up
