"""How much memory a model's weights take."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["weight_bytes"]


def weight_bytes(model: nn.Module, shared: nn.Module | None = None) -> int:
    """Bytes of parameters and buffers, tied ones once.

    Args:
        model: whose.
        shared: a model whose tensors are not counted again.
    """
    others = set() if shared is None else {id(tensor) for tensor in _tensors(shared)}
    own = {id(tensor): tensor for tensor in _tensors(model) if id(tensor) not in others}
    return sum(tensor.numel() * tensor.element_size() for tensor in own.values())


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
