"""A tokenizer as llguidance wants it. Reading ``tokenizer.json`` once more takes it 9 s for 262,144 tokens, all the
while holding the GIL; given every token's bytes it takes 5 s, in pieces of at most 3.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

from metasd_langchain.errors import BadGrammar, MissingExtra

__all__ = ["ll_tokenizer", "require", "token_bytes"]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def require() -> Any:
    """The llguidance package.

    Raises:
        MissingExtra: it is not installed.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise MissingExtra("llguidance, which grammars need,", "grammar")
    import llguidance

    return llguidance


class _Vocabulary:
    """What llguidance asks of a tokenizer: the tokens' bytes, and ids of a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: Any, lock: Any, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._backend, self._lock = backend, lock

    def __call__(self, text: str) -> list[int]:
        with self._lock:
            before = self._backend.encode_special_tokens
            self._backend.encode_special_tokens = True  # text that looks like a control token is text
            try:
                ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            finally:
                self._backend.encode_special_tokens = before
        return ids


def ll_tokenizer(target: Any) -> Any:
    """llguidance's form of a target's tokenizer. Takes seconds for a large vocabulary.

    Args:
        target: has ``tokenizer`` (transformers, a fast one), ``stop_ids`` and ``lock``.

    Raises:
        BadGrammar: the tokenizer is no fast one.
    """
    llguidance = require()
    tokenizer = target.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadGrammar("grammar", f"{type(tokenizer).__name__} is no fast tokenizer, which grammars need")
    eos = tokenizer.eos_token_id  # whether it may end an answer is decided by the request's stop ids
    with target.lock:
        tokens = token_bytes(backend)
        if tokens is None:
            return llguidance.LLTokenizer(backend.to_str(), eos_token=eos)
        special = [i for i, added in backend.get_added_tokens_decoder().items() if added.special]
    if eos is None:  # llguidance needs one: an id that no vocabulary has
        eos = len(tokens)
        tokens.append(b"<end>")
        special.append(eos)
    vocabulary = _Vocabulary(backend, target.lock, tokens, special, eos)
    bare = llguidance.LLTokenizer(vocabulary, slices=[])  # slices apart: the GIL is free for others in between
    return bare.with_slices(bare.general_slices())


def token_bytes(backend: Any) -> list[bytes] | None:
    """Each token's bytes, by id; None when the tokenizer decodes in a way that is not known here.

    Args:
        backend: a tokenizer of Hugging Face's ``tokenizers``.
    """
    try:
        steps = list(_flat(json.loads(backend.decoder.__getstate__())))
    except (AttributeError, TypeError, ValueError):
        return None
    kinds = [step.get("type") for step in steps]
    alphabet = _alphabet() if "ByteLevel" in kinds else None
    space = next((found for found in map(_space, steps) if found), "")
    if alphabet is None and not space:
        return None
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    tokens = [b""] * (max(vocab.values()) + 1)
    for piece, i in vocab.items():
        byte = _BYTE.fullmatch(piece) if "ByteFallback" in kinds and len(piece) == 6 else None
        if i in added:
            tokens[i] = added[i].replace(space, " ").encode() if space else added[i].encode()
        elif byte:
            tokens[i] = bytes([int(byte[1], 16)])
        elif alphabet is None:
            tokens[i] = piece.replace(space, " ").encode()
        elif all(character in alphabet for character in piece):
            tokens[i] = bytes(alphabet[character] for character in piece)
        else:
            tokens[i] = piece.encode()
    return tokens


def _flat(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flat(step)
    else:
        yield decoder


def _space(step: dict[str, Any]) -> str:
    """The character that a decoder's step turns into a space, or ""."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    pattern = step.get("pattern")
    if step["type"] == "Replace" and step.get("content") == " " and isinstance(pattern, dict):
        return str(pattern.get("String", ""))
    return ""


def _alphabet() -> dict[str, int]:
    """Characters of byte-level tokenizers to bytes (Radford et al. 2019): printable ones stand for themselves, the
    others, in order, for 256 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(others)})
    return alphabet
