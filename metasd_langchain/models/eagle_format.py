"""Reading and writing EAGLE checkpoints: a folder with ``config.json`` and safetensors.

Written is the layout of ``speculators`` 0.9 (vLLM project). Read are that layout and those of SafeAILab's EAGLE
repository (EAGLE-1 and -2: ``layers.0``, full vocabulary, the target's own output layer; EAGLE-3: ``midlayer``,
``d2t``/``t2d``), also as ``pytorch_model.bin``.

The vocabulary map: ``d2t[i]`` is what is added to draft id i to get the target's id, ``t2d`` marks the target's ids
that have a draft id. Draft ids are in the order of target ids, so each follows from the other.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metasd_langchain.errors import BadCheckpoint, BadOption, IncompatibleVocabulary
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts

__all__ = ["load_eagle", "read_config", "save_eagle"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_VERSION = "0.9.0"  # of speculators, whose layout is written
_THIRD = frozenset({"Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_PADDING = 512  # vocabularies are padded to round sizes; what is further apart is another vocabulary
# Written by others and of no use here: the target's own parts, buffers that follow from the config.
_IGNORED = ("verifier_", "rotary_emb", "layers.0.self_attn.rotary_emb", "t2d", "d2t", "embed_tokens", "lm_head")


def save_eagle(head: EagleHead, folder: str | Path, *, dtype: torch.dtype = torch.bfloat16, **notes: Any) -> Path:
    """Write a head. A file that is there is replaced only by one that is complete.

    Args:
        head: to be written; shared embeddings are not.
        folder: made when missing.
        dtype: of the weights in the file.
        notes: JSON-able remarks under the config's key "metasd" (recipe, licence).

    Returns:
        The folder.

    Raises:
        BadCheckpoint: the files cannot be written (disk full, no permission).
    """
    where = Path(folder).expanduser()
    state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    config = head.config
    if not config.full_vocabulary:
        t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool)
        t2d[head.draft_ids.cpu()] = True
        state |= {"d2t": head.d2t.cpu().clone(), "t2d": t2d}
    try:
        where.mkdir(parents=True, exist_ok=True)
        _replace(where / WEIGHTS, lambda path: save_file(state, path, {"format": "pt"}))
        text = json.dumps(_as_speculators(config, notes), indent=2) + "\n"
        _replace(where / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, SafetensorError) as cause:
        raise BadCheckpoint(str(where), "", f"cannot be written: {cause}", hint="is the disk full?") from cause
    return where


def load_eagle(folder: str | Path, parts: TargetParts) -> EagleHead:
    """Read a head for a target.

    Args:
        folder: with ``config.json`` and weights.
        parts: of the target; embeddings that the checkpoint lacks are the target's.

    Returns:
        The head in float32. ``lm_head`` is None when the checkpoint has none and uses the target's.

    Raises:
        BadCheckpoint: truncated, foreign, or of another shape than its config says; names file and field.
        IncompatibleVocabulary: made for another vocabulary.
    """
    where = Path(folder).expanduser()
    config = read_config(where, parts.layers)
    _check_target(where / CONFIG, config, parts)
    file, state = _weights(where)
    state = {_renamed(name): tensor for name, tensor in state.items()}
    config = _fitted(config, state, parts)
    d2t = _vocabulary_map(file, config, state)
    embedding = None if "embed_tokens.weight" in state else parts.embedding
    if embedding is not None and parts.hidden_size != config.hidden_size:
        raise BadCheckpoint(file, "embed_tokens.weight", f"missing, and the target's are {parts.hidden_size} wide")
    head = EagleHead(config, embedding, d2t, head="lm_head.weight" in state)
    if head.lm_head is None and not config.full_vocabulary:
        raise BadCheckpoint(file, "lm_head.weight", "missing, though the vocabulary is reduced")
    _fill(file, head, state)
    return head.eval()


def read_config(folder: Path, layers: int) -> EagleConfig:
    """A checkpoint's shape, from its config of any of the layouts.

    Args:
        folder: of the checkpoint.
        layers: of the target, from which follow the hidden states a config does not name.

    Raises:
        BadCheckpoint: no such file, no JSON, a field that is missing or wrong.
    """
    file = folder / CONFIG
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as cause:
        raise BadCheckpoint(str(file), "", "cannot be read", hint="give the folder of an EAGLE checkpoint") from cause
    except ValueError as cause:
        raise BadCheckpoint(str(file), "", "is no JSON: truncated or of another kind") from cause
    if not isinstance(raw, dict):
        raise BadCheckpoint(str(file), "", "is no JSON object")
    return _Reader(file, raw, layers).config()


class _Reader:
    """Fields of a config.json, each with the file's and its own name in the error."""

    def __init__(self, file: Path, raw: Mapping[str, Any], layers: int) -> None:
        self._file, self._raw, self._layers = str(file), raw, layers
        layer = raw.get("transformer_layer_config", raw)
        if not isinstance(layer, Mapping):
            raise BadCheckpoint(self._file, "transformer_layer_config", "is no object")
        self._layer: Mapping[str, Any] = layer

    def config(self) -> EagleConfig:
        version = self._kind()
        hidden = self._whole("hidden_size")
        heads = self._whole("num_attention_heads")
        vocab = self._whole("vocab_size")
        if self._whole("num_hidden_layers", 1) != 1:
            raise BadCheckpoint(self._file, "num_hidden_layers", "only heads of one layer are served")
        rope = self._layer.get("rope_parameters") or self._layer.get("rope_scaling") or {}
        theta = rope.get("rope_theta", self._layer.get("rope_theta", 10000.0))
        shape = {
            "version": version,
            "hidden_size": hidden,
            "target_hidden_size": self._target_hidden(hidden),
            "target_vocab_size": vocab,
            "draft_vocab_size": self._draft_vocabulary(vocab),
            "heads": heads,
            "kv_heads": self._whole("num_key_value_heads", heads),
            "head_dim": self._whole("head_dim", hidden // heads),
            "intermediate_size": self._whole("intermediate_size"),
            "aux_layers": self._aux_layers(version),
            "activation": self._layer.get("hidden_act", "silu"),
            "eps": float(self._layer.get("rms_norm_eps", 1e-6)),
            "rope_theta": float(theta),
            "rope_scaling": rope if rope.get("rope_type", rope.get("type", "default")) != "default" else None,
            "qk_norm": bool(self._layer.get("qk_norm", self._layer.get("model_type") == "qwen3")),
            "attention_bias": bool(self._layer.get("attention_bias", self._layer.get("qkv_bias", False))),
            "fc_bias": version == "eagle" and bool(self._raw.get("fusion_bias", self._raw.get("bias", True))),
            "norm_before_residual": bool(self._raw.get("norm_before_residual", False)),
            "norm_before_fc": bool(self._raw.get("norm_before_fc", False)),
            "join_residual": version == "eagle3" and bool(self._raw.get("join_residual", False)),
            "target": self._target(),
            "tokenizer": str((self._raw.get("metasd") or {}).get("tokenizer", "")),
            "spread": self._spread(),
        }
        try:
            return EagleConfig(**shape)
        except BadOption as error:
            raise BadCheckpoint(self._file, error.option, str(error)) from error

    def _kind(self) -> str:
        named = self._raw.get("speculators_model_type")
        if named is not None and named not in ("eagle", "eagle3"):
            raise BadCheckpoint(self._file, "speculators_model_type", f"{named!r} is neither 'eagle' nor 'eagle3'")
        if named is not None:
            return str(named)
        architectures = set(self._raw.get("architectures") or ())
        return "eagle3" if architectures & _THIRD or "draft_vocab_size" in self._raw else "eagle"

    def _whole(self, field: str, default: int | None = None) -> int:
        value = self._layer.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadCheckpoint(
                self._file, field, "missing or no whole number above 0", hint="is it an EAGLE checkpoint?"
            )
        return value

    def _target_hidden(self, hidden: int) -> int:
        return int(self._raw.get("target_hidden_size") or hidden)

    def _draft_vocabulary(self, vocab: int) -> int:
        return int(self._raw.get("draft_vocab_size") or vocab)

    def _aux_layers(self, version: str) -> tuple[int, ...]:
        """Not named: "eagle" reads the last state, "eagle3" the three of SafeAILab's code."""
        layers = self._layers
        said = self._raw.get("eagle_aux_hidden_state_layer_ids")
        if said is None:
            said = (self._raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if said is None or version == "eagle":
            return (layers,) if version == "eagle" else (2, layers // 2, layers - 3)
        if not isinstance(said, list) or not said or not all(layer in range(layers + 1) for layer in said):
            raise BadCheckpoint(
                self._file, "eagle_aux_hidden_state_layer_ids", f"no list of layers from 0 to the target's {layers}"
            )
        return tuple(said)

    def _spread(self) -> tuple[float, float]:
        said = (self._raw.get("metasd") or {}).get("spread", [1.0, 1.0])
        if not isinstance(said, list) or len(said) != 2 or not all(type(value) in (int, float) for value in said):
            raise BadCheckpoint(self._file, "metasd.spread", "no pair of numbers")
        return float(said[0]), float(said[1])

    def _target(self) -> str:
        verifier = (self._raw.get("speculators_config") or {}).get("verifier") or {}
        return str(verifier.get("name_or_path") or "")


def _check_target(file: Path, config: EagleConfig, parts: TargetParts) -> None:
    if config.target_hidden_size != parts.hidden_size:
        raise BadCheckpoint(
            str(file),
            "target_hidden_size",
            f"made for hidden states of width {config.target_hidden_size}, the target's are {parts.hidden_size} wide",
            hint=f"it was trained for {config.target}" if config.target else "",
        )
    if abs(config.target_vocab_size - parts.vocab_size) > _PADDING:
        raise IncompatibleVocabulary(
            f"{file}, vocab_size: made for {config.target_vocab_size} token ids, the target has {parts.vocab_size}",
            hint=f"it was trained for {config.target}" if config.target else "",
        )
    if config.tokenizer and parts.tokenizer and config.tokenizer != parts.tokenizer:
        raise IncompatibleVocabulary(
            f"{file}, tokenizer: made for a tokenizer that gives other ids",
            hint=f"it was trained for {config.target}" if config.target else "",
        )


def _fitted(config: EagleConfig, state: dict[str, Tensor], parts: TargetParts) -> EagleConfig:
    """The config for a target whose vocabulary is padded to another size; tensors are cut or filled in place."""
    size = parts.vocab_size
    if config.target_vocab_size == size:
        return config
    own = state.get("embed_tokens.weight")
    if own is not None:
        state["embed_tokens.weight"] = F.pad(own[:size], (0, 0, 0, max(0, size - len(own))))
    state.pop("t2d", None)  # of the other size; d2t says the same
    draft = config.draft_vocab_size
    if config.full_vocabulary:
        draft = min(draft, size)
        if "lm_head.weight" in state:
            state["lm_head.weight"] = state["lm_head.weight"][:draft]
        state.setdefault("d2t", torch.zeros(draft, dtype=torch.int64))
        state["d2t"] = state["d2t"][:draft]
    return replace(config, target_vocab_size=size, draft_vocab_size=draft)


def _weights(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The file that was read, and its tensors."""
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not found:
        raise BadCheckpoint(str(folder / WEIGHTS), "", "missing", hint="give the folder of an EAGLE checkpoint")
    state: dict[str, Tensor] = {}
    for file in found:
        try:
            if file.suffix == ".safetensors":
                state |= load_file(file)
            else:
                state |= torch.load(file, map_location="cpu", weights_only=True)
        except (
            OSError,
            SafetensorError,
            RuntimeError,
            EOFError,
            ValueError,
            TypeError,
            pickle.UnpicklingError,
        ) as cause:
            raise BadCheckpoint(str(file), "", "cannot be read: truncated or of another kind") from cause
    return str(found[0]), state


def _renamed(name: str) -> str:
    """SafeAILab's names as ours."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _vocabulary_map(file: str, config: EagleConfig, state: Mapping[str, Tensor]) -> Tensor | None:
    """``d2t`` as int64 ``[draft_vocab]``, checked; None when the vocabulary is full."""
    d2t, t2d = state.get("d2t"), state.get("t2d")
    size = config.draft_vocab_size
    if d2t is None and t2d is not None and t2d.numel() == config.target_vocab_size:
        ids = t2d.flatten().nonzero()[:, 0]
        d2t = ids - torch.arange(len(ids))
    if d2t is None:
        if config.full_vocabulary:
            return None
        raise IncompatibleVocabulary(f"{file}, d2t: missing, though only {size} of the target's tokens can be drafted")
    if d2t.dtype.is_floating_point or d2t.shape != (size,):
        raise IncompatibleVocabulary(f"{file}, d2t: not {size} whole numbers")
    d2t = d2t.to(torch.int64)
    ids = torch.arange(size) + d2t
    if bool((ids < 0).any() or (ids >= config.target_vocab_size).any()):
        raise IncompatibleVocabulary(f"{file}, d2t: leads to ids outside the target's {config.target_vocab_size}")
    if len(ids.unique()) != size:
        raise IncompatibleVocabulary(f"{file}, d2t: several draft ids for one token")
    if t2d is not None and not _marks(t2d, ids, config.target_vocab_size):
        raise IncompatibleVocabulary(f"{file}, t2d: does not mark the tokens that d2t leads to")
    return d2t


def _marks(t2d: Tensor, ids: Tensor, vocab: int) -> bool:
    marked = torch.zeros(vocab, dtype=torch.bool)
    marked[ids] = True
    return t2d.numel() == vocab and bool((t2d.flatten().bool() == marked).all())


def _fill(file: str, head: EagleHead, state: Mapping[str, Tensor]) -> None:
    """Copy tensors by name; every parameter must be there, and nothing that is not understood."""
    wanted = dict(head.named_parameters())
    for name, parameter in wanted.items():
        tensor = state.get(name)
        if tensor is None:
            raise BadCheckpoint(file, name, "missing")
        if tensor.shape != parameter.shape:
            raise BadCheckpoint(file, name, f"has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
        if not bool(tensor.isfinite().all()):
            raise BadCheckpoint(file, name, "holds nan or infinite numbers")
        with torch.no_grad():
            parameter.copy_(tensor)
    foreign = sorted(name for name in state if name not in wanted and not name.startswith(_IGNORED))
    if foreign:
        raise BadCheckpoint(file, foreign[0], "is no part of an EAGLE head of this config")


def _as_speculators(config: EagleConfig, notes: Mapping[str, Any]) -> dict[str, Any]:
    layer = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.eps,
        "attention_bias": config.attention_bias,
        "rope_parameters": {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta},
        "vocab_size": config.target_vocab_size,
        "tie_word_embeddings": False,
    }
    third = config.version == "eagle3"
    own: dict[str, Any] = {"norm_before_residual": config.norm_before_residual, "norm_before_fc": config.norm_before_fc}
    if config.join_residual:
        own["join_residual"] = True  # not of the format: a reader that does not know it finds a tensor too many
    return {
        "architectures": ["Eagle3DraftModel" if third else "EagleSpeculator"],
        "speculators_model_type": config.version,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": config.version,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": config.target, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        **(own if third else {"fusion_bias": config.fc_bias}),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "metasd": {"tokenizer": config.tokenizer, "spread": list(config.spread), **notes},
    }


def _replace(file: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file, then put it in its place."""
    part = file.with_name(f".{file.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write(part)
        part.replace(file)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
