"""Key/value slots of our own and the attention over packed rows.

transformers lets a model call a registered attention function and hands our context object through its ``**kwargs``.
So the model classes stay transformers', while the engine owns keys, values and masks: a slot holds one row's keys and
values of every layer, rewinding is setting a number, and keeping an accepted path moves O(draft) entries.

On a CPU, slots of a half-precision model hold float32: scores and mixing then run in float32 whatever the width of the
forward (torch's half-precision products are also the slower ones there), at twice the memory per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from metasd_langchain.errors import UnsupportedModel
from metasd_langchain.models.tree import offsets, visible

__all__ = ["IMPLEMENTATION", "PackedRows", "Row", "Slot", "SlotCache"]

IMPLEMENTATION = "metasd"
_UNSERVED = ("s_aux", "sinks", "head_mask", "position_bias", "alibi")  # would change scores; refused, never ignored
_GROW = 256  # tokens a slot grows by at least: few reallocations, little waste
_DIRECT = 80  # up to this many new tokens scores are formed directly; above, scaled_dot_product_attention saves memory


@dataclass(slots=True)
class Slot:
    """One row's keys and values: per layer ``[kv_heads, capacity, head_dim]``; the first `length` entries count."""

    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Row:
    """One row of a packed forward: where its new tokens lie and what they see.

    Attributes:
        slot: its keys and values.
        start, stop: its new tokens in the packed sequence.
        pending: how many of them are committed tokens; the rest is the draft.
        parents: the draft's parents.
    """

    slot: Slot
    start: int
    stop: int
    pending: int
    parents: tuple[int, ...]
    masks: dict[tuple[int | None, torch.device], Tensor | None] = field(default_factory=dict)

    def positions(self) -> list[int]:
        """Absolute positions of the new tokens."""
        return [self.slot.length + offset for offset in offsets(self.pending, self.parents)]

    def lowest(self, window: int | None) -> int:
        """First cached position any new token may see."""
        return 0 if window is None else max(0, self.slot.length - window + 1)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Additive float32 mask ``[n, keys]`` over the visible slice, or None when everything in it is seen."""
        key = window, device  # layers may lie on several devices
        if key not in self.masks:
            self.masks[key] = self._build_mask(window, device)
        return self.masks[key]

    def _build_mask(self, window: int | None, device: torch.device) -> Tensor | None:
        n = self.stop - self.start
        if n == 1:
            return None  # a single token sees the whole slice, which `lowest` already cut to its window
        low, past = self.lowest(window), self.slot.length
        sees = torch.cat([torch.ones(n, past - low, dtype=torch.bool), visible(self.pending, self.parents)], 1)
        if window is not None:
            own = torch.tensor(self.positions())
            keys = torch.cat([torch.arange(low, past), own])
            sees &= keys[None, :] > own[:, None] - window
        return torch.zeros(n, past - low + n).masked_fill_(~sees, -torch.inf).to(device)


class PackedRows:
    """The context of one forward: all rows' new tokens lie one behind the other in a sequence ``[1, total]``.

    Stands in for a transformers cache (which asks it for nothing but lengths) and is what `attend` works on.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(self, cache: SlotCache, rows: Sequence[Row]) -> None:
        self.cache = cache
        self.rows = rows

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values pass through; `attend` stores them."""
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Positions are given explicitly, so the model need not know a length."""
        return 0

    def get_query_offset(self, *args: Any, **kwargs: Any) -> int:
        """See `get_seq_length`."""
        return 0

    def get_mask_sizes(self, query: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Sizes of a mask that is never built."""
        return (query if isinstance(query, int) else len(query)), 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Store the new keys and values, attend row by row.

        Args:
            layer: layer index.
            query: ``[1, heads, total, head_dim]``.
            key, value: ``[1, kv_heads, total, head_dim]``.
            scale: factor on the scores.
            window: keys a query sees, its own included; None = all.
            softcap: scores become ``softcap * tanh(scores / softcap)``.

        Returns:
            ``[1, total, heads, head_dim]`` in the query's dtype.
        """
        parts = []
        for row in self.rows:
            keys, values = self.cache.write(layer, row, key, value)
            low, end = row.lowest(window), row.slot.length + row.stop - row.start
            mask = row.mask(window, query.device)
            part = query[0, :, row.start : row.stop].to(keys.dtype)
            direct = softcap is not None or (keys.device.type == "cpu" and row.stop - row.start <= _DIRECT)
            mix = _direct if direct else _fused
            parts.append(mix(part, keys[:, low:end], values[:, low:end], mask, scale, softcap))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return joined.to(query.dtype).transpose(0, 1).unsqueeze(0)


def _direct(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Softmax attention spelled out: ``[heads, n, head_dim]`` against ``[kv_heads, keys, head_dim]``."""
    heads, n, _ = query.shape
    shared = heads // keys.shape[0]  # query heads that share a key/value head lie side by side: one product serves them
    scores = torch.bmm((query * scale).reshape(keys.shape[0], shared * n, -1), keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(heads, n, -1)
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    mixed = torch.bmm(weights.view(keys.shape[0], shared * n, -1), values)
    return mixed.view(heads, n, values.shape[-1])


def _fused(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """torch's own attention kernel; memory linear in the number of keys."""
    grouped = query.shape[0] != keys.shape[0]
    bias = None if mask is None else mask.to(query.dtype)
    return F.scaled_dot_product_attention(
        query[None], keys[None], values[None], attn_mask=bias, scale=scale, enable_gqa=grouped
    )[0]


class SlotCache:
    """Owner of the slots of one model.

    Args:
        layers: number of layers that attend.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def write(self, layer: int, row: Row, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store a row's new keys and values of a layer behind its slot's length; returns the slot's tensors."""
        slot, end = row.slot, row.slot.length + row.stop - row.start
        if not slot.keys:
            slot.keys = [key.new_empty(0)] * self.layers
            slot.values = [value.new_empty(0)] * self.layers
        if slot.keys[layer].dim() < 3 or slot.keys[layer].shape[1] < end:
            slot.keys[layer] = _grown(slot.keys[layer], key, slot.length, end)
            slot.values[layer] = _grown(slot.values[layer], value, slot.length, end)
        slot.keys[layer][:, slot.length : end] = key[0, :, row.start : row.stop]
        slot.values[layer][:, slot.length : end] = value[0, :, row.start : row.stop]
        return slot.keys[layer], slot.values[layer]

    def keep(self, slot: Slot, pending: int, path: Sequence[int]) -> None:
        """Make the trunk and the accepted path the slot's content; everything else written behind them is dropped.

        Args:
            slot: the row's slot, its length as before the forward.
            pending: committed tokens fed by the forward.
            path: accepted draft nodes, root to leaf.
        """
        base = slot.length + pending
        if any(node != place for place, node in enumerate(path)):
            index = torch.tensor([base + node for node in path])
            places = {tensor.device: index.to(tensor.device) for tensor in slot.keys}
            for tensor in (*slot.keys, *slot.values):
                tensor[:, base : base + len(path)] = tensor[:, places[tensor.device]]
        slot.length = base + len(path)


def _grown(old: Tensor, new: Tensor, length: int, end: int) -> Tensor:
    """A larger copy of a slot's tensor: at least `end` tokens, growing by half so that copying stays amortised."""
    capacity = max(end + _GROW, length + length // 2)
    dtype = torch.float32 if new.device.type == "cpu" and new.dtype in (torch.bfloat16, torch.float16) else new.dtype
    grown = torch.empty(new.shape[1], capacity, new.shape[3], dtype=dtype, device=new.device)
    if length:
        grown[:, :length] = old[:, :length]
    return grown


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function transformers calls in place of its own attention; see ``AttentionInterface``."""
    refused = [name for name in _UNSERVED if kwargs.get(name) is not None]
    if refused:
        raise UnsupportedModel(f"attention with {', '.join(refused)}")
    rows: PackedRows = kwargs["metasd"]
    scale = kwargs.get("scaling")
    if scale is None:
        scale = float(query.shape[-1]) ** -0.5
    window = kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    softcap = kwargs.get("softcap")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return rows.attend(layer, query, key, value, scale, window, softcap), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
