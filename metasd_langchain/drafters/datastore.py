"""Retrieval from a datastore: what followed the text's last tokens in a corpus of your own.

Law: let s be the longest suffix of prompt + answer, up to `max_match` tokens, that occurs in the corpus. The
continuations of up to 64 of its occurrences, evenly spread over all, form a trie; a node is worth the share of them
that pass through it. Draft the budget's most frequent nodes, none rarer than `min_share`.

Source: REST (He et al. 2023, arXiv 2311.08252). Ours: the suffix array is searched in place in a mapped file, by
segments, so neither memory nor start-up grows with the corpus; and the budget, not a fixed tree, prunes the trie.

When it is good: the answers resemble a text you have (your code base, manuals, past tickets). ``suffix`` does the same
with the prompt and past answers, and needs no file.

A datastore is public: every scope drafts from it, so build it from nothing that only some callers may see.

Options: ``path`` (a file that ``metasd datastore build`` wrote; needed), ``min_match`` (2), ``max_match`` (16),
``min_share`` (0.05: a node less likely than that costs more than it brings), ``name`` ("datastore").
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metasd_langchain.corpus import END, Corpus
from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import only, text, whole
from metasd_langchain.drafters._scoring import guessed
from metasd_langchain.errors import BadOption, DrafterError, IncompatibleVocabulary
from metasd_langchain.registry import number
from metasd_langchain.suffix_array import DEPTH, SuffixArray
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

if TYPE_CHECKING:
    from metasd_langchain.models.load import Target

__all__ = ["DatastoreDrafter", "create"]

_OCCURRENCES = 64  # looked at: the share of a continuation is then known to a few percent
_MIN_SHARE = 0.05  # a further node costs some 3 % of a plain step to verify


class _Node:
    """A token of the trie of continuations."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, _Node] = {}


