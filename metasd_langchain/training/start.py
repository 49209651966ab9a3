"""Beginning with the weights of a head that is trained already, whose draft vocabulary may be another."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metasd_langchain.errors import BadCheckpoint
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.eagle_format import CONFIG, load_eagle

__all__ = ["head_digest", "load_start", "take_over"]

_FREE = ("draft_vocab_size", "target", "tokenizer", "spread")  # what two heads of one shape may differ in


def head_digest(folder: Path) -> str:
    """Names a checkpoint by what its files hold.

    Raises:
        BadCheckpoint: no checkpoint there, or one that cannot be read.
    """
    found = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    try:
        for file in (folder / CONFIG, *files):
            found.update(file.read_bytes())
    except OSError as cause:
        raise BadCheckpoint(str(folder / CONFIG), "", f"cannot be read: {cause.strerror}") from cause
    return found.hexdigest()[:16]


def load_start(folder: Path, config: EagleConfig, parts: TargetParts) -> EagleHead:
    """A head that one of this shape can begin with.

    Args:
        folder: where it lies.
        config: of the head to be trained; its draft vocabulary may be another.
        parts: of the target.

    Raises:
        BadCheckpoint, IncompatibleVocabulary: see ``load_eagle``; or it has another shape, whose field is named.
    """
    start = load_eagle(folder, parts)
    file, other = str(folder / CONFIG), asdict(start.config)
    for name, value in asdict(config).items():
        if name not in _FREE and other[name] != value:
            raise BadCheckpoint(file, name, f"is {other[name]}, training needs {value}")
    if start.lm_head is None:
        raise BadCheckpoint(file, "lm_head", "missing, so there is none to go on from")
    return start


def take_over(module: nn.Module, start: EagleHead) -> None:
    """Set a fresh head's weights to those of another of the same shape.

    Output rows are matched by the target's token ids; a token that the other could not propose keeps the row it has,
    which is the target's.

    Args:
        module: the head to be trained, just initialised; changed in place.
        start: where its weights come from.
    """
    own: Any = module
    given = dict(start.named_parameters())
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if name != "lm_head.weight":
                parameter.copy_(given[name])
        ids = start.draft_ids
        places = torch.searchsorted(ids, own.draft_ids).clamp_max(len(ids) - 1)
        known = ids[places] == own.draft_ids
        own.lm_head.weight[known] = given["lm_head.weight"][places[known]]
