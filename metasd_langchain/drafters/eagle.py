"""EAGLE: a trained head guesses on from the target's own hidden states.

Law: after every round the head reads the states of the tokens the target has accepted (``models/eagle.py`` says how),
then drafts on from its own features. When decoding greedily a node is the head's most likely token. When sampling it
is ``argmax(log q + noise)`` with the noise the target will use at that position, after the target's filters: an exact
draw from q that the target repeats nearly as often as rejection sampling would accept it. With ``verify="rejection"``
the draft is a chain drawn from q, given with it.

A node is worth the product of the chances, along its path, that the target takes it. A ``chain`` follows the best node
while it is worth at least ``stop``; a ``tree`` expands the best ``width`` nodes of each depth and keeps those that are
worth most (EAGLE-2, Li et al. 2024, arXiv 2406.16858), so that cutting it at any budget leaves the best of that budget.

States of skipped rounds are kept, the last ``window`` of them, and read at once when the head is played again; what it
then drafts is what it would have drafted had it played all the time. Texts longer than the window stay as fast.

When another is better: ``suffix`` where text is repeated; it costs nothing. The head is for text that is new.

Options: ``path`` (folder of a checkpoint, or ``preset/domain`` in the user's cache), ``name`` ("eagle-" and the path's
last part), ``shape`` ("tree" or "chain"), ``width`` (4; nodes expanded, and children of each, in a tree), ``stop``
(0.08; least worth of a node), ``window`` (1024; pairs the head sees), ``device`` ("auto": the target's).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import choice, only, text, whole
from metasd_langchain.errors import BadOption
from metasd_langchain.registry import number
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

if TYPE_CHECKING:
    from torch import Tensor

    from metasd_langchain.models.eagle_step import EagleStep
    from metasd_langchain.models.load import Target

__all__ = ["Eagle", "create"]

_FRESH = 32  # bits of a position; above them counts the draft, so that each draws anew in rejection mode
_DEPTH = 8  # of a tree
_AHEAD = 8  # tokens the target has not read yet (forced by a grammar, the rest of a prompt) that are guessed across


@dataclass(frozen=True, slots=True)
class _Shape:
    width: int
    stop: float


@dataclass(slots=True)
class _Growing:
    """A draft being grown: nodes in the order they were found, so parents come first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, worth: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.worth.append(worth)
        return len(self.tokens) - 1

    def best(self, budget: int) -> Draft:
        """The nodes that are worth most. A parent is worth at least what its children are, so it is among them."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.worth[node], node))
        kept = sorted(order[:budget])
        index = {-1: -1, **{node: place for place, node in enumerate(kept)}}
        return Draft(tuple(self.tokens[node] for node in kept), tuple(index[self.parents[node]] for node in kept))


class _Session:
    """One generation: the states to be read, the head's keys and values, the draft."""

    def __init__(self, step: EagleStep, request: Request, shape: _Shape) -> None:
        from metasd_langchain.models.eagle_step import HeadCache
        from metasd_langchain.models.proposals import Proposer

        self._step, self._shape = step, shape
        self._greedy = request.sampling.greedy
        self._drawn = request.verify == "rejection" and not self._greedy
        size = step.config.target_vocab_size
        self._proposer = Proposer(request.sampling, step.draft_ids, size, exact=self._drawn, spread=step.config.spread)
        self._prompt = len(request.prompt)
        self._cache = HeadCache()
        self._feature: Tensor | None = None
        self._unread: deque[tuple[int, list[Tensor]]] = deque()  # first place in the text, states by layer
        self._rows = 0
        self._drafts = 0
        self._hint = math.nan
        self._asked = False  # in this round
        self._unscored: int | None = None  # first place of the text to be scored; None: nobody asks
        self._features: list[tuple[int, Tensor]] = []  # place of the first token they foretell, features

    def hint(self) -> float:
        """Tokens the head expected to get accepted when it last drafted, if that was in the round before."""
        return self._hint

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Read what is new, then draft."""
        feature = self._read(tokens) if budget > 0 else None
        if feature is None:
            return EMPTY_DRAFT
        self._drafts += 1
        self._asked = True
        position = len(tokens) - self._prompt
        if self._drawn:
            return self._draw(feature, position, budget, draws)
        grown = self._grow(feature, position, budget, draws)
        draft = grown.best(budget)
        self._hint = sum(sorted(grown.worth, reverse=True)[:budget]) or math.nan
        return draft

    scores_late = True

    def score(self, tokens: Sequence[int], start: int) -> list[float]:
        """The head's probability of each token, by the target's states; greedy, whether it would draft the token.

        In a greedy tree the token may be any child that the head gives a parent (HedgeSpec's rule for trees), though
        the budget may leave fewer. Sampled, a tree counts as a chain. Drafting reads the head's own features instead of
        the target's states, so that tokens further ahead look somewhat better than they are; for all heads alike.
        """
        if self._unscored is None:
            self._unscored = start
        found = dict.fromkeys(range(start, len(tokens)), math.nan)
        if found:
            self._catch_up(tokens)
            self._score(tokens, found)
            self._unscored = len(tokens)
        return list(found.values())

    def _score(self, tokens: Sequence[int], found: dict[int, float]) -> None:
        """Fill in what the features that were kept foretell, and keep those of what is still to come."""
        ahead: list[tuple[int, Tensor]] = []
        places: list[int] = []
        rows: list[Tensor] = []
        for first, features in self._features:
            known = [place for place in range(first, first + len(features)) if place in found]
            places += known
            if known:
                rows.append(features[known[0] - first : known[-1] - first + 1])
            if first + len(features) > len(tokens):
                ahead.append((len(tokens), features[len(tokens) - first :]))
        self._features = ahead
        if not places:
            return
        logits = self._step.logits(self._step.joined(rows))
        chances, ranks = self._proposer.probabilities(logits, [tokens[place] for place in places])
        for place, chance, rank in zip(places, chances, ranks, strict=True):
            drafted = rank < self._shape.width and chance >= self._shape.stop
            found[place] = float(drafted) if self._greedy else chance

    def observe(self, round: Round) -> None:
        """Keep the states; they are read when the head is next played."""
        if round.committed:
            self._hint, self._asked = (self._hint if self._asked else math.nan), False
        if not round.hidden:
            return
        states = [round.hidden[layer] for layer in self._step.config.aux_layers]
        self._unread.append((round.hidden_start, states))
        self._rows += len(states[0])
        while self._rows - len(self._unread[0][1][0]) >= self._step.window:
            self._rows -= len(self._unread.popleft()[1][0])

    def close(self) -> None:
        """Let go of states, keys and values."""
        from metasd_langchain.models.eagle_step import HeadCache

        self._unread.clear()
        self._rows = 0
        self._cache, self._feature, self._features = HeadCache(), None, []

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read(self, tokens: Sequence[int]) -> Tensor | None:
        """The feature after the last token; None when nothing is known of the text."""
        step, cache, last = self._step, self._cache, len(tokens) - 1
        self._catch_up(tokens)
        cache.nodes = 0
        feature = self._feature
        if feature is None or not last - _AHEAD <= cache.end <= last:
            return None
        for depth, token in enumerate(tokens[cache.end + 1 :], 1):
            feature = step.guess(cache, [token], feature, depth)
        return feature

    def _catch_up(self, tokens: Sequence[int]) -> None:
        """Read the states that were kept."""
        step, cache = self._step, self._cache
        if not self._unread:
            return
        start = self._unread[0][0]
        if start != cache.end:  # what lies between was dropped: out of every window
            cache.restart(start)
        layers = [step.joined(chunks) for chunks in zip(*(states for _, states in self._unread), strict=True)]
        self._unread.clear()
        self._rows = 0
        count = len(layers[0])
        end = start + count + 1  # the token that the last feature foretells
        keep = 1 if self._unscored is None else min(count, max(1, end - self._unscored + 1))
        features = step.read(cache, tokens[start + 1 : start + 1 + count], layers, keep)
        if self._unscored is not None:
            self._features.append((end - keep + 1, features))
        self._feature = features[-1:]

    # -- drafting ----------------------------------------------------------------------------------------------------

    def _grow(self, feature: Tensor, position: int, budget: int, draws: Draws) -> _Growing:
        """Nodes by depth, the best ones expanded."""
        step, width, stop = self._step, self._shape.width, self._shape.stop
        grown = _Growing()
        forced = self._cache.nodes
        parents, features = [-1], feature
        place: dict[int, int] = {}  # node -> its place among the nodes of the cache
        deepest = budget if width == 1 else min(budget, _DEPTH)
        for depth in range(1, deepest + 1):
            found = []
            ids, chances = self._proposer.likely(step.logits(features), draws, position + depth - 1, width)
            for parent, children, shares in zip(parents, ids, chances, strict=True):
                above = 1.0 if parent < 0 else grown.worth[parent]
                found += [(above * share, parent, token) for token, share in zip(children, shares, strict=True)]
            found = sorted((item for item in found if item[0] >= stop and item[0] > 0.0), key=lambda item: -item[0])
            fresh = [grown.add(token, parent, worth) for worth, parent, token in found]
            frontier = fresh[:width]
            if not frontier or depth == deepest or self._settled(grown, frontier[0], budget):
                break
            rows = [parents.index(grown.parents[node]) for node in frontier]
            features = step.guess(
                self._cache,
                [grown.tokens[node] for node in frontier],
                features[rows],
                forced + depth,
                None if width == 1 else _sees(grown, frontier, place, forced),
            )
            parents = frontier
        return grown

    def _settled(self, grown: _Growing, best: int, budget: int) -> bool:
        """Whether nothing below the best node of this depth can still be among the nodes that are kept."""
        return sum(worth > grown.worth[best] for worth in grown.worth) >= budget

    def _draw(self, feature: Tensor, position: int, budget: int, draws: Draws) -> Draft:
        """A chain drawn from q, with q. Whether to go on never depends on the token that was drawn last."""
        step, chain, rows, worth = self._step, [], [], 1.0
        for depth in range(1, budget + 1):
            # Fresh noise for each draft: what a rejected draft showed of it may have moved the choice of this arm.
            place = position + depth - 1 + (self._drafts << _FRESH)
            drawn = self._proposer.draw(step.logits(feature)[0], draws, place)
            worth *= drawn.confidence
            if worth < self._shape.stop:
                break
            chain.append(drawn.token)
            rows.append(drawn.q)
            if depth < budget:
                feature = step.guess(self._cache, [drawn.token], feature, self._cache.nodes + 1)
        self._hint = math.nan
        return Draft.chain(chain, step.stacked(rows)) if chain else EMPTY_DRAFT


def _sees(grown: _Growing, nodes: Sequence[int], place: dict[int, int], forced: int) -> NDArray[np.bool_]:
    """Which nodes of the cache each of the new ones sees: forced tokens, its ancestors and itself."""
    known = forced + len(place)
    sees = np.zeros((len(nodes), known + len(nodes)), dtype=np.bool_)
    sees[:, :forced] = True
    for row, node in enumerate(nodes):
        sees[row, known + row] = True
        above = grown.parents[node]
        while above >= 0:
            sees[row, place[above]] = True
            above = grown.parents[above]
    place.update({node: known + row for row, node in enumerate(nodes)})
    return sees


class _BoundEagle:
    """A head loaded for a target."""

    candidates = 0
    prompt_rows = 0

    def __init__(self, name: str, step: EagleStep, shape: _Shape) -> None:
        self.name = name
        self.hidden_layers = step.config.aux_layers
        self.hidden_width = step.config.target_hidden_size
        self.hidden_window = step.window
        self.memory_bytes = step.nbytes
        self._step, self._shape = step, shape

    def open(self, request: Request) -> _Session:
        """A generation's keys and values."""
        return _Session(self._step, request, self._shape)

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared between generations but the weights."""


class Eagle:
    """A checkpoint to be played; read when it meets its target.

    Args:
        path: folder of a checkpoint, or ``preset/domain`` in the user's cache.
        name: its name in arms; "" = "eagle-" and the path's last part.
        shape: "tree" or "chain".
        width: of a tree: nodes expanded a depth, and children of each.
        stop: least worth of a drafted node.
        window: pairs of the text that the head sees.
        device: "auto" (the target's), "cpu", "cuda:1" and the like.
    """

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        path: str,
        *,
        name: str = "",
        shape: str = "tree",
        width: int = 4,
        stop: float = 0.08,
        window: int = 1024,
        device: str = "auto",
    ) -> None:
        self.path = str(path)
        self.name = name or f"eagle-{PurePath(self.path.replace('@', '-')).stem}"
        self.device = device
        self.window = window
        self._shape = _Shape(width if shape == "tree" else 1, stop)

    def bind(self, target: Target) -> _BoundEagle:
        """Read the checkpoint for a target.

        Raises:
            LoadError: nothing there.
            BadCheckpoint, IncompatibleVocabulary: see ``load_eagle``.
        """
        from metasd_langchain.models.checkpoints import drafter_path
        from metasd_langchain.models.eagle_step import load_step

        step = load_step(drafter_path(self.path, target.name), target, self.device, self.window)
        return _BoundEagle(self.name, step, self._shape)

    def open(self, request: Request) -> _Session:
        """Raises: a head needs its target; the engine binds it."""
        raise BadOption("drafters", self.name, "a drafter bound to its target: drafter.bind(target)")

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared between generations."""


def create(options: Options) -> Eagle:
    """Build the drafter from options; ``path`` is needed."""
    only(options, ("path", "name", "shape", "width", "stop", "window", "device"))
    path = options.get("path")
    if not isinstance(path, (str, PurePath)) or not str(path):
        raise BadOption("path", path, "the folder of an EAGLE checkpoint, as in 'eagle:PATH@5'")
    return Eagle(
        str(path),
        name=text(options, "name", "") if "name" in options else "",
        shape=choice(options, "shape", ("tree", "chain")),
        width=whole(options, "width", 4, 1, 16),
        stop=number("stop", options.get("stop", 0.08), 0.0, 1.0),
        window=whole(options, "window", 1024, 8, 2**20),
        device=text(options, "device", "auto"),
    )
