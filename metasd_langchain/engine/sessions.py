"""The draft sessions of one answer, behind a fence."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from metasd_langchain.drafters import DraftSession
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.pool import Pool
from metasd_langchain.errors import DrafterError
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

if TYPE_CHECKING:
    from metasd_langchain.models.lm import Slot

__all__ = ["Sessions", "agreed"]

logger = logging.getLogger("metasd_langchain")
_COMPARED = 8  # nodes of a draft that are compared: only the first few tokens are telling
_STRIKES = 3  # rounds in a row with a failure, after which a drafter sits out the rest of the answer
_MOST = 1.0 + 1e-4  # a sum of probabilities that are rounded
T = TypeVar("T")


class Sessions:
    """One draft session a drafter. A drafter that raises, or drafts nonsense, costs its draft, never the answer.

    Args:
        request: what is generated.
        pool: whose drafters.
        vocab: ids from 0 to this are the target's; nodes with other ids are dropped.
        slot: the answer's keys and values, for sessions with a method ``attach``: they read what is below its length,
            and may write behind it, where a round's forward writes before anything is read.
    """

    def __init__(self, request: Request, pool: Pool, vocab: int, slot: Slot | None = None) -> None:
        self._vocab = vocab
        self._strikes = dict.fromkeys(pool.drafters, 0)
        self._failed: set[str] = set()  # in this round
        self._silent: set[str] = set()  # failed when last asked to propose, and not asked since
        self._unscored: set[str] = set()  # the same for scoring
        self._near_free = [name for name, drafter in pool.drafters.items() if getattr(drafter, "near_free", False)]
        self._sessions: dict[str, DraftSession] = {}
        for name, drafter in pool.drafters.items():
            try:
                session = self._sessions[name] = drafter.open(request)
                if slot is not None and hasattr(session, "attach"):
                    session.attach(slot)
            except Exception as error:
                self._strike(name, error)
                self._strikes[name] = _STRIKES

    @property
    def benched(self) -> frozenset[str]:
        """Drafters that failed in three rounds in a row."""
        return frozenset(name for name, strikes in self._strikes.items() if strikes >= _STRIKES)

    def hints(self) -> dict[str, float]:
        """Each playing session's hint."""
        return {name: self._guard(name, partial(_hint, session), math.nan) for name, session in self._playing()}

    def propose(self, name: str, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """The named drafter's draft of at most `budget` nodes, none deeper than that; empty when it fails."""
        try:
            draft = self._legal(name, self._sessions[name].propose(tokens, budget, draws)).cut(budget, budget)
        except Exception as error:
            self._silent.add(name)
            self._strike(name, error)
            return EMPTY_DRAFT
        self._silent.discard(name)
        return draft

    def compared(self, tokens: Sequence[int], room: int, draws: Draws) -> dict[str, int]:
        """Near-free drafter -> how many tokens of its draft, from the first on, another one of them drafts, too.

        One that has no idea is left out: it neither seconds nor objects. Nothing is said where only one has an idea.
        """
        budget = min(room, _COMPARED)
        asked = [name for name in self._near_free if self._strikes[name] < _STRIKES]
        if len(asked) < 2:
            return {}
        drafts = {name: self.propose(name, tokens, budget, draws) for name in asked}
        return agreed({name: draft for name, draft in drafts.items() if draft})

    def scoring(self, tokens: Sequence[int]) -> dict[str, bool]:
        """Drafters that can score committed tokens, and whether they do so after they observed them.

        Args:
            tokens: of the prompt.
        """
        found: dict[str, bool] = {}
        for name, session in self._playing():
            if self.score(name, tokens, len(tokens)) is not None:
                found[name] = bool(getattr(session, "scores_late", False))
        return found

    def score(self, name: str, tokens: Sequence[int], start: int) -> list[float] | None:
        """The named drafter's probability of each of ``tokens[start:]``; None when it cannot, fails or is benched."""
        ask = getattr(self._sessions.get(name), "score", None)
        if ask is None or self._strikes[name] >= _STRIKES:
            return None
        try:
            found = ask(tokens, start)
            scores = None if found is None else [float(score) for score in found]
            if scores is not None:
                _check_scores(scores, len(tokens) - start)
        except Exception as error:
            self._unscored.add(name)
            self._strike(name, error)
            return None
        self._unscored.discard(name)
        return scores

    def observe(self, round: Round) -> None:
        """Tell every playing session; ends the round."""
        for name, session in self._playing():
            self._guard(name, partial(session.observe, round), None)
            if name not in self._failed | self._silent | self._unscored:
                self._strikes[name] = 0
        self._failed.clear()

    def close(self) -> None:
        """End every session, benched ones too."""
        for name, session in self._sessions.items():
            self._guard(name, session.close, None)
        self._sessions.clear()

    def _playing(self) -> list[tuple[str, DraftSession]]:
        return [item for item in self._sessions.items() if self._strikes[item[0]] < _STRIKES]

    def _guard(self, name: str, call: Callable[[], T], fallback: T) -> T:
        try:
            return call()
        except Exception as error:
            self._strike(name, error)
            return fallback

    def _strike(self, name: str, error: Exception) -> None:
        if name in self._failed:
            return
        self._failed.add(name)
        self._strikes[name] += 1
        # Only the error's class: its message may quote the prompt.
        logger.warning("drafter %s failed (%s); the answer goes on without it", name, type(error).__name__)

    def _legal(self, name: str, draft: Draft) -> Draft:
        """The draft without ids outside the vocabulary, nor what hangs on them."""
        tokens = [operator.index(token) for token in draft.tokens]
        if draft.q is not None and tuple(draft.q.shape) != (len(tokens), self._vocab):
            raise DrafterError(f"q has shape {tuple(draft.q.shape)}, not {(len(tokens), self._vocab)}")
        if all(0 <= token < self._vocab for token in tokens):
            return draft
        logger.warning("drafter %s drafted an id outside the vocabulary; dropped", name)
        index = {-1: -1}
        kept: list[int] = []
        for node, (token, parent) in enumerate(zip(tokens, draft.parents, strict=True)):
            if 0 <= token < self._vocab and parent in index:
                index[node] = len(kept)
                kept.append(node)
        q = None if draft.q is None else draft.q[kept]
        return Draft(tuple(tokens[i] for i in kept), tuple(index[draft.parents[i]] for i in kept), q)


def agreed(drafts: Mapping[str, Draft]) -> dict[str, int]:
    """Name -> length of the longest path from the root that its tree shares with another one's; {} for a single tree.

    Args:
        drafts: trees, none empty.
    """
    if len(drafts) < 2:
        return {}
    paths = {name: _paths(draft) for name, draft in drafts.items()}
    return {
        name: max(
            (len(path) for path in own if any(path in paths[other] for other in paths if other != name)), default=0
        )
        for name, own in paths.items()
    }


def _paths(draft: Draft) -> set[tuple[int, ...]]:
    """Tokens from the root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*found[parent], token) if parent >= 0 else (token,))
    return set(found)


def _check_scores(scores: Sequence[float], expected: int) -> None:
    if len(scores) != expected:
        raise DrafterError(f"{len(scores)} scores for {expected} tokens")
    if any(not (math.isnan(score) or 0.0 <= score <= _MOST) for score in scores):
        raise DrafterError("a score is no probability")


def _hint(session: DraftSession) -> float:
    return float(session.hint())
