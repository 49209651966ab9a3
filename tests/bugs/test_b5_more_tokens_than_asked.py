"""B5: more tokens than asked for are returned, or drafts reach past the cap or the model's window.
Exactly `max_tokens` come back, and no forward reads a position beyond prompt and cap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import PerfectDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from metasd_langchain.values import Draft
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
MODEL.lm_head.weight.data[:260] = 0  # neither EOS nor bytes that are no text
PAIR = (MODEL, kit.TOKENIZER)
CAPS = range(1, 11)
ASKED = len(kit.encode(kit.PROMPT))


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), 40))


ANSWER = truth(kit.encode(kit.PROMPT))


class Boundless(PerfectDrafter):
    """Drafts the whole rest of the answer, whatever the budget."""

    def draft(self, truth: Sequence[int], budget: int) -> Draft:
        return super().draft(truth, 40)


DRAFTERS: dict[str, Any] = {
    **{
        f"{name} {shape}": [(quality(shape, truth), 8)]
        for name, quality in (("perfect", kit.perfect), ("half", kit.half), ("hostile", kit.hostile))
        for shape in ("chain", "tree")
    },
    **{f"perfect@{block}": [(kit.perfect("chain", truth), block)] for block in kit.BLOCKS},
    "boundless chain": [(Boundless(truth, vocab=kit.VOCAB), 8)],
    "boundless tree": [(Boundless(truth, vocab=kit.VOCAB, shape="tree"), 16)],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How far each forward read: positions up to this number."""
    lm, seen = kit.make(model=PAIR)._load().target.lm, []
    score = lm.score

    def scoring(feeds: Any, *args: Any) -> Any:
        seen.extend(feed.slot.length + feed.width for feed in feeds)
        return score(feeds, *args)

    monkeypatch.setattr(lm, "score", scoring)
    return seen


def make(drafters: Any, **options: Any) -> MetaSDLLM:
    return kit.make(model=PAIR, drafters=drafters, **options)


ENGINE = make(None)
ENGINE._load()  # one engine for all tests, so that `reach` watches the one that plays


@pytest.mark.parametrize("name", DRAFTERS)
def test_exactly_so_many_tokens_and_no_position_beyond(name: str, reach: list[int]) -> None:
    llm = make(DRAFTERS[name])
    for cap in CAPS:
        del reach[:]
        steps = list(llm.steps(kit.PROMPT, max_tokens=cap))
        summary = steps[-1].summary
        assert summary is not None
        assert tuple(token for step in steps for token in step.tokens) == ANSWER[:cap]
        assert "".join(step.text for step in steps) == kit.decode(ANSWER[:cap])
        assert (summary.finish_reason, summary.completion_tokens) == ("length", cap)
        assert reach
        assert max(reach) < ASKED + cap  # the last token is chosen, never read


@pytest.mark.parametrize("cap", [1, 2, 9, 10])
async def test_every_way_of_calling_keeps_to_the_cap(cap: int) -> None:
    want = kit.Answer(
        kit.decode(ANSWER[:cap]),
        "length",
        {"prompt_tokens": ASKED, "completion_tokens": cap, "total_tokens": ASKED + cap},
    )
    by_field = make(DRAFTERS["boundless chain"], max_tokens=cap)
    by_call = make(DRAFTERS["perfect tree"])
    for answers in (await kit.every_way(by_field), await kit.every_way(by_call, max_tokens=cap)):
        assert all(answer == want for answer in answers.values())


@pytest.mark.parametrize("name", ["perfect chain", "half tree", "hostile chain", "boundless tree", "default pool"])
def test_the_models_window_is_a_cap_too(name: str) -> None:
    short = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5, max_position_embeddings=ASKED + 5)
    short.load_state_dict(MODEL.state_dict())
    llm = MetaSDLLM(model=(short, kit.TOKENIZER), drafters=DRAFTERS[name], max_tokens=40)
    lm, seen = llm._load().target.lm, []
    score = lm.score
    lm.score = lambda feeds, *args: (seen.extend(f.slot.length + f.width for f in feeds), score(feeds, *args))[1]
    steps = list(llm.steps(kit.PROMPT))
    summary = steps[-1].summary
    assert summary is not None
    assert tuple(token for step in steps for token in step.tokens) == ANSWER[:5]
    assert summary.finish_reason == "length"
    assert max(seen) < ASKED + 5


def test_rows_of_one_forward_keep_to_their_own_caps(reach: list[int]) -> None:
    llm = make(DRAFTERS["perfect chain"])
    started = [llm.steps(kit.PROMPT, max_tokens=cap) for cap in CAPS]
    assert [tuple(t for step in steps for t in step.tokens) for steps in started] == [ANSWER[:cap] for cap in CAPS]
    assert max(reach) < ASKED + max(CAPS)
