"""Text as it streams is text as it decodes: for tokenizers with byte fallback, with byte-level pieces, with a Strip."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from metasd_langchain.engine.text import Detokenizer, TextStream
from metasd_langchain.testing.models import tiny_tokenizer
from metasd_langchain.values import Piece

EMOJI = "\U0001fae9"  # four bytes
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
ROLES = {name.strip("<>") + "_token": name for name in SPECIALS}


def gpt2_style() -> Any:
    """Byte-level BPE: every byte is a printable character, some pieces end in the middle of a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = dict(zip(_byte_order(), _byte_characters(), strict=True))
    pieces = [*SPECIALS, *alphabet]
    merges = []
    for left, right in [
        ("h", "e"),
        ("l", "l"),
        ("Ġ", "h"),
        ("Ċ", "Ċ"),
        ("a", characters[0xF0]),
        ("Ċ", characters[0xE2]),
    ]:
        merges.append((left, right))
        pieces.append(left + right)
    raw = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **ROLES)


def _byte_order() -> list[int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _byte_characters() -> list[str]:
    order = _byte_order()
    return [chr(byte) if place < 188 else chr(256 + place - 188) for place, byte in enumerate(order)]


def llama_style() -> Any:
    """Pieces with byte fallback and a decoder that strips one space at the beginning of what it is given."""
    pieces = [*SPECIALS, *[f"<0x{byte:02X}>" for byte in range(256)]]
    pieces += ["▁", "▁▁", "▁▁▁▁", "▁the", "▁a", "▁x", "\n", "\n\n", *[chr(c) for c in range(33, 127)], "ing", "�"]
    raw = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token=ROLES["unk_token"], byte_fallback=True)
    )
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **ROLES)


MAKERS = {"gemma": tiny_tokenizer, "gpt2": gpt2_style, "llama": llama_style}


@cache
def tokenizer(kind: str) -> Any:
    return MAKERS[kind]()


@cache
def detokenizer(kind: str) -> Detokenizer:
    return Detokenizer(tokenizer(kind))


def byte_tokens(kind: str, data: bytes) -> list[int]:
    """The bytes, one token each."""
    if kind == "gpt2":
        characters = dict(zip(_byte_order(), _byte_characters(), strict=True))
        names = [characters[byte] for byte in data]
    else:
        names = [f"<0x{byte:02X}>" for byte in data]
    return [int(i) for i in tokenizer(kind).convert_tokens_to_ids(names)]


def tokens_of(kind: str, *names: str) -> list[int]:
    ids = [int(i) for i in tokenizer(kind).convert_tokens_to_ids(list(names))]
    assert tokenizer(kind).unk_token_id not in ids
    return ids


def stream(kind: str, ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], int, bool]:
    """Chunks, tokens pushed until the end, and whether a stop string ended it."""
    text = TextStream(detokenizer(kind).decode, detokenizer(kind).byte_ids, stop)
    chunks: list[str] = []
    for count, token in enumerate(ids, 1):
        chunks += [piece.text for piece in text.push(token, drafted=False)]
        if text.stopped:
            return chunks, count, True
    chunks += [piece.text for piece in text.flush()]
    return chunks, len(ids), text.stopped


def cut(text: str, stop: Sequence[str]) -> str:
    found = [at for at in (text.find(string) for string in stop if string) if at >= 0]
    return text[: min(found)] if found else text