class _Match:
    """Where the longest suffix occurs: its length and, by segment, the rows of the order."""

    def __init__(self, corpus: Corpus, text: Sequence[int], least: int, most: int) -> None:
        self.length = 0
        self._found: list[tuple[SuffixArray, range]] = []
        for segment in corpus.segments:
            length, rows = segment.longest(text, max(least, self.length), most)
            if length > self.length:
                self.length, self._found = length, []
            if length and length == self.length:
                self._found.append((segment, rows))

    def trie(self, depth: int) -> _Node:
        """Continuations of at most `depth` tokens."""
        root = _Node()
        total = sum(len(rows) for _, rows in self._found)
        stride = max(1, -(-total // _OCCURRENCES))
        for segment, rows in self._found:
            for row in rows[::stride]:
                root.count += 1
                node = root
                for token in segment.tokens(segment.place(row) + self.length, depth).tolist():
                    if token == END:
                        break
                    node = node.children.setdefault(token, _Node())
                    node.count += 1
        return root


def _pruned(root: _Node, budget: int, least: float) -> Draft:
    """The most frequent nodes of a trie, parents first; equal ones in the order they were met."""
    tokens: list[int] = []
    parents: list[int] = []
    heap: list[tuple[int, int, int, int, _Node]] = []
    met = 0

    def meet(parent: int, above: _Node) -> None:
        nonlocal met
        for token, node in above.children.items():
            if node.count >= least:
                heapq.heappush(heap, (-node.count, met, parent, token, node))
                met += 1

    meet(-1, root)
    while heap and len(tokens) < budget:
        _, _, parent, token, node = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        meet(len(tokens) - 1, node)
    return Draft(tuple(tokens), tuple(parents))


class _DatastoreSession:
    def __init__(self, prompt: Sequence[int], corpus: Corpus, least: int, most: int, share: float) -> None:
        self._corpus: Corpus | None = corpus
        self._least, self._most, self._share = least, most, share
        self._tail = tuple(prompt[-most:])
        self._known: tuple[tuple[int, ...], _Match] | None = None

    def hint(self) -> float:
        """Length of the longest match."""
        match = self._match(self._tail)
        return 0 if match is None else match.length

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """The most frequent continuations of the longest match."""
        match = self._match(tuple(tokens[-self._most :]))
        if match is None or not match.length or budget <= 0:
            return EMPTY_DRAFT
        root = match.trie(budget)
        return _pruned(root, budget, self._share * root.count)

    def _match(self, tail: tuple[int, ...]) -> _Match | None:
        """Looked up once for the same last tokens: the hint has asked already."""
        if self._corpus is None:
            return None
        if self._known is None or self._known[0] != tail:
            self._known = tail, _Match(self._corpus, tail, self._least, self._most)
        return self._known[1]

    def score(self, tokens: Sequence[int], start: int) -> list[float]:
        """1 where the best guess is the token, else 0. A tree's other branches do not count."""
        return guessed(self.propose, tokens, start)

    def observe(self, round: Round) -> None:
        """Move on."""
        self._tail = (*self._tail, *round.committed)[-self._most :]

    def close(self) -> None:
        """Let go of the file."""
        self._corpus, self._known = None, None


class DatastoreDrafter:
    """Knows the file. Nothing is opened before `bind`, which returns the drafter that plays.

    Args:
        path: the file.
        min_match, max_match: shortest and longest suffix that is looked for, in tokens.
        min_share: least share of the occurrences that a drafted node has.
        name: its name in arms.
    """

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        path: str | Path,
        *,
        min_match: int = 2,
        max_match: int = 16,
        min_share: float = _MIN_SHARE,
        name: str = "datastore",
    ) -> None:
        if not 1 <= min_match <= max_match <= DEPTH:
            raise BadOption("min_match, max_match", (min_match, max_match), f"1 <= min_match <= max_match <= {DEPTH}")
        self.name = name
        self._path, self._limits, self._share = Path(path), (min_match, max_match), min_share

    def bind(self, target: Target) -> _Bound:
        """The drafter for a target: maps the file and sees that it holds the target's token ids.

        Raises:
            BadDatastore: not there, foreign, truncated, of a newer format.
            IncompatibleVocabulary: made with another tokenizer.
        """
        from metasd_langchain.models.vocabulary import fingerprint

        corpus = Corpus(self._path.expanduser())
        if corpus.about["fingerprint"] != fingerprint(target.tokenizer):
            raise IncompatibleVocabulary(
                f"datastore {self._path.name} was built with another tokenizer than the target's",
                hint="build it again with --model and the target's name",
            )
        if corpus.about["highest"] >= target.lm.vocab_size:
            raise IncompatibleVocabulary(f"datastore {self._path.name} holds ids that the target does not have")
        return _Bound(self.name, corpus, *self._limits, self._share)

    def open(self, request: Request) -> _DatastoreSession:
        """Not before `bind`.

        Raises:
            DrafterError: always.
        """
        raise DrafterError(f"{self.name} is not bound to a target yet")

    def forget(self, scope: str | None = None) -> None:
        """Nothing is learned."""


class _Bound:
    """The drafter with its file, checked against a target."""

    candidates = 0
    prompt_rows = 0
    near_free = True
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, corpus: Corpus, least: int, most: int, share: float) -> None:
        self.name, self._corpus = name, corpus
        self._least, self._most, self._share = least, most, share

    def open(self, request: Request) -> _DatastoreSession:
        """A session that stands at the prompt's end."""
        return _DatastoreSession(request.prompt, self._corpus, self._least, self._most, self._share)

    def forget(self, scope: str | None = None) -> None:
        """Nothing is learned."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the file; it is mapped, so only what is looked at takes memory."""
        return self._corpus.nbytes


def create(options: Options) -> DatastoreDrafter:
    """Build the drafter from options."""
    only(options, ("path", "min_match", "max_match", "min_share", "name"))
    path = options.get("path")
    if not isinstance(path, (str, Path)) or not str(path):
        raise BadOption("path", path, "a file that `metasd datastore build` wrote, as in datastore:FILE@16")
    return DatastoreDrafter(
        path,
        min_match=whole(options, "min_match", 2, 1, DEPTH),
        max_match=whole(options, "max_match", 16, 1, DEPTH),
        min_share=number("min_share", options.get("min_share", _MIN_SHARE), 0.0, 1.0),
        name=text(options, "name", "datastore"),
    )
