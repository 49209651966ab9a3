"""Are greedy answers those of transformers, and where not: a rounding tie or a mistake?

In half precision any change of a forward's width changes the rounding, so the top two logits may swap places when they
lie within it. A *near tie* is a first difference between two tokens whose logits lie within the bound in a fresh
forward over the common text; a wider gap is *wrong*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from evaluators.figures import Cell

__all__ = ["gap", "identity"]

# Two units in the last place of a bfloat16 between 16 and 32, where top logits of small models lie; float16 has three
# bits more. In float32 the same sums in another order differ by less than this.
_BOUNDS = {torch.bfloat16: 0.25, torch.float16: 0.03125, torch.float32: 1e-3}


def identity(
    cells: Iterable[Cell], method: str, base: str, model: Any, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """How many prompts a method answers as the base does, and what kind the differences are.

    Args:
        cells: a greedy run's.
        method, base: names.
        model: transformers model that judges differences.
        prompts: ids of the prompts.

    Returns:
        ``identical_to_hf``: prompts whose every repetition equals the base's; ``near_ties``, ``wrong``: the others, by
        their widest gap; ``gaps``: that gap of each (logits; None where one answer goes on and the other has ended);
        ``gap_bound``. The three counts add up to the prompts compared.
    """
    answers: dict[str, dict[int, set[tuple[int, ...]]]] = {method: defaultdict(set), base: defaultdict(set)}
    for cell in cells:
        if cell.method in answers:
            answers[cell.method][cell.prompt].add(cell.ids)
    bound = _BOUNDS.get(model.dtype, 0.25)
    same = 0
    gaps: list[float | None] = []
    for prompt in sorted(answers[method].keys() & answers[base].keys()):
        pairs = [(own, other) for own in answers[method][prompt] for other in answers[base][prompt] if own != other]
        if not pairs:
            same += 1
            continue
        found = [gap(model, prompts[prompt], own, other) for own, other in pairs]
        gaps.append(None if None in found else max(value for value in found if value is not None))
    wrong = sum(value is None or value > bound for value in gaps)
    return {
        "identical_to_hf": same,
        "near_ties": len(gaps) - wrong,
        "wrong": wrong,
        "gaps": gaps,
        "gap_bound": bound,
    }


def gap(model: Any, prompt: Sequence[int], one: Sequence[int], two: Sequence[int]) -> float | None:
    """Distance of two answers' logits at their first difference; None when one is a beginning of the other.

    The forward runs in the model's dtype over all tokens at once; the two logits are formed in float32 from the last
    hidden state, so that the distance itself is not rounded.
    """
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if at is None:
        return None
    head = model.get_output_embeddings()
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1]))
    try:
        with torch.inference_mode():
            model(torch.tensor([[*prompt, *one[:at]]], device=model.device), use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    pair = [one[at], two[at]]
    with torch.inference_mode():
        logits = head.weight[pair].float() @ seen[-1].float()
        if getattr(head, "bias", None) is not None:
            logits = logits + head.bias[pair].float()
        cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        if cap:
            logits = torch.tanh(logits / cap) * cap
    return float((logits[0] - logits[1]).abs())
