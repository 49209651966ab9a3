"""A causal language model as the engine sees it: one packed forward over rows of (pending tokens + draft tree)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from metasd_langchain.errors import UnsupportedModel
from metasd_langchain.models.attention import IMPLEMENTATION, PackedRows, Row, Slot, SlotCache
from metasd_langchain.models.packed_linear import PackedLinear, pack_linears
from metasd_langchain.models.shadow import shadow
from metasd_langchain.models.taps import Taps
from metasd_langchain.values import EMPTY_DRAFT, Draft

__all__ = ["CausalLM", "Feed", "Scores", "Slot"]

# The largest difference from the model's own logits, root mean square over their standard deviation. Half precision
# differs by 0.02 on ordinary text, by rounding alone.
_TOLERANCE = {torch.float32: 1e-3}
_HALF_TOLERANCE = 0.2
_ATTENDING = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Feed:
    """What a forward reads of one row.

    Attributes:
        slot: the row's keys and values; holds the tokens before `pending`.
        pending: committed tokens not yet in the slot, at least one.
        draft: nodes that hang on the last pending token.
        scored: how many pending tokens, from the end, get logits; 0 for an inner piece of a long prompt. Every draft
            node gets logits when this is at least 1.
    """

    slot: Slot
    pending: tuple[int, ...]
    draft: Draft = EMPTY_DRAFT
    scored: int = 1

    @property
    def width(self) -> int:
        """New tokens of the row."""
        return len(self.pending) + len(self.draft)

    @property
    def rows(self) -> int:
        """Scored rows."""
        return self.scored + len(self.draft) if self.scored else 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's answer to a list of feeds.

    Attributes:
        logits: ``[rows, vocab]`` in the model's dtype; per feed the scored pending tokens, then the draft's nodes.
        starts: first row of each feed.
        tokens: first new token of each feed in the packed sequence.
        hidden: layer -> ``[new tokens, width]`` states of every new token of the packed sequence, numbered as
            transformers does: 0 = embeddings, i = output of layer i, the number of layers = after the final norm.
    """

    logits: Tensor
    starts: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    hidden: dict[int, Tensor] = field(default_factory=dict)


