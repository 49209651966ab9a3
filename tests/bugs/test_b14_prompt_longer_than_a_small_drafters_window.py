"""B14: a prompt longer than the drafter's window: a crash, or zero acceptance for ever. Small models.

vllm#57941, vllm#58080, vllm PR#24662. Heads have a test of their own.
"""

from __future__ import annotations

import logging

import pytest

from metasd_langchain.drafters.small_lm import SmallLM
from metasd_langchain.testing.models import tiny_model
from tests.bugs.kit import TOKENIZER, encode, ids, make, ref, rounds, scripted

LONG = "the cat sat on the mat and then " * 8
WINDOW = 32


@pytest.mark.parametrize("budget", [1, 4, 16, 64])
@pytest.mark.parametrize("kv", ["full", "window:20"])
def test_the_answer_is_right_and_the_drafter_plays_on(budget: int, kv: str, caplog: pytest.LogCaptureFixture) -> None:
    assert len(encode(LONG)) > 60
    llm = scripted(SmallLM((tiny_model("llama", max_position_embeddings=WINDOW), TOKENIZER), kv=kv), budget)
    with caplog.at_level(logging.WARNING, "metasd_langchain"):
        assert ids(llm, LONG) == ref(LONG)
    assert not caplog.records  # nothing failed
    assert all(record.drafted for record in rounds(llm, LONG)[:-1])


def test_what_is_left_of_the_text_still_helps() -> None:
    """The target itself with a short window is right now and then: it is windowed, not switched off."""
    twin = tiny_model(max_position_embeddings=WINDOW)
    llm = scripted(SmallLM((twin, TOKENIZER), confidence=0.0), 3)
    assert sum(record.accepted for record in rounds(llm, LONG)) > 0


def test_the_bandit_moves_to_another_arm_when_it_does_not_help() -> None:
    useless = SmallLM((tiny_model("llama", seed=9, max_position_embeddings=WINDOW), TOKENIZER), confidence=0.0)
    llm = make(drafters=[(useless, 8), "plain"], max_tokens=64, memory="request", policy="ucb")
    assert ids(llm, LONG) == ref(LONG, 64)
    arms = [record.arm for record in rounds(llm, LONG)]
    assert arms[-16:].count("plain") > 8
