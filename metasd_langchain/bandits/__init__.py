"""Multi-armed bandits that choose the drafter and draft length of each round. No torch in here.

``policies/`` holds one policy a file, ``rewards.py`` turns an ``Outcome`` into a number, ``selector.py`` joins the two
with a cost model and a memory. To add a policy ``foo``: write ``policies/foo.py`` with
``create(options: Mapping[str, object]) -> Policy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from metasd_langchain.values import Choice, Situation

__all__ = ["Encoding", "Policy", "State"]

State = dict[str, object]  # JSON-able sufficient statistics, by arm name


class Encoding(NamedTuple):
    """How prompts are turned into vectors: a name of ``bandits.routers.ENCODERS``, and numbers of a vector."""

    name: str
    size: int


@runtime_checkable
class Policy(Protocol):
    """Chooses an arm each round and learns from its reward.

    Attributes:
        name: its registered name.
        full_information: whether ``update`` wants a reward of every arm (True) or of the played one only.

    Optional attributes, of the class or of the object:
        features: names of `FEATURES` that it cannot do without; those that cost something are measured for it alone.
        encoding: an `Encoding`: every `Situation` then holds a vector of the prompt.
        compares: True: drafts of near-free drafters are compared before each choice, see `Situation.seconded`.
        fits: ``fits(arms)``, asked once with the names of the pool's arms; raises a ConfigError when they do not suit.
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