class CausalLM:
    """Packed forwards over a transformers causal LM; one thread at a time.

    Args:
        model: any decoder-only model of transformers whose layers are full or sliding attention. It is not changed: the
            engine works on a second module tree over the same parameters.
        owned: True when nobody else uses the model, so that its linear layers may be laid out anew and freed.
        compile: hand the packed model to ``torch.compile``.

    Raises:
        UnsupportedModel: recurrent, hybrid, chunked, bidirectional or encoder-decoder models, dynamic rotary scaling,
            and any model whose packed forward disagrees with its own plain forward.
    """

    def __init__(self, model: Any, *, owned: bool = False, compile: bool = False) -> None:
        self.config = model.config.get_text_config()
        _refuse(model, self.config)
        probe = _probe_tokens(self.config)
        reference = _plain_logits(model, probe)
        twin: Any = shadow(model, owned).eval()
        twin.set_attn_implementation(IMPLEMENTATION)
        self.packed_linears = pack_linears(twin) if owned else 0
        self._cache = SlotCache(self.config.num_hidden_layers)
        self.vocab_size: int = self.config.vocab_size
        self.window: int = _window(self.config)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._twin = twin
        taps = Taps(twin, self.config.num_hidden_layers)
        self._taps = taps if taps.serves and not compile else None  # a compiled forward would be compiled anew
        self._model = torch.compile(twin, dynamic=True) if compile else twin
        try:
            self._probe(probe, reference)
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError) as cause:
            raise UnsupportedModel(
                f"{self.config.model_type}: a packed forward fails ({type(cause).__name__})"
            ) from cause

    def score(self, feeds: Sequence[Feed], hidden_layers: Sequence[int] = ()) -> Scores:
        """One forward over all feeds. Slots keep their length until ``keep``."""
        rows, tokens, positions, wanted, starts = self._pack(feeds)
        index = torch.tensor(wanted, dtype=torch.long)  # on the host: the last layer may lie on another device
        context = PackedRows(self._cache, rows)
        taps = self._taps
        if taps is not None:
            taps.ask(hidden_layers)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                cache=context,
                use_cache=True,
                logits_to_keep=index,
                output_hidden_states=bool(hidden_layers) and taps is None,
                metasd=context,
            )
            if taps is not None:
                hidden = taps.take(hidden_layers)
            else:
                hidden = {layer: output.hidden_states[layer][0] for layer in hidden_layers}
            return Scores(output.logits[0], tuple(starts), tuple(row.start for row in rows), hidden)

    def keep(self, feed: Feed, path: Sequence[int] = ()) -> None:
        """Commit a feed's pending tokens and the accepted nodes of its draft to its slot; drop the other nodes."""
        with torch.inference_mode():
            self._cache.keep(feed.slot, len(feed.pending), path)

    def embedding_rows(self) -> Tensor:
        """Input embeddings, ``[vocab, hidden]``, without a factor that the model multiplies them with. Not a copy."""
        return self._twin.get_input_embeddings().weight.detach()  # type: ignore[no-any-return]

    def head_rows(self) -> Tensor:
        """Rows of the output layer, ``[vocab, hidden]``; a copy where they are laid out anew."""
        head = self._twin.get_output_embeddings()
        if isinstance(head, PackedLinear):
            return self.embedding_rows() if self.config.tie_word_embeddings else head.packed.to_dense()
        return head.weight.detach()  # type: ignore[no-any-return]

    def norm_factor(self) -> Tensor:
        """What the final norm multiplies with, ``[hidden]``, whichever way the model writes it down."""
        norm = getattr(self._twin.get_decoder(), "norm", None)
        ones = torch.ones(1, self.config.hidden_size, device=self.device, dtype=self.dtype)
        with torch.no_grad():
            return (ones if norm is None else norm(ones))[0].clone()

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()

    def _pack(self, feeds: Sequence[Feed]) -> tuple[list[Row], list[int], list[int], list[int], list[int]]:
        rows: list[Row] = []
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        starts: list[int] = []
        for feed in feeds:
            start = len(tokens)
            row = Row(feed.slot, start, start + feed.width, len(feed.pending), feed.draft.parents)
            rows.append(row)
            tokens += feed.pending
            tokens += feed.draft.tokens
            positions += row.positions()
            starts.append(len(wanted))
            wanted += range(row.stop - feed.rows, row.stop)
        return rows, tokens, positions, wanted, starts

    def _probe(self, tokens: tuple[int, ...], reference: Tensor) -> None:
        """Compare packed rounds with the model's own forward: catches state outside the slots, unserved attention."""
        split = Slot()
        first = Feed(split, tokens[:1], Draft.chain(tokens[2:]))
        self.score([first])
        self.keep(first)
        logits = self.score([Feed(split, tokens[1:])]).logits[-1].float().cpu()
        if len(split.keys) != self.config.num_hidden_layers or any(key.dim() < 3 for key in split.keys):
            raise UnsupportedModel(f"{self.config.model_type}: some layers keep no keys and values")
        error = float((logits - reference).square().mean().sqrt() / reference.std())
        if not error <= _TOLERANCE.get(self.dtype, _HALF_TOLERANCE):  # nan is no agreement
            raise UnsupportedModel(f"{self.config.model_type}: packed rounds and a plain forward disagree")


def _probe_tokens(config: Any) -> tuple[int, ...]:
    """Three tokens that could begin a text: without its BOS some models' activations are far from ordinary."""
    bos = config.bos_token_id if isinstance(config.bos_token_id, int) else 3
    return tuple(token % config.vocab_size for token in (bos, 1018, 506))


def _plain_logits(model: nn.Module, tokens: tuple[int, ...]) -> Tensor:
    """Logits after the tokens by the model's own code, ``[vocab]``."""
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    with torch.inference_mode():
        output = model.eval()(input_ids=torch.tensor([tokens], device=device), use_cache=False)
    return output.logits[0, -1].float().cpu()  # type: ignore[no-any-return]


def _refuse(model: nn.Module, config: Any) -> None:
    kind = config.model_type
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENDING
    if other:
        raise UnsupportedModel(f"{kind}: layers of type {', '.join(sorted(other))} cannot be rewound after a rejection")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: an encoder-decoder model")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{kind}: bidirectional attention")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{kind}: does not take a registered attention function")
    if _scaling(config) == "dynamic":
        raise UnsupportedModel(f"{kind}: dynamic rotary scaling makes old keys depend on the length")


def _scaling(config: Any) -> str:
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [
        entry.get("rope_type", "default") for entry in (parameters, *parameters.values()) if isinstance(entry, dict)
    ]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), "default")


def _window(config: Any) -> int:
    """Tokens of prompt and answer together. With longrope the part below the switch of its factors: past it every
    cached key would have to be computed anew.
    """
    window = int(config.max_position_embeddings)
    if _scaling(config) == "longrope":
        parameters = getattr(config, "rope_parameters", None) or {}
        original = parameters.get("original_max_position_embeddings")
        window = min(window, int(original or getattr(config, "original_max_position_embeddings", None) or window))
    return window
