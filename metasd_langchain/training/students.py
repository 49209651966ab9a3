"""What can be trained on teacher data: an EAGLE head and a small language model, behind one face.

The teacher's distribution over the draft vocabulary is its last hidden state times the output layer's rows. The loss is
the cross entropy with it (soft labels), which is its divergence up to a constant. The measure is the chance that a
proposal is kept: ``sum(min(p, q)) = 1 - TV(p, q)`` at the data's temperature, with p over the whole vocabulary; greedy,
whether the likeliest tokens agree. Both are taken at every step ahead for a head, which reads its own features there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metasd_langchain.bandits.rewards import expected_length
from metasd_langchain.models.draft_lm import DraftLM, DraftLMConfig
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import save_eagle
from metasd_langchain.models.vocabulary import DraftVocabulary
from metasd_langchain.training.batches import Batch
from metasd_langchain.training.calibration import Spread, shared_noise

__all__ = ["AHEAD", "EagleStudent", "SmallLMStudent", "Student", "Tally"]

AHEAD = 4  # steps ahead that are measured
_CALIBRATED = 256  # positions of a batch that chances are fitted to
_BETA, _DISTANCE = 0.5, 10.0  # of the regression: where it turns linear, and its size beside the cross entropy
_DECAY = 0.8  # weight of each further step in the loss, as in EAGLE-3


class Student(Protocol):
    """A module and how it is compared with the teacher."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """Mean over positions, a scalar."""
        ...

    def tally(self, batch: Batch) -> Tally:
        """How often its proposals would be kept."""
        ...

    def calibrate(self, held_out: Iterable[Batch]) -> None:
        """Learn how far its chances are to be trusted; after training."""
        ...

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """Write what a drafter loads."""
        ...


@dataclass(slots=True)
class Tally:
    """Sums over positions, by step ahead.

    Attributes:
        kept: sum of ``sum(min(p, q))`` where answers were drawn.
        drawn: positions of those.
        agreed: positions whose likeliest token is the teacher's, where answers are greedy.
        greedy: positions of those.
    """

    kept: Tensor
    drawn: Tensor
    agreed: Tensor
    greedy: Tensor

    @classmethod
    def empty(cls) -> Tally:
        """Nothing counted."""
        return cls(*(torch.zeros(AHEAD, dtype=torch.float64) for _ in range(4)))

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.kept + other.kept, self.drawn + other.drawn, self.agreed + other.agreed, self.greedy + other.greedy
        )

    def figures(self) -> dict[str, Any]:
        """Acceptance by step, and the tokens of a round that drafts AHEAD tokens: ``1 + a1 + a1 a2 + ...``."""
        kept = (self.kept / self.drawn.clamp_min(1.0)).tolist()
        agreed = (self.agreed / self.greedy.clamp_min(1.0)).tolist()
        return {
            "acceptance_t08": [round(value, 4) for value in kept],
            "acceptance_greedy": [round(value, 4) for value in agreed],
            "tokens_per_round_t08": round(expected_length(kept), 4),
            "tokens_per_round_greedy": round(expected_length(agreed), 4),
        }


class _Distilled:
    """What both kinds share.

    Args:
        rows: ``[draft_vocab, hidden]``, the target's output layer for the draft vocabulary.
        draft_ids: ``[draft_vocab]`` target ids, ascending.
        softcap: of the target's logits, where it has one.
        prompt_weight: of positions in prompts, which nobody drafts at but which teach, too.
        half: compute products in bfloat16.
    """

    def __init__(
        self, rows: Tensor, draft_ids: Tensor, softcap: float | None, prompt_weight: float, half: bool
    ) -> None:
        self.draft_ids = draft_ids
        self._rows, self._softcap, self._prompt_weight, self._half = rows, softcap, prompt_weight, half
        self._width = rows.shape[1]

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._half)

    def _teacher(self, states: Tensor) -> Tensor:
        """Logits of the draft vocabulary, float32 ``[positions, draft_vocab]``."""
        last = states[:, -self._width :]
        logits = (last.to(self._rows.dtype) @ self._rows.T).float()
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _weights(self, batch: Batch) -> Tensor:
        """Of each position in the loss, ``[rows, n]``."""
        return batch.answer.float() + self._prompt_weight * (batch.real & ~batch.answer).float()

    def _distilled(self, teacher: Tensor, own: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """Cross entropy with the teacher, later steps ahead counting less.

        Args:
            teacher: its logits.
            own: logits of each step, ``[positions, draft_vocab]``.
            weights: of the positions in each step, ``[positions]``.
        """
        goal = teacher.softmax(-1)
        total = torch.zeros(())
        for step, (logits, weight) in enumerate(zip(own, weights, strict=True)):
            entropy = -(goal * logits.float().log_softmax(-1)).sum(-1)
            total = total + _DECAY**step * (entropy * weight).sum() / weight.sum().clamp_min(1e-6)
        return total

    def _compared(
        self, teacher: Tensor, own: Sequence[Tensor], batch: Batch, chosen: Tensor, usable: Sequence[Tensor]
    ) -> Tally:
        """Tally of chosen positions of a batch.

        Args:
            teacher: its logits.
            own: logits of each step.
            batch: where the positions are from.
            chosen: int64 ``[positions, 2]``: row, and index of the position at which the teacher speaks.
            usable: of each step, which positions mean something.
        """
        tally = Tally.empty()
        rows, places = chosen[:, 0], chosen[:, 1]
        normaliser = batch.normalisers[rows, places]
        known = ~normaliser.isnan()
        greedy = batch.greedy[rows]
        temperature = torch.where(greedy, 1.0, batch.temperatures[rows])[:, None]
        mass = (teacher / temperature - normaliser[:, None]).exp().nan_to_num()
        following = batch.tokens[rows, (places + 1).clamp_max(batch.tokens.shape[1] - 1)]
        read = (places + 1 < batch.tokens.shape[1]) & batch.real[rows, (places + 1).clamp_max(batch.real.shape[1] - 1)]
        for step, logits in enumerate(own):
            drawn = known & ~greedy & usable[step]
            kept = torch.minimum(mass, (logits.float() / temperature).softmax(-1)).sum(-1)
            tally.kept[step], tally.drawn[step] = kept[drawn].sum().double(), drawn.sum().double()
            counted = greedy & read & usable[step]
            same = self.draft_ids[logits.argmax(-1)] == following
            tally.agreed[step], tally.greedy[step] = same[counted].sum().double(), counted.sum().double()
        return tally


class EagleStudent(_Distilled):
    """An EAGLE head, unrolled over its own features in training (EAGLE-3's training-time test).

    Args:
        config: its shape; `draft_vocab_size` must fit `draft_ids`.
        parts: of the target.
        draft_ids: as in `_Distilled`.
        layers: which hidden states the data hold, in order; the head's are among them.
        unroll: steps ahead that are trained.
        regression: weight of the distance between the normed feature and the target's last state, which EAGLE-1 trains
            on: with few data it teaches more than token probabilities alone.
        scale: root mean square of the target's last states, or None when not known; the start is scaled by it.
        seed: of the start.
        softcap, prompt_weight, half: as in `_Distilled`.
    """

    def __init__(
        self,
        config: EagleConfig,
        parts: TargetParts,
        draft_ids: Tensor,
        *,
        layers: Sequence[int],
        unroll: int = 2,
        regression: float = 1.0,
        scale: float | None = None,
        seed: int = 0,
        softcap: float | None = None,
        prompt_weight: float = 0.1,
        half: bool = True,
    ) -> None:
        rows = parts.head[draft_ids.to(parts.head.device)].cpu()
        super().__init__(rows, draft_ids, softcap, prompt_weight, half)
        self.module = EagleHead.initialised(config, parts, draft_ids, seed=seed)
        self._unroll, self._scale = unroll, scale or 1.0
        same = config.version == "eagle3" and config.hidden_size == parts.hidden_size
        self._regression = regression if same and scale else 0.0
        if same and scale:
            _begin(self.module, scale, seed)
        width = parts.hidden_size
        places = [list(layers).index(layer) for layer in config.aux_layers]
        wanted = [column for place in places for column in range(place * width, (place + 1) * width)]
        self._columns = None if len(wanted) == len(layers) * width else torch.tensor(wanted)

    def loss(self, batch: Batch) -> Tensor:
        """See Student."""
        weights = self._weights(batch)[:, 1:]  # index i: the teacher speaks after token i + 1
        chosen = weights.nonzero()
        teacher, own, at, features = self._both(batch, chosen, self._unroll)
        weight = weights[chosen[:, 0], chosen[:, 1]]
        by_step = [weight * (at >= step) for step in range(self._unroll)]
        total = self._distilled(teacher, own, by_step)
        if self._regression:
            goal = batch.hidden[chosen[:, 0], at + 1][:, -self._width :]
            total = total + self._regression * self._distance(features, goal, by_step)
        return total

    def _distance(self, features: Sequence[Tensor], goal: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Smooth L1 between normed features and the target's last states, in units of their size."""
        total = torch.zeros(())
        for step, (feature, weight) in enumerate(zip(features, weights, strict=True)):
            normed = self.module.norm(feature.float()) / self._scale
            far = F.smooth_l1_loss(normed, goal.float() / self._scale, reduction="none", beta=_BETA).mean(-1)
            total = total + _DECAY**step * (far * weight).sum() / weight.sum().clamp_min(1e-6)
        return _DISTANCE * total

    def tally(self, batch: Batch) -> Tally:
        """See Student."""
        with torch.no_grad():
            chosen = batch.answer[:, 1:].nonzero()
            teacher, own, at, _ = self._both(batch, chosen, AHEAD)
            places = torch.stack([chosen[:, 0], chosen[:, 1] + 1], 1)
            return self._compared(teacher, own, batch, places, [at >= step for step in range(AHEAD)])

    def calibrate(self, held_out: Iterable[Batch]) -> None:
        """See Student: every step ahead counts, as it does in a tree."""
        noise = torch.Generator().manual_seed(0)
        greedy, drawn = Spread(), Spread()
        for batch in held_out:
            with torch.no_grad():
                chosen = batch.answer[:, 1:].nonzero()[:_CALIBRATED]
                teacher, own, at, _ = self._both(batch, chosen, AHEAD)
            rows, places = chosen[:, 0], at + 1
            follows = (places + 1).clamp_max(batch.tokens.shape[1] - 1)
            following = batch.tokens[rows, follows]
            real = batch.real[rows, follows] & (places + 1 < batch.tokens.shape[1])
            normaliser = batch.normalisers[rows, places]
            for step, logits in enumerate(own):
                use = batch.greedy[rows] & real & (at >= step)
                greedy.add(logits[use].float(), self._columns_of(following[use]))
                use = ~batch.greedy[rows] & ~normaliser.isnan() & (at >= step)
                heat = batch.temperatures[rows[use]][:, None]
                goal = teacher[use] / heat - normaliser[use][:, None]
                drawn.add(*shared_noise(goal, (logits[use].float() / heat).log_softmax(-1), noise))
        self.module.config = replace(self.module.config, spread=(greedy.value, drawn.value))

    def _columns_of(self, ids: Tensor) -> Tensor:
        """Draft ids of target ids, -1 where there is none."""
        places = torch.searchsorted(self.draft_ids, ids).clamp_max(len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[places] == ids, places, -1)

    def _both(self, batch: Batch, chosen: Tensor, steps: int) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
        """At chosen pairs the teacher's logits and the head's of each step, the pairs' indices, and features."""
        rows, at = chosen[:, 0], chosen[:, 1]
        with torch.no_grad():
            teacher = self._teacher(batch.hidden[rows, at + 1])
        inputs = batch.hidden if self._columns is None else batch.hidden[..., self._columns]
        with self._autocast():
            features = [feature[rows, at] for feature in self.module(batch.tokens, inputs, steps)]
            own = [self.module.logits(feature) for feature in features]
        return teacher, own, at, features

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Student."""
        save_eagle(self.module, folder, **notes)


def _begin(head: EagleHead, scale: float, seed: int) -> None:
    """Start a head so that its logits have the size of the target's, whatever the size of its states.

    The final norm multiplies by the size of the target's last states, to which its output rows are used; what is fused
    has size one.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head.norm.weight.fill_(scale)
        head.fc.weight.normal_(0.0, head.fc.weight.shape[1] ** -0.5 / scale)
        layer: Any = head.layers[0]
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.reset_parameters()


class SmallLMStudent(_Distilled):
    """An independent small language model over the draft vocabulary.

    Args:
        config: its shape.
        parts: of the target.
        draft_ids: as in `_Distilled`.
        fingerprint: of the target's tokenizer.
        seed: of the start.
        softcap, prompt_weight, half: as in `_Distilled`. Prompts teach such a model as much as answers.
    """

    def __init__(
        self,
        config: DraftLMConfig,
        parts: TargetParts,
        draft_ids: Tensor,
        *,
        fingerprint: str = "",
        seed: int = 0,
        softcap: float | None = None,
        prompt_weight: float = 1.0,
        half: bool = True,
    ) -> None:
        rows = parts.head[draft_ids.to(parts.head.device)].cpu()
        super().__init__(rows, draft_ids, softcap, prompt_weight, half)
        vocabulary = DraftVocabulary(draft_ids.tolist(), parts.vocab_size, fingerprint)
        self.module = DraftLM.fresh(vocabulary, config, embedding=parts.embedding, seed=seed)

    def loss(self, batch: Batch) -> Tensor:
        """See Student."""
        weights = self._weights(batch)
        chosen = weights.nonzero()
        teacher, own = self._both(batch, chosen)
        return self._distilled(teacher, [own], [weights[chosen[:, 0], chosen[:, 1]]])

    def tally(self, batch: Batch) -> Tally:
        """See Student. Every step ahead is alike: it reads tokens only."""
        with torch.no_grad():
            chosen = batch.answer.nonzero()
            teacher, own = self._both(batch, chosen)
            everywhere = torch.ones(len(chosen), dtype=torch.bool)
            return self._compared(teacher, [own] * AHEAD, batch, chosen, [everywhere] * AHEAD)

    def _both(self, batch: Batch, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows, places = chosen[:, 0], chosen[:, 1]
        with torch.no_grad():
            teacher = self._teacher(batch.hidden[rows, places])
        with self._autocast():
            return teacher, self.module(batch.tokens)[rows, places]

    def calibrate(self, held_out: Iterable[Batch]) -> None:
        """See Student. Its format has no place for it."""

    def save(self, folder: Path, notes: dict[str, Any]) -> None:
        """See Student. Notes go into the recipe beside it."""
        self.module.save(folder)
