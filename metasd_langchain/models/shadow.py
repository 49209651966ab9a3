"""A second module tree over the same parameters, so that the engine can change attention and linear layers of a model
that somebody else goes on using.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn

from metasd_langchain.errors import UnsupportedModel

__all__ = ["shadow"]


def shadow(model: nn.Module, owned: bool) -> nn.Module:
    """Copy the module objects and the config, share every parameter.

    The copy's dictionaries of buffers and hooks are its own, so neither rotary scaling that replaces a buffer nor a
    hook that is registered later reaches the other.
    A model whose modules carry a ``forward`` or hooks of their own (accelerate's dispatch over devices, a compiled
    forward) cannot be copied so: it is used as it is when nobody else owns it.

    Raises:
        UnsupportedModel: such a model that belongs to somebody.
    """
    if any("forward" in module.__dict__ or hasattr(module, "_hf_hook") for module in model.modules()):
        if not owned:
            raise UnsupportedModel(
                "a live model whose modules have a forward or hooks of their own",
                hint="pass its folder or hub id, with device_map or compile as options",
            )
        return model
    return _copy(model, {}, {})


def _copy(module: nn.Module, modules: dict[int, nn.Module], configs: dict[int, Any]) -> nn.Module:
    if id(module) in modules:
        return modules[id(module)]
    twin = copy.copy(module)
    modules[id(module)] = twin
    for name, value in vars(module).items():
        if "hooks" in name and isinstance(value, OrderedDict):  # transformers registers some when states are asked for
            twin.__dict__[name] = copy.copy(value)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_modules"] = {
        name: None if child is None else _copy(child, modules, configs) for name, child in module._modules.items()
    }
    config = module.__dict__.get("config")
    if config is not None:
        twin.__dict__["config"] = configs.setdefault(id(config), copy.deepcopy(config))
    return twin
