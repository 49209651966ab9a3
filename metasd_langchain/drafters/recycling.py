"""Token recycling: the candidates the target weighed and did not take are guesses for the next time.

Law: every scored row, those of rejected nodes included, tells the target's k best next tokens after a token. Keep them
by token; draft by following them. A ``chain`` takes the best candidate again and again until a token is unknown. A
``tree`` grows best first: a node is worth the product of the chances, along its path, that the target chooses it, so
that cutting the tree at any budget leaves the best tree of that budget.

Source: Token Recycling (Luo et al. 2024, arXiv 2408.08696). Ours, with ``context=2`` (default): what is known of the
last *two* tokens is asked first, before the candidates of the last one: what followed the pair in the prompt or
answer, then the target's candidates after the pair. One token says little of what comes next, two say a lot, and the
lookup costs the same. The paper's tree has one shape; ours is narrow where the text has said how it goes on and wide
where only candidates are known.

Measured on 37 Spec-Bench answers of the embedded model (greedy, replayed, geometric mean over six task groups): the
best chain with ``context=1`` is 2.1 times plain decoding (6 nodes), with ``context=2`` 3.2 times (12 nodes; 3.1 with 8,
2.6 with 4); the tree is 1 % better than the chain at 12 nodes, no better below. Scoring the prompt's last 32 rows
gained nothing, so ``prompt_rows`` is 0. At temperature 0.8 (7 answers only) 4 nodes are best: 1.24 times, with
``context=1`` 1.17.

When another is better: ``suffix`` where text is repeated (it sees whole phrases, and costs no top-k on the device).

Options: ``shape`` ("chain" or "tree"), ``k`` (8), ``context`` (2, or 1 as in the paper), ``prompt_rows`` (0; rows at
the prompt's end to learn from), ``shared`` (True; generations of one scope learn from each other), ``max_bytes``
(32 MB, of all shared tables), ``name`` ("recycling", for the tree "recycling_tree").
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, cast

from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import choice, flag, only, text, whole
from metasd_langchain.drafters._scoring import guessed
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

__all__ = ["RecyclingDrafter", "create"]

MAX_BYTES = 32 * 2**20
# How often the target's next token was the candidate of each rank, by where the candidates come from: measured with the
# embedded model on Spec-Bench questions. Only their rough size matters: they shape the tree.
_SAID = (0.80, 0.06, 0.01)  # first what followed the pair in the text, then the target's candidates
_PAIR = (0.50, 0.10, 0.06, 0.04, 0.03, 0.02)
_TOKEN = (0.30, 0.10, 0.05, 0.05, 0.03, 0.02)
_ALONE = (0.60, 0.08, 0.04, 0.03, 0.02, 0.02)  # of the token, when pairs are not kept
_WEAK = (0.26,)
_TABLE_BYTES = 4096  # charged for every scope, so that many empty scopes are bounded too
_NONE = -1  # no token id
_Key = int | tuple[int, int]
_Chances = tuple[float, ...]
# (-worth, parent, rank, worth of the parent, the parent's token, candidates after it, chances of their ranks)
_Branch = tuple[float, int, int, float, int, tuple[int, ...], _Chances]


class _Rows(Protocol):
    """The part of a numpy array that is used."""

    def tolist(self) -> list[list[int]]: ...


class _Table(dict[_Key, tuple[int, ...]]):
    """Token, or pair of tokens, to the target's best next tokens."""


