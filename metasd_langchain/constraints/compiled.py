"""Grammars compiled by llguidance, and the sessions over them."""

from __future__ import annotations

import itertools
import os
import re
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from metasd_langchain.constraints import Constraint, Grammar
from metasd_langchain.constraints.closing import Closer, Way
from metasd_langchain.constraints.legal import Legal
from metasd_langchain.constraints.vocabulary import ll_tokenizer, require
from metasd_langchain.errors import BadGrammar, ConstraintFailed
from metasd_langchain.values import Draft

__all__ = ["CompiledConstraint", "check", "compiled"]

_GRAMMARS = 64  # compiled ones kept for each tokenizer
_NEAR = 64  # tokens beyond twice what the end needs
_QUIET = {"log_level": 0}  # else the parser writes text of the answer to stderr

_compilers: weakref.WeakKeyDictionary[Any, _Compiler] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def compiled(grammar: Grammar, target: Any) -> Constraint:
    """A grammar for a target's tokenizer; compiled once, then shared.

    The first grammar of a tokenizer also builds llguidance's form of it, which takes seconds for a large vocabulary.

    Args:
        grammar: what an answer may be.
        target: `metasd_langchain.models.load.Target`, or what has its ``lm``, ``tokenizer``, ``stop_ids`` and ``lock``.

    Raises:
        MissingExtra: llguidance is not installed.
        BadGrammar: it cannot be compiled.
    """
    check(grammar)
    with _lock:
        compiler = _compilers.get(target.lm)
        if compiler is None:
            compiler = _compilers[target.lm] = _Compiler()
    return compiler.constraint(grammar, target)


@lru_cache(maxsize=_GRAMMARS)
def check(grammar: Grammar) -> None:
    """Raise for a grammar that cannot be compiled for any tokenizer. Needs no model."""
    wrong, messages = require().LLMatcher.validate_grammar_with_warnings(grammar.lark)
    if wrong:
        raise BadGrammar(grammar.label, _reason(messages[0] if messages else ""))


def _reason(message: str) -> str:
    """What a compiler's message says: its lines quote the grammar, so only the first one, without the place."""
    first = re.sub(r"^(at )?\d+\(\d+\):\s*", "", message.strip()).partition("\n")[0].strip()
    detail = re.search(r"^error: .*$", message, flags=re.MULTILINE)  # of a regular expression's parser
    return f"{first} ({detail[0].removeprefix('error: ')})" if detail else first or "the parser does not say why"


class _Compiler:
    """Compiled grammars of one tokenizer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._closer: Any = None
        self._known: OrderedDict[Grammar, CompiledConstraint] = OrderedDict()

    def forked(self) -> None:
        self._lock = threading.Lock()
        for constraint in self._known.values():
            constraint.forked()

    def constraint(self, grammar: Grammar, target: Any) -> CompiledConstraint:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = ll_tokenizer(target)
                self._closer = Closer(self._tokenizer)
            found = self._known.pop(grammar, None)
            if found is None:
                found = CompiledConstraint(grammar, self._tokenizer, self._closer, target.lm.vocab_size)
            self._known[grammar] = found
            while len(self._known) > _GRAMMARS:
                self._known.popitem(last=False)  # the one longest not asked for
            return found


class CompiledConstraint:
    """A grammar for one tokenizer.

    Args:
        grammar: what an answer may be.
        tokenizer: llguidance's.
        closer: seeks ends for it.
        vocab: size of the target's vocabulary.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, closer: Closer, vocab: int) -> None:
        self.grammar, self.tokenizer, self.closer, self.vocab = grammar, tokenizer, closer, vocab
        self._matcher = require().LLMatcher(tokenizer, grammar.lark, **_QUIET)
        if self._matcher.is_error():
            raise BadGrammar(grammar.label, _reason(self._matcher.get_error()))
        self._lock = threading.Lock()  # two threads must not copy one matcher at the same time
        self.way = closer.shortest(self._matcher)

    def forked(self) -> None:
        """In the child of a fork, where nobody holds the lock any more."""
        self._lock = threading.Lock()

    def open(self, stop_ids: frozenset[int] = frozenset(), cap: int | None = None) -> _Session:
        """Begin an answer."""
        return _Session(self, stop_ids, cap)

    def shortest(self) -> int | None:
        """Tokens of the shortest answer that was found."""
        return None if self.way is None else len(self.way)

    def matcher(self) -> Any:
        """A parser at the answer's beginning."""
        with self._lock:
            return self._matcher.deep_copy()


