"""What happens to a row's logits before a token is chosen: bias, penalties, bans and the user's processors.

The order is transformers': bias, repetition, n-grams, least length, then what the caller brings; OpenAI's presence and
frequency penalties, which transformers does not have, stand before the least length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from metasd_langchain.errors import TargetError
from metasd_langchain.values import Shaping

__all__ = ["Shaper"]

Processor = Callable[[Tensor, Tensor], Tensor]  # ids [1, n], logits [1, vocab] -> logits [1, vocab]


class Shaper:
    """The shaping of one answer. Keeps nothing between calls: all state is in the tokens.

    Args:
        shaping: what to apply.
        prompt: tokens of the prompt; presence and frequency count behind it.
        stop_ids: what cannot come before the least length.
    """

    def __init__(self, shaping: Shaping, prompt: int, stop_ids: frozenset[int]) -> None:
        # transformers' classes where it has them: the answer must be the one that its users know
        from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

        chain: list[Processor] = []
        if shaping.logit_bias:
            chain.append(_Bias(shaping.logit_bias))
        if shaping.repetition_penalty != 1.0:
            chain.append(RepetitionPenaltyLogitsProcessor(float(shaping.repetition_penalty)))
        if shaping.no_repeat_ngram_size:
            chain.append(NoRepeatNGramLogitsProcessor(shaping.no_repeat_ngram_size))
        if shaping.presence_penalty or shaping.frequency_penalty:
            chain.append(_Counted(prompt, shaping.presence_penalty, shaping.frequency_penalty))
        if shaping.min_tokens and stop_ids:
            chain.append(_Least(prompt + shaping.min_tokens, sorted(stop_ids)))
        self._chain = (*chain, *shaping.processors)

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Shaped logits.

        Args:
            tokens: prompt, answer so far and the path to the row.
            logits: ``[vocab]`` after the last of them; left as they are.

        Returns:
            float32 ``[vocab]``.
        """
        ids = torch.tensor([tokens], device=logits.device)
        scores = logits[None].to(torch.float32, copy=True)
        shape = scores.shape
        for processor in self._chain:
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != shape:
                raise TargetError(f"the logits processor {type(processor).__name__} gave no logits of the same shape")
        return scores[0]


class _Bias:
    def __init__(self, pairs: Sequence[tuple[int, float]]) -> None:
        self._ids = torch.tensor([token for token, _ in pairs])
        self._values = torch.tensor([value for _, value in pairs], dtype=torch.float32)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_add(1, self._ids.to(scores.device), self._values.to(scores)[None])


class _Counted:
    """Presence and frequency penalty (OpenAI's definition): ``logit - presence * [count > 0] - frequency * count``."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        seen, counts = ids[0, self._prompt :].unique(return_counts=True)
        return scores.index_add(1, seen, -(self._presence + self._frequency * counts.to(scores))[None])


class _Least:
    def __init__(self, length: int, stop_ids: Sequence[int]) -> None:
        self._length, self._stop_ids = length, list(stop_ids)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] < self._length:
            scores[:, [token for token in self._stop_ids if token < scores.shape[1]]] = -torch.inf
        return scores