class _Tables:
    """The tables of all scopes under one bound. Locked, as ``forget`` may come from any thread."""

    def __init__(self, max_bytes: int, entry_bytes: int) -> None:
        self._max_bytes, self._entry_bytes = max_bytes, entry_bytes
        self._lock = threading.Lock()
        self._tables: dict[str, _Table] = {}  # the longest unopened first

    def __reduce__(self) -> tuple[type[_Tables], tuple[int, int]]:
        """What was generated stays in this process: a pickled drafter starts empty."""
        return _Tables, (self._max_bytes, self._entry_bytes)

    def table(self, scope: str) -> _Table:
        """The scope's table."""
        with self._lock:
            table = self._tables.pop(scope, None)
            self._tables[scope] = table = _Table() if table is None else table
            return table

    def trim(self) -> None:
        """Drop whole scopes, the longest unopened first; of the last one the oldest entries."""
        with self._lock:
            while self.nbytes > self._max_bytes and len(self._tables) > 1:
                self._tables.pop(next(iter(self._tables))).clear()
            for table in self._tables.values():
                while table and self.nbytes > self._max_bytes:
                    del table[next(iter(table))]

    def forget(self, scope: str | None) -> None:
        """Empty the tables, under running generations too."""
        with self._lock:
            for name in [name for name in self._tables if scope is None or name == scope]:
                self._tables.pop(name).clear()

    @property
    def nbytes(self) -> int:
        """Memory held, by an upper estimate."""
        return sum(_TABLE_BYTES + len(table) * self._entry_bytes for table in self._tables.values())


class _RecyclingSession:
    def __init__(
        self, prompt: Sequence[int], *, k: int, context: int, tree: bool, table: _Table, tables: _Tables | None
    ) -> None:
        self._k, self._context, self._tree = k, context, tree
        self._table, self._tables = table, tables
        self._before = prompt[-2] if len(prompt) > 1 else _NONE
        self._last = prompt[-1] if prompt else _NONE
        # What followed in the text: weak entries, private to the generation. The latest wins.
        self._followed: dict[_Key, int] = dict(pairwise(prompt))
        if context == 2:
            self._followed.update(zip(pairwise(prompt), prompt[2:], strict=False))

    def hint(self) -> float:
        """What is known of the last tokens.

        4 = what followed the pair in the text, 3 = candidates of the pair, 2 = candidates of the token, 1 = what
        followed the token in the text, 0 = nothing.
        """
        if self._context == 2:
            pair = self._before, self._last
            if pair in self._followed:
                return 4
            if pair in self._table:
                return 3
        if self._last in self._table:
            return 2
        return 1 if self._last in self._followed else 0

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Follow the candidates from the last token on."""
        if not tokens or budget <= 0:
            return EMPTY_DRAFT
        before, last = (tokens[-2] if len(tokens) > 1 else _NONE), tokens[-1]
        return self._grow(before, last, budget) if self._tree else self._follow(before, last, budget)

    def _candidates(self, before: int, token: int) -> tuple[tuple[int, ...], _Chances]:
        """What may come after `token`, best first, and the chance of each rank."""
        found, chances = self._table.get(token, ()), (_TOKEN if self._context == 2 else _ALONE)
        if self._context == 2:
            pair = before, token
            if pair in self._table:
                found, chances = self._table[pair], _PAIR
            said = self._followed.get(pair)
            if said is not None:
                return (said, *[other for other in found if other != said]), _SAID
        if not found and token in self._followed:
            return (self._followed[token],), _WEAK
        return found, chances

    def _follow(self, before: int, token: int, budget: int) -> Draft:
        chain: list[int] = []
        while len(chain) < budget:
            found, _ = self._candidates(before, token)
            if not found:
                break
            before, token = token, found[0]
            chain.append(token)
        return Draft.chain(chain)

    def _grow(self, before: int, token: int, budget: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        heap: list[_Branch] = []

        def branch(worth: float, parent: int, before: int, token: int) -> None:
            found, chances = self._candidates(before, token)
            if found:
                heapq.heappush(heap, (-worth * chances[0], parent, 0, worth, token, found, chances))

        branch(1.0, -1, before, token)
        while heap and len(tokens) < budget:
            negated, parent, rank, worth, above, found, chances = heapq.heappop(heap)
            tokens.append(found[rank])
            parents.append(parent)
            branch(-negated, len(tokens) - 1, above, found[rank])
            if rank + 1 < min(len(found), len(chances)):
                heapq.heappush(heap, (-worth * chances[rank + 1], parent, rank + 1, worth, above, found, chances))
        return Draft(tuple(tokens), tuple(parents))

    def score(self, tokens: Sequence[int], start: int) -> list[float]:
        """1 where the best guess is the token, else 0. A tree's other branches do not count."""
        return guessed(self.propose, tokens, start)

    def observe(self, round: Round) -> None:
        """Learn the candidates of every scored row, and what was committed."""
        if round.candidates is not None:
            self._learn(round)
        for token in round.committed:
            self._followed[self._last] = token
            if self._context == 2:
                self._followed[self._before, self._last] = token
            self._before, self._last = self._last, token

    def _learn(self, round: Round) -> None:
        table, k = self._table, self._k
        rows = cast(_Rows, round.candidates).tolist()
        for token, parent, best in zip(round.fed, round.parents, rows, strict=True):
            entry = tuple(best[:k])
            table[token] = entry
            if self._context == 1:
                continue
            if parent >= 0:
                table[round.fed[parent], token] = entry
            elif token == self._last:
                # The first row is mostly the last committed token. In a round that scored the prompt's rows it is not,
                # and the token before it is not known here.
                table[self._before, token] = entry
        if self._tables is not None:
            self._tables.trim()

    def close(self) -> None:
        """Let go of the tables."""
        self._followed = {}
        self._table, self._tables = _Table(), None


