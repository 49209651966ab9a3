"""Suffix matching: copy what followed the longest suffix of the text that occurred before, here or in past outputs.

Law: let s be the longest suffix of prompt + answer that occurred earlier in it. Draft what followed its latest
occurrence; if the text is in a loop, go on round the loop to the full budget. If an output of another generation of
the same scope contains a longer suffix, draft what followed there, up to that output's end.

Source: SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), with three differences. The index is a suffix automaton
(see ``metasd_langchain/automaton.py``), so a suffix of any length is matched. Where several continuations are known
the latest is taken, not the most frequent, which would need counts up all the links (the two were not compared). How
far to draft is left to the bandit, which sees the match length as the hint.

When another is better: ``recycling`` on open chat, where nothing is repeated; ``lookup`` where memory is short.

Options: ``min_match`` (1; shortest match that is drafted from), ``shared`` (True; learn from past outputs),
``max_bytes`` (32 MB; of all past outputs together, the longest unused dropped first), ``name``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from metasd_langchain.automaton import ROOT, SuffixAutomaton, replay
from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import flag, only, text, whole
from metasd_langchain.drafters._scoring import guessed
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

__all__ = ["SuffixDrafter", "create"]

MAX_BYTES = 32 * 2**20
_SEGMENTS = 4  # a segment is closed at a quarter of the bound; more forget in smaller steps and cost time every round
_REACH = 64  # tokens of context matched against an output the session has not met yet
_END = -1  # stands behind every output; no token id, so no match runs across


class _Shelf:
    """Past outputs of one scope, as segments: an automaton cannot delete, but a whole one can be dropped."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.segments: tuple[SuffixAutomaton, ...] = ()  # replaced, never changed: a session may be reading it
        self.forgotten = False


class _Outputs:
    """The shelves of all scopes under one bound. Locked, as ``forget`` may come from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._shelves: weakref.WeakValueDictionary[str, _Shelf] = weakref.WeakValueDictionary()
        self._filled: dict[SuffixAutomaton, _Shelf] = {}  # every segment, the longest untouched first
        self.nbytes = 0

    def __reduce__(self) -> tuple[type[_Outputs], tuple[int]]:
        """What was generated stays in this process: a pickled drafter starts empty."""
        return _Outputs, (self._max_bytes,)

    def shelf(self, scope: str) -> _Shelf:
        """The scope's shelf. It lives as long as a session or a segment needs it."""
        with self._lock:
            shelf = self._shelves.get(scope)
            if shelf is None:
                shelf = self._shelves[scope] = _Shelf(scope)
            return shelf

    def add(self, shelf: _Shelf, tokens: Sequence[int]) -> None:
        """Put an output on its shelf and drop old segments until the bound holds."""
        with self._lock:
            if shelf.forgotten or not tokens:
                return
            segment = shelf.segments[-1] if shelf.segments else None
            if segment is None or segment.nbytes * _SEGMENTS >= self._max_bytes:
                segment = SuffixAutomaton()
                shelf.segments = (*shelf.segments, segment)
            else:
                self._filled.pop(segment)
                self.nbytes -= segment.nbytes
            segment.extend((*tokens, _END))
            self._filled[segment] = shelf
            self.nbytes += segment.nbytes
            while self.nbytes > self._max_bytes:
                self._drop(next(iter(self._filled)))

    def forget(self, scope: str | None) -> None:
        """Drop a scope's outputs, and those of its running generations too when they end."""
        with self._lock:
            for shelf in [s for s in self._shelves.values() if scope is None or s.scope == scope]:
                shelf.forgotten = True
                del self._shelves[shelf.scope]
                for segment in shelf.segments:
                    self._drop(segment)

    def _drop(self, segment: SuffixAutomaton) -> None:
        shelf = self._filled.pop(segment)
        shelf.segments = tuple(kept for kept in shelf.segments if kept is not segment)
        self.nbytes -= segment.nbytes


class _View:
    """Where a session stands in one segment: the longest suffix of its text that the segment contains."""

    def __init__(self, segment: SuffixAutomaton) -> None:
        self.segment = segment
        self._seen = -1
        self._place = (ROOT, 0)

    def follow(self, text: Sequence[int], fresh: Sequence[int]) -> None:
        """Take in the text's `fresh` end; walk a longer stretch again when the segment has grown since."""
        if self._seen != len(self.segment.text):
            self._seen, self._place, fresh = len(self.segment.text), (ROOT, 0), text[-_REACH:]
        if fresh:
            self._place = self.segment.walk(*self._place, fresh)

    def match(self, extra: Sequence[int] = ()) -> tuple[int, int]:
        """Length of the longest suffix that goes on in some past output, and where it goes on."""
        state, length = self.segment.walk(*self._place, extra)
        while length and self.segment.text[self.segment.start(state)] == _END:
            state, length = self.segment.shorter(state)
        return length, self.segment.start(state)


