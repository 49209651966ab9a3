"""B4: an end-of-sequence token inside an accepted block does not end the answer, or something behind it leaks.
Nothing behind it may be in ids, text, stream, usage, cache, nor in what drafters and the bandit are told.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import PerfectDrafter, RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.values import Request, Round
from tests.bugs import kit


def talker() -> Any:
    """A model whose answers vary (tied to its embeddings it says one token for ever) and are printable."""
    model = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)
    model.lm_head.weight.data[:260] = 0
    return model


MODEL = talker()
PLACES = range(16)
QUALITIES = {"perfect": kit.perfect, "half": kit.half, "hostile": kit.hostile}


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), 40))


ANSWER = truth(kit.encode(kit.PROMPT))


def pair_with(eos: int, how: str) -> tuple[Any, Any]:
    """A model and tokenizer that declare one more end."""
    model, tokenizer = talker(), tiny_tokenizer()
    if how == "generation config":
        model.generation_config.eos_token_id = eos
    elif how == "its list":
        model.generation_config.eos_token_id = [1, eos, 5]
    elif how == "config":
        model.config.eos_token_id = eos
    else:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    return model, tokenizer


HOWS = ("generation config", "its list", "config")


class Told(PerfectDrafter):
    """Keeps what sessions are told."""

    def __init__(self) -> None:
        super().__init__(truth, vocab=kit.VOCAB)
        self.rounds: list[Round] = []

    def open(self, request: Request) -> Any:
        session = super().open(request)
        observe = session.observe

        def observing(played: Round) -> None:
            self.rounds.append(played)
            observe(played)

        session.observe = observing  # type: ignore[method-assign]
        return session


def test_the_first_tokens_of_the_answer_are_all_different() -> None:
    assert len(set(ANSWER[: len(PLACES)])) == len(PLACES)  # so that each place can be the first end


@pytest.mark.parametrize("place", PLACES)
def test_the_answer_ends_with_the_declared_token_whatever_is_drafted(place: int) -> None:
    pair = pair_with(ANSWER[place], HOWS[place % 3])
    drafters: list[Any] = [
        [(quality(shape, truth), block)]
        for name, quality in QUALITIES.items()
        for block in ((1, 2, 4, 8, 16) if name == "perfect" else (2, 8))
        for shape in ("chain", "tree")
    ]
    drafters += [[(RaisingDrafter(at=1), 4), "lookup@8"], ["suffix@16"], ["recycling_tree@8"], None]
    for arms in drafters:
        steps = list(MetaSDLLM(model=pair, drafters=arms, max_tokens=24).steps(kit.PROMPT))
        summary = steps[-1].summary
        assert summary is not None
        assert tuple(token for step in steps for token in step.tokens) == ANSWER[: place + 1]
        assert "".join(step.text for step in steps) == kit.decode(ANSWER[:place])
        assert (summary.finish_reason, summary.completion_tokens) == ("stop", place + 1)
        assert sum(record.committed for record in summary.rounds) == place + 1
        assert all(record.accepted <= record.committed for record in summary.rounds)


@pytest.mark.parametrize("how", [*HOWS, "tokenizer"])
async def test_every_way_of_calling_ends_there(how: str) -> None:
    pair = pair_with(ANSWER[6], how)
    assert kit.TOKENIZER.convert_ids_to_tokens(ANSWER[6]) not in kit.PROMPT.replace(" ", "\u2581")
    llm = MetaSDLLM(model=pair, drafters=[(kit.perfect("chain", truth), 8)], policy="fixed", max_tokens=24)
    asked = len(kit.encode(kit.PROMPT))
    usage = {"prompt_tokens": asked, "completion_tokens": 7, "total_tokens": asked + 7}
    for name, answer in (await kit.every_way(llm)).items():
        assert answer == kit.Answer(kit.decode(ANSWER[:6]), "stop", usage), name


@pytest.mark.parametrize("place", PLACES)
def test_cache_drafters_and_bandit_hear_nothing_of_what_lies_behind(place: int, monkeypatch: Any) -> None:
    drafter = Told()
    pair = pair_with(ANSWER[place], "generation config")
    llm = MetaSDLLM(model=pair, drafters=[(drafter, 8)], policy="fixed", reward="be", max_tokens=24)
    lm, lengths = llm._load().target.lm, []
    keep = lm.keep

    def keeping(feed: Any, path: Any = ()) -> None:
        keep(feed, path)
        lengths.append(feed.slot.length)

    monkeypatch.setattr(lm, "keep", keeping)
    steps = list(llm.steps(kit.PROMPT))
    assert tuple(token for told in drafter.rounds for token in told.committed) == ANSWER[: place + 1]
    assert all(len(told.path) <= len(told.committed) for told in drafter.rounds)
    assert lengths[-1] <= len(kit.encode(kit.PROMPT)) + place  # the end itself need not be there
    full, rest = divmod(place + 1, 9)  # a round of 8 accepted tokens and a bonus; in the last one only what counts
    rewards = [1.0] * full + ([rest / 8] if rest else [])
    assert steps[-1].summary is not None
    assert steps[-1].summary.values["perfect@8"] == pytest.approx(sum(rewards) / len(rewards))
