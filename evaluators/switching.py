"""What it costs to play a drafter again after other arms have played: it has to catch up with the text.

``stay``: seconds of a draft when the drafter played the round before too; ``back``: after so many rounds of other
arms; ``first``: never played before. A cost is what the draft took longer than ``stay``, as a share of a plain step at
the same context. Drafters are given a made-up text of ordinary ids and hidden states of the right shape: what they
guess does not matter, only how much they read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from evaluators.playback import forward_seconds
from metasd_langchain import Engine, Request
from metasd_langchain.drafters import Drafter, DraftSession
from metasd_langchain.engine.draws import Draws
from metasd_langchain.values import Round

__all__ = ["AWAY", "switch_costs"]

AWAY = 16  # rounds of other arms between two plays
_TOKENS = 2  # committed a round
_STAYS = 8


def switch_costs(
    engine: Engine, drafters: Mapping[str, Drafter], contexts: Sequence[int], repetitions: int
) -> dict[str, dict[str, Any]]:
    """``{context: {drafter: {back, first, stay_s, plain_s}}}``; `back` and `first` are shares of a plain step.

    Args:
        engine: whose plain step is the measure.
        drafters: bound ones, by name in the report.
        contexts: lengths of the prompt in tokens.
        repetitions: sessions opened at each context.
    """
    costs: dict[str, dict[str, Any]] = {}
    for context in contexts:
        plain = forward_seconds(engine, [1], context, max(5, repetitions))[1]
        costs[str(context)] = {
            name: _cost(engine, drafter, context, plain, repetitions) for name, drafter in drafters.items()
        }
    return costs


def _cost(engine: Engine, drafter: Drafter, context: int, plain: float, repetitions: int) -> dict[str, float]:
    firsts, stays, backs = [], [], []
    for repetition in range(repetitions + 1):
        text = _Text(engine, drafter, context)
        first = text.draft()
        stay = [text.draft() for _ in range(_STAYS)]
        text.pass_by(AWAY)
        back = text.draft()
        text.close()
        if repetition:  # the first warms up
            firsts.append(first)
            stays += stay
            backs.append(back)
    usual = float(np.median(stays))
    return {
        "back": (float(np.median(backs)) - usual) / plain,
        "first": (float(np.median(firsts)) - usual) / plain,
        "stay_s": usual,
        "plain_s": plain,
    }


class _Text:
    """A session of a drafter on a growing text."""

    def __init__(self, engine: Engine, drafter: Drafter, context: int) -> None:
        self._rng = np.random.default_rng(0)
        self._most = min(5000, engine.target.lm.vocab_size)
        self._tokens = self._fresh(context)
        self._drafter, self._dtype = drafter, engine.target.lm.dtype
        self._session: DraftSession = drafter.open(Request(tuple(self._tokens)))
        self._read = 0
        self.pass_by(1)

    def _fresh(self, count: int) -> list[int]:
        fresh: list[int] = self._rng.integers(3, self._most, count).tolist()
        return fresh

    def pass_by(self, rounds: int) -> None:
        """Rounds of other arms."""
        for _ in range(rounds):
            start, fresh = self._read, self._fresh(_TOKENS)
            self._tokens += fresh
            self._read = len(self._tokens) - 1  # the last one waits for the next forward
            hidden = {layer: self._states(self._read - start) for layer in self._drafter.hidden_layers}
            self._session.observe(Round(tuple(fresh), hidden=hidden, hidden_start=start))

    def _states(self, count: int) -> torch.Tensor:
        width = int(getattr(self._drafter, "hidden_width", 0))
        return torch.from_numpy(self._rng.standard_normal((count, width), dtype=np.float32)).to(self._dtype)

    def draft(self) -> float:
        """A round of the drafter's own, of one guess: what it takes grows with what it has to read first."""
        started = time.perf_counter()
        self._session.propose(self._tokens, 1, Draws(0))
        seconds = time.perf_counter() - started
        self.pass_by(1)
        return seconds

    def close(self) -> None:
        """End the session."""
        self._session.close()
