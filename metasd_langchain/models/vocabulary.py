"""Which token id means what: whether two tokenizers agree, and the part of a vocabulary that a small drafter speaks."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metasd_langchain.errors import BadOption, IncompatibleVocabulary

__all__ = ["DraftVocabulary", "fingerprint", "quick_fingerprint", "refuse_other_meanings"]

_fingerprints: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()  # by size and name
_SHOWN = 3
_SAMPLED = 2048


def fingerprint(tokenizer: Any) -> str:
    """A short name of a tokenizer's id for every token. The same ids under another class have the same name."""
    size, known = _fingerprints.get(tokenizer, (-1, ""))
    if size != len(tokenizer):  # tokens can be added, never taken away
        digest = hashlib.blake2s(digest_size=12)
        for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
            digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
        known = digest.hexdigest()
        _fingerprints[tokenizer] = len(tokenizer), known
    return known


def quick_fingerprint(tokenizer: Any) -> str:
    """As `fingerprint`, from some two thousand of the ids, evenly spread: in milliseconds, whatever the vocabulary."""
    size = len(tokenizer)
    ids = list(range(0, size, max(1, size // _SAMPLED)))
    names = "\n".join(map(str, tokenizer.convert_ids_to_tokens(ids)))
    return hashlib.blake2s(f"{size}\n{names}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def refuse_other_meanings(drafter: str, own: Mapping[str, int], target: Mapping[str, int]) -> None:
    """Check that ids which both vocabularies have are the same tokens.

    One may have more ids than the other (padding, added tokens): those are never drafted.

    Args:
        drafter: whose vocabulary is looked at, for the message.
        own, target: token -> id.

    Raises:
        IncompatibleVocabulary: some id means two things.
    """
    if own == target:
        return
    named = {number: token for token, number in target.items()}
    wrong = sorted(number for token, number in own.items() if named.get(number, token) != token)
    if wrong:
        some = ", ".join(map(str, wrong[:_SHOWN]))
        raise IncompatibleVocabulary(
            f"{drafter} has another tokenizer than the target: {len(wrong)} of {len(own)} token ids differ, "
            f"among them {some}",
            hint="a drafter must be trained on the target's own token ids",
        )


class DraftVocabulary:
    """The target's token ids that a drafter knows, and their places in its own columns.

    A token that it does not know has the place `unknown`, one past the last column: it can be read but not drafted.

    Args:
        ids: ``[n]`` target ids, no one twice; column i of the drafter's logits stands for ``ids[i]``.
        target_size: columns of the target's logits.
        fingerprint: of the target's tokenizer, see `fingerprint`; "" when it is not known.

    Raises:
        BadOption: no ids, one twice, or one outside the target's vocabulary.
    """

    def __init__(self, ids: Sequence[int] | NDArray[np.int64], target_size: int, fingerprint: str = "") -> None:
        self.d2t: NDArray[np.int64] = np.array(ids, dtype=np.int64)
        if self.d2t.ndim != 1 or not len(self.d2t) or len(np.unique(self.d2t)) != len(self.d2t):
            raise BadOption("d2t", f"{self.d2t.shape}", "at least one target id, none twice")
        if self.d2t.min() < 0 or self.d2t.max() >= target_size:
            raise BadOption("d2t", int(self.d2t.max()), f"target ids below {target_size}")
        self.target_size, self.fingerprint = target_size, fingerprint
        self.t2d = np.full(target_size, len(self.d2t), dtype=np.int64)
        self.t2d[self.d2t] = np.arange(len(self.d2t))

    def __len__(self) -> int:
        """Columns."""
        return len(self.d2t)

    @property
    def unknown(self) -> int:
        """The place of every token that has no column."""
        return len(self.d2t)

    def places(self, tokens: Sequence[int]) -> list[int]:
        """Places of target ids."""
        places: list[int] = self.t2d[np.asarray(tokens, dtype=np.int64)].tolist()
        return places
