"""A29: a character whose bytes are several tokens arrives broken (U+FFFD) in a stream, is lost, or comes twice, when a
block, the cap or a stop string falls between its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import tiny_model
from tests.bugs import kit
from tests.unit.test_text import byte_tokens, tokenizer

EMOJI = "\U0001fae9"
BAD = "\ufffd"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # five characters shown as one
PROMPT = "the cat sat on the mat"


def saying(answers: Mapping[tuple[int, ...], Sequence[int]]) -> Any:
    """A tiny model whose weights make it say given ids after given prompts of ids: its output layer is solved for."""
    model = tiny_model(hidden_size=256, tie_word_embeddings=False)
    states, wanted = [], []
    with torch.inference_mode():
        for prompt, answer in answers.items():
            hidden = model.model(torch.tensor([[*prompt, *answer]])).last_hidden_state[0]
            states.append(hidden[len(prompt) - 1 : -1].double())
            wanted.append(torch.nn.functional.one_hot(torch.tensor(answer), kit.VOCAB).double() * 40)
        layer = torch.linalg.lstsq(torch.cat(states), torch.cat(wanted), driver="gelsd").solution
        model.lm_head.weight.copy_(layer.T)
    return model


def answer_of(kind: str, text: str | bytes) -> tuple[int, ...]:
    """Ids of an answer in bytes, one token each, then EOS."""
    return (*byte_tokens(kind, text.encode() if isinstance(text, str) else text), 1)


@cache
def pair(kind: str, text: str | bytes) -> tuple[Any, Any]:
    prompt = tuple(tokenizer(kind)(PROMPT)["input_ids"])
    return saying({prompt: answer_of(kind, text)}), tokenizer(kind)


def make(kind: str, text: str | bytes, quality: Any = None, budget: int = 4, **options: Any) -> MetaSDLLM:
    if quality is not None:
        drafter = quality("tree" if budget > 2 else "chain", answers=lambda prompt: (*answer_of(kind, text), *[9] * 16))
        options.update(drafters=[(drafter, budget)], policy="fixed")
    return MetaSDLLM(model=pair(kind, text), **{"max_tokens": 64, **options})


def decode(kind: str, ids: Sequence[int]) -> str:
    return str(tokenizer(kind).decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


PLAYERS = [(kit.perfect, k) for k in (1, 2, 3, 16)] + [(kit.half, 8), (kit.hostile, 4)]
KINDS = ["gemma", "gpt2", "llama"]
TEXTS = [
    f"a {EMOJI}b{EMOJI}{EMOJI} c",
    f"é€{EMOJI}漢字{FAMILY}\u0301!",
    f"{EMOJI}",
    f"x{BAD}y",  # the model really says it
    b"a\xf0\x9f\xabb",  # never completed
    b"\x80\xffok\xf0\x9f",
    EMOJI.encode() + b"\xff" + EMOJI.encode(),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_chunks_joined_are_the_text_wherever_blocks_end(kind: str, text: str | bytes) -> None:
    ids = answer_of(kind, text)
    want = decode(kind, ids)
    assert want == text or isinstance(text, bytes)
    inside: set[int] = set()
    for quality, budget in PLAYERS:
        llm = make(kind, text, quality, budget)
        chunks, said = [], 0
        for step in llm.steps(PROMPT):
            chunks += [piece.text for piece in step.pieces]
            said += len(step.tokens)
            inside.add(said)
        assert said == len(ids)
        assert "".join(chunks) == want
        streamed = list(llm.stream(PROMPT))
        assert "".join(streamed) == want
        if BAD not in want:
            assert not any(BAD in chunk for chunk in (*chunks, *streamed))
    assert inside == set(range(1, len(ids) + 1))  # some block ended after every token


@pytest.mark.parametrize("kind", KINDS)
async def test_every_way_says_the_same_also_when_the_cap_falls_inside_a_character(kind: str) -> None:
    text = f"é{EMOJI}a"
    ids = answer_of(kind, text)
    for cap in range(1, len(ids) + 1):
        want = decode(kind, ids[:cap])
        for options in (
            {"quality": kit.perfect, "budget": 8},
            {"drafters": ["plain"]},
            {"temperature": 1.0, "seed": 1},
        ):
            llm = make(kind, text, max_tokens=cap, **options)
            answers = await kit.every_way(llm, PROMPT)
            assert {answer.text for answer in answers.values()} == {want}
            assert kit.ids(llm, PROMPT) == ids[:cap]
        pieces = [piece for step in llm.steps(PROMPT) for piece in step.pieces]
        assert all(BAD not in piece.text for piece in pieces[:-1])  # only the end can be cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", kit.BLOCKS)
def test_a_stop_before_inside_or_behind_such_a_character(kind: str, budget: int) -> None:
    text = f"ok {EMOJI}é!STOP{EMOJI}漢x"
    for stop, want in (
        (EMOJI, "ok "),
        ("é", f"ok {EMOJI}"),
        (f"é!STOP{EMOJI}", f"ok {EMOJI}"),
        ("漢x", f"ok {EMOJI}é!STOP{EMOJI}"),
        (f"{EMOJI}漢y", text),  # begun, not completed
        (BAD, text),  # half a character is no such character
    ):
        llm = make(kind, text, kit.perfect, budget, stop=[stop])
        streamed = list(llm.stream(PROMPT))
        assert "".join(streamed) == llm.invoke(PROMPT) == want
        assert not any(BAD in chunk for chunk in streamed)


async def test_what_callbacks_and_async_streams_get_is_whole_too() -> None:
    for budget in kit.BLOCKS:
        llm, heard = make("gemma", TEXTS[0], kit.half, budget), kit.Heard()
        pieces = [piece async for piece in llm.astream(PROMPT, {"callbacks": [heard]})]
        assert heard.tokens == pieces
        assert "".join(pieces) == TEXTS[0]
        assert not any(BAD in piece for piece in pieces)
