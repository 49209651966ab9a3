"""An EAGLE head: one decoder layer that guesses the target's next tokens from the target's own hidden states.

Law: let ``f_i`` be the target's hidden states after reading token ``x_i``. The pair ``(f_i, x_{i+1})`` is what the
target knows when it is about to read ``x_{i+1}``; the head turns it into a feature ``g_{i+1}`` and a distribution over
``x_{i+2}``. Further ahead there is no ``f``: the head then reads its own feature, ``(g_{i+1}, x_{i+2})``, and so on.

Sources: EAGLE (Li et al. 2024, arXiv 2401.15077) regresses the last hidden state: embedding and state are joined by
one linear layer, and the target's head reads the feature. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) drops the
regression, fuses the states of several layers, normalises both inputs and predicts tokens directly; training unrolls
the head over its own features ("training-time test"). EAGLE-2 (2406.16858) changes how drafts are grown, not the head.

The module's parameter names are those of the ``speculators`` checkpoint layout; ``models/eagle_format.py`` reads and
writes it, ``models/eagle_step.py`` is the same mathematics laid out for drafting one token at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metasd_langchain.errors import BadOption
from metasd_langchain.models.vocabulary import quick_fingerprint

if TYPE_CHECKING:
    from metasd_langchain.models.lm import CausalLM

__all__ = ["ACTIVATIONS", "EagleConfig", "EagleHead", "TargetParts", "rotary_frequencies"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Shape of a head.

    Attributes:
        version: "eagle3" (normalised inputs, free features) or "eagle" (EAGLE-1 and -2: the feature imitates the
            target's last hidden state).
        hidden_size: width of the head, also of the embeddings it reads.
        target_hidden_size: width of the target's hidden states.
        target_vocab_size: the target's vocabulary.
        draft_vocab_size: tokens the head can propose; equal to the target's when nothing was left out.
        heads, kv_heads, head_dim, intermediate_size: of the decoder layer.
        aux_layers: which hidden states it reads, as transformers numbers them: 0 = embeddings, i = output of layer i,
            the number of layers = the last one, after the final norm. "eagle" reads exactly the last.
        activation: of the MLP, a key of ACTIVATIONS.
        eps: of the norms.
        rope_theta: rotary base.
        rope_scaling: None, or a mapping with ``rope_type`` "linear" or "llama3".
        qk_norm: queries and keys are normalised per head, as in Qwen 3 and Gemma 3.
        attention_bias, fc_bias: the linear layers have biases.
        norm_before_residual: "eagle3" only: the residual is the normalised state.
        norm_before_fc: "eagle3" only: the joined hidden states are normalised before they are fused.
        join_residual: "eagle3" only: the residual is a linear layer of embedding and state together, as in EAGLE-1,
            not the state alone. With little training it learns much faster; other readers of the format lack it.
        target: name of the target it was trained for, or "".
        tokenizer: fingerprint of the target's tokenizer (``models/vocabulary.py``), or "" when the file says nothing.
        spread: what the head's scores are divided by to give the chances that the target takes its tokens, greedy and
            sampled; see ``training/calibration.py``.
    """

    version: Literal["eagle", "eagle3"]
    hidden_size: int
    target_hidden_size: int
    target_vocab_size: int
    draft_vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    aux_layers: tuple[int, ...]
    activation: str = "silu"
    eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    join_residual: bool = False
    target: str = ""
    tokenizer: str = ""
    spread: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        if self.version not in ("eagle", "eagle3"):
            raise BadOption("version", self.version, "'eagle' or 'eagle3'")
        for option in ("hidden_size", "target_hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, option) < 1:
                raise BadOption(option, getattr(self, option), "at least 1")
        if self.heads % self.kv_heads:
            raise BadOption("kv_heads", self.kv_heads, f"a divisor of heads={self.heads}")
        if self.head_dim % 2:
            raise BadOption("head_dim", self.head_dim, "an even number")
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise BadOption("draft_vocab_size", self.draft_vocab_size, f"from 1 to {self.target_vocab_size}")
        if self.activation not in ACTIVATIONS:
            raise BadOption("activation", self.activation, ", ".join(ACTIVATIONS))
        if not all(0.0 < value < math.inf for value in self.spread):
            raise BadOption("spread", self.spread, "two numbers above 0")
        if not self.aux_layers or (self.version == "eagle" and len(self.aux_layers) != 1):
            raise BadOption("aux_layers", self.aux_layers, "one layer for 'eagle', one or more for 'eagle3'")

    @classmethod
    def of_target(cls, parts: TargetParts, **changes: Any) -> EagleConfig:
        """The target's own layer shape, reading its last hidden state; `changes` over that.

        ``aux_layers`` of three layers make an "eagle3" head that other readers of the format take too.
        """
        shape: dict[str, Any] = {
            "version": "eagle3",
            "hidden_size": parts.hidden_size,
            "target_hidden_size": parts.hidden_size,
            "target_vocab_size": parts.vocab_size,
            "draft_vocab_size": parts.vocab_size,
            "aux_layers": (parts.layers,),
            "target": parts.name,
            "tokenizer": parts.tokenizer,
            **parts.shape,
        }
        return cls(**{**shape, **changes})

    @property
    def feature_size(self) -> int:
        """Width of the joined hidden states it reads."""
        return self.target_hidden_size * len(self.aux_layers)

    @property
    def full_vocabulary(self) -> bool:
        """Whether every token of the target can be proposed."""
        return self.draft_vocab_size == self.target_vocab_size


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a head takes from its target. Tensors are the target's own, never changed.

    Attributes:
        name: the target's.
        embedding: ``[vocab, hidden]`` input embeddings, without the factor that Gemma multiplies them with.
        norm: ``[hidden]`` the factor of the final norm.
        layers: number of layers.
        shape: heads, kv_heads, head_dim, intermediate_size, activation, eps of its layers.
        rows: gives `head`; asked only when it is needed, since it may be a large copy.
        tokenizer: fingerprint of the tokenizer, "" = unknown.
    """

    name: str
    embedding: Tensor
    norm: Tensor
    layers: int
    shape: Mapping[str, Any]
    rows: Callable[[], Tensor]
    tokenizer: str = ""

    @property
    def head(self) -> Tensor:
        """``[vocab, hidden]`` rows of the output layer."""
        return self.rows()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.embedding.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, possibly more than the tokenizer has."""
        return int(self.embedding.shape[0])

    @classmethod
    def of(cls, lm: CausalLM, name: str = "", tokenizer: Any = None) -> TargetParts:
        """Parts of a loaded target: ``target.lm``, ``target.name``, ``target.tokenizer``."""
        config = lm.config
        heads = int(config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
        shape = {
            "heads": heads,
            "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
            "head_dim": head_dim,
            "intermediate_size": int(config.intermediate_size),
            "activation": activation if activation in ACTIVATIONS else "silu",
            "eps": float(getattr(config, "rms_norm_eps", 1e-6)),
        }
        known = "" if tokenizer is None else quick_fingerprint(tokenizer)
        return cls(name, lm.embedding_rows(), lm.norm_factor(), config.num_hidden_layers, shape, lm.head_rows, known)


def rotary_frequencies(config: EagleConfig) -> Tensor:
    """Angles per position, float32 ``[head_dim / 2]``; "linear" and "llama3" scaling as in transformers.

    Raises:
        BadOption: another kind of scaling.
    """
    frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    factor = float(scaling.get("factor", 1.0))
    if kind == "linear":
        return frequencies / factor
    if kind != "llama3":
        raise BadOption("rope_scaling", kind, "default, linear or llama3")
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 1: short waves stay, 0: long ones are stretched
    return frequencies * (kept + (1.0 - kept) / factor)


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, width: int) -> None:
        super().__init__()
        bias, head_dim = config.attention_bias, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.heads * head_dim, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, config.eps)
            self.k_norm = nn.RMSNorm(head_dim, config.eps)


