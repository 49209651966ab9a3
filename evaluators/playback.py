"""What a drafter would have got accepted in an answer that is known, without asking the target again.

Drafts cannot change an answer, so its tokens and the target's hidden states can be taken down once and every drafter
be played through it: its rounds are those it would have had in the engine, at a fifth of the time. Only the draft is
timed; what a round's forward costs is measured beside (`forward_seconds`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from metasd_langchain import Draft, Engine, Request, Sampling, make_pool
from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.drafters import Drafter, DraftSession, Draws
from metasd_langchain.engine.draws import Draws as Noise
from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.values import EMPTY_DRAFT, Round

__all__ = ["Played", "Record", "forward_seconds", "record", "replay"]

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
    request = taken.request
    prompt, tokens = len(request.prompt), [*request.prompt, *taken.answer]
    noise = Noise(request.sampling.seed or 0)
    session = drafter.open(request)
    committed, drafted, seconds = [], [], []
    read, known = 0, prompt + 1  # tokens in the target's slot; tokens committed
    _tell(session, taken, read, prompt, tokens[prompt:known])
    read = prompt
    while known < len(tokens):
        session.hint()
        started = time.perf_counter()
        room = min(budget, request.max_tokens - (known - prompt) - 1)  # as in the engine: the target adds one
        draft = session.propose(tokens[:known], room, noise).cut(room, room) if room > 0 else EMPTY_DRAFT
        seconds.append(time.perf_counter() - started)
        accepted = _accepted(draft, tokens[known:])
        fresh = tokens[known : known + accepted + 1]
        _tell(session, taken, read, known + accepted, fresh)
        read, known = known + accepted, known + len(fresh)
        committed.append(len(fresh))
        drafted.append(len(draft))
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
