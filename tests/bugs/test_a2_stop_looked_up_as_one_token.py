"""A2: stop strings are looked up as token ids. One that is no single token, or that the answer spells with other tokens
than the tokenizer would (from the middle of one into the middle of another), never fires.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, every_way, make
from tests.bugs.test_a1_stop_ignored_in_invoke import SETUPS, cut, playing, speaker, spell

TEXT = "I think.\n\nAction: get\n\nObservation: é costs 7 naïve <eos> ..."
EMOJI = "\U0001fae9"  # four byte tokens
TYPED = tuple(TOKENIZER.convert_tokens_to_ids(list("<eos>")))
ANSWER = (*spell(TEXT[: TEXT.index("<eos>")]), *TYPED, *spell(f" ... {EMOJI}"))
ENDS = [len(kit.decode(ANSWER[:count])) for count in range(1, len(ANSWER) + 1)]
MODEL = speaker(ANSWER)


def halted(llm: Any, stop: list[str]) -> tuple[tuple[int, ...], str, str]:
    """Ids, text and finish reason of an answer."""
    steps = list(llm.steps(PROMPT, stop=stop))
    ids = tuple(token for step in steps for token in step.tokens)
    return ids, "".join(step.text for step in steps), steps[-1].summary.finish_reason


def holds(llm: Any, stops: list[str]) -> None:
    """The answer ends exactly where reading it token by token ends it."""
    text, count = cut(ANSWER, stops)
    assert halted(llm, stops) == (ANSWER[:count], text, "stop"), stops


def test_the_answer_is_spelled_in_many_tokens_and_the_stops_are_no_tokens() -> None:
    assert kit.decode(ANSWER) == f"{TEXT} {EMOJI}"
    assert TOKENIZER.convert_tokens_to_ids("\nObservation:") == TOKENIZER.unk_token_id
    assert max(end - start for start, end in pairwise(ENDS)) > 1


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_stop_from_the_middle_of_one_token_into_the_next(setup: tuple[str, str, int]) -> None:
    llm = playing(MODEL, ANSWER, setup)
    for end in ENDS[SETUPS.index(setup) % 15 : -4 : 15]:
        holds(llm, [TEXT[max(0, end - 2) : end + 3]])


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_stop_of_every_length_at_every_place(length: int) -> None:
    text = kit.decode(ANSWER)
    for at in range(0, len(text) - length + 1, 3 if length > 1 else 2):
        block = BLOCKS[at % len(BLOCKS)]
        holds(playing(MODEL, ANSWER, ("perfect", "chain", block)), [text[at : at + length]])


@pytest.mark.parametrize(
    "stops",
    [
        ["\nObservation:"],
        ["\n\n"],
        ["<eos>"],  # spelled in letters
        ["é"],  # two byte tokens
        [EMOJI],
        ["\n\nObservation:", "Observation"],  # both end in one token or the next: the first in the text cuts
        ["get\n", "t\n\nO", "Action: get\n\nObservation: é"],
    ],
)
async def test_every_mode_ends_there_and_shows_nothing_of_it(stops: list[str]) -> None:
    text, count = cut(ANSWER, stops)
    for setup in (("perfect", "tree", 16), ("half", "chain", 8)):
        llm = playing(MODEL, ANSWER, setup)
        holds(llm, stops)
    for answer in (await every_way(llm, stop=stops)).values():
        assert (answer.text, answer.finish_reason, answer.usage["completion_tokens"]) == (text, "stop", count)


def test_sampled_answers_end_at_the_same_text() -> None:
    hot = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    said = kit.ids(make(drafters=["plain"], **hot))
    whole = kit.decode(said)
    stops = [stop for stop in (whole[at : at + 3] for at in range(len(whole) - 3)) if "\ufffd" not in stop]
    assert len(stops) > 8
    for stop in stops[::3]:
        text, count = cut(said, [stop])
        for drafter in (kit.perfect("chain", lambda prompt: said), kit.half("tree", lambda prompt: said)):
            assert halted(kit.scripted(drafter, 8, **hot), [stop])[:2] == (said[:count], text), stop
