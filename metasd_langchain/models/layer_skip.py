"""The target with some attention and feed-forward parts left out, over the same weights and the same keys and values.

A part is left out by giving zeros: what is added to the residual is nothing, also behind a norm. A layer without both
parts is not run at all. Reads the keys and values of a slot below its length and writes behind it only, where the
engine's next forward writes before it reads; so the target's own are never touched, and a part that is left out needs
none. `agreement`, which goes back into the text, works on a copy.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metasd_langchain.errors import UnsupportedModel
from metasd_langchain.models.lm import CausalLM, Feed, Slot
from metasd_langchain.models.shadow import shadow

__all__ = ["SkippingLM"]


class _Part:
    """Stands in for the ``forward`` of an attention or feed-forward module, or of a layer."""

    def __init__(self, forward: Callable[..., Any], passes: bool) -> None:
        self._forward, self._passes = forward, passes
        self._extra: int | None = None  # what it returns besides the states; None: nothing, not even a tuple
        self.seen = False
        self.skipped = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.skipped:
            output = self._forward(*args, **kwargs)
            self._extra = len(output) - 1 if isinstance(output, tuple) else None
            self.seen = True
            return output
        states = args[0] if args else kwargs["hidden_states"]
        states = states if self._passes else torch.zeros_like(states)
        return states if self._extra is None else (states, *[None] * self._extra)


class SkippingLM:
    """Packed forwards with parts left out.

    Args:
        lm: the target's; neither it nor its modules are changed.

    Attributes:
        layers: parts ``2 i`` (attention) and ``2 i + 1`` (feed-forward) belong to layer i.

    Raises:
        UnsupportedModel: layers of another make than attention and feed-forward beside a residual.
    """

    def __init__(self, lm: CausalLM) -> None:
        twin: Any = shadow(lm._twin, False)
        stack: Any = getattr(twin.get_decoder(), "layers", None)
        if not isinstance(stack, nn.ModuleList) or not all(
            hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in stack
        ):
            raise UnsupportedModel(f"{lm.config.model_type}: its layers have no attention and feed-forward part")
        self._whole = [_gate(layer, True) for layer in stack]
        self._parts = [_gate(part, False) for layer in stack for part in (layer.self_attn, layer.mlp)]
        self.layers = len(stack)
        self._lm = copy.copy(lm)  # packs and scores as the target does, with these modules
        self._lm._twin = self._lm._model = twin
        self._lm.score([Feed(Slot(), (0, 0))])
        if not all(part.seen for part in (*self._parts, *self._whole)):
            raise UnsupportedModel(f"{lm.config.model_type}: not every layer runs its attention and feed-forward part")

    def leave_out(self, parts: Iterable[int]) -> None:
        """Choose what is left out from now on."""
        chosen = set(parts)
        for number, part in enumerate(self._parts):
            part.skipped = number in chosen
        for number, layer in enumerate(self._whole):
            layer.skipped = {2 * number, 2 * number + 1} <= chosen

    def step(self, slot: Slot, tokens: Sequence[int]) -> Tensor:
        """Read tokens behind a slot's length, and raise the length; gives the last one's logits ``[vocab]``.

        Args:
            slot: from `scratch`.
            tokens: at least one.
        """
        feed = Feed(slot, tuple(tokens))
        logits = self._lm.score([feed]).logits[-1]
        self._lm.keep(feed)
        return logits

    def seconds(self, slot: Slot, token: int, width: int) -> float:
        """How long a forward of `width` new tokens takes with what is left out now. The slot keeps its length."""
        feed = Feed(scratch(slot), (token,) * width)
        started = time.perf_counter()
        self._lm.score([feed])
        self._lm.synchronize()
        return time.perf_counter() - started

    def agreement(self, slot: Slot, tokens: Sequence[int], count: int) -> float:
        """Share of the last `count` tokens that would be drafted, each after the true ones before it.

        Args:
            slot: the target's keys and values of `tokens` but the last, or more.
            tokens: more than `count`.
        """
        start, stop = len(tokens) - 1 - count, len(tokens) - 1
        copied = Slot(start, [key[:, :stop].clone() for key in slot.keys], [v[:, :stop].clone() for v in slot.values])
        logits = self._lm.score([Feed(copied, tuple(tokens[start:stop]), scored=count)]).logits
        drafted = logits.argmax(-1).cpu()
        return float((drafted == torch.tensor(tokens[start + 1 :])).float().mean())


def scratch(slot: Slot) -> Slot:
    """A slot that shares the tensors of another but has a length of its own."""
    return Slot(slot.length, list(slot.keys), list(slot.values))


def _gate(module: Any, passes: bool) -> _Part:
    part = _Part(partial(type(module).forward, module), passes)
    module.forward = part
    return part
