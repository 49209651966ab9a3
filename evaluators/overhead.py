"""Which share of our engine's wall clock is not the target's forwards.

A call is timed, then its forwards are repeated bare: the same slot lengths, the same new tokens and scored rows a
forward, nothing in between. Call and repetition alternate, so that a machine that slows down slows both.
``overhead_share`` = 1 - bare / wall, the median over a prompt's pairs, weighted over prompts by wall. Rejected drafts
are replaced by other tokens and trees by chains of the same width: neither changes what a dense model's forward costs.
``outside_forward_share`` is its cross-check from inside the timed calls: 1 - the forwards' own clock / wall. It is
blind to forwards that run slower between other work than bare ones do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evaluators.methods import PREFILL_TOKENS, Answer, Ours
from metasd_langchain import Draft
from metasd_langchain.models.lm import CausalLM, Feed, Slot
from metasd_langchain.values import RoundRecord

__all__ = ["bare_seconds", "overhead"]

_WARM_ROUNDS = 4


def overhead(
    method: Ours, prompts: Sequence[Sequence[int]], pairs: int, seed: int, deadline: float | None = None
) -> dict[str, Any]:
    """``overhead_share`` and ``outside_forward_share`` of a method on some prompts, each call with a fresh memory.

    Past the deadline (a reading of ``time.perf_counter``) nothing further is begun, but there is always one pair.
    """
    walls: list[float] = []
    shares: list[float] = []
    inside: list[float] = []
    for prompt in prompts:
        measured: list[tuple[float, float, float]] = []
        for _ in range(pairs):
            if deadline is not None and time.perf_counter() > deadline and (measured or walls):
                break
            method.reset(memory=True)
            answer = method.answer(prompt, seed)
            if not walls and not measured:  # this thread may not have run a forward yet
                bare_seconds(method.engine.target.lm, prompt, replace(answer, rounds=answer.rounds[:_WARM_ROUNDS]))
            bare = bare_seconds(method.engine.target.lm, prompt, answer)
            measured.append((answer.seconds, bare, answer.forward_s))
        if not measured:
            break
        wall, bare_s, forward_s = np.array(measured).T
        walls.append(float(np.median(wall)))
        shares.append(float(np.median(1.0 - bare_s / wall)))
        inside.append(float(np.median(1.0 - forward_s / wall)))
    return {
        "overhead_share": float(np.average(shares, weights=walls)),
        "outside_forward_share": float(np.average(inside, weights=walls)),
        "overhead_prompts": len(walls),
    }


def bare_seconds(lm: CausalLM, prompt: Sequence[int], answer: Answer) -> float:
    """Seconds of a call's forwards, repeated one after the other. The engine must be idle."""
    slot = Slot()
    seconds = 0.0
    for feed, path in _feeds(slot, [*prompt, *answer.ids], len(prompt), answer.rounds):
        start = time.perf_counter()
        lm.score([feed])
        lm.synchronize()
        seconds += time.perf_counter() - start
        lm.keep(feed, path)
    return seconds


def _feeds(slot: Slot, text: list[int], at: int, rounds: Sequence[RoundRecord]) -> Iterator[tuple[Feed, range]]:
    """The call's feeds, each with the draft nodes it kept. `text`: prompt and answer; `at`: length of the prompt."""
    while at - slot.length > PREFILL_TOKENS:
        yield Feed(slot, tuple(text[slot.length : slot.length + PREFILL_TOKENS]), scored=0), range(0)
    for record in rounds:
        nodes = text[at : at + record.drafted]
        nodes += [text[-1]] * (record.drafted - len(nodes))
        yield Feed(slot, tuple(text[slot.length : at]), Draft.chain(nodes)), range(record.committed - 1)
        at += record.committed
