"""A1: a stop string is honoured by some ways of asking and silently ignored by others (invoke, bind, field, batch ...),
so that the same chain ends its answer in one and runs on in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from langchain_core.caches import InMemoryCache
from langchain_core.prompts import PromptTemplate

from metasd_langchain import MetaSDLLM
from tests.bugs import kit
from tests.bugs.kit import BLOCKS, PROMPT, TOKENIZER, every_way, ids, make

DRAFTERS = {"perfect": kit.perfect, "half": kit.half, "hostile": kit.hostile}
SETUPS = [(name, shape, block) for name in DRAFTERS for shape in ("chain", "tree") for block in BLOCKS]
TEXT = "Thought: look\n\nObservation: 42 is in the end."


class Speaker(transformers.Gemma3ForCausalLM):  # type: ignore[misc]
    """The tiny model, made to say given tokens at given places whatever was drafted; elsewhere it says its own."""

    script: dict[int, int]  # place of a token -> the token that follows it

    def forward(self, input_ids: Any = None, position_ids: Any = None, logits_to_keep: Any = 0, **options: Any) -> Any:
        output = super().forward(input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, **options)
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids[0]
        kept = places[slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep]
        for row, place in enumerate(kept.tolist()):
            if place in self.script:
                output.logits[0, row, self.script[place]] += 1e4
        return output


def speaker(answer: Sequence[int], prompt: str = PROMPT, kind: type[Speaker] = Speaker, **config: Any) -> Speaker:
    """A model that answers every prompt of this one's length with these tokens."""
    like = kit.tiny_model(**config)
    model = kind(like.config).eval()
    model.load_state_dict(like.state_dict())
    start = len(kit.encode(prompt)) - 1
    model.script = {start + at: token for at, token in enumerate(answer)}
    return model


def spell(text: str) -> tuple[int, ...]:
    """Ids of an answer of this text."""
    return tuple(TOKENIZER(text)["input_ids"][1:])


def cut(answer: Sequence[int], stops: Sequence[str]) -> tuple[str, int]:
    """Where an answer ends by reading it token by token: its text, and how many tokens were needed to see the end."""
    for count in range(1, len(answer) + 1):
        text = kit.decode(answer[:count])
        found = [at for at in map(text.find, stops) if at >= 0]
        if found:
            return text[: min(found)], count
    return kit.decode(answer), len(answer)


def playing(model: Any, answer: Sequence[int], setup: tuple[str, str, int], **options: Any) -> MetaSDLLM:
    """A MetaSDLLM over a model whose answer the drafter of a setup knows."""
    name, shape, block = setup
    drafter = DRAFTERS[name](shape, lambda prompt: answer)
    return kit.scripted(drafter, block, **{"model": (model, TOKENIZER), "max_tokens": len(answer), **options})


ANSWER = spell(TEXT)
MODEL = speaker(ANSWER)


def speaking(**options: Any) -> MetaSDLLM:
    return make(model=(MODEL, TOKENIZER), **{"max_tokens": len(ANSWER), **options})


@pytest.mark.parametrize("setup", SETUPS, ids=str)
async def test_every_mode_ends_at_the_stop_whoever_drafted(setup: tuple[str, str, int]) -> None:
    at = SETUPS.index(setup) % (len(TEXT) - 4) + 1
    stop = TEXT[at : at + 3]
    text, count = cut(ANSWER, [stop])
    warm = {} if at % 2 else {"temperature": 0.8, "seed": at}
    llm = playing(MODEL, ANSWER, setup, **warm)
    assert ids(llm, stop=[stop]) == ANSWER[:count]
    if setup in SETUPS[::2]:
        for answer in (await every_way(llm, stop=[stop])).values():
            assert (answer.text, answer.finish_reason) == (text, "stop")
            assert answer.usage["completion_tokens"] == count


def ways(stop: list[str]) -> Iterator[tuple[str, MetaSDLLM | Any, dict[str, Any]]]:
    yield "call", speaking(), {"stop": stop}
    yield "alias of a call", speaking(), {"stop_sequences": stop}
    yield "field", speaking(stop=stop), {}
    yield "alias of a field", speaking(stop_sequences=stop), {}
    yield "bind", speaking().bind(stop=stop), {}
    yield "call over field", speaking(stop=["Thought"]), {"stop": stop}
    yield "bind over field", speaking(stop=["Thought"]).bind(stop=stop), {}
    yield "nothing over field", speaking(stop=stop), {"stop": None}
    yield "where invoke streams inside", speaking(streaming=True), {"stop": stop}
    yield "in a chain", PromptTemplate.from_template("{prompt}") | speaking(stop=stop), {}
    yield "bound in a chain", PromptTemplate.from_template("{prompt}") | speaking().bind(stop=stop), {}
    yield "after its unstopped answer was cached", cached(), {"stop": stop}


def cached() -> MetaSDLLM:
    llm = speaking(cache=InMemoryCache())
    assert llm.invoke(PROMPT) == TEXT
    return llm


async def test_every_way_of_saying_the_stop_is_heard_in_every_mode() -> None:
    stop, want = ["", "no such", "end", "\nObservation:"], "Thought: look\n"
    for name, llm, options in ways(stop):
        given: Any = {"prompt": PROMPT} if "chain" in name else PROMPT
        assert llm.invoke(given, **options) == want, name
        assert "".join(llm.stream(given, **options)) == want, name
        assert llm.batch([given, given], **options) == [want, want], name
        assert await llm.ainvoke(given, **options) == want, name
        assert "".join([piece async for piece in llm.astream(given, **options)]) == want, name
        assert await llm.abatch([given, given], **options) == [want, want], name
    (row,), (other,) = speaking().generate([PROMPT, PROMPT], stop=stop).generations
    assert row.text == other.text == want


async def test_a_stop_in_the_prompt_or_across_its_end_is_not_one_of_the_answer() -> None:
    for stop in ("cat", PROMPT[-2:] + TEXT[:2], "<bos>"):
        assert stop not in TEXT
        answers = await every_way(speaking(), stop=[stop])
        assert {(answer.text, answer.finish_reason) for answer in answers.values()} == {(TEXT, "length")}
