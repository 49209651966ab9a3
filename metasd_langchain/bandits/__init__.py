"""Multi-armed bandits that choose the drafter and draft length of each round. No torch in here.

``policies/`` holds one policy a file, ``rewards.py`` turns an ``Outcome`` into a number, ``selector.py`` joins the two
with a cost model and a memory. To add a policy ``foo``: write ``policies/foo.py`` with
``create(options: Mapping[str, object]) -> Policy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from metasd_langchain.values import Choice, Situation

__all__ = ["Policy", "State"]

State = dict[str, object]  # JSON-able sufficient statistics, by arm name


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm each round and learns from its reward.

    Attributes:
        name: its registered name.
        full_information: whether ``update`` wants a reward of every arm (True) or of the played one only.
    """

    name: str
    full_information: ClassVar[bool]

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        """Choose among ``situation.arms``; arms may appear and vanish between calls."""
        ...

    def update(self, situation: Situation, choice: Choice, rewards: Mapping[str, float]) -> None:
        """Learn. `situation` is the one `select` saw; `rewards` maps arm names to rewards in [0, 1]."""
        ...

    def values(self) -> Mapping[str, float]:
        """The current mean reward of each arm, for display."""
        ...

    def dump(self) -> State:
        """Sufficient statistics, JSON-able."""
        ...

    def load(self, state: State) -> None:
        """Continue from statistics that ``dump`` gave. A wrong shape raises BanditMemoryError."""
        ...