class RecyclingDrafter:
    """Holds the shared tables.

    Args:
        shape: "chain" or "tree".
        k: candidates kept a token.
        context: tokens of context candidates are kept by, 1 or 2.
        prompt_rows: rows at the prompt's end to learn from.
        shared: generations of one scope share a table.
        max_bytes: bound of all shared tables together.
        name: its name in arms; "" = by its shape.
    """

    hidden_layers: tuple[int, ...] = ()
    near_free = True

    def __init__(
        self,
        *,
        shape: str = "chain",
        k: int = 8,
        context: int = 2,
        prompt_rows: int = 0,
        shared: bool = True,
        max_bytes: int = MAX_BYTES,
        name: str = "",
    ) -> None:
        self._tree = shape == "tree"
        self.name = name or ("recycling_tree" if self._tree else "recycling")
        self.candidates = k
        self.prompt_rows = prompt_rows
        self._context = context
        # A dict slot, a key of two ints, a tuple of k ints.
        self._tables = _Tables(max_bytes, 105 + 120 + 40 + 40 * k) if shared else None

    def open(self, request: Request) -> _RecyclingSession:
        """Read the prompt's pairs and find the scope's table."""
        table = _Table() if self._tables is None else self._tables.table(request.scope)
        return _RecyclingSession(
            request.prompt, k=self.candidates, context=self._context, tree=self._tree, table=table, tables=self._tables
        )

    def forget(self, scope: str | None = None) -> None:
        """Drop the tables, of one scope or of all."""
        if self._tables is not None:
            self._tables.forget(scope)

    @property
    def nbytes(self) -> int:
        """Memory held by shared tables, by an upper estimate."""
        return self._tables.nbytes if self._tables is not None else 0


def create(options: Options) -> RecyclingDrafter:
    """Build the drafter from options."""
    only(options, ("shape", "k", "context", "prompt_rows", "shared", "max_bytes", "name"))
    shape = choice(options, "shape", ("chain", "tree"))
    return RecyclingDrafter(
        shape=shape,
        k=whole(options, "k", 8, 1, 64),
        context=whole(options, "context", 2, 1, 2),
        prompt_rows=whole(options, "prompt_rows", 0, 0, 4096),
        shared=flag(options, "shared", True),
        max_bytes=whole(options, "max_bytes", MAX_BYTES, 0, 2**40),
        name=text(options, "name", "recycling_tree" if shape == "tree" else "recycling"),
    )
