"""A second module tree over the same parameters, so that the engine can change attention and linear layers of a model
that somebody else goes on using.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["shadow"]


def shadow(model: nn.Module) -> nn.Module:
    """Copy the module objects and the config, share every parameter.

    The copy's buffers dictionaries are its own, so rotary scaling that replaces a buffer does not reach the original.
    A model whose modules carry hooks bound to themselves (accelerate's dispatch over devices) is returned as it is.
    """
    if any("forward" in module.__dict__ or hasattr(module, "_hf_hook") for module in model.modules()):
        return model
    return _copy(model, {}, {})


def _copy(module: nn.Module, modules: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    if id(module) in modules:
        return modules[id(module)]
    twin = copy.copy(module)
    modules[id(module)] = twin
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_modules"] = {
        name: None if child is None else _copy(child, modules, configs) for name, child in module._modules.items()
    }
    config = module.__dict__.get("config")
    if config is not None:
        twin.__dict__["config"] = configs.setdefault(id(config), copy.deepcopy(config))
    return twin
