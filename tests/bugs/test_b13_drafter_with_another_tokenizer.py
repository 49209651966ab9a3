"""B13: a drafter with another tokenizer re-adds BOS and drifts. Here it is refused, and text is never encoded again.

transformers PR#46124.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from metasd_langchain import MetaSDLLM
from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.errors import IncompatibleVocabulary
from metasd_langchain.testing.models import BOS, tiny_model
from tests.bugs.kit import PROMPT, TOKENIZER, encode, ids, ref, scripted


def words() -> Any:
    """A tokenizer of whole words that adds a BOS of its own."""
    vocabulary = {word: number for number, word in enumerate(["<s>", "<unk>", *sorted(set(PROMPT.split()))])}
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, **special)


ASK: dict[str, Callable[[MetaSDLLM], object]] = {
    "invoke": lambda llm: llm.invoke(PROMPT),
    "stream": lambda llm: list(llm.stream(PROMPT)),
    "batch": lambda llm: llm.batch([PROMPT]),
    "ainvoke": lambda llm: asyncio.run(llm.ainvoke(PROMPT)),
}


@pytest.mark.parametrize("ask", ASK)
def test_it_is_refused_by_name(ask: str) -> None:
    llm = scripted(SmallLM((tiny_model("llama", vocab_size=32), words()), name="wordy"), 4)
    with pytest.raises(IncompatibleVocabulary, match="wordy has another tokenizer than the target") as caught:
        ASK[ask](llm)
    assert "target's own token ids" in caught.value.hint
    assert PROMPT not in str(caught.value)


def test_the_right_one_reads_the_prompts_ids_once_each_and_drafts_no_bos() -> None:
    drafter = SmallLM((tiny_model(), TOKENIZER), confidence=0.0)
    llm = scripted(drafter, 4)
    fed: list[int] = []
    bind = drafter.bind

    def listening(target: Any) -> Any:
        bound = bind(target)
        lm = bound._reader.lm
        score = lm.score
        lm.score = lambda feeds: fed.extend(feeds[0].pending) or score(feeds)
        return bound

    drafter.bind = listening  # type: ignore[method-assign]
    assert ids(llm) == ref()
    assert tuple(fed[: len(encode(PROMPT))]) == encode(PROMPT)
    assert fed.count(BOS) == 1
