"""Token recycling drafted as a tree: `recycling` with ``shape="tree"``, under a name that arms can say."""

from __future__ import annotations

from metasd_langchain.drafters import Drafter, Options
from metasd_langchain.drafters.recycling import create as create_recycling

__all__ = ["create"]


def create(options: Options) -> Drafter:
    """Build the drafter from the options of `recycling`."""
    return create_recycling({**options, "shape": "tree"})
