"""The way from the middle of an answer to its end: which few tokens complete it.

No parser says how far the end is, so it is sought: forced tokens first, then what tends to close something. The way
found completes the answer; it need not be the shortest. `Closer.quick` costs some ten microseconds a token and is asked
all along an answer; `Closer.shortest` looks at many ways and is asked once a grammar.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

__all__ = ["Closer", "Way"]

Way = tuple[int, ...]  # tokens that complete an answer
Search = Callable[[Any], list[int]]  # a matcher's state -> what to say next, or nothing
_STEPS = 500  # choices of one search; past that it has lost its way
_TRIES = 150  # branches that `shortest` looks at
_FEW = 48  # legal tokens that are looked at one by one


class Closer:
    """Seeks ways to the end for one tokenizer.

    Args:
        tokenizer: llguidance's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._eos = int(tokenizer.eos_token)
        mixes = ["".join(mix) for size in (2, 1) for mix in itertools.product('"}]', repeat=size)]
        brackets = self._single([text for text in mixes if text[0] != '"'])
        quotes = self._single([text for text in mixes if text[0] == '"'])
        # A comma ends a number, which could go on for ever
        self._outside, self._inside = (*brackets, *self._single([","])), tuple(quotes)
        self._both, self._letters = self._single(["}", "]"]), self._single(["q", "Q"])
        # What `shortest` may say at once: a closing and an opening mark are often one token
        self._wide = self._single(
            ["".join(mix) for size in (4, 3, 2) for mix in itertools.product('"}],:{[ 0', repeat=size)]
        )
        self._long = self._single([mark * size for size in (32, 16, 8, 4, 3, 2) for mark in "a0- _"])
        digits = self._single(string.digits)
        words = self._single(["true", "null", "false"])
        letters = self._single(string.ascii_lowercase + string.ascii_uppercase)
        marks = self._single([c for c in string.punctuation if c not in '"[{'] + [" ", "\n", "[", "{"])
        # Two orders, since a loop of one is left in the other
        self._orders = (
            (*quotes, *digits, *words, *letters, *marks),
            (*quotes, *marks, *reversed(letters), *words, *digits),
        )

    def _single(self, texts: Any) -> list[int]:
        """Texts that are one token."""
        found = (self._tokenizer.tokenize_str(text) for text in texts)
        pairs = ((ids[0], text) for ids, text in zip(found, texts, strict=True) if len(ids) == 1)
        return [token for token, text in pairs if self._tokenizer.decode_bytes([token]) == text.encode()]

    def fits(self, matcher: Any, way: Way) -> bool:
        """Whether a way leads from a matcher's state to an end."""
        if not way:
            return bool(matcher.is_accepting())
        return bool(matcher.validate_tokens([*way, self._eos]) == len(way) + 1)

    def quick(self, matcher: Any) -> Way | None:
        """A way to the end from a matcher's state; None when none is found."""
        return self._found(matcher)[0]

    def _found(self, matcher: Any, first: int = 0) -> tuple[Way | None, int]:
        """A way, and which search found it; they are tried from the `first` on."""
        searches = (partial(self._first, self._orders[0]), partial(self._first, self._orders[1]), self._new)
        for place in range(first, len(searches)):
            way = self._follow(matcher.deep_copy(), searches[place])
            if way is not None:
                return way, place
        return None, len(searches)

    def _follow(self, matcher: Any, begin: Callable[[], Search]) -> Way | None:
        way: list[int] = []
        search = begin()
        for _ in range(_STEPS):
            if matcher.is_accepting():
                return tuple(way)
            tokens = matcher.compute_ff_tokens()
            if tokens and b'"' in self._tokenizer.decode_bytes(tokens):
                search = begin()  # another string
            tokens = tokens or search(matcher)
            if not tokens or not matcher.consume_tokens(tokens):
                return None
            way += tokens
        return None

    def _first(self, order: Way) -> Search:
        """What closes something, else the first legal token of an order. May go round in a loop of the grammar."""

        def search(matcher: Any) -> list[int]:
            token = next(self._moves(matcher, order), None)
            return self._some(matcher)[:1] if token is None else [token]

        return search

    def _new(self) -> Search:
        """What closes something, else the first legal token that leads where other tokens are legal than ever since:
        so it leaves every loop. Slow.
        """
        seen: list[bytes] = []

        def search(matcher: Any) -> list[int]:
            closers = self._closers(matcher)
            fallback: list[int] = []
            for token in itertools.chain(self._moves(matcher, self._orders[1]), self._some(matcher)[:4]):
                if token in closers:
                    seen.clear()
                    return [token]
                after = matcher.deep_copy()
                if not after.consume_token(token):
                    continue
                place = after.compute_bitmask()
                seen.append(place)
                if place not in seen[:-1] or after.is_accepting():
                    return [token]
                fallback = fallback or [token]
                if len(seen) > _STEPS:  # no loop then: a long string, say
                    break
            return fallback

        return search

    def _closers(self, matcher: Any) -> Way:
        """What may close something here. Inside a string, where letters or both brackets may come, that is a quotation
        mark; elsewhere it opens one.
        """
        inside = all(self._can(matcher, token) for token in self._both)
        inside = inside or any(self._can(matcher, token) for token in self._letters)
        return self._inside if inside else self._outside

    def _can(self, matcher: Any, token: int) -> bool:
        return bool(matcher.validate_tokens([token]) == 1)

    def _moves(self, matcher: Any, order: Way) -> Iterator[int]:
        """Legal tokens, what closes something first."""
        return self._legal(matcher, (*self._closers(matcher), *order))

    def _legal(self, matcher: Any, tokens: Sequence[int]) -> Iterator[int]:
        return (token for token in tokens if self._can(matcher, token))

    def _some(self, matcher: Any) -> list[int]:
        """Legal tokens, longest text first, when they are few; else a few of them."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        ids: list[int] = np.flatnonzero(np.unpackbits(bits, bitorder="little"))[: _FEW + 1].tolist()
        ids = [token for token in ids if token != self._eos and token < self._tokenizer.vocab_size]
        if len(ids) > _FEW:
            return ids[:4]
        return sorted(ids, key=lambda token: (-len(self._tokenizer.decode_bytes([token])), token))

    def shortest(self, matcher: Any) -> Way | None:
        """A shorter way, where there is one: at every step each branch is tried with its quick way behind it, and the
        best is taken.
        """
        best, search = self._found(matcher)
        here, tries = matcher.deep_copy(), 0
        behind: Way = ()
        while not here.is_accepting() and tries < _TRIES:
            found: list[tuple[int, Way, Any]] = []
            for tokens in self._branches(here):
                after = here.deep_copy()
                rest = self._found(after, search)[0] if after.consume_tokens(list(tokens)) else None
                tries += 1
                if rest is not None:
                    found.append((len(tokens) + len(rest), tokens, after))
                    if best is None or len(behind) + len(tokens) + len(rest) < len(best):
                        best = (*behind, *tokens, *rest)
            if not found:
                break
            _, tokens, here = min(found, key=lambda branch: branch[0])
            behind = (*behind, *tokens)
        return best

    def _branches(self, matcher: Any) -> list[Way]:
        forced = matcher.compute_ff_tokens()
        if forced:
            return [tuple(forced)]
        found = dict.fromkeys(itertools.islice(self._legal(matcher, self._wide), 4))
        found.update(dict.fromkeys(itertools.islice(self._legal(matcher, self._long), 2)))
        for order, most in zip(self._orders, (5, 3), strict=True):
            found.update(dict.fromkeys(itertools.islice(self._moves(matcher, order), most)))
        found.update(dict.fromkeys(self._some(matcher)[:6]))
        return [(token,) for token in found]
