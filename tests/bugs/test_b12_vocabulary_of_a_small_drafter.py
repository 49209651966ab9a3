"""B12: draft and target vocabularies differ in size or meaning. Small models; heads have a test of their own.

vllm#7252, vllm#10913; llama.cpp PR#3812.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.errors import IncompatibleVocabulary
from metasd_langchain.testing.models import tiny_model
from tests.bugs.kit import PROMPT, TOKENIZER, ids, make, ref, scripted


@pytest.mark.parametrize("more", [64, -64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_padded_or_shorter_vocabulary_drafts_ids_of_the_target_only(more: int, temperature: float) -> None:
    drafter = SmallLM((tiny_model("llama", seed=3, vocab_size=512 + more), TOKENIZER), confidence=0.0)
    drafted: list[int] = []
    llm = scripted(_Listening(drafter, drafted), 6, temperature=temperature, seed=1)
    plain = make(drafters=["plain"], temperature=temperature, seed=1)
    assert ids(llm) == ids(plain)
    assert drafted
    assert max(drafted) < min(512, 512 + more)


class _Listening:
    """Notes what a drafter drafts."""

    candidates, prompt_rows, hidden_layers = 0, 0, ()

    def __init__(self, inner: Any, drafted: list[int]) -> None:
        self.name, self._inner, self._drafted = "listening", inner, drafted

    def bind(self, target: Any) -> Any:
        return _Listening(self._inner.bind(target), self._drafted)

    def open(self, request: Any) -> Any:
        session, drafted = self._inner.open(request), self._drafted
        propose = session.propose

        def listening(*arguments: Any) -> Any:
            draft = propose(*arguments)
            drafted.extend(draft.tokens)
            return draft

        session.propose = listening
        return session

    def forget(self, scope: str | None = None) -> None: ...


def permuted() -> Any:
    """The tiny tokenizer with the ids of two words exchanged."""
    raw = json.loads(TOKENIZER.backend_tokenizer.to_str())
    vocabulary = raw["model"]["vocab"]
    vocabulary["t"], vocabulary["a"] = vocabulary["a"], vocabulary["t"]
    special = {name: getattr(TOKENIZER, name) for name in ("bos_token", "eos_token", "unk_token")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(raw)), **special)


def test_the_same_size_with_other_meanings_is_refused_before_anything_is_generated() -> None:
    llm = scripted(SmallLM((tiny_model(), permuted()), name="tiny"), 4)
    with pytest.raises(IncompatibleVocabulary, match="tiny has another tokenizer than the target: 2 of 512 token ids"):
        llm.invoke(PROMPT)
    with pytest.raises(IncompatibleVocabulary):  # and again: nothing half made is kept
        llm.invoke(PROMPT)
    assert ids(scripted(SmallLM((tiny_model(), TOKENIZER)), 4)) == ref()
