"""Several drafters as one: their drafts are joined into one tree, so that one forward scores what each of them guessed.

``fused:suffix+recycling_tree@12``: the first drafter's nodes come first; what it leaves of the budget is filled with
the next one's, less what it repeats. So a later drafter stands in where an earlier one has no idea (a fallback), and
backs it up where it has a short one. A tree over drafts of different origin is verified as any other (SpecInfer, Miao
et al. 2024, arXiv 2305.09781, merges trees of several small models alike); the bandit decides whether it pays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metasd_langchain.drafters import Drafter, DraftSession, Draws, Options
from metasd_langchain.drafters._options import only, text
from metasd_langchain.errors import BadOption
from metasd_langchain.registry import resolve
from metasd_langchain.values import Draft, Request, Round

if TYPE_CHECKING:
    from metasd_langchain.models.lm import Slot
    from metasd_langchain.models.load import Target

__all__ = ["Fused", "create", "joined"]

_PACKAGE = "metasd_langchain.drafters"
_WINDOW = 1024


def joined(drafts: Sequence[Draft], budget: int) -> Draft:
    """One tree of at most `budget` nodes: all nodes of the first draft, then what the others add, in their order.

    A distribution that a draft was drawn from is dropped: of a tree over several drafts none is the proposal, and a
    node taken as it is stays exact under either verifier.
    """
    tokens: list[int] = []
    parents: list[int] = []
    places: dict[tuple[int, int], int] = {}  # parent and token -> node
    for draft in drafts:
        mine = {-1: -1}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            above = mine.get(parent)
            if above is None:
                continue  # it hangs on a node that found no room
            place = places.get((above, token))
            if place is None and len(tokens) < budget:
                place = places[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
            if place is not None:
                mine[node] = place
    return Draft(tuple(tokens), tuple(parents))


class _Session:
    def __init__(self, parts: Sequence[DraftSession]) -> None:
        self._parts = parts

    def attach(self, slot: Slot) -> None:
        """Hand the answer's keys and values on to parts that draft with them."""
        for part in self._parts:
            if hasattr(part, "attach"):
                part.attach(slot)

    def hint(self) -> float:
        """Of the first part that would draft; nan when one before it has no idea."""
        return next((hint for hint in (part.hint() for part in self._parts) if math.isnan(hint) or hint > 0), 0.0)

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """The parts in turn, until the budget is full."""
        drafts: list[Draft] = []
        tree = Draft()
        for part in self._parts:
            drafts.append(part.propose(tokens, budget, draws).cut(budget, budget))
            tree = joined(drafts, budget)
            if len(tree) >= budget:
                break
        return tree

    @property
    def scores_late(self) -> bool:
        """As the parts do, which must be alike."""
        return all(getattr(part, "scores_late", False) for part in self._parts)

    def score(self, tokens: Sequence[int], start: int) -> list[float] | None:
        """Of each token the best part's score; None unless all parts score, at one time."""
        if any(getattr(part, "scores_late", False) != self.scores_late for part in self._parts):
            return None
        found: list[list[float]] = []
        for part in self._parts:
            score = getattr(part, "score", None)
            own = None if score is None else score(tokens, start)
            if own is None:
                return None
            found.append(own)
        return [_best(scores) for scores in zip(*found, strict=True)]

    def observe(self, round: Round) -> None:
        """Tell every part."""
        for part in self._parts:
            part.observe(round)

    def close(self) -> None:
        """End every part."""
        for part in self._parts:
            part.close()


def _best(scores: Sequence[float]) -> float:
    return max((score for score in scores if not math.isnan(score)), default=math.nan)


class Fused:
    """Drafters whose drafts are joined.

    Args:
        parts: at least two, the one that is asked first in front.
        name: its name in arms; "" = the parts' names joined by "+".
    """

    def __init__(self, parts: Sequence[Drafter], name: str = "") -> None:
        if len(parts) < 2:
            raise BadOption("parts", tuple(part.name for part in parts), "at least two drafters")
        self.name = name or "+".join(part.name for part in parts)
        self._parts = tuple(parts)
        self.candidates = max(part.candidates for part in parts)
        self.prompt_rows = max(part.prompt_rows for part in parts)
        self.hidden_layers = tuple(sorted({layer for part in parts for layer in part.hidden_layers}))
        wanting = [int(getattr(part, "hidden_window", _WINDOW)) for part in parts if part.hidden_layers]
        self.hidden_window = max(wanting, default=0)
        self.near_free = all(getattr(part, "near_free", False) for part in parts)

    @property
    def memory_bytes(self) -> int:
        """What the parts hold."""
        return sum(int(getattr(part, "memory_bytes", 0)) for part in self._parts)

    def bind(self, target: Target) -> Fused:
        """The same over parts that are ready for the target. Raises what they raise."""
        ready: list[Any] = [part.bind(target) if hasattr(part, "bind") else part for part in self._parts]
        return Fused(ready, self.name)

    def open(self, request: Request) -> _Session:
        """A session of each part."""
        return _Session([part.open(request) for part in self._parts])

    def forget(self, scope: str | None = None) -> None:
        """Drop what the parts have indexed."""
        for part in self._parts:
            part.forget(scope)


def create(options: Options) -> Fused:
    """Build it from options; ``path`` holds the parts: "suffix+recycling_tree", "suffix+eagle:five-domains/math"."""
    only(options, ("path", "name"))
    path = options.get("path", "suffix+recycling_tree")
    if not isinstance(path, str):
        raise BadOption("path", path, "names of drafters joined by +")
    parts: list[Any] = []
    for spec in path.split("+"):
        kind, _, where = spec.partition(":")
        chosen: Mapping[str, object] | None = {"path": where} if where else None
        parts.append(resolve("drafter", kind, _PACKAGE, _PACKAGE, chosen))
    return Fused(parts, text(options, "name", "fused"))