class _SuffixSession:
    def __init__(self, prompt: Sequence[int], min_match: int, outputs: _Outputs | None, shelf: _Shelf | None) -> None:
        self._own = SuffixAutomaton(prompt)
        self._prompt = len(prompt)
        self._min_match = min_match
        self._outputs, self._shelf = outputs, shelf
        self._segments: tuple[SuffixAutomaton, ...] = ()
        self._views: list[_View] = []
        self._behind = 0  # tokens the views have not taken in yet

    def hint(self) -> float:
        """Length of the longest match."""
        own = self._own.match_length
        longest = max([own, *(view.match()[0] for view in self._current_views())])
        return longest if longest >= self._min_match else 0

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Copy the continuation of the longest match; at equal length the own text's."""
        extra = tokens[len(self._own.text) :]
        length, start, source = self._own.match_length, self._own.match_start, tokens
        if extra:
            state, length = self._own.walk(self._own.match_state, length, extra)
            start = self._own.start(state)
        for view in self._current_views():
            found, behind = view.match(extra)
            if found > length:
                length, start, source = found, behind, view.segment.text
        if length < max(1, self._min_match) or budget <= 0:
            return EMPTY_DRAFT
        if source is tokens:
            return Draft.chain(replay(tokens, start, budget))
        block = list(source[start : start + budget])
        return Draft.chain(block[: block.index(_END)] if _END in block else block)

    def score(self, tokens: Sequence[int], start: int) -> list[float]:
        """1 where the guess is the token, else 0."""
        return guessed(self.propose, tokens, start)

    def observe(self, round: Round) -> None:
        """Append the committed tokens."""
        self._own.extend(round.committed)
        self._behind += len(round.committed)

    def close(self) -> None:
        """Hand the output to later generations of the scope."""
        outputs, self._outputs = self._outputs, None
        if outputs is not None and self._shelf is not None:
            outputs.add(self._shelf, self._own.text[self._prompt :])
        self._shelf, self._segments, self._views = None, (), []

    def _current_views(self) -> list[_View]:
        """A view of every segment of the scope, up to date with the text. Lazy: bounded work, only when asked."""
        segments = self._shelf.segments if self._shelf is not None else ()
        if segments is not self._segments:
            known = {id(view.segment): view for view in self._views}
            self._views = [known.get(id(segment)) or _View(segment) for segment in segments]
            self._segments = segments
        fresh = self._own.text[-self._behind :] if self._behind else ()
        for view in self._views:
            view.follow(self._own.text, fresh)
        self._behind = 0
        return self._views


class SuffixDrafter:
    """Holds the past outputs.

    Args:
        min_match: shortest match that is drafted from.
        shared: learn from the outputs of earlier generations of the same scope.
        max_bytes: bound of all past outputs together.
        name: its name in arms.
    """

    candidates = 0
    prompt_rows = 0
    near_free = True
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, *, min_match: int = 1, shared: bool = True, max_bytes: int = MAX_BYTES, name: str = "suffix"
    ) -> None:
        self.name = name
        self._min_match = min_match
        self._outputs = _Outputs(max_bytes) if shared else None

    def open(self, request: Request) -> _SuffixSession:
        """Index the prompt and find the scope's past outputs."""
        shelf = self._outputs.shelf(request.scope) if self._outputs is not None else None
        return _SuffixSession(request.prompt, self._min_match, self._outputs, shelf)

    def forget(self, scope: str | None = None) -> None:
        """Drop past outputs, of one scope or of all."""
        if self._outputs is not None:
            self._outputs.forget(scope)

    @property
    def nbytes(self) -> int:
        """Memory held by past outputs, by an upper estimate."""
        return self._outputs.nbytes if self._outputs is not None else 0


def create(options: Options) -> SuffixDrafter:
    """Build the drafter from options."""
    only(options, ("min_match", "shared", "max_bytes", "name"))
    return SuffixDrafter(
        min_match=whole(options, "min_match", 1, 1, 1024),
        shared=flag(options, "shared", True),
        max_bytes=whole(options, "max_bytes", MAX_BYTES, 0, 2**40),
        name=text(options, "name", "suffix"),
    )
