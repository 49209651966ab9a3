"""A small language model over a part of the target's vocabulary: trained here, drafts in ``drafters/small_lm.py``.

It reads and writes the target's token ids. Inside, they are places in a ``DraftVocabulary``: the embedding has one row
more than there are columns, for tokens it does not know; the head is the embedding (tied) without that row.

A folder holds what transformers writes for a Llama (``config.json``, ``model.safetensors``) and
``draft_vocabulary.safetensors`` with ``d2t`` (int64 ``[n]``: the target id of each column, absolute, not the offsets of
the speculators format) and, as metadata, the target's tokenizer fingerprint and size. Any causal model of transformers
with that file beside it serves as well.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from metasd_langchain.errors import BadCheckpoint, BadOption
from metasd_langchain.models.vocabulary import DraftVocabulary

__all__ = ["VOCABULARY_FILE", "DraftLM", "DraftLMConfig", "read_model", "read_vocabulary"]

VOCABULARY_FILE = "draft_vocabulary.safetensors"
_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class DraftLMConfig:
    """Shape of a fresh model; the defaults have 9 M parameters over 8,192 columns, 12 M over 16,384.

    Args:
        hidden_size, intermediate_size, layers, heads, kv_heads: as in Llama.
        window: most tokens it can read at once; past it the drafter keeps first and last ones.
        rope_theta: base of the rotary angles.
    """

    hidden_size: int = 384
    intermediate_size: int = 1024
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    window: int = 2048
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "window"):
            if getattr(self, name) < 1:
                raise BadOption(name, getattr(self, name), "a whole number of at least 1")
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise BadOption("heads", self.heads, "a divisor of half the hidden size, and a multiple of kv_heads")


class DraftLM(nn.Module):
    """The model as a trainer sees it.

    Args:
        model: a causal model of transformers with one embedding row more than the vocabulary has columns.
        vocabulary: which target ids it knows.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, model: Any, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        self.model = model
        self.vocabulary = vocabulary
        self.register_buffer("d2t", torch.from_numpy(vocabulary.d2t.copy()), persistent=False)
        self.register_buffer("t2d", torch.from_numpy(vocabulary.t2d.copy()), persistent=False)

    @classmethod
    def fresh(
        cls,
        vocabulary: DraftVocabulary,
        config: DraftLMConfig | None = None,
        *,
        embedding: Tensor | None = None,
        seed: int = 0,
    ) -> DraftLM:
        """A new float32 model.

        Args:
            vocabulary: which target ids it knows.
            config: its shape.
            embedding: the target's input embedding ``[target_size, width]``: own rows start as its rows of the known
                tokens, in the hidden_size directions in which those vary most, scaled to the usual size of a start.
            seed: of the weights; the global generator is left as it was.
        """
        config = config or DraftLMConfig()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=len(vocabulary) + 1,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    num_hidden_layers=config.layers,
                    num_attention_heads=config.heads,
                    num_key_value_heads=config.kv_heads,
                    max_position_embeddings=config.window,
                    rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                    tie_word_embeddings=True,
                    bos_token_id=None,
                    eos_token_id=None,
                    pad_token_id=None,
                )
            )
        draft = cls(model, vocabulary)
        if embedding is not None:
            draft.start_from(embedding)
        return draft

    def start_from(self, embedding: Tensor) -> None:
        """Replace the embedding by the target's; see `fresh`."""
        with torch.no_grad():
            own: Tensor = self.model.get_input_embeddings().weight
            rows = embedding.detach()[self.d2t.to(embedding.device)].to(own)
            size = own.std()
            rows = rows - rows.mean(0)
            if rows.shape[1] > own.shape[1]:
                _, directions = torch.linalg.eigh(rows.T @ rows)  # ascending: the last vary most
                rows = rows @ directions[:, -own.shape[1] :]
            rows = rows * (size / rows.std())
            own[: len(self.vocabulary), : rows.shape[1]] = rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token.

        Args:
            tokens: ``[batch, n]`` target ids.

        Returns:
            ``[batch, n, columns]``; column i stands for target id ``d2t[i]``.
        """
        logits: Tensor = self.model(input_ids=self.t2d[tokens], use_cache=False).logits
        return logits[..., : len(self.vocabulary)]

    @property
    def parameter_count(self) -> int:
        """Trained numbers; tied ones count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, folder: Path | str) -> None:
        """Write a checkpoint. Each file is complete or the one that was there; other files stay.

        Raises:
            BadCheckpoint: it cannot be written (a full disk, say); an older checkpoint is kept.
        """
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".save-", dir=folder) as work:
                self.model.config.save_pretrained(work)
                save_weights(self._weights(), str(Path(work) / "model.safetensors"), {"format": "pt"})
                _write_vocabulary(Path(work) / VOCABULARY_FILE, self.vocabulary)
                for file in sorted(Path(work).iterdir()):
                    file.replace(folder / file.name)
        except (OSError, SafetensorError) as cause:  # safetensors reports a full disk as an error of its own
            raise BadCheckpoint(folder.name, "", f"cannot be written: {cause}") from cause

    def _weights(self) -> dict[str, Tensor]:
        """Parameters by name, tied ones once."""
        return {name: tensor.detach().contiguous() for name, tensor in self.model.named_parameters()}

    @classmethod
    def load(cls, folder: Path | str, *, dtype: Any = torch.float32) -> DraftLM:
        """Read a checkpoint.

        Raises:
            BadCheckpoint: names file and field.
        """
        vocabulary = read_vocabulary(Path(folder))
        if vocabulary is None:
            raise BadCheckpoint(VOCABULARY_FILE, "", "is not there", hint="only models trained here have one")
        return cls(read_model(Path(folder), dtype), vocabulary)


