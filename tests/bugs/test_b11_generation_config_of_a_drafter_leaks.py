"""B11: the assistant's own generation config decides about the answer (its EOS, sampling, lengths).

transformers PR#30778, PR#28166, PR#31301.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.testing.models import tiny_model
from tests.bugs.kit import BLOCKS, TOKENIZER, ids, ref, rounds, scripted

OWN = {
    "max_length": 5,
    "max_new_tokens": 2,
    "min_new_tokens": 30,
    "do_sample": True,
    "temperature": 3.0,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [9, 10],
}


def opinionated() -> Any:
    """The target's twin, whose generation config would end the answer at its second token, and otherwise spoil it."""
    model = tiny_model()
    model.generation_config = GenerationConfig(eos_token_id=ref()[1], **OWN)
    model.config.eos_token_id = ref()[1]
    return model


@pytest.mark.parametrize("budget", BLOCKS)
def test_the_answer_is_the_targets(budget: int) -> None:
    assert ids(scripted(SmallLM((opinionated(), TOKENIZER), confidence=0.0), budget)) == ref()


def test_the_draft_is_what_the_model_thinks_not_what_its_config_says() -> None:
    drafter = SmallLM((opinionated(), TOKENIZER), confidence=0.0)
    played = rounds(scripted(drafter, 8))
    assert [record.accepted for record in played[:-1]] == [record.drafted for record in played[:-1]]
    assert played[0].drafted == 8  # neither its EOS nor its lengths ended the draft


def test_no_config_is_changed() -> None:
    model = opinionated()
    before = copy.deepcopy((model.generation_config.to_dict(), model.config.to_dict()))
    ids(scripted(SmallLM((model, TOKENIZER)), 4))
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


def test_from_a_folder_too(tmp_path: Path) -> None:
    model = opinionated()
    model.config.save_pretrained(tmp_path)
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert ids(scripted(SmallLM(tmp_path, confidence=0.0), 4)) == ref()
