"""B12, heads: draft and target vocabularies differ in size or meaning. Padding is served and never drafted; another
vocabulary is refused when the head is bound, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from metasd_langchain.errors import IncompatibleVocabulary
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from tests.bugs import kit
from tests.eagles import random_head, saved

COUNT = 16


def head_for(target: Target, **changes: Any) -> EagleHead:
    """A head that knows its target's tokenizer, as a trained one does."""
    head = random_head(target, **changes)
    parts = TargetParts.of(target.lm, target.name, target.tokenizer)
    config = EagleConfig.of_target(parts, aux_layers=(1, 2, 3), draft_vocab_size=head.config.draft_vocab_size)
    head.config = config
    return head


@pytest.mark.parametrize("more", [64, -64])
@pytest.mark.parametrize("reduced", [True, False])
def test_a_padded_vocabulary_works_and_ids_the_target_lacks_are_never_drafted(
    tmp_path: Path, more: int, reduced: bool
) -> None:
    other = load_target((tiny_model(vocab_size=kit.VOCAB + more), tiny_tokenizer()))
    head = random_head(other, draft_vocab_size=300 if reduced else kit.VOCAB + more)
    path = saved(head, tmp_path)
    for temperature in (0.0, 0.9):
        plain = kit.make(drafters=["plain"], temperature=temperature, seed=2, max_tokens=COUNT)
        llm = kit.make(drafters=[f"eagle:{path}@5"], policy="fixed", temperature=temperature, seed=2, max_tokens=COUNT)
        assert kit.ids(llm) == kit.ids(plain)
        assert sum(record.drafted for record in kit.rounds(llm)) > 0


def permuted() -> Any:
    """The tiny tokenizer with two ids exchanged."""
    tokenizer = tiny_tokenizer()
    raw = tokenizer.backend_tokenizer.to_str()
    one, two = '"<0x01>"', '"<0x02>"'
    assert raw.count(one) == raw.count(two) == 1
    tokenizer._tokenizer = Tokenizer.from_str(raw.replace(one, '"<x>"').replace(two, one).replace('"<x>"', two))
    return tokenizer


def test_the_same_size_with_other_meanings_is_refused(tmp_path: Path) -> None:
    target = load_target((kit.MODEL, kit.TOKENIZER))
    path = saved(head_for(target), tmp_path)
    assert kit.ids(kit.make(drafters=[f"eagle:{path}@3"], max_tokens=COUNT)) == kit.ref(count=COUNT)
    with pytest.raises(IncompatibleVocabulary, match="tokenizer") as caught:
        kit.make(model=(kit.MODEL, permuted()), drafters=[f"eagle:{path}@3"]).invoke(kit.PROMPT)
    assert "config.json" in str(caught.value)


def test_another_size_is_refused(tmp_path: Path) -> None:
    other = load_target((tiny_model(vocab_size=2048), tiny_tokenizer()))
    path = saved(random_head(other, draft_vocab_size=2048), tmp_path)
    with pytest.raises(IncompatibleVocabulary, match="2048 token ids, the target has 512"):
        kit.make(drafters=[f"eagle:{path}@3"]).invoke(kit.PROMPT)
