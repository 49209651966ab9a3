"""Tells models apart across processes, so that what was learned about drafting for one is not used for another."""

from __future__ import annotations

import hashlib
import json
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from metasd_langchain.models.lm import CausalLM
    from metasd_langchain.models.load import Target

__all__ = ["identity"]

_TENSORS, _NUMBERS = 64, 4  # read of a model: a few milliseconds
_known: weakref.WeakKeyDictionary[CausalLM, str] = weakref.WeakKeyDictionary()


def identity(target: Target, place: str = "") -> str:
    """A model's name, dtype and kind of device, with a hash of its place, its config and some of its weights.

    Args:
        target: the model.
        place: folder, file or hub id where it was loaded from; "" for a live object.
    """
    lm = target.lm
    found = _known.get(lm)
    if found is None:
        found = _known[lm] = _digest(lm)
    whole = hashlib.blake2s(f"{place}\n{found}".encode(), digest_size=8).hexdigest()
    return f"{target.name} {str(lm.dtype).removeprefix('torch.')} {lm.device.type} {whole}"


def _digest(lm: CausalLM) -> str:
    model: Any = lm._model
    parameters = list(model.parameters())
    every = max(1, len(parameters) // _TENSORS)
    config = {key: value for key, value in lm.config.to_dict().items() if not key.startswith("_")}
    config.pop("transformers_version", None)
    parts = [json.dumps(config, sort_keys=True, default=str)]
    parts += [f"{tuple(tensor.shape)} {_sample(tensor)}" for tensor in parameters[::every]]
    return hashlib.blake2s("\n".join(parts).encode()).hexdigest()


def _sample(tensor: Tensor) -> list[float]:
    """A few numbers from a tensor's middle, without a copy of it; none where it holds none."""
    try:
        row = tensor.detach()
        while row.dim() > 1:
            row = row[len(row) // 2]
        numbers: list[float] = row[:_NUMBERS].tolist()
    except (RuntimeError, NotImplementedError, IndexError):  # offloaded, or a layout without rows
        return []
    return numbers
