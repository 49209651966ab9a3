"""A5: special tokens leak into the text ("</s>", "<end_of_turn>"), or text that merely looks like one is stripped from
the answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from metasd_langchain.testing.models import tiny_tokenizer
from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, every_way, ids, make, scripted
from tests.bugs.test_a1_stop_ignored_in_invoke import DRAFTERS, SETUPS, Speaker, playing, speaker, spell

TURN = "<end_of_turn>"
OTHER = tiny_tokenizer()  # with a special token more, as chat models have; it is no EOS
OTHER.add_special_tokens({"additional_special_tokens": [TURN]})
TURN_ID = OTHER.convert_tokens_to_ids(TURN)
LIKE = [
    "<eos>",
    "</s>",
    TURN,
    "<bos>",
    "<pad>",
    "<unk>",
    "<|im_end|>",
    "<|endoftext|>",
    "[INST]",
    "<0x0A>",
    "<",
    "<<eos>>",
]
WORDS = spell("so the end . \n is here")
PAD, EOS, BOS, UNK = range(4)


def typed(text: str) -> tuple[int, ...]:
    """A text as ordinary pieces, one a character."""
    return tuple(TOKENIZER.convert_tokens_to_ids(list(text)))


def ending(at: int) -> tuple[int, ...]:
    return (*WORDS[:at], EOS)


ENDING: dict[int, Speaker] = {at: speaker((*ending(at), *WORDS[at:])) for at in range(len(WORDS))}


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_an_end_token_at_every_place_of_a_block_is_no_text(setup: tuple[str, str, int]) -> None:
    for at in range(SETUPS.index(setup) % 4, len(WORDS), 4):
        llm = playing(ENDING[at], (*ending(at), *WORDS[at:]), setup)  # the drafter drafts past the end
        steps = list(llm.steps(PROMPT))
        assert tuple(token for step in steps for token in step.tokens) == ending(at)
        assert "".join(step.text for step in steps) == kit.decode(WORDS[:at])


@pytest.mark.parametrize("at", range(0, len(WORDS), 3))
async def test_an_end_token_is_no_text_in_any_mode(at: int) -> None:
    llm = playing(ENDING[at], ending(at), ("perfect", "tree", BLOCKS[at % 5]))
    for answer in (await every_way(llm, max_tokens=30)).values():
        assert (answer.text, answer.finish_reason) == (kit.decode(WORDS[:at]), "stop")
        assert answer.usage["completion_tokens"] == at + 1


@pytest.mark.parametrize("special", [PAD, BOS, UNK, TURN_ID])
async def test_a_special_token_amid_the_answer_is_no_text_and_no_end(special: int) -> None:
    for at in (0, 3):
        said = (*WORDS[:at], special, *WORDS[at:], special, special)
        model: Any = (speaker(said, vocab_size=len(OTHER)), OTHER)
        plain = make(model=model, max_tokens=len(said))
        for answer in (await every_way(plain)).values():
            assert (answer.text, answer.finish_reason) == (kit.decode(WORDS), "length")
            assert answer.usage["completion_tokens"] == len(said)
        for drafter in DRAFTERS.values():
            llm = scripted(drafter("tree", lambda prompt, said=said: said), 8, model=model, max_tokens=len(said))
            assert ids(llm) == said
            assert llm.invoke(PROMPT) == kit.decode(WORDS)


async def test_text_that_looks_like_a_special_token_survives() -> None:
    said = (*WORDS, *(token for like in LIKE for token in typed(like)), *WORDS[-2:])
    whole = kit.decode(WORDS) + "".join(LIKE) + kit.decode(WORDS[-2:])
    model: Any = (speaker(said, vocab_size=len(OTHER)), OTHER)
    for block, (name, drafter) in zip((4, 16, 1), DRAFTERS.items(), strict=True):
        for shape in ("chain", "tree"):
            llm = scripted(drafter(shape, lambda prompt: said), block, model=model, max_tokens=len(said))
            assert llm.invoke(PROMPT) == whole, name
    for answer in (await every_way(make(model=model, max_tokens=len(said)))).values():
        assert (answer.text, answer.finish_reason) == (whole, "length")


@pytest.mark.parametrize("like", ["<eos>", TURN])
async def test_real_and_typed_side_by_side_and_as_a_stop(like: str) -> None:
    said = (*WORDS, TURN_ID, *typed(like), TURN_ID, *WORDS[:2], EOS)
    model: Any = (speaker(said, vocab_size=len(OTHER)), OTHER)
    llm = make(model=model, max_tokens=40)
    assert {answer.text for answer in (await every_way(llm)).values()} == {
        kit.decode(WORDS) + like + kit.decode(WORDS[:2])
    }
    stopped = await every_way(llm, stop=[like])  # the text stops it, not the special token that shows as nothing
    assert {answer.text for answer in stopped.values()} == {kit.decode(WORDS)}
    assert ids(llm, stop=[like]) == said[: len(WORDS) + 1 + len(typed(like))]
