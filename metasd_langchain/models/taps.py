"""Hidden states of chosen layers, without transformers' own way of asking for them, which wraps every module anew in
each forward (a tenth of a plain step of the embedded model).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["Taps"]


class Taps:
    """Hooks on a model's decoder; each is set when its layer is first asked for.

    Args:
        model: whose modules nobody else uses.
        layers: how many it has.
    """

    def __init__(self, model: Any, layers: int) -> None:
        decoder = model.get_decoder()
        blocks = getattr(decoder, "layers", None)
        norm = getattr(decoder, "norm", None)
        self._blocks: list[nn.Module] = list(blocks) if isinstance(blocks, nn.ModuleList) else []
        self._norm = norm
        self.serves = len(self._blocks) == layers and isinstance(norm, nn.Module)
        self._set: set[int] = set()
        self._seen: dict[int, Tensor] = {}

    def ask(self, layers: Sequence[int]) -> None:
        """Have the next forward keep the states of these layers, numbered as transformers does."""
        self._seen.clear()
        for layer in layers:
            if layer not in self._set:
                self._tap(layer)
                self._set.add(layer)

    def take(self, layers: Sequence[int]) -> dict[int, Tensor]:
        """What the forward saw: layer -> ``[new tokens, width]``."""
        taken = {layer: self._seen[layer][0] for layer in layers}
        self._seen.clear()
        return taken

    def _tap(self, layer: int) -> None:
        if layer == 0:
            self._blocks[0].register_forward_pre_hook(partial(self._before, layer), with_kwargs=True)
            return
        block: Any = self._norm if layer == len(self._blocks) else self._blocks[layer - 1]
        block.register_forward_hook(partial(self._after, layer))

    def _before(self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen[layer] = args[0] if args else kwargs["hidden_states"]

    def _after(self, layer: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._seen[layer] = output[0] if isinstance(output, tuple) else output
