"""Other packages' engines, measured beside ours when they are installed."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

import torch

from evaluators.errors import EvaluatorError
from evaluators.methods import Answer, Limits

__all__ = ["Economize"]

_VERSION = "0.3.2"
_NGRAM, _CYCLE = 3, 8


class Economize:
    """economize's prompt lookup, as in our survey of peers: ``LookupConfig(max_ngram=3)``, ``cycle_length=8``.

    Sampled runs use its TopPSampler and rejection verifier, the public way; the sampler sorts the whole vocabulary for
    every token even with top_p 1. Its ``generate`` does not, but fails on transformers 5.24 ("cannot forward the model
    inputs ['cache']").

    Args:
        model: a transformers model that nobody else uses.
        limits: as for the others.

    Raises:
        EvaluatorError: it is not installed, or cannot run the model.
    """

    name = "economize"

    def __init__(self, model: Any, limits: Limits) -> None:
        try:
            import economize
            from economize.techniques.lookup.config import LookupConfig
        except ImportError as cause:
            raise EvaluatorError("not installed (pip install --group eval)") from cause
        self.version = importlib.metadata.version("economize")
        self._limits, self._sampler = limits, economize.TopPSampler
        config = economize.DecodeConfig(cycle_length=_CYCLE, verifier=None if limits.greedy else "rejection")
        try:
            self._model = economize.apply(model, LookupConfig(max_ngram=_NGRAM), decoding=config)
        except economize.EconomizeError as cause:
            raise EvaluatorError(f"{type(cause).__name__}: {cause}") from cause

    @property
    def note(self) -> str:
        """A word of warning, or ""."""
        return "" if self.version == _VERSION else f"version {self.version}, not {_VERSION}"

    def answer(self, prompt: Sequence[int], seed: int) -> Answer:
        """See Method."""
        limits = self._limits
        start = time.perf_counter()
        sampler = None if limits.greedy else self._sampler(limits.temperature, limits.top_p, seed)
        ids = torch.tensor(list(prompt), device=self._model.device)
        result = self._model.decode(ids, limits.max_tokens, selector=sampler, stop=limits.stop_ids or None)
        new = tuple(result.tokens.tolist())
        return Answer(new, time.perf_counter() - start, result.cost.count("exact"))

    def reset(self, *, memory: bool) -> None:
        """Nothing is kept between calls: every call builds its drafter anew."""
