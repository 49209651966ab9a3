"""What one answer tells its policy beside the hints: features of the round, and a vector of the prompt."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.engine.pool import Pool
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.engine.text import Detokenizer
from metasd_langchain.models.encoders import PromptState, hidden_layer
from metasd_langchain.models.lm import Feed, Scores
from metasd_langchain.values import Request

if TYPE_CHECKING:
    from metasd_langchain.models.load import Target

__all__ = ["Context"]

logger = logging.getLogger("metasd_langchain")


class Context:
    """Measures what the policy asked for, and nothing else that costs anything.

    Args:
        request: what is generated.
        pool: whose policy; bound, so that its encoder is loaded.
        target: who answers.
        detokenizer: ids to text.

    Attributes:
        vector: of the prompt; None while it is not known, or when nobody asked.
    """

    def __init__(self, request: Request, pool: Pool, target: Target, detokenizer: Detokenizer) -> None:
        self._prompt = float(len(request.prompt))
        self._asked_entropy = "entropy" in pool.selector.wants
        self._entropy = math.nan
        self.vector: NDArray[np.float64] | None = None
        self._state: PromptState | None = None
        self._layers: tuple[int, ...] = ()
        encoding = pool.selector.encoding
        if pool.encoder is not None:
            try:
                self.vector = pool.encoder.encode([detokenizer.decode(request.prompt)])[0]
            except Exception as error:  # a prompt that cannot be encoded costs the route, never the answer
                logger.warning("encoding a prompt failed (%s); it is not routed", type(error).__name__)
        elif encoding is not None:
            self._state = PromptState(encoding.name, len(request.prompt))
            self._layers = (hidden_layer(target),)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states are wanted of the next forward."""
        return self._layers

    def features(self, position: int, batch: int) -> dict[str, float]:
        """Of the next round, by the names of ``values.FEATURES``."""
        told = {"position": float(position), "batch": float(batch), "prompt": self._prompt}
        if self._asked_entropy:
            told["entropy"] = self._entropy
        return told

    def read(self, feed: Feed, scores: Scores, place: int) -> None:
        """A forward read a feed; as long as it was of the prompt, its states count."""
        if self._state is None:
            return
        first = scores.tokens[place]
        self._state.add(scores.hidden[self._layers[0]][first : first + len(feed.pending)])
        if self._state.complete:
            self.vector, self._state, self._layers = self._state.vector, None, ()

    def drawn(self, rows: TargetRows, row: int) -> None:
        """The newest token came from a row."""
        if self._asked_entropy:
            self._entropy = rows.entropy(row)
