"""A3: the beginning of a stop string is streamed before the stop is recognised; or, the other way round, text that only
looked like the beginning of one is held back and never comes, or comes late.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, Heard, ids
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, cut, playing, speaker, spell

TEXT = "aab aaab ab Ob Obs: \nObs\nObserv\nObservation: aabaabaac é. <eos"  # beginnings of stops, and stops
ANSWER = spell(TEXT)
MODEL = speaker(ANSWER)
BYTES = set(TOKENIZER.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)]))
STOPS = [
    ["\nObservation:"],  # after "\nObs" and "\nObserv"
    ["aabaac"],  # begins again inside its own beginning
    ["aaab a"],
    ["Obs:", "\nObservation: aabaabaad"],  # one begins, the other is completed first
    ["ation: aabaa", "b aaab"],
]
NEAR = [["\nObserver"], ["aabaad", "aac!"], ["\nObservation: aabaabaac é!", "<eos>", "s: \n\n"], ["é?", "ation; "]]


def streamed(llm: MetaSDLLM, **options: Any) -> list[str]:
    """The chunks of a stream; its callbacks hear each of them, before the consumer has it."""
    heard, chunks = Heard(), []
    for chunk in llm.stream(PROMPT, {"callbacks": [heard]}, **options):
        chunks.append(chunk)
        assert heard.tokens == chunks
    return chunks


async def astreamed(llm: MetaSDLLM, **options: Any) -> list[str]:
    """The same of an astream."""
    heard, chunks = Heard(), []
    async for chunk in llm.astream(PROMPT, {"callbacks": [heard]}, **options):
        chunks.append(chunk)
        assert heard.tokens == chunks
    return chunks


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_no_chunk_carries_a_part_of_a_completed_stop(setup: tuple[str, str, int]) -> None:
    llm, turn = playing(MODEL, ANSWER, setup), SETUPS.index(setup)
    stop = STOPS[(turn + turn // 5) % len(STOPS)]
    text, count = cut(ANSWER, stop)
    assert ids(llm, stop=stop) == ANSWER[:count]
    chunks = streamed(llm, stop=stop) if turn % 2 else await astreamed(llm, stop=stop)
    for seen in accumulate(chunks):  # nothing can be taken back, so at no time may there be more
        assert text.startswith(seen), (stop, chunks)
    assert "".join(chunks) == text


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_a_stop_that_is_never_completed_swallows_nothing(setup: tuple[str, str, int]) -> None:
    llm, turn = playing(MODEL, ANSWER, setup), SETUPS.index(setup)
    stop = NEAR[turn % len(NEAR)]
    assert "".join(await astreamed(llm, stop=stop) if turn % 2 else streamed(llm, stop=stop)) == TEXT


@pytest.mark.parametrize("cap", range(1, len(ANSWER), 4))
async def test_what_is_held_back_comes_out_at_whatever_end(cap: int) -> None:
    stop = [TEXT[at : at + 5] + "~" for at in range(len(TEXT) - 5)]  # some beginning is always held back
    block = BLOCKS[cap % len(BLOCKS)]
    capped = playing(MODEL, ANSWER, ("perfect", "chain", block), max_tokens=cap)
    said = (*ANSWER[:cap], 1)  # with an EOS in the next place
    ended = playing(speaker(said), said, ("perfect", "tree", block))
    for llm in (capped, ended):
        assert "".join(streamed(llm, stop=stop)) == "".join(await astreamed(llm, stop=stop)) == kit.decode(said)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_text_that_begins_no_stop_comes_as_early_as_without_stops(block: int) -> None:
    llm = playing(MODEL, ANSWER, ("half", "chain", block))
    assert streamed(llm, stop=["~", "#!"]) == streamed(llm)
    done, shown, early = (), "", 0
    for step in llm.steps(PROMPT, stop=["Observ#"]):
        done, shown = done + step.tokens, shown + step.text
        text = kit.decode(done)
        held = max(length for length in range(7) if text.endswith("Observ#"[:length]))
        if done[-1] not in BYTES:  # after a byte the text may still change
            assert shown == text[: len(text) - held]
            early += 1
    assert early >= 2