KINDS = st.sampled_from(sorted(MAKERS))


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A tokenizer and ids: anything, or runs of bytes (half of them of real characters) among pieces and specials."""
    kind = draw(KINDS)
    size = len(tokenizer(kind))
    parts: list[list[int]] = draw(
        st.lists(
            st.one_of(
                st.lists(st.integers(0, size - 1), min_size=1, max_size=4),
                st.binary(min_size=1, max_size=5).map(lambda data: byte_tokens(kind, data)),
                st.sampled_from(["é", "€", EMOJI, "�", " ", "a", "\n"]).map(lambda c: byte_tokens(kind, c.encode())),
                st.sampled_from([[0], [1], [3]]),
            ),
            max_size=8,
        )
    )
    return kind, [token for part in parts for token in part]


@given(answers())
@settings(max_examples=400)
def test_joined_chunks_are_the_decoded_answer(answer: tuple[str, list[int]]) -> None:
    kind, ids = answer
    chunks, _, stopped = stream(kind, ids)
    assert "".join(chunks) == detokenizer(kind).decode(ids)
    assert all(chunks)
    assert not stopped


@given(answers(), st.data())
@settings(max_examples=400)
def test_joined_chunks_are_the_decoded_answer_cut_at_the_first_stop(
    answer: tuple[str, list[int]], data: st.DataObject
) -> None:
    kind, ids = answer
    whole = detokenizer(kind).decode(ids)
    middle = [whole[i : i + n] for i in range(0, len(whole), 2) for n in (1, 2, 3) if "�" not in whole[i : i + n]]
    stop = data.draw(st.lists(st.sampled_from([*middle, "zq", "a", "  "]), max_size=3))
    chunks, count, stopped = stream(kind, ids, stop)
    seen = detokenizer(kind).decode(ids[:count])
    assert "".join(chunks) == cut(seen, stop)
    assert stopped == any(string in seen for string in stop if string)
    if not stopped:
        assert count == len(ids)
        assert "".join(chunks) == whole


@given(st.integers(0, 2**32), st.sampled_from(["gemma", "gpt2", "llama"]))
@settings(max_examples=100)
def test_the_token_that_completes_a_stop_is_the_last_one_pushed(seed: int, kind: str) -> None:
    """On plain text, where every token is text at once, the end is the first prefix that holds a stop string."""
    rng = random.Random(seed)
    names = {
        "gemma": ["▁t", "he", "a", "n", "▁", "\n"],
        "gpt2": ["Ġh", "he", "l", "ll", "Ċ"],
        "llama": ["▁the", "▁", "a"],
    }
    ids = tokens_of(kind, *rng.choices(names[kind], k=20))
    whole = detokenizer(kind).decode(ids)
    stop = [whole[at : at + rng.randint(1, 5)] for at in (rng.randrange(len(whole)) for _ in range(2))]
    first = next(n for n in range(1, 21) if any(string in detokenizer(kind).decode(ids[:n]) for string in stop))
    _, count, stopped = stream(kind, ids, stop)
    assert (count, stopped) == (first, True)


@given(
    st.text("abcd", min_size=1, max_size=30), st.lists(st.text("abcd", min_size=1, max_size=5), min_size=1, max_size=3)
)
@settings(max_examples=300)
def test_a_beginning_of_a_stop_leaves_only_when_it_can_no_longer_be_completed(text: str, stop: list[str]) -> None:
    ids = tokens_of("gemma", *text)
    running = TextStream(detokenizer("gemma").decode, detokenizer("gemma").byte_ids, stop)
    given_out = ""
    for count, token in enumerate(ids, 1):
        given_out += "".join(piece.text for piece in running.push(token, drafted=True))
        if running.stopped:
            assert given_out == cut(text[:count], stop)
            return
        held = max(n for n in range(count + 1) if n == 0 or any(s.startswith(text[count - n : count]) for s in stop))
        assert given_out == text[: count - held]  # neither leaked nor held back for longer than needed
    given_out += "".join(piece.text for piece in running.flush())
    assert given_out == text


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_character_of_four_tokens_comes_whole_wherever_a_block_ends(kind: str, after: int) -> None:
    ids = [*byte_tokens(kind, b"ab"), *byte_tokens(kind, EMOJI.encode()), *byte_tokens(kind, b"c")]
    text = TextStream(detokenizer(kind).decode, detokenizer(kind).byte_ids, ())
    head = [piece.text for token in ids[: 2 + after] for piece in text.push(token, drafted=True)]
    assert not any("�" in chunk for chunk in head)
    assert EMOJI not in "".join(head)
    tail = [piece.text for token in ids[2 + after :] for piece in text.push(token, drafted=True)] + [
        piece.text for piece in text.flush()
    ]
    assert "".join(head + tail) == f"ab{EMOJI}c"
    assert not any("�" in chunk for chunk in head + tail)


@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("bytes_seen", [1, 2, 3])
def test_a_character_cut_by_the_end_reads_as_the_tokenizer_reads_it(kind: str, bytes_seen: int) -> None:
    ids = byte_tokens(kind, b"a" + EMOJI.encode()[:bytes_seen])
    chunks, _, _ = stream(kind, ids)
    assert "".join(chunks) == detokenizer(kind).decode(ids)
    assert "�" in chunks[-1]


def test_a_valid_run_of_bytes_may_turn_invalid_and_nothing_had_left_by_then() -> None:
    ids = byte_tokens("gemma", EMOJI.encode() + b"\xff") + tokens_of("gemma", "a")
    chunks, _, _ = stream("gemma", ids)
    assert chunks == ["�" * 5 + "a"]


@pytest.mark.parametrize("kind", ["gemma", "llama"])
def test_a_special_token_inside_a_run_of_bytes_does_not_end_it(kind: str) -> None:
    data = byte_tokens(kind, EMOJI.encode())
    chunks, _, _ = stream(kind, [*data[:2], 0, *data[2:]])
    assert "".join(chunks) == EMOJI
    spoilt = [*byte_tokens(kind, b"A"), 0, *byte_tokens(kind, b"\xff")]
    chunks, _, _ = stream(kind, spoilt)
    assert "".join(chunks) == detokenizer(kind).decode(spoilt) == "��"


def test_a_special_token_does_not_cost_the_space_behind_it() -> None:
    ids = [*tokens_of("llama", "▁a"), 0, *tokens_of("llama", "▁x"), 0, 1, *tokens_of("llama", "▁", "▁the")]
    chunks, _, _ = stream("llama", ids)
    assert "".join(chunks) == detokenizer("llama").decode(ids) == "a x  the"


@pytest.mark.parametrize(
    ("kind", "names", "text"),
    [
        ("gemma", ["▁", "h", "e"], " he"),
        ("gemma", ["▁", "▁", "▁", "▁", "."], "    ."),
        ("gemma", ["a", "▁", ",", "\n", "\n", "▁", "▁", "x"], "a ,\n\n  x"),
        ("gpt2", ["Ġh", "e", "Ġ", "Ġ", "Ġ", "Ġ", ".", "ĊĊ", "Ġ", "x"], " he    .\n\n x"),
        ("llama", ["▁the", "▁▁▁▁", ".", "\n\n", "▁▁", "▁", "▁x"], "the    .\n\n    x"),
        ("llama", ["▁", "▁", "▁a"], "  a"),
        ("llama", ["x", "▁", "!"], "x !"),
    ],
)
def test_spaces_and_newlines_stay(kind: str, names: list[str], text: str) -> None:
    chunks, _, _ = stream(kind, tokens_of(kind, *names))
    assert "".join(chunks) == text
    assert len(chunks) >= len(names) - 2  # they came one by one


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_special_tokens_are_no_text_and_text_that_looks_like_one_survives(kind: str) -> None:
    typed = [token for character in "<eos>" for token in tokens_of(kind, character)]
    chunks, _, _ = stream(kind, [2, *typed, 0, *tokens_of(kind, "!"), 1])
    assert "".join(chunks) == "<eos>!"


def test_a_stop_inside_a_run_of_bytes_ends_it_at_once() -> None:
    ids = byte_tokens("gemma", f"x{EMOJI}END more".encode())
    chunks, count, stopped = stream("gemma", ids, ["END"])
    assert (chunks, count, stopped) == ([f"x{EMOJI}"], 8, True)


def test_a_stop_and_the_first_byte_of_a_character_in_one_token() -> None:
    ids = tokens_of("gpt2", "a", "Ċâ", "l")
    chunks, count, stopped = stream("gpt2", ids, ["\n"])
    assert (chunks, count, stopped) == (["a"], 2, True)


def test_the_stop_that_is_complete_first_counts_and_of_two_at_once_the_one_that_begins_first() -> None:
    chunks, count, _ = stream("gemma", tokens_of("gemma", *"xabcdef"), ["abcdef", "cd"])
    assert ("".join(chunks), count) == ("xab", 5)
    chunks, count, _ = stream("gemma", tokens_of("gemma", "x", "the"), ["he", "the"])
    assert ("".join(chunks), count) == ("x", 2)


def test_empty_stop_strings_are_ignored() -> None:
    assert stream("gemma", tokens_of("gemma", "a", "b"), ["", ""]) == (["a", "b"], 2, False)


def test_pieces_say_who_guessed_them_also_when_a_stop_held_them_back() -> None:
    text = TextStream(detokenizer("gemma").decode, detokenizer("gemma").byte_ids, ["abX"])
    drafted = [True, False, True]
    pieces = [
        piece
        for token, flag in zip(tokens_of("gemma", *"abc"), drafted, strict=True)
        for piece in text.push(token, flag)
    ]
    assert pieces == [Piece("a", True), Piece("b", False), Piece("c", True)]


def test_byte_tokens_are_found_only_where_the_tokenizer_has_them() -> None:
    assert detokenizer("gemma").byte_ids == frozenset(range(260))  # the specials lie before them
    assert detokenizer("gpt2").byte_ids == frozenset(range(4))