def read_model(folder: Path, dtype: Any) -> Any:
    """The causal model of a folder in transformers format, on the CPU.

    Raises:
        BadCheckpoint: not there, truncated, foreign, or tensors that do not fit its config.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise BadCheckpoint(folder.name, "config.json", "is not there", hint="give the folder of a causal model")
    try:
        json.loads(config.read_text(encoding="utf-8"))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as cause:
        raise BadCheckpoint(folder.name, "", f"cannot be read: {type(cause).__name__}: {cause}") from cause
    live, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        fields = sorted(field if isinstance(field, str) else field[0] for field in report[kind])
        if fields:
            raise BadCheckpoint(folder.name, fields[0], f"{kind.replace('_', ' ')}: {len(fields)} tensors")
    return live.eval()


def read_vocabulary(folder: Path) -> DraftVocabulary | None:
    """The reduced vocabulary beside a model; None when it has none.

    Raises:
        BadCheckpoint: the file is truncated or foreign, or its map is no map.
    """
    file = folder / VOCABULARY_FILE
    if not file.is_file():
        return None
    try:
        with safe_open(str(file), framework="np") as stored:
            about = stored.metadata() or {}
            d2t = stored.get_tensor("d2t")
        if about.get("format") != _FORMAT:
            raise BadCheckpoint(file.name, "format", f"{about.get('format')!r} is not {_FORMAT!r}")
        return DraftVocabulary(d2t, int(about["target_size"]), about.get("fingerprint", ""))
    except BadOption as cause:
        raise BadCheckpoint(file.name, "d2t", str(cause)) from cause
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as cause:
        raise BadCheckpoint(file.name, "", f"cannot be read: {type(cause).__name__}: {cause}") from cause


def _write_vocabulary(file: Path, vocabulary: DraftVocabulary) -> None:
    about = {
        "format": _FORMAT,
        "target_size": str(vocabulary.target_size),
        "fingerprint": vocabulary.fingerprint,
    }
    save_file({"d2t": np.ascontiguousarray(vocabulary.d2t)}, str(file), about)
