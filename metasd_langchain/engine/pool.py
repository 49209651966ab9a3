"""What a request may play: drafters, the arms over them, and the bandit that chooses."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from metasd_langchain.bandits import Encoding
from metasd_langchain.bandits.routers import ENCODERS
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.drafters import Drafter
from metasd_langchain.errors import BadOption, BadRouter, LoadError, MetaSDError, UnknownName
from metasd_langchain.values import VerifyMode

if TYPE_CHECKING:
    from metasd_langchain.models.encoders import SentenceEncoder
    from metasd_langchain.models.lm import CausalLM
    from metasd_langchain.models.load import Target

__all__ = ["Pool"]

_WINDOW = 1024


@dataclass(frozen=True)
class Pool:
    """Drafters by name and the selector over their arms. Shared by the requests of one configuration.

    Attributes:
        drafters: every drafter that an arm of the selector names; `plain` has none.
        selector: policy, reward and memory.
        encoder: what turns a prompt's text into a vector for the policy; None where it wants none of text, or `bound`
            was not called.
    """

    drafters: Mapping[str, Drafter]
    selector: Selector
    encoder: SentenceEncoder | None = None
    _bound: WeakKeyDictionary[CausalLM, Pool] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def bound(self, target: Target) -> Pool:
        """The pool with every drafter made ready for a target; once for each target.

        Raises:
            MetaSDError: a drafter or a router does not fit the target, or its files cannot be read.
            MissingExtra: the policy wants an encoder that is not installed.
        """
        with self._lock:
            pool = self._bound.get(target.lm)
            if pool is None:
                drafters = {name: _ready(name, drafter, target) for name, drafter in self.drafters.items()}
                encoder = _encoder(self.selector.encoding, target)
                pool = self._bound[target.lm] = replace(self, drafters=drafters, encoder=encoder)
            return pool

    def check(self, verify: VerifyMode) -> None:
        """Raise BadOption for a way of verifying that the pool cannot be played with."""
        if verify == "rejection" and self.drafters and self.selector.compares:
            # A drawn draft is a sample only as long as nobody looks at it before it is chosen.
            raise BadOption("verify", verify, "'invariant', as the policy compares drafts before it chooses")

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
        """Hidden states that some drafter wants to see."""
        return tuple(sorted({layer for drafter in self.drafters.values() for layer in drafter.hidden_layers}))

    @property
    def hidden_window(self) -> int:
        """How many of the last tokens' hidden states some drafter wants to see."""
        wanted = [drafter for drafter in self.drafters.values() if drafter.hidden_layers]
        return max((int(getattr(drafter, "hidden_window", _WINDOW)) for drafter in wanted), default=0)

    @property
    def memory_bytes(self) -> dict[str, int]:
        """What each drafter holds, in bytes, as far as it says; weights count once they are loaded."""
        with self._lock:
            pools = [self, *self._bound.values()]
        return {
            name: sum(int(getattr(pool.drafters[name], "memory_bytes", 0)) for pool in pools if _own(pool, self, name))
            for name in self.drafters
        }

    def forget(self, scope: str | None = None) -> None:
        """Drop shared text indexes (of one scope or all) and, for all scopes, what the bandit learned."""
        with self._lock:
            pools = [self, *self._bound.values()]
        for pool in pools:
            for drafter in pool.drafters.values():
                drafter.forget(scope)
        if scope is None:
            self.selector.forget()


def _own(pool: Pool, unbound: Pool, name: str) -> bool:
    """Whether a drafter of a bound pool is another object than the unbound one."""
    return pool is unbound or pool.drafters[name] is not unbound.drafters[name]


def _encoder(encoding: Encoding | None, target: Target) -> SentenceEncoder | None:
    """The encoder of prompts' texts, where the policy wants one; checks that vectors are of the size it wants."""
    if encoding is None:
        return None
    from metasd_langchain.models.encoders import hidden_size, sentence_encoder

    encoder = sentence_encoder() if encoding.name == "minilm" else None
    if encoder is None and encoding.name not in ENCODERS:
        raise UnknownName("encoder of a policy", encoding.name, ENCODERS)
    size = hidden_size(target) if encoder is None else encoder.size
    if size != encoding.size:
        problem = f"was fitted to vectors of {encoding.size} numbers; {encoding.name} gives {size} for {target.name}"
        raise BadRouter("", "", problem, hint="fit one for this model")
    return encoder


def _ready(name: str, drafter: Drafter, target: Target) -> Drafter:
    """The drafter for a target: what its optional ``bind`` returns."""
    bind = getattr(drafter, "bind", None)
    if bind is None:
        return drafter
    try:
        bound = bind(target)
    except MetaSDError:
        raise
    except Exception as cause:
        raise LoadError(f"drafter {name} cannot be used with {target.name}: {type(cause).__name__}") from cause
    if not isinstance(bound, Drafter):
        raise LoadError(f"drafter {name}: bind returned {type(bound).__name__}, not a drafter")
    return bound
