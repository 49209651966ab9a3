"""An answer's constraint inside a round: forced tokens, illegal nodes, and which tokens each scored row may choose.

Everything asked here is a function of the answer's tokens up to a row, so the constraint cannot tell a drafted token
from one that the target supplied, and neither can the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metasd_langchain.constraints.legal import Legal
from metasd_langchain.values import EMPTY_DRAFT, Draft

if TYPE_CHECKING:
    from metasd_langchain.constraints import ConstraintSession

__all__ = ["Guide", "RowMasks"]

_FORCED = 32  # forced tokens a round may try: more would cost more width than they save forwards
_REFUSALS = 8  # tokens that may prove too long for the room left before the short way is taken


class Guide:
    """The constraint of one answer.

    Args:
        session: what the grammar says.
        vocab: size of the target's vocabulary.
        forces: whether forced tokens are drafted; plain decoding drafts nothing.
    """

    def __init__(self, session: ConstraintSession, vocab: int, *, forces: bool) -> None:
        self._session, self._vocab, self._forces = session, vocab, forces

    def ended(self, answer: Sequence[int]) -> bool:
        """Whether nothing can come any more."""
        return self._session.ended(answer)

    def forced(self, answer: Sequence[int], room: int) -> tuple[int, ...]:
        """At most `room` tokens that the grammar leaves no choice about."""
        return self._session.forced(answer, min(room, _FORCED)) if self._forces else ()

    def hung(self, answer: Sequence[int], forced: tuple[int, ...], draft: Draft, *, prune: bool = True) -> Draft:
        """A draft behind forced tokens, without its illegal nodes.

        Args:
            answer: committed tokens of the answer.
            forced: what `forced` gave.
            draft: what was drafted after answer and forced tokens.
            prune: False leaves illegal nodes where they are: rejection sampling may drop nothing that was drawn.
        """
        if prune and len(draft):
            draft = self._session.pruned([*answer, *forced], draft)
        return draft.behind(forced)

    def masks(self, answer: Sequence[int], draft: Draft = EMPTY_DRAFT) -> RowMasks:
        """What each row of a round may choose from."""
        return RowMasks(self._session, self._vocab, answer, draft)


class RowMasks:
    """Which tokens the rows of one round may choose from, each along its own path. Row 0 follows the last committed
    token, row ``1 + i`` node i.
    """

    def __init__(self, session: ConstraintSession, vocab: int, answer: Sequence[int], draft: Draft) -> None:
        self._session, self._vocab = session, vocab
        self._answer, self._draft = list(answer), draft
        self._legal: dict[int, Legal] = {}
        self._refused: dict[int, int] = {}
        self._closing: set[int] = set()  # rows that have only the short way left

    def legal(self, row: int) -> Legal:
        """Tokens a row may choose from."""
        if row not in self._legal:
            self._legal[row] = self._session.legal(self._before(row))
        return self._legal[row]

    def refuses(self, row: int, token: int) -> bool:
        """Whether a chosen token leaves too little room for the answer's end. The row then has fewer tokens to choose
        from; in the end those on a short way to it.
        """
        answer = self._before(row)
        if self._session.allows(answer, token) or row in self._closing:
            return False
        fewer = self.legal(row).changed(drop=(token,))
        refused = self._refused[row] = self._refused.get(row, 0) + 1
        if not fewer or (refused >= _REFUSALS and fewer.few is None):
            closing = self._session.closing(answer)
            if not closing:  # no way is known: better this token than none
                return False
            fewer = Legal.of(closing, self._vocab)
            self._closing.add(row)
        self._legal[row] = fewer
        return True

    def tight(self, row: int) -> bool:
        """Whether the end is so near that a single token may use up the room it needs."""
        return self._session.tight(self._before(row))

    def keep_fitting(self, row: int, tokens: Sequence[int]) -> None:
        """Of some legal tokens leave those that fit, or the short way to the end."""
        answer = self._before(row)
        legal = self.legal(row)
        fitting = [token for token in tokens if token in legal and self._session.allows(answer, token)]
        kept = fitting or self._session.closing(answer)
        if kept:
            self._legal[row] = Legal.of(kept, self._vocab)

    def _before(self, row: int) -> list[int]:
        """The answer up to a row."""
        path: list[int] = []
        node = row - 1
        while node >= 0:
            path.append(self._draft.tokens[node])
            node = self._draft.parents[node]
        return [*self._answer, *reversed(path)]
