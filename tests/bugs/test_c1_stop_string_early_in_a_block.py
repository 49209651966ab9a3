"""C1: only the end of an accepted block is searched for stop strings, so one that is complete earlier in it is missed.
The answer is cut at the first stop string wherever in a block it begins, spans or ends, and counts the token ending it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
MODEL.lm_head.weight.data[:260] = 0  # neither EOS nor bytes that are no text
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 20
PLACES = range(17)  # of the token that completes the stop string; a block of 16 and its bonus token


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


ANSWER = truth(kit.encode(kit.PROMPT))
TEXT = kit.decode(ANSWER)
ENDS = [len(kit.decode(ANSWER[: n + 1])) for n in range(COUNT)]  # of the text after each token


def stop_at(place: int, longer: int = 0) -> str:
    """The shortest string that is first complete with the token at a place, plus what lies before it."""
    end = ENDS[place]
    start = next(at for at in range(end - 1, -1, -1) if TEXT.find(TEXT[at:end]) == at)
    return TEXT[max(0, start - longer) : end]


def first_end(*stops: str) -> tuple[str, int]:
    """Text and tokens that are left when the earliest of some stop strings ends the answer."""
    count = next(n for n in range(1, COUNT + 1) if any(stop in kit.decode(ANSWER[:n]) for stop in stops))
    text = kit.decode(ANSWER[:count])
    return text[: min(text.index(stop) for stop in stops if stop in text)], count


def make(drafter: Any, block: int, **options: Any) -> MetaSDLLM:
    return kit.scripted(drafter, block, model=PAIR, max_tokens=COUNT, **options)


def check(llm: MetaSDLLM, *stops: str) -> None:
    text, count = first_end(*stops)
    steps = list(llm.steps(kit.PROMPT, stop=list(stops)))
    assert tuple(token for step in steps for token in step.tokens) == ANSWER[:count]
    assert "".join(step.text for step in steps) == text
    assert steps[-1].summary is not None
    assert (steps[-1].summary.finish_reason, steps[-1].summary.completion_tokens) == ("stop", count)


def test_the_stop_strings_are_complete_where_they_should_be() -> None:
    assert [first_end(stop_at(place))[1] for place in PLACES] == [place + 1 for place in PLACES]
    assert len(kit.encode("x" + stop_at(9, longer=5))) > 4  # spans tokens


@pytest.mark.parametrize("longer", [0, 5])
@pytest.mark.parametrize("place", PLACES)
def test_a_stop_completed_at_any_token_of_a_block_cuts_there(place: int, longer: int) -> None:
    stop = stop_at(place, longer)
    check(make(kit.perfect("chain", truth), 16), stop)  # all of it in the first block
    check(make(kit.perfect("tree", truth), 16), stop)
    for block in kit.BLOCKS:
        check(make(kit.half("tree" if block % 3 == 1 else "chain", truth), block), stop)
    check(kit.make(model=PAIR, max_tokens=COUNT), stop)
    check(kit.make(model=PAIR, max_tokens=COUNT, drafters=["plain"]), stop)


@pytest.mark.parametrize("block", kit.BLOCKS)
def test_of_several_stops_the_earliest_completed_wins(block: int) -> None:
    llm = make(kit.perfect("chain", truth), block)
    for places in ((1, 9), (9, 1), (15, 3, 8), (0, 16), (7, 6, 5)):
        check(llm, *(stop_at(place, 2) for place in places))
    check(llm, "never said", stop_at(11), "nor this")


@pytest.mark.parametrize("block", kit.BLOCKS)
def test_a_stop_inside_a_token_cuts_inside_it(block: int) -> None:
    llm, inside = make(kit.perfect("chain", truth), block), 0
    for place in PLACES:
        start = ENDS[place - 1] if place else 0
        for end in range(start + 1, ENDS[place]):  # the token goes on behind the stop
            stop = TEXT[max(0, end - 3) : end]
            check(llm, stop)
            inside += 1
    assert inside > 5


@pytest.mark.parametrize("place", [0, 1, 8, 16])
async def test_every_way_of_calling_cuts_there(place: int) -> None:
    stop = stop_at(place, 3)
    text, count = first_end(stop)
    asked = len(kit.encode(kit.PROMPT))
    usage = {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}
    for block in (1, 16):
        for name, answer in (await kit.every_way(make(kit.perfect("chain", truth), block), stop=[stop])).items():
            assert answer == kit.Answer(text, "stop", usage), (name, block)


def test_a_sampled_block_is_searched_like_a_greedy_one() -> None:
    hot: dict[str, Any] = {"temperature": 0.9, "seed": 4}
    plain = kit.make(model=PAIR, max_tokens=COUNT, drafters=["plain"])
    answer = kit.ids(plain, **hot)
    drafts = {kit.encode(kit.PROMPT): answer}.get
    for n in range(2, 12):
        stop = kit.decode(answer)[n : n + 3]
        want = kit.ids(plain, stop=[stop], **hot)
        assert want == answer[: len(want)] != answer
        for quality in (kit.perfect, kit.half):
            assert kit.ids(make(quality("chain", drafts), 16), stop=[stop], **hot) == want
