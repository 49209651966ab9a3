"""Where the time of a forward goes, by torch's profiler: five parts that add up to the forward's unprofiled median.

``head``, ``body``: inside linear layers, the one over the vocabulary and the others. ``attention``: scores, softmax and
mixing, outside linear layers. ``other``: every other torch operation. ``python``: between operations. The profiler
slows operations and Python down, products hardly, so `other` and `python` are upper bounds and products lower ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile

__all__ = ["FORWARD", "PARTS", "split"]

PARTS = ("head", "body", "attention", "other", "python")
FORWARD = "evaluators.forward"  # range that a forward puts around what its clock measures
_LINEAR = "evaluators.linear."
_ATTENTION = ("aten::scaled_dot_product", "aten::_scaled_dot_product", "aten::bmm", "aten::baddbmm", "aten::matmul")
_SOFTMAX = ("aten::softmax", "aten::_softmax")


def split(forward: Callable[[], float], vocab: int, repetitions: int) -> dict[str, float]:
    """Milliseconds of each of PARTS, their ``total``, and the number of ``operations``, of one forward.

    Args:
        forward: runs one forward inside a ``record_function(FORWARD)`` and returns its seconds.
        vocab: outputs of the head.
        repetitions: forwards to take the median and the profile over.
    """
    total = float(np.median([forward() for _ in range(repetitions)])) * 1e3
    with _Ranges(vocab), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repetitions):
            forward()
    parts: dict[str, float] = defaultdict(float)
    operations = 0
    for event in profiler.events() or ():
        names = _ancestry(event)
        if FORWARD not in names:
            continue
        parts[_part(names)] += event.self_cpu_time_total
        operations += names[0].startswith("aten::") and not names[1].startswith("aten::")
    measured = sum(parts.values())
    scaled = {part: total * parts[part] / measured if measured else 0.0 for part in PARTS}
    return {"total": total, **scaled, "operations": operations / repetitions}


class _Ranges:
    """Marks every call of a linear layer for the profiler, in any model; also layers that only look like ``nn.Linear``.

    Hooks for all modules of the process, so that a model inside an engine is reached as well.
    """

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._open: list[record_function] = []

    def __enter__(self) -> None:
        self._handles = [register_module_forward_pre_hook(self._start), register_module_forward_hook(self._stop)]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _start(self, module: torch.nn.Module, _inputs: Any) -> None:
        if _is_linear(module):
            part = "head" if module.out_features == self._vocab else "body"
            self._open.append(record_function(_LINEAR + part))
            self._open[-1].__enter__()

    def _stop(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if _is_linear(module):
            self._open.pop().__exit__(None, None, None)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(getattr(module, "out_features", None), int)


def _ancestry(event: Any) -> list[str]:
    """Names of an event and of what it ran in, innermost first."""
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


def _part(names: list[str]) -> str:
    for name in names:
        if name.startswith(_LINEAR):
            return name.removeprefix(_LINEAR)
    if names[0] == FORWARD:
        return "python"
    return "attention" if any(name.startswith((*_ATTENTION, *_SOFTMAX)) for name in names) else "other"
