"""The target drafts for itself with some of its layers' parts left out. Needs no weights and no training.

Law: a chain is drafted by the target's own modules without a set of attention and feed-forward parts, on the target's
own keys and values, each token drawn with the noise the target will use; it ends when the product of the tokens'
chances falls below `confidence`. Which parts are left out is searched on the fly: with a draft, one set is tried on the
last 32 tokens of the text (what share of them would it have drafted?), 48 sets in all; then the best is kept.

It measures what it costs: its draft steps, a plain step, a wider one. When the best set's agreement does not make up
for that, whatever the length of the chain, its hint is 0 (it would draft nothing) for 256 rounds, then for twice as
many, and so on; between, it may try again. On a small target it never pays: there the head, which is never left out,
is a large part of a step.

Source: SWIFT (Xia et al. 2024, arXiv 2410.06916). One search a target, kept for the process; sets hold no
text.

When another is better: an ``eagle`` head costs a twentieth of a step; ``suffix`` and ``recycling`` cost nothing.

Options: ``ratio`` (0.45; share of the parts that is left out), ``confidence`` (0.3), ``seed`` (0; of the search),
``name`` ("layer_skip").
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from metasd_langchain.drafters import Draws, Options
from metasd_langchain.drafters._options import only, text, whole
from metasd_langchain.drafters._skip_search import Costs, Search, speed
from metasd_langchain.errors import BadOption, DrafterError
from metasd_langchain.registry import number
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

if TYPE_CHECKING:
    from torch import Tensor

    from metasd_langchain.models.layer_skip import SkippingLM
    from metasd_langchain.models.lm import Slot
    from metasd_langchain.models.load import Target

__all__ = ["LayerSkipDrafter", "create"]

CONFIDENCE = 0.3
_TRIED_ON = 32  # tokens
_WIDE = 4  # further tokens in the wider forward
_PROMPT = 8  # pending tokens above which a round reads a prompt: nothing is drafted then
_CHECK = 16  # rounds between two looks at whether it pays
_REST, _LONGEST_REST = 256, 8192  # rounds
_FADE = 0.98
_EARLY, _HOPE = 6, 0.25  # sets after which it may be hopeless already; agreement that further ones may add


class _Shared:
    """What all generations of a target share: the search, the costs, whether it pays."""

    def __init__(self, model: SkippingLM, ratio: float, seed: int) -> None:
        self.model, self._ratio, self._seed = model, ratio, seed
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.search, self.costs = Search(self.model.layers, self._ratio, self._seed), Costs()
        self.played = self.search.best()
        self._accepted = self._rejected = 0.0
        self._rounds = self._resting = 0
        self._rest = _REST

    @property
    def rests(self) -> bool:
        """Whether nothing is drafted now."""
        return self._resting > 0

    def count(self) -> None:
        """A round begins."""
        self._resting = max(0, self._resting - 1)

    def explore(self, slot: Slot, tokens: Sequence[int], budget: int) -> None:
        """Try one more set, and see what steps cost now."""
        model, search = self.model, self.search
        model.leave_out(())
        plain, wide = (model.seconds(slot, tokens[-1], width) for width in (1, 1 + _WIDE))
        self.costs.note(plain, wide, _WIDE)
        parts = search.suggest()
        model.leave_out(parts)
        search.learn(parts, model.agreement(slot, tokens, _TRIED_ON))
        self.played = search.best()
        if search.trials >= _EARLY:
            self._judge(min(1.0, search.best_score + (0.0 if search.frozen else _HOPE)), budget)

    def judge(self, drafted: int, accepted: int, budget: int) -> None:
        """A draft was verified."""
        self._accepted = self._accepted * _FADE + accepted
        self._rejected = self._rejected * _FADE + (accepted < drafted)
        self._rounds += 1
        if self.search.frozen and self._rounds % _CHECK == 0:
            self._judge(self._accepted / (self._accepted + self._rejected), budget)

    def _judge(self, agreement: float, budget: int) -> None:
        if self.costs.known and speed(agreement, budget, *self.costs.shares) < 1.0:
            self._resting, self._rest = self._rest, min(_LONGEST_REST, 2 * self._rest)


class _LayerSkipSession:
    def __init__(self, request: Request, shared: _Shared, size: int, confidence: float) -> None:
        from metasd_langchain.models.proposals import Proposer

        self._shared, self._confidence = shared, confidence
        self._prompt, self._stop_ids = len(request.prompt), request.stop_ids
        self._proposer = Proposer(request.sampling, None, size, exact=request.verify == "rejection")
        self._slot: Slot | None = None
        self._drafted: tuple[int, ...] = ()
        self._drafts = 0
        self._budget = 0

    def attach(self, slot: Slot) -> None:
        """The target's keys and values of this answer; see ``engine.sessions``."""
        self._slot = slot

    def hint(self) -> float:
        """No idea; 0 while it rests, or when the prompt is not read yet."""
        self._shared.count()
        return 0 if self._shared.rests or self._slot is None or not self._slot.length else math.nan

    def propose(self, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        """Try a set while the search goes on, then draft a chain."""
        self._drafted = ()
        slot, shared = self._slot, self._shared
        if slot is None or not slot.length or budget <= 0 or len(tokens) - slot.length > _PROMPT:
            return EMPTY_DRAFT
        read = slot.length >= len(tokens) - 1 > _TRIED_ON
        if read and not (shared.search.frozen or shared.rests):
            shared.explore(slot, tokens, budget)
        if shared.rests or not shared.search.size:
            return EMPTY_DRAFT
        draft = self._chain(slot, tokens, budget, draws)
        self._drafted, self._budget = draft.tokens, budget
        return draft

    def _chain(self, slot: Slot, tokens: Sequence[int], budget: int, draws: Draws) -> Draft:
        from metasd_langchain.models.layer_skip import scratch

        model, view = self._shared.model, scratch(slot)
        model.leave_out(self._shared.played)
        position = len(tokens) - self._prompt
        self._drafts += 1
        drafted: list[int] = []
        rows: list[Tensor] = []
        sure, fed = 1.0, list(tokens[slot.length :])
        while True:
            started = time.perf_counter()
            proposal = self._proposer.guess(model.step(view, fed), draws, position + len(drafted), self._drafts)
            if len(fed) == 1:
                self._shared.costs.note_draft(time.perf_counter() - started)
            drafted.append(proposal.token)
            if proposal.q is not None:
                rows.append(proposal.q)
            sure *= proposal.confidence
            if len(drafted) >= budget or sure < self._confidence or proposal.token in self._stop_ids:
                return Draft.chain(drafted, _stacked(rows))
            fed = [proposal.token]

    def observe(self, round: Round) -> None:
        """Count what became of the draft, if it was played."""
        drafted, self._drafted = self._drafted, ()
        if drafted and round.fed[len(round.fed) - len(drafted) :] == drafted:
            self._shared.judge(len(drafted), len(round.path), self._budget)

    def close(self) -> None:
        """Let go of the slot."""
        self._slot = None


def _stacked(rows: list[Tensor]) -> Tensor | None:
    if not rows:
        return None
    import torch

    return torch.stack(rows)


class LayerSkipDrafter:
    """Options only: `bind` returns the drafter that plays.

    Args:
        ratio: share of all attention and feed-forward parts that is left out.
        confidence: drafting ends when the product of the tokens' chances falls below.
        seed: of the search.
        name: its name in arms.
    """

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, *, ratio: float = 0.45, confidence: float = CONFIDENCE, seed: int = 0, name: str = "layer_skip"
    ) -> None:
        if not 0.0 < ratio < 1.0:
            raise BadOption("ratio", ratio, "a number between 0 and 1")
        self.name = name
        self._ratio, self._confidence, self._seed = ratio, confidence, seed

    def bind(self, target: Target) -> _Bound:
        """The drafter over a target's modules.

        Raises:
            UnsupportedModel: its layers are of another make.
        """
        from metasd_langchain.models.layer_skip import SkippingLM

        shared = _Shared(SkippingLM(target.lm), self._ratio, self._seed)
        return _Bound(self.name, shared, target.lm.vocab_size, self._confidence)

    def open(self, request: Request) -> _LayerSkipSession:
        """Not before `bind`.

        Raises:
            DrafterError: always.
        """
        raise DrafterError(f"{self.name} is not bound to a target yet")

    def forget(self, scope: str | None = None) -> None:
        """Nothing is learned before `bind`."""


class _Bound:
    """The drafter over a target."""

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()
    memory_bytes = 0  # the weights are the target's

    def __init__(self, name: str, shared: _Shared, size: int, confidence: float) -> None:
        self.name, self._shared = name, shared
        self._size, self._confidence = size, confidence

    def open(self, request: Request) -> _LayerSkipSession:
        """A session; the engine attaches the answer's slot to it."""
        return _LayerSkipSession(request, self._shared, self._size, self._confidence)

    def forget(self, scope: str | None = None) -> None:
        """Search anew; what a scope said is in no set, so there is nothing to drop for one alone."""
        if scope is None:
            self._shared.reset()


def create(options: Options) -> LayerSkipDrafter:
    """Build the drafter from options."""
    only(options, ("ratio", "confidence", "seed", "name"))
    return LayerSkipDrafter(
        ratio=number("ratio", options.get("ratio", 0.45), 0.0, 1.0),
        confidence=number("confidence", options.get("confidence", CONFIDENCE), 0.0, 1.0),
        seed=whole(options, "seed", 0, 0, 2**31),
        name=text(options, "name", "layer_skip"),
    )