class _Mlp(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class _Layer(nn.Module):
    """Parameters of the decoder layer, under the names of the format."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        third = config.version == "eagle3"
        self.self_attn = _Attention(config, config.hidden_size * (2 if third else 1))
        self.mlp = _Mlp(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.eps)
        if third:
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.eps)
            self.hidden_norm = nn.RMSNorm(config.hidden_size, config.eps)


class EagleHead(nn.Module):
    """The head as a module for training, and the owner of the weights.

    Args:
        config: its shape.
        embedding: ``[vocab, hidden]``, the target's; None: the head has embeddings of its own (``embed_tokens``).
        d2t: ``[draft_vocab]`` int64, what is added to a draft id to get the target's id (draft ids are in the order of
            target ids); None when the vocabulary is full.
        head: False: ``lm_head`` is missing, because the target's own output layer is used ("eagle" checkpoints).
    """

    d2t: Tensor
    frequencies: Tensor

    def __init__(
        self, config: EagleConfig, embedding: Tensor | None, d2t: Tensor | None = None, *, head: bool = True
    ) -> None:
        super().__init__()
        self.config = config
        third = config.version == "eagle3"
        width = config.feature_size + (0 if third else config.hidden_size)
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        if third:
            self.norm = nn.RMSNorm(config.hidden_size, config.eps)
            if config.norm_before_fc:
                self.input_norm = nn.RMSNorm(config.feature_size, config.eps)
            if config.join_residual:
                self.join = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if head else None
        self.embed_tokens = nn.Embedding(config.target_vocab_size, config.hidden_size) if embedding is None else None
        self.shared_embedding = None if embedding is None else _Held(embedding)
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if d2t is None else d2t.to(torch.int64)
        self.register_buffer("d2t", offsets, persistent=False)
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)

    @classmethod
    def initialised(
        cls, config: EagleConfig, parts: TargetParts, draft_ids: Tensor | None = None, *, seed: int = 0
    ) -> EagleHead:
        """A head to be trained: output rows and final norm are the target's, the feature begins as the state it reads
        last, and the rest is small noise.

        Args:
            config: its shape.
            parts: of the target.
            draft_ids: ``[draft_vocab]`` target ids it may propose, ascending; None = all.
            seed: of the noise; the global generator is left as it was.
        """
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids.to(torch.int64).cpu()
        if len(ids) != config.draft_vocab_size or bool((ids.diff() <= 0).any()):
            raise BadOption("draft_ids", len(ids), f"{config.draft_vocab_size} different ids, ascending")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = cls(config, parts.embedding, ids - torch.arange(len(ids)))
        hidden, lm_head = config.hidden_size, head.lm_head
        with torch.no_grad():
            if lm_head is not None and parts.hidden_size == hidden:
                rows = parts.head
                lm_head.weight.copy_(rows[ids.to(rows.device)].float())
            if config.version == "eagle3" and config.target_hidden_size == hidden:
                head.norm.weight.copy_(parts.norm.float())
            if config.target_hidden_size == hidden:  # identity on the last state read
                head.fc.weight.mul_(0.1)
                head.fc.weight[:, -hidden:] += torch.eye(hidden)
            layer: Any = head.layers[0]
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        return head

    # -- inputs and outputs ------------------------------------------------------------------------------------------

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ``[draft_vocab]``."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...] -> [..., hidden]`` in the head's dtype."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)  # type: ignore[no-any-return]
        held: Any = self.shared_embedding
        return F.embedding(tokens, held.tensor).to(self.fc.weight.dtype)

    def logits(self, features: Tensor) -> Tensor:
        """``[..., hidden] -> [..., draft_vocab]``: the distribution over the token after the one that was read."""
        if self.lm_head is None:
            raise BadOption("lm_head", None, "a head with output rows of its own")
        return self.lm_head(self.norm(features) if self.config.version == "eagle3" else features)  # type: ignore[no-any-return]

    def fuse(self, hidden: Tensor) -> Tensor:
        """The state a pair begins with: ``[..., feature_size] -> [..., hidden]``; unchanged for "eagle"."""
        if self.config.version == "eagle":
            return hidden
        return self.fc(self.input_norm(hidden) if self.config.norm_before_fc else hidden)  # type: ignore[no-any-return]

    # -- training ----------------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, hidden: Tensor, steps: int = 1) -> list[Tensor]:
        """Features over whole sequences, unrolled over the head's own features (EAGLE-3's training-time test).

        Args:
            tokens: ``[batch, n]`` ids; sequences shorter than n are padded on the right.
            hidden: ``[batch, n, feature_size]``, the target's states after each token.
            steps: how many tokens ahead the head is unrolled.

        Returns:
            `steps` tensors ``[batch, n - 1, hidden]``. Index i of each predicts token ``i + 2``, to be compared with
            the target's distribution after token ``i + 1``. In step s (0-based) the target's states up to ``i - s`` and
            the head's features from there on were read; indices below s are without meaning.
        """
        embedded = self.embed(tokens[:, 1:])
        state = self.fuse(hidden[:, :-1].to(self.fc.weight.dtype))
        angles = torch.arange(embedded.shape[1], device=tokens.device)[:, None] * self.frequencies
        keys: list[Tensor] = []
        values: list[Tensor] = []
        features: list[Tensor] = []
        for step in range(steps):
            if step:  # pair i reads the feature of pair i - 1
                state = torch.cat([state[:, :1], features[-1][:, :-1]], 1)
            x, residual = self._inputs(embedded, state)
            query, key, value = self._project(x, angles)
            keys.append(key)
            values.append(value)
            features.append(self._finish(residual, _mixed(query, keys, values)))
        return features

    def _inputs(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual."""
        if self.config.version == "eagle":
            x = self.fc(torch.cat([embedded, state], -1))
            return x, x
        layer: Any = self.layers[0]
        normed = layer.hidden_norm(state)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        if self.config.join_residual:
            return x, self.join(x)
        return x, normed if self.config.norm_before_residual else state

    def _project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, ``[batch, heads, n, head_dim]``."""
        attention: Any = self.layers[0].self_attn
        config = self.config
        query = attention.q_proj(x).unflatten(-1, (config.heads, config.head_dim)).transpose(1, 2)
        key = attention.k_proj(x).unflatten(-1, (config.kv_heads, config.head_dim)).transpose(1, 2)
        value = attention.v_proj(x).unflatten(-1, (config.kv_heads, config.head_dim)).transpose(1, 2)
        if config.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        return _rotated(query, angles), _rotated(key, angles), value

    def _finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        layer: Any = self.layers[0]
        x = residual + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        y = layer.post_attention_layernorm(x)
        gate = ACTIVATIONS[self.config.activation](layer.mlp.gate_proj(y))
        return x + layer.mlp.down_proj(gate * layer.mlp.up_proj(y))  # type: ignore[no-any-return]


class _Held:
    """Keeps a tensor that is not the module's: neither saved nor moved nor trained with it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding, halves as pairs (Llama): ``[..., n, head_dim]`` by ``[n, head_dim / 2]``."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _mixed(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of the latest step: what was read with the target's states up to ``i - s``, then the head's own path.

    Args:
        query: ``[batch, heads, n, head_dim]`` of step s.
        keys, values: ``[batch, kv_heads, n, head_dim]`` of steps 0 to s.
    """
    last = len(keys) - 1
    if last == 0:
        return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, enable_gqa=True)
    groups = query.shape[1] // keys[0].shape[1]
    n = query.shape[2]
    wide_keys = [key.repeat_interleave(groups, 1) for key in keys]
    wide_values = [value.repeat_interleave(groups, 1) for value in values]
    scale = query.shape[-1] ** -0.5
    sees = torch.ones(n, n, dtype=torch.bool, device=query.device).tril(-last)
    scores = [(query @ wide_keys[0].transpose(-1, -2) * scale).masked_fill(~sees, -torch.inf)]
    own = range(1, last + 1)  # rolled indices that wrap around belong to rows without meaning
    scores += [(query * wide_keys[step].roll(last - step, 2)).sum(-1, keepdim=True) * scale for step in own]
    weights = torch.cat(scores, -1).softmax(-1)
    mixed = weights[..., :n] @ wide_values[0]
    for step in own:
        mixed = mixed + weights[..., n + step - 1, None] * wide_values[step].roll(last - step, 2)
    return mixed