class _Session:
    """See `ConstraintSession`. The parser stands where it was last asked about and is moved to where it is asked next,
    back by ``rollback``. It never reads a token that was not found legal before: one illegal token poisons it for good.
    """

    def __init__(self, constraint: CompiledConstraint, stop_ids: frozenset[int], cap: int | None) -> None:
        self._constraint, self._closer = constraint, constraint.closer
        self._tokens, self._vocab = constraint.tokenizer.vocab_size, constraint.vocab
        self._stop_ids = sorted(stop_ids)
        self._ends = sorted({*stop_ids, *constraint.tokenizer.eos_tokens})
        self._cap = cap
        self._matcher = constraint.matcher()
        self._at: list[int] = []  # what the parser has read
        self._ways: list[Way | None] = [constraint.way]  # to the end, after each beginning of it as far as known
        self._next: tuple[int, int, Way | None] | None = None  # the same for a token that may come: place, token, way

    def _go(self, answer: Sequence[int]) -> Any:
        """Move the parser to the end of an answer."""
        wanted = list(answer)
        shared = len(self._at)
        if wanted[:shared] != self._at:
            pairs = zip(wanted, self._at, strict=False)
            shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            if not self._matcher.rollback(len(self._at) - shared):  # it gave up there; a new one may not be asked again
                self._matcher, shared = self._constraint.matcher(), 0
            del self._at[shared:], self._ways[shared + 1 :]
            self._next = None
        if len(wanted) > shared:
            rest = wanted[shared:]
            if self._readable(self._matcher, rest) != len(rest):
                raise ConstraintFailed("the answer is none of the grammar's")
            self._matcher.consume_tokens(rest)
            self._at = wanted
        return self._matcher

    def _readable(self, matcher: Any, tokens: Sequence[int]) -> int:
        """How many tokens, from the front, are legal one after another. Ids that llguidance does not know poison it."""
        known = list(itertools.takewhile(lambda token: 0 <= token < self._tokens, tokens))
        return int(matcher.validate_tokens(known)) if known else 0

    def ended(self, answer: Sequence[int]) -> bool:
        """Whether nothing can come any more."""
        return bool(self._go(answer).is_stopped())

    def forced(self, answer: Sequence[int], limit: int) -> tuple[int, ...]:
        """The tokens that the grammar leaves no choice about."""
        return tuple(self._go(answer).compute_ff_tokens()[:limit])

    def legal(self, answer: Sequence[int]) -> Legal:
        """Tokens that may come next."""
        matcher = self._go(answer)
        ends = self._stop_ids if matcher.is_accepting() else ()
        legal = Legal(matcher.compute_bitmask(), self._vocab).changed(self._ends, ends)
        if matcher.is_error() or not legal:
            raise ConstraintFailed(f"no token is legal ({matcher.stop_reason()})")
        return legal

    def pruned(self, answer: Sequence[int], draft: Draft) -> Draft:
        """The draft without its illegal nodes and what hangs on them."""
        matcher = self._go(answer)
        if draft.is_chain:
            return draft.cut(self._readable(matcher, draft.tokens), len(draft))
        kept: list[int] = []
        states: dict[int, Any] = {-1: matcher}
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
            above = states.get(parent)
            if above is None or self._readable(above, [token]) != 1:
                continue
            states[node] = above.deep_copy()
            states[node].consume_token(token)
            kept.append(node)
        return draft.only(kept)

    # -- the way to the end -------------------------------------------------------------------------------------------

    def allows(self, answer: Sequence[int], token: int) -> bool:
        """Whether a legal token still lets the answer be completed within its cap."""
        if self._cap is None or token in self._stop_ids:
            return True
        matcher = self._go(answer)
        way, left = self._way(), self._cap - len(self._at)
        after = self._after(matcher, way, token, left - 1)
        self._next = len(self._at), token, after
        if way is None or len(way) > left:  # nothing to hold on to
            return True
        if after is None:  # not known
            return not self._near(way, left)
        return len(after) < left

    def tight(self, answer: Sequence[int]) -> bool:
        """Whether the end is so near that a single token may use up the room it needs."""
        if self._cap is None:
            return False
        self._go(answer)
        way = self._way()
        return way is not None and self._near(way, self._cap - len(self._at))

    def _near(self, way: Way, left: int) -> bool:
        return left <= 2 * len(way) + _NEAR

    def closing(self, answer: Sequence[int]) -> tuple[int, ...]:
        """The first token of the way to the end, or all that may end the answer here."""
        matcher = self._go(answer)
        way = self._way()
        if way:
            return way[:1]
        return tuple(self._stop_ids) if matcher.is_accepting() else ()

    def _way(self) -> Way | None:
        """The way from where the parser stands. A function of what was read, token by token."""
        place = len(self._at)
        if len(self._ways) == place and self._next is not None and self._next[:2] == (place - 1, self._at[-1]):
            self._ways.append(self._next[2])
        if len(self._ways) <= place:
            matcher, known = self._constraint.matcher(), len(self._ways) - 1
            matcher.consume_tokens(self._at[:known])
            for token in self._at[known:]:
                self._ways.append(self._after(matcher, self._ways[-1], token, (self._cap or 0) - len(self._ways)))
                matcher.consume_token(token)
        return self._ways[place]

    def _after(self, matcher: Any, way: Way | None, token: int, left: int) -> Way | None:
        """The way after one more token: the old one where it still leads to the end in time, else a new one."""
        if way and way[0] == token:
            return way[1:]
        state = matcher.deep_copy()
        state.consume_token(token)
        if way is not None and len(way) <= left and self._closer.fits(state, way):
            return way
        return self._closer.quick(state)


def _forked() -> None:
    """In the child of a fork: whoever held a lock is not there."""
    global _lock  # noqa: PLW0603 - one lock a process
    _lock = threading.Lock()
    for compiler in list(_compilers.values()):
        compiler.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
