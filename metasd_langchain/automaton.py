"""Where did the end of this text occur before? A suffix automaton that grows one token at a time.

The automaton of a text of n tokens has at most 2n states; each stands for the substrings that end at the same set of
positions, and its *link* leads to the longest suffix that also ends elsewhere. So the longest suffix of the text that
occurred before is the link of the state of the whole text, and comes for free with every appended token
(Blumer et al. 1985). Appending is O(1) amortised.

Two choices keep it small and quick in Python:

- Every state remembers one end position; the token behind it is the state's *first* way on, kept as one integer. Only
  the states that really branch own a dict. About 40 bytes a state instead of 300.
- The latest end position of a state changes with every token for all states up the links. The walk is cut after
  ``_REFRESH`` links, since in repetitive text there are thousands; a state beyond it keeps an older end, which is
  still a true occurrence.

An automaton cannot delete. Bound memory by dropping whole automata (see ``drafters/suffix.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

__all__ = ["ROOT", "SuffixAutomaton", "replay"]

ROOT = 0
_REFRESH = 16
_STATE_BYTES = 5 * 4 + 3  # five arrays of 32-bit integers, with their spare room
_BRANCH_BYTES = 232 + 32 + 100  # a dict of up to five entries, its key object, its slot in the outer dict
_EDGE_BYTES = 105  # two int objects and a slot in a sparse table


class SuffixAutomaton:
    """An online suffix automaton over token ids (32-bit; negative ids may serve as separators).

    Attributes:
        text: all tokens so far.
        match_state: state of the longest suffix of the text that occurred before, ``ROOT`` if none did.
        match_length: its length.
        match_start: position just behind its latest earlier occurrence, where its continuation starts.
    """

    __slots__ = (
        "_edges",
        "_first",
        "_last",
        "_latest",
        "_length",
        "_link",
        "_more",
        "_next",
        "match_length",
        "match_start",
        "match_state",
        "text",
    )

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.text = array("i")
        self._length = array("i", [0])  # longest substring of the state
        self._link = array("i", [-1])
        self._first = array("i", [-1])  # end of its first occurrence; the root "ends" before the text
        self._next = array("i", [-1])  # way on by text[first + 1]
        self._latest = array("i", [-1])  # end of a late occurrence
        self._more: dict[int, dict[int, int]] = {}  # ways on by other tokens
        self._edges = 0  # entries in _more
        self._last = ROOT
        self.match_state = ROOT
        self.match_length = 0
        self.match_start = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        text, link, first, more = self.text, self._link, self._first, self._more
        position, state = len(text), len(link)
        text.append(token)
        self._length.append(position + 1)
        first.append(position)
        self._next.append(-1)
        self._latest.append(position)
        link.append(ROOT)
        # The state of the text so far has the new position behind its first end, so its first way on is the new state.
        self._next[self._last] = state
        source, target = link[self._last], ROOT
        while source >= 0:
            if text[first[source] + 1] == token:
                target = self._next[source]
                break
            branches = more.get(source)
            if branches is None:
                more[source] = {token: state}
            else:
                target = branches.get(token, ROOT)
                if target:
                    break
                branches[token] = state
            self._edges += 1
            source = link[source]
        self._last = state
        if target and self._length[target] != self._length[source] + 1:
            target = self._split(source, token, target)
        link[state] = target
        self._refresh(target, position)

    def _split(self, source: int, token: int, target: int) -> int:
        """Give the substrings of `target` that also end at the new position a state of their own."""
        text, link, first, more = self.text, self._link, self._first, self._more
        clone = len(link)
        self._length.append(self._length[source] + 1)
        link.append(link[target])
        first.append(first[target])
        self._next.append(self._next[target])
        self._latest.append(self._latest[target])
        if target in more:
            more[clone] = dict(more[target])
            self._edges += len(more[clone])
        while source >= 0:
            if text[first[source] + 1] == token:
                if self._next[source] != target:
                    break
                self._next[source] = clone
            else:
                if more[source].get(token) != target:
                    break
                more[source][token] = clone
            source = link[source]
        link[target] = clone
        return clone

    def _refresh(self, state: int, position: int) -> None:
        """Note the match, then mark the suffixes of the text as seen at `position`."""
        latest, link = self._latest, self._link
        self.match_state, self.match_length = state, self._length[state]
        self.match_start = latest[state] + 1
        for _ in range(_REFRESH):
            if state <= ROOT:
                break
            latest[state] = position
            state = link[state]

    def walk(self, state: int, length: int, tokens: Iterable[int]) -> tuple[int, int]:
        """Follow another text: from the match (state, length) of its suffix to that after `tokens`."""
        text, link, first, more, lengths = self.text, self._link, self._first, self._more, self._length
        size = len(text)
        for token in tokens:
            while True:
                behind = first[state] + 1
                if behind < size and text[behind] == token:
                    state, length = self._next[state], length + 1
                    break
                branches = more.get(state)
                target = branches.get(token, ROOT) if branches else ROOT
                if target:
                    state, length = target, length + 1
                    break
                if state == ROOT:
                    length = 0
                    break
                state = link[state]
                length = lengths[state]
        return state, length

    def start(self, state: int) -> int:
        """Position just behind a late occurrence of the state's substrings."""
        return self._latest[state] + 1

    def shorter(self, state: int) -> tuple[int, int]:
        """The next shorter suffix that occurs elsewhere too: its state and length."""
        state = self._link[state]
        return (ROOT, 0) if state <= ROOT else (state, self._length[state])

    @property
    def nbytes(self) -> int:
        """Upper estimate of the memory held."""
        arrays = len(self.text) * 5 + len(self._link) * _STATE_BYTES
        return 1024 + arrays + len(self._more) * _BRANCH_BYTES + self._edges * _EDGE_BYTES


def replay(text: Sequence[int], start: int, budget: int) -> list[int]:
    """Up to `budget` tokens from `start`; a text that ends in a loop is taken to go round again.

    The continuation of a match runs into the end of the text when the match is near. If the text ends with two copies
    of what lies behind `start` it is in a loop, and the loop is drafted to the full budget; else the draft ends there.
    """
    block = list(text[start : start + budget])
    period = len(text) - start
    if 0 < period < budget and period <= start and block == list(text[start - period : start]):
        block = (block * (budget // period + 1))[:budget]
    return block
