"""The halting rules on their own: where a block ends, why, and with which text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from metasd_langchain.engine.halt import Halt
from metasd_langchain.engine.text import TextStream
from metasd_langchain.values import Piece

END = 0


class Taken(NamedTuple):
    """A block's committed tokens, their text that became final, and why the answer ended with them."""

    count: int
    pieces: tuple[Piece, ...]
    finish: str | None


def halt(max_tokens: int = 100, stop: Sequence[str] = (), stop_ids: Sequence[int] = (END,)) -> Halt:
    """Ids are characters: 1 = a, 2 = b ...; END is no text."""
    text = TextStream(lambda ids: "".join(chr(96 + i) for i in ids if i != END), frozenset({END}), stop)
    return Halt(text, frozenset(stop_ids), max_tokens)


def take(rule: Halt, tokens: Sequence[int], accepted: int) -> Taken:
    """A block of which the first tokens were drafted; nothing is committed behind the end."""
    count = 0
    for token in tokens:
        count += 1
        if rule.push(token, count <= accepted):
            break
    taken = rule.collect()
    return Taken(count, taken.pieces, taken.finish)


def word(text: str) -> list[int]:
    return [ord(character) - 96 for character in text]


def read(taken: Taken) -> str:
    return "".join(piece.text for piece in taken.pieces)


def test_nothing_ends_a_plain_block() -> None:
    rule = halt()
    assert take(rule, word("abc"), 2) == Taken(3, (Piece("a", True), Piece("b", True), Piece("c", False)), None)
    assert rule.left == 97


@pytest.mark.parametrize("at", range(6))
def test_a_stop_id_counts_and_is_no_text_wherever_it_stands(at: int) -> None:
    block = word("abcdef")
    block[at] = END
    taken = take(halt(), block, 5)
    assert (taken.count, read(taken), taken.finish) == (at + 1, "abcdef"[:at], "stop")


@pytest.mark.parametrize("cap", range(1, 7))
def test_the_cap_is_exact(cap: int) -> None:
    taken = take(halt(cap), word("abcdef"), 5)
    assert (taken.count, read(taken), taken.finish) == (cap, "abcdef"[:cap], "length")


def test_the_cap_goes_over_blocks() -> None:
    rule = halt(4)
    assert take(rule, word("abc"), 2).finish is None
    assert rule.left == 1
    assert take(rule, word("de"), 1) == Taken(1, (Piece("d", True),), "length")


@pytest.mark.parametrize(("first", "finish"), [("stop id", "stop"), ("stop string", "stop"), ("cap", "length")])
def test_of_several_ends_the_first_token_decides_and_a_stop_on_the_last_allowed_token_is_a_stop(
    first: str, finish: str
) -> None:
    blocks = {"stop id": [1, END, 3], "stop string": word("axc"), "cap": [1, 2, END]}
    taken = take(halt(2, ["x"]), blocks[first], 0)
    assert (taken.count, taken.finish) == (2, finish)
    assert read(taken) == {"stop id": "a", "stop string": "a", "cap": "ab"}[first]


def test_a_stop_string_over_blocks_is_cut_from_both_and_the_token_that_completes_it_counts() -> None:
    rule = halt(stop=["cde"])
    first = take(rule, word("abcd"), 3)
    assert (read(first), first.finish) == ("ab", None)
    second = take(rule, word("efg"), 2)
    assert second == Taken(1, (), "stop")
    assert rule.left == 95


def test_a_beginning_that_is_not_completed_comes_out_at_every_kind_of_end() -> None:
    for tokens, cap in (([*word("abc"), END], 99), (word("abc"), 3)):
        assert read(take(halt(cap, ["cde"]), tokens, 0)) == "abc"
    rule = halt(stop=["cde"])
    assert read(take(rule, word("abcd"), 0)) == "ab"
    assert "".join(piece.text for piece in rule.flush()) == "cd"
    assert rule.flush() == ()


def test_blocks_of_any_size_end_alike() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(0 if rng.random() < 0.1 else 1, 4) for _ in range(12)]
        stop = ["".join(rng.choices("abc", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 2))]
        cap = rng.randint(1, 14)
        results = []
        for size in (1, 2, 5, 12):
            rule, count, text, finish = halt(cap, stop), 0, "", None
            for start in range(0, len(tokens), size):
                taken = take(rule, tokens[start : start + size], size)
                count, text, finish = count + taken.count, text + read(taken), taken.finish
                if finish:
                    break
            else:
                text += "".join(piece.text for piece in rule.flush())
            assert rule.left == cap - count
            results.append((count, text, finish))
        assert len(set(results)) == 1
