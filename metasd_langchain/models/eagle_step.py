"""An EAGLE head laid out for drafting: few operations a token, keys and values of its own, windowed.

The mathematics is ``EagleHead.forward``'s. Differences are of form: queries, keys and values are one product, and so
are the MLP's two inputs; bfloat16 products on a CPU are laid out for oneDNN once; rotary pairs lie side by side, so
that rotating is one complex product; sums and attention are float32.

Keys and values of a pair depend on that pair alone (there is one layer), not on what the head attended to. So pairs
that were skipped, because another drafter played, are caught up by one product over all of them, and the result is
what reading everything from the start would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from metasd_langchain.errors import BadOption
from metasd_langchain.models.eagle import ACTIVATIONS, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import load_eagle
from metasd_langchain.models.packed_linear import PackedLinear, native_bfloat16

if TYPE_CHECKING:
    from metasd_langchain.models.load import Target

__all__ = ["EagleStep", "HeadCache", "load_step"]

_GROW = 256


class HeadCache:
    """Keys and values of one generation: of the last pairs read, then of drafted nodes.

    Attributes:
        end: number of pairs of the text that were read, dropped ones included; also the next pair's position.
        length: pairs that are kept.
        nodes: drafted nodes behind them.
    """

    def __init__(self) -> None:
        self.end = 0
        self.length = 0
        self.nodes = 0
        self.keys = torch.empty(0)
        self.values = torch.empty(0)

    def restart(self, position: int) -> None:
        """Forget everything; the next pair to be read lies at `position`."""
        self.end, self.length, self.nodes = position, 0, 0

    def write(self, keys: Tensor, values: Tensor, window: int) -> None:
        """Store new entries ``[kv_heads, n, head_dim]`` behind those that count; old ones beyond the window go."""
        used, n = self.length + self.nodes, keys.shape[1]
        if self.keys.dim() < 3 or self.keys.shape[1] < used + n:
            if self.length > window and not self.nodes:
                self._drop(self.length - window)
                used = self.length
            self._grow(keys, used + n + _GROW // 4)  # room for more, else every round would drop a few
        self.keys[:, used : used + n] = keys
        self.values[:, used : used + n] = values

    def _drop(self, count: int) -> None:
        for tensor in (self.keys, self.values):
            tensor[:, : self.length - count] = tensor[:, count : self.length].clone()
        self.length -= count

    def _grow(self, like: Tensor, end: int) -> None:
        if self.keys.dim() == 3 and self.keys.shape[1] >= end:
            return
        used = self.length + self.nodes
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = torch.empty(like.shape[0], end + _GROW, like.shape[2], dtype=torch.float32, device=like.device)
            if used:
                new[:, :used] = old[:, :used]
            setattr(self, name, new)


class EagleStep:
    """A head ready to draft. One thread at a time.

    Args:
        head: as loaded or trained; its weights are copied.
        dtype: of the products: the target's.
        device: where it runs.
        output: ``[vocab, hidden]`` the target's output rows, for a head without ``lm_head``.
        window: pairs a query sees, its own included.
    """

    def __init__(
        self,
        head: EagleHead,
        dtype: torch.dtype,
        device: torch.device,
        output: Tensor | None = None,
        window: int = 1024,
    ) -> None:
        config = head.config
        self.config, self.window, self.device = config, window, device
        self._dtype = dtype
        layer: Any = head.layers[0]
        attention = layer.self_attn
        pairs = _interleaving(config.head_dim)
        q, k = (_interleaved(part, pairs, config.head_dim) for part in (attention.q_proj, attention.k_proj))
        v = attention.v_proj
        self._qkv = self._linear(torch.cat([q[0], k[0], v.weight]), _joined([q[1], k[1], v.bias]))
        self._o = self._linear(attention.o_proj.weight)
        self._gate_up = self._linear(torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        self._down = self._linear(layer.mlp.down_proj.weight)
        self._fc = self._linear(head.fc.weight, head.fc.bias)
        self._join = self._linear(head.join.weight) if config.join_residual else None
        rows = head.lm_head.weight if head.lm_head is not None else output
        if rows is None:
            raise ValueError("a head without output rows needs the target's")
        self._output = self._linear(rows)
        self._norms = {
            name: self._float(module.weight)
            for name, module in (*layer.named_modules(), *head.named_children())
            if isinstance(module, nn.RMSNorm)
        }
        if config.qk_norm:
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                self._norms[name] = self._norms[name][pairs.to(device)]
        shared: Any = head.shared_embedding
        own = head.embed_tokens
        self._embedding = shared.tensor if own is None else own.weight.detach().to(device, dtype)
        self._activation = ACTIVATIONS[config.activation]
        self._frequencies = head.frequencies.to(device)
        self._turns = torch.empty(0)
        self._ids = head.draft_ids.cpu().numpy()
        own_bytes = 0 if own is None else self._embedding.nbytes
        shared_rows = rows.numel() if head.lm_head is None else 0
        numbers = sum(parameter.numel() for parameter in head.parameters()) + shared_rows
        self.nbytes = own_bytes + (numbers - (0 if own is None else own.weight.numel())) * dtype.itemsize

    @property
    def draft_ids(self) -> NDArray[np.int64]:
        """Target ids of the draft vocabulary, ``[draft_vocab]``."""
        return self._ids

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, cache: HeadCache, tokens: Sequence[int], hidden: Sequence[Tensor], keep: int = 1) -> Tensor:
        """Read n pairs of the text that follow what the cache has read.

        Args:
            cache: of the generation; drafted nodes in it are dropped.
            tokens: n ids, each the token *after* the state it is paired with.
            hidden: the states by layer, each ``[n, target_hidden]``.
            keep: of how many pairs, from the end, the feature is wanted; 1 to n.

        Returns:
            Their features, float32 ``[keep, hidden]``.
        """
        with torch.inference_mode():
            cache.nodes = 0
            joined = hidden[0] if len(hidden) == 1 else torch.cat(tuple(hidden), -1)
            state = joined.to(self.device, torch.float32)
            if self.config.version == "eagle3":
                normed = self._normed("input_norm", state) if self.config.norm_before_fc else state
                state = self._fc(normed.to(self._dtype)).float()
            x, residual = self._inputs(tokens, state)
            query, keys, values = self._project(x, self._turn(cache.end, cache.end + len(tokens)))
            cache.write(keys, values, self.window)
            cache.end += len(tokens)
            cache.length += len(tokens)
            low = max(0, cache.length - keep + 1 - self.window)
            keys, values = cache.keys[:, low : cache.length], cache.values[:, low : cache.length]
            mask = None if keep == 1 else self._earlier(keep, cache.length - low)
            return self._finish(residual[-keep:], _attend(query[:, -keep:], keys, values, mask))

    def guess(
        self,
        cache: HeadCache,
        tokens: Sequence[int],
        features: Tensor,
        depth: int = 1,
        sees: NDArray[np.bool_] | None = None,
    ) -> Tensor:
        """Read drafted nodes of one depth.

        Args:
            cache: the nodes are put behind those it holds.
            tokens: m ids.
            features: ``[m, hidden]`` of each node's parent.
            depth: of the nodes, 1 for those that follow the last pair read.
            sees: bool ``[m, nodes + m]``, which drafted nodes (earlier ones, then these) each of them sees; None: all,
                which is right for a chain.

        Returns:
            Features, float32 ``[m, hidden]``.
        """
        with torch.inference_mode():
            place = cache.end + depth - 1
            x, residual = self._inputs(tokens, features)
            query, keys, values = self._project(x, self._turn(place, place + 1))
            cache.write(keys, values, self.window)
            cache.nodes += len(tokens)
            # `depth` nodes of the window are drafted ones; those are seen however many they are.
            low = min(cache.length, max(0, cache.length + depth - self.window))
            end = cache.length + cache.nodes
            mask = None
            if sees is not None:
                mask = torch.zeros(len(tokens), end - low, device=self.device)
                mask[:, cache.length - low :].masked_fill_(~torch.from_numpy(sees).to(self.device), -torch.inf)
            return self._finish(residual, _attend(query, cache.keys[:, low:end], cache.values[:, low:end], mask))

    def logits(self, features: Tensor) -> Tensor:
        """``[m, hidden] -> [m, draft_vocab]``, float32."""
        with torch.inference_mode():
            normed = self._normed("norm", features) if self.config.version == "eagle3" else features
            return self._output(normed.to(self._dtype)).float()  # type: ignore[no-any-return]

    def joined(self, states: Sequence[Tensor]) -> Tensor:
        """Hidden states of several rounds, in order, as one."""
        with torch.inference_mode():
            return states[0] if len(states) == 1 else torch.cat(tuple(states))

    def stacked(self, rows: Sequence[Tensor | None]) -> Tensor:
        """Distributions of a chain's nodes as one."""
        return torch.stack([row for row in rows if row is not None])

    # -- parts -------------------------------------------------------------------------------------------------------

    def _inputs(self, tokens: Sequence[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual; see ``EagleHead``."""
        ids = torch.tensor(tokens, device=self._embedding.device)
        embedded = F.embedding(ids, self._embedding).to(self.device, torch.float32)
        if self.config.version == "eagle":
            x = self._fc(torch.cat([embedded, state], -1).to(self._dtype)).float()
            return x, x
        normed = self._normed("hidden_norm", state)
        x = torch.cat([self._normed("input_layernorm", embedded), normed], -1)
        if self._join is not None:
            return x, self._join(x.to(self._dtype)).float()
        return x, normed if self.config.norm_before_residual else state

    def _project(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``[heads, n, head_dim]``, keys and values ``[kv_heads, n, head_dim]``, float32."""
        config = self.config
        joined = self._qkv(x.to(self._dtype)).float().view(x.shape[0], -1, config.head_dim).transpose(0, 1)
        both = joined[: config.heads + config.kv_heads]
        if config.qk_norm:
            query = self._normed("self_attn.q_norm", both[: config.heads])
            both = torch.cat([query, self._normed("self_attn.k_norm", both[config.heads :])])
        pairs = torch.view_as_complex(both.reshape(*both.shape[:2], -1, 2))
        turned = torch.view_as_real(pairs * turn).flatten(2)
        return turned[: config.heads], turned[config.heads :], joined[config.heads + config.kv_heads :]

    def _earlier(self, queries: int, keys: int) -> Tensor:
        """Mask ``[queries, keys]`` of the last keys' queries: each sees itself and what lies before, in the window."""
        ends = torch.arange(keys - queries, keys, device=self.device)[:, None]
        places = torch.arange(keys, device=self.device)
        seen = (places <= ends) & (places > ends - self.window)
        return torch.zeros(queries, keys, device=self.device).masked_fill_(~seen, -torch.inf)

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        x = residual + self._o(mixed.transpose(0, 1).flatten(1).to(self._dtype)).float()
        gate, up = self._gate_up(self._normed("post_attention_layernorm", x).to(self._dtype)).chunk(2, -1)
        return x + self._down(self._activation(gate) * up).float()  # type: ignore[no-any-return]

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight = self._norms[name]
        return F.rms_norm(x, weight.shape, weight, self.config.eps)

    def _turn(self, start: int, stop: int) -> Tensor:
        """Rotations of positions, complex ``[n, head_dim / 2]``."""
        if len(self._turns) < stop:
            places = torch.arange(max(stop + _GROW, 2 * len(self._turns)), device=self.device)
            angles = places[:, None].float() * self._frequencies
            self._turns = torch.polar(torch.ones_like(angles), angles)
        return self._turns[start:stop]

    def _float(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, torch.float32)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
        linear = nn.utils.skip_init(
            nn.Linear, weight.shape[1], weight.shape[0], bias=bias is not None, dtype=self._dtype, device=self.device
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        linear.requires_grad_(False)
        packed = self._dtype == torch.bfloat16 and self.device.type == "cpu" and native_bfloat16()
        return PackedLinear(linear) if packed else linear


def load_step(folder: Path, target: Target, device: str = "auto", window: int = 1024) -> EagleStep:
    """Read a checkpoint for a target. Errors as in ``load_eagle``, and BadOption for a device that is not there."""
    lm = target.lm
    parts = TargetParts.of(lm, target.name, target.tokenizer)
    head = load_eagle(folder, parts)
    output = parts.head if head.lm_head is None else None
    if device == "auto":
        return EagleStep(head, lm.dtype, lm.device, output, window)
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as cause:
        raise BadOption("device", device, "a device of this machine") from cause
    dtype = torch.float32 if place.type == "cpu" and not native_bfloat16() else lm.dtype
    return EagleStep(head, dtype, place, output, window)


def _interleaving(head_dim: int) -> Tensor:
    """Order of a head's columns in which rotary pairs (halves, as Llama has them) lie side by side."""
    return torch.arange(head_dim).view(2, -1).transpose(0, 1).flatten()


def _interleaved(linear: nn.Linear, pairs: Tensor, head_dim: int) -> tuple[Tensor, Tensor | None]:
    weight = linear.weight.unflatten(0, (-1, head_dim))[:, pairs].flatten(0, 1)
    bias = None if linear.bias is None else linear.bias.unflatten(0, (-1, head_dim))[:, pairs].flatten()
    return weight, bias


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    there = [bias for bias in biases if bias is not None]
    return torch.cat(there) if there else None


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """``[heads, n, head_dim]`` against ``[kv_heads, m, head_dim]``; mask ``[n, m]`` is added to the scores."""
    heads, n, head_dim = query.shape
    kv_heads = keys.shape[0]
    grouped = (query * head_dim**-0.5).reshape(kv_heads, heads // kv_heads * n, head_dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2))
    if mask is not None:
        scores = scores + mask.repeat(heads // kv_heads, 1)
    return torch.bmm(scores.softmax(-1), values).view(heads, n, head_dim)
