"""A policy that plays one arm and keeps what it is told."""

from __future__ import annotations

import numpy as np

from metasd_langchain.bandits import Encoding
from metasd_langchain.values import PLAIN, Choice, Situation


class Listener:
    """Plays one arm, and keeps every situation."""

    name = "listener"
    full_information = False

    def __init__(
        self,
        arm: str = PLAIN,
        features: tuple[str, ...] = (),
        encoding: Encoding | None = None,
        *,
        compares: bool = False,
    ) -> None:
        self.arm, self.features, self.encoding, self.compares = arm, features, encoding, compares
        self.seen: list[Situation] = []

    def __deepcopy__(self, memo: object) -> Listener:
        return self

    def select(self, situation: Situation, rng: np.random.Generator) -> Choice:
        self.seen.append(situation)
        return Choice(self.arm)

    def update(self, *told: object) -> None: ...

    def values(self) -> dict[str, float]:
        return {}

    def dump(self) -> dict[str, object]:
        return {}

    def load(self, state: object) -> None: ...
