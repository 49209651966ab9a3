"""Lossless, adaptive speculative decoding for LangChain: several drafters guess, your model verifies, a bandit chooses.

Importing the package loads neither torch nor transformers; names are resolved when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from metasd_langchain._version import __version__

if TYPE_CHECKING:
    from metasd_langchain.assemble import make_pool, shared_engine
    from metasd_langchain.bandits.memory import SqliteMemory
    from metasd_langchain.chat import ChatMetaSD
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.engine.pool import Pool
    from metasd_langchain.errors import MetaSDError
    from metasd_langchain.llm import MetaSDLLM
    from metasd_langchain.values import Arm, Draft, Request, Round, Sampling, Step, Summary

_HOMES = {
    "Arm": "values",
    "ChatMetaSD": "chat",
    "Draft": "values",
    "Engine": "engine.loop",
    "MetaSDError": "errors",
    "MetaSDLLM": "llm",
    "Pool": "engine.pool",
    "Request": "values",
    "Round": "values",
    "Sampling": "values",
    "SqliteMemory": "bandits.memory",
    "Step": "values",
    "Summary": "values",
    "make_pool": "assemble",
    "shared_engine": "assemble",
}

__all__ = [
    "Arm",
    "ChatMetaSD",
    "Draft",
    "Engine",
    "MetaSDError",
    "MetaSDLLM",
    "Pool",
    "Request",
    "Round",
    "Sampling",
    "SqliteMemory",
    "Step",
    "Summary",
    "__version__",
    "make_pool",
    "shared_engine",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
