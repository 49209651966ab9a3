"""Drafters guess the next tokens. One file each; the module's name is the drafter's name.

The seam has two halves. A ``Drafter`` lives as long as its owner wants and holds what is shared (weights, an index of
past text). A ``DraftSession`` is one generation. Nothing a drafter does can change an answer: the verifier alone
commits tokens, and a drafter that raises is benched.

To add a drafter ``foo``: write ``drafters/foo.py`` with ``create(options: Mapping[str, object]) -> Drafter``. From
outside: pass an instance, a dotted name ``package.module:factory``, or register an entry point in the group
``metasd_langchain.drafters``.

A drafter that needs the target (its weights, dtype or tokenizer) has a method ``bind(target) -> Drafter``: called once
before it is played with that target, on the thread of the caller, who receives its errors; it returns the drafter for
that target, itself or another. ``memory_bytes`` says what it holds, ``hidden_window`` how many of the last tokens'
hidden states it wants (1024).

A drafter whose drafts cost no more than a look into a table sets ``near_free = True``: policies that compare drafts
have it propose in every round before they choose, so its ``propose`` must leave no trace in the session.

**Scoring.** A session may have a method ``score(tokens, start) -> list[float] | None``: its own probability of each of
the committed ``tokens[start:]``, given those before, as it would have drafted it (a drafter without probabilities: 1
where its guess is the token, else 0); nan where it is not known, None when it cannot. It is what policies with full
information learn from, and must not change what the session drafts. It is asked once at the answer's beginning with
nothing to score (``start == len(tokens)``); from then on after each round, right *before* the session observes the
round. A session whose scoring costs a forward sets ``scores_late = True``: it is asked every few rounds, after it has
observed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.values import Draft, Request, Round

__all__ = ["DraftSession", "Drafter", "Draws"]


class Draws(Protocol):
    """The request's shared randomness: lets a model drafter draw with the noise the verifier will use."""

    def gumbel(self, position: int, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Gumbel noise of the given tokens at a position of the answer (0 = its first token)."""
        ...


class DraftSession(Protocol):
    """One generation of one drafter. Called on the engine's thread only."""

    def hint(self) -> float:
        """How well the drafter would do now, cheaply (e.g. matched length); 0 = would draft nothing, nan = no idea."""
        ...

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Draft at most `budget` nodes after `tokens` (prompt and answer so far). No idea: ``EMPTY_DRAFT``."""
        ...

    def observe(self, round: Round) -> None:
        """Learn from a round, whoever drafted it. The session has then seen all committed tokens."""
        ...

    def close(self) -> None:
        """The generation is over."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Long-lived part: weights, shared index.

    Attributes:
        name: its name in arms, e.g. "suffix".
        candidates: how many of the target's best next tokens a row it wants to see in ``Round.candidates``; 0 = none.
        prompt_rows: how many rows at the prompt's end it wants scored besides the last, 0 for most.
        hidden_layers: hidden states of the target it wants to see, as ``Scores.hidden`` numbers them; () for most.
    """

    name: str
    candidates: int
    prompt_rows: int
    hidden_layers: tuple[int, ...]

    def open(self, request: Request) -> DraftSession:
        """Start a generation; the session already knows the prompt's tokens."""
        ...

    def forget(self, scope: str | None = None) -> None:
        """Drop what is shared between requests, of one scope or of all."""
        ...


Options = Mapping[str, object]
