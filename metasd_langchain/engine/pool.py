"""What a request may play: drafters, the arms over them, and the bandit that chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metasd_langchain.bandits.selector import Selector
from metasd_langchain.drafters import Drafter

__all__ = ["Pool"]


@dataclass(frozen=True)
class Pool:
    """Drafters by name and the selector over their arms. Shared by the requests of one configuration.

    Attributes:
        drafters: every drafter that an arm of the selector names; `plain` has none.
        selector: policy, reward and memory.
    """

    drafters: Mapping[str, Drafter]
    selector: Selector

    @property
    def candidates(self) -> int:
        """Best next tokens a scored row that some drafter wants to see."""
        return max((drafter.candidates for drafter in self.drafters.values()), default=0)

    @property
    def prompt_rows(self) -> int:
        """Rows at the prompt's end, besides the last, that some drafter wants scored."""
        return max((drafter.prompt_rows for drafter in self.drafters.values()), default=0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Target layers that some drafter wants to see."""
        return tuple(sorted({layer for drafter in self.drafters.values() for layer in drafter.hidden_layers}))

    def forget(self, scope: str | None = None) -> None:
        """Drop shared text indexes (of one scope or all) and, for all scopes, what the bandit learned."""
        for drafter in self.drafters.values():
            drafter.forget(scope)
        if scope is None:
            self.selector.forget()
