"""Loading a small model that drafts: a folder of ours or of transformers, or a live pair."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from metasd_langchain.errors import IncompatibleVocabulary
from metasd_langchain.models.draft_lm import read_model, read_vocabulary
from metasd_langchain.models.footprint import weight_bytes
from metasd_langchain.models.lm import CausalLM
from metasd_langchain.models.load import pick_dtype
from metasd_langchain.models.vocabulary import DraftVocabulary

__all__ = ["Small", "load_small"]


@dataclass(frozen=True, slots=True)
class Small:
    """A loaded model.

    Attributes:
        lm: packed forwards.
        vocabulary: which target ids its columns stand for; None: its ids are the target's.
        tokenizer: its own, when it has no reduced vocabulary.
        nbytes: bytes of its weights.
    """

    lm: CausalLM
    vocabulary: DraftVocabulary | None
    tokenizer: Any
    nbytes: int


def load_small(model: str | Path | tuple[Any, Any], device: str, target_device: torch.device) -> Small:
    """Load the model, and how its token ids are to be read.

    Args:
        model: folder, or a live pair ``(model, tokenizer)``.
        device: "auto" is `target_device`. A live model stays where it is.

    Raises:
        BadCheckpoint, UnsupportedModel: the model.
        IncompatibleVocabulary: a folder that does not say what its token ids mean.
    """
    if isinstance(model, tuple):
        live, tokenizer = model
        return Small(CausalLM(live), None, tokenizer, weight_bytes(live))
    folder = Path(model).expanduser()
    vocabulary = read_vocabulary(folder)
    place = target_device if device == "auto" else torch.device(device)
    live = read_model(folder, pick_dtype("auto", place.type))
    tokenizer = None if vocabulary is not None else _tokenizer(folder)
    lm = CausalLM(live.to(place), owned=True)
    return Small(lm, vocabulary, tokenizer, weight_bytes(live))


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as cause:
        raise IncompatibleVocabulary(
            f"{folder.name} holds no tokenizer, so what its token ids mean is not known",
            hint="save the target's tokenizer into the folder if the model was trained on its ids",
        ) from cause
