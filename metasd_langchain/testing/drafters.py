"""Scripted drafters: what a drafter of known quality makes of an engine, without a model.

Each knows the answer the target will give (``answers``) and drafts it right, wrong or half right. None can change an
answer, so an engine's output must be the same under all of them; only the number of rounds differs.

As a ``chain`` a draft is one line. As a ``tree`` every position has one sibling more: for the perfect drafter the
siblings are wrong, so that the right path has to be picked out; for the hostile one all nodes are wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.drafters import Drafter, DraftSession, Draws
from metasd_langchain.errors import BadOption
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

__all__ = ["Answers", "HalfDrafter", "HostileDrafter", "NoDraws", "PerfectDrafter", "RaisingDrafter", "Shape"]

Answers = Mapping[tuple[int, ...], Sequence[int]] | Callable[[tuple[int, ...]], Sequence[int]]
Shape = Literal["chain", "tree"]


class NoDraws:
    """Draws without noise, for calling ``propose`` by hand."""

    def gumbel(self, position: int, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Zero for every token."""
        return np.zeros(len(tokens))


class _Scripted:
    """Common part: knows the answer of each prompt."""

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, answers: Answers, shape: Shape, vocab: int) -> None:
        if shape not in {"chain", "tree"}:
            raise BadOption("shape", shape, "chain or tree")
        if vocab < 2:  # else there is no wrong token
            raise BadOption("vocab", vocab, "at least 2")
        self.name = name
        self._answers, self._shape, self._vocab = answers, shape, vocab

    def open(self, request: Request) -> DraftSession:
        """Look the answer up."""
        known = self._answers
        answer = known(request.prompt) if callable(known) else known.get(request.prompt, ())
        return _ScriptedSession(self, len(request.prompt), tuple(answer))

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared."""

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        """The draft's main line, given what the target will say."""
        raise NotImplementedError

    def wrong(self, token: int) -> int:
        """A token that is not `token`."""
        return (token + 1) % self._vocab

    def draft(self, truth: Sequence[int], budget: int) -> Draft:
        """The line, or with every node of it a wrong sibling before it."""
        if self._shape == "chain":
            return Draft.chain(self.line(truth, budget))
        tokens: list[int] = []
        parents: list[int] = []
        above = -1
        for depth, token in enumerate(self.line(truth, (budget + 1) // 2)):
            right = truth[depth] if depth < len(truth) else token
            siblings = [s for s in range(self._vocab) if s not in {right, token}][:1]
            for node in [*siblings, token][-(budget - len(tokens)) :]:  # the line goes first when one node is left
                tokens.append(node)
                parents.append(above)
            above = len(tokens) - 1
        return Draft(tuple(tokens), tuple(parents))


class _ScriptedSession:
    def __init__(self, drafter: _Scripted, start: int, answer: tuple[int, ...]) -> None:
        self._drafter, self._start, self._answer = drafter, start, answer
        self._seen = 0

    def hint(self) -> float:
        """Tokens of the answer that are left."""
        return max(0, len(self._answer) - self._seen)

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Draft by the script; nothing behind the answer's end."""
        truth = self._answer[len(tokens) - self._start :]
        return self._drafter.draft(truth, budget) if truth and budget > 0 else EMPTY_DRAFT

    def observe(self, round: Round) -> None:
        """Count the committed tokens."""
        self._seen += len(round.committed)

    def close(self) -> None:
        """Nothing to let go."""


class PerfectDrafter(_Scripted):
    """Drafts the answer itself: everything is accepted.

    Args:
        answers: prompt -> tokens of the answer; a mapping, or a function of the prompt.
        shape: "chain", or "tree" with a wrong sibling before every node.
        vocab: ids below it may serve as wrong siblings.
        name: its name in arms.
    """

    def __init__(self, answers: Answers, *, shape: Shape = "chain", vocab: int = 2, name: str = "perfect") -> None:
        super().__init__(name, answers, shape, vocab)

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        """The truth."""
        return list(truth[:budget])


class HostileDrafter(_Scripted):
    """Drafts only tokens that are not the answer's: nothing is accepted.

    Args:
        vocab: size of the vocabulary.
        avoid: prompt -> tokens of the answer.
        shape: "chain", or "tree".
        name: its name in arms.
    """

    def __init__(self, vocab: int, avoid: Answers, *, shape: Shape = "chain", name: str = "hostile") -> None:
        super().__init__(name, avoid, shape, vocab)

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        """The wrong token at every position, to the full budget even where the answer is shorter."""
        return [self.wrong(truth[min(i, len(truth) - 1)]) for i in range(budget)]


class HalfDrafter(_Scripted):
    """Right in the first half of each block, rounded down, and wrong from there: every block ends in a rejection.

    Args:
        answers: prompt -> tokens of the answer.
        vocab: size of the vocabulary.
        shape: "chain", or "tree" (halves the line through the tree).
        name: its name in arms.
    """

    def __init__(self, answers: Answers, vocab: int, *, shape: Shape = "chain", name: str = "half") -> None:
        super().__init__(name, answers, shape, vocab)

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        """Half of the truth, then wrong tokens."""
        block = list(truth[:budget])
        half = len(block) // 2
        return block[:half] + [self.wrong(token) for token in block[half:]]


class RaisingDrafter:
    """Raises ``ValueError("boom")`` in ``propose``, to see that the engine goes on.

    Args:
        at: the call of ``propose`` that raises, counted from 0 in each generation.
        times: how many calls in a row raise from there.
        inner: drafter that is asked in the other calls; None drafts nothing.
        name: its name in arms.
    """

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, at: int = 0, *, times: int = 1, inner: Drafter | None = None, name: str = "raising") -> None:
        self.name = name
        self._at, self._times, self._inner = at, times, inner

    def open(self, request: Request) -> DraftSession:
        """Start counting."""
        inner = self._inner.open(request) if self._inner is not None else None
        return _RaisingSession(range(self._at, self._at + self._times), inner)

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared."""


class _RaisingSession:
    def __init__(self, raises: range, inner: DraftSession | None) -> None:
        self._raises, self._inner = raises, inner
        self._calls = 0

    def hint(self) -> float:
        """The inner drafter's, else no idea."""
        return self._inner.hint() if self._inner is not None else float("nan")

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Raise when its time has come."""
        self._calls += 1
        if self._calls - 1 in self._raises:
            raise ValueError("boom")
        return self._inner.propose(tokens, budget, draws) if self._inner is not None else EMPTY_DRAFT

    def observe(self, round: Round) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.observe(round)

    def close(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.close()
