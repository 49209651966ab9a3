"""A36: one way of asking drops what another honours: invoke forgets `stop` or usage where it streams inside, a batch
forgets the seed, an option of a call counts in one mode only.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metasd_langchain import MetaSDLLM
from tests.bugs import kit

PROMPTS = [kit.PROMPT, "a", "0123 ABC \n\n xyz", "é \U0001fae9 <eos>", kit.PROMPT * 3]
PLAIN = kit.make(drafters=["plain"])
ALIASES = {"max_tokens": "max_new_tokens", "stop": "stop_sequences"}


@st.composite
def players(draw: st.DrawFn) -> dict[str, Any]:
    """A pool of arms, by name or scripted, and who chooses."""
    shape = draw(st.sampled_from(["chain", "tree"]))
    scripted = st.tuples(
        st.sampled_from([kit.perfect, kit.half, kit.hostile]).map(lambda make: make(shape)), st.sampled_from(kit.BLOCKS)
    )
    arms = st.one_of(
        st.none(),
        scripted.map(lambda arm: [arm]),
        st.sets(st.sampled_from(["plain", "lookup@4", "suffix@8", "suffix@2", "recycling@3", "recycling_tree@6"]))
        .filter(bool)
        .map(sorted),
    )
    return {
        "drafters": draw(arms),
        "policy": draw(st.sampled_from(["hinted_ucb", "ucb", "fixed", "random"])),
        "reward": draw(st.sampled_from(["throughput", "bd", "be"])),
        "memory": draw(st.sampled_from(["process", "request"])),
        "streaming": draw(st.booleans()),
        "speculative": draw(st.sampled_from([True, True, False])),
    }


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values)


samplings = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0, 1e-6, 0.5, 1, 1.7, 30.0]),
            "seed": st.one_of(st.integers(0, 9), st.integers(-(2**70), 2**70)),
        },
        optional={
            "top_p": maybe(st.floats(0.01, 1.0)),
            "top_k": maybe(st.integers(0, 600)),
            "min_p": maybe(st.floats(0.0, 1.0)),
        },
    ),
)


shapings = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.floats(0.7, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "no_repeat_ngram_size": st.integers(0, 3),
        "logit_bias": st.dictionaries(st.integers(0, kit.VOCAB - 1), st.floats(-20.0, 20.0), max_size=3),
        "stop_token_ids": st.lists(st.integers(2, kit.VOCAB - 1), max_size=40),
    },
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A prompt and options, with stops of which some are really met."""
    prompt, options = draw(st.sampled_from(PROMPTS)), {**draw(samplings), **draw(shapings)}
    options["max_tokens"] = draw(st.integers(1, 12))
    options["min_tokens"] = draw(st.integers(0, options["max_tokens"]))
    text = "".join(step.text for step in PLAIN.steps(prompt, **options))
    places = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 5))
    met = places.map(lambda place: text[place[0] : place[0] + place[1]])
    stop = draw(maybe(st.lists(st.one_of(met, st.text(max_size=3)), max_size=3)))
    return prompt, options if stop is None else {**options, "stop": stop}


async def check(llm: MetaSDLLM, call: tuple[str, dict[str, Any]], options: dict[str, Any]) -> None:
    """All ways give what a plain call gives, and its ids are what was counted."""
    prompt, asked = call
    ids = kit.ids(PLAIN, prompt, **asked)
    answers = await kit.every_way(llm, prompt, **options)
    info = PLAIN.generate([prompt], **asked).generations[0][0]
    alone = kit.Answer(info.text, info.generation_info["finish_reason"], info.generation_info["usage"])
    assert answers == dict.fromkeys(answers, alone)
    assert kit.ids(llm, prompt, **options) == ids
    assert alone.usage == {
        "prompt_tokens": llm.get_num_tokens(prompt),
        "completion_tokens": len(ids),
        "total_tokens": llm.get_num_tokens(prompt) + len(ids),
    }
    stops = [stop for stop in asked.get("stop", ()) if stop]
    assert not any(stop in alone.text for stop in stops)
    by_id = ids[-1] in {1, *asked.get("stop_token_ids", ())}
    text = kit.decode(ids[:-1] if by_id else ids)
    assert text.startswith(alone.text)
    ended = by_id or any(stop in text for stop in stops)
    assert alone.finish_reason == ("stop" if ended else "length")
    assert ended or (alone.text, len(ids)) == (text, asked["max_tokens"])


@given(calls(), players(), st.sampled_from(["fields", "call", "aliases", "mixed"]))
@settings(max_examples=40)
async def test_every_way_gives_one_answer_whatever_is_asked_for(call: Any, player: Any, place: str) -> None:
    asked = call[1]
    if place == "fields":
        await check(kit.make(**player, **asked), call, {})
    elif place == "call":
        await check(kit.make(**player), call, asked)
    elif place == "aliases":
        await check(kit.make(**player), call, {ALIASES.get(name, name): value for name, value in asked.items()})
    else:  # fields that the call's options replace
        fields = {"temperature": 1.3, "seed": 99, "max_tokens": 2, "top_k": 3, "top_p": 0.4, "min_p": 0.2}
        reset = {"temperature": 0, "seed": None, "top_k": None, "top_p": None, "min_p": None}
        await check(kit.make(**player, **fields), call, {**reset, **asked})


@given(calls(), st.sampled_from([kit.perfect, kit.half, kit.hostile]), st.sampled_from(kit.BLOCKS), st.booleans())
@settings(max_examples=15)
async def test_every_way_gives_one_answer_by_rejection_too(call: Any, quality: Any, budget: int, tree: bool) -> None:
    prompt, asked = call
    llm = kit.scripted(quality("tree" if tree else "chain"), budget, verify="rejection")
    answers = await kit.every_way(llm, prompt, **asked)
    assert len(set(map(str, answers.values()))) == 1
    assert answers["invoke"].usage["completion_tokens"] == len(kit.ids(llm, prompt, **asked))


@pytest.mark.parametrize("callbacks", [None, []])
async def test_no_callbacks_are_no_callbacks_in_every_way(callbacks: Any) -> None:
    config: Any = {"callbacks": callbacks}
    want = kit.decode(kit.ref(count=4))
    llm = kit.make(max_tokens=4)
    assert llm.invoke(kit.PROMPT, config) == "".join(llm.stream(kit.PROMPT, config)) == want
    assert llm.batch([kit.PROMPT], config) == await llm.abatch([kit.PROMPT], config) == [want]
    assert "".join([piece async for piece in llm.astream(kit.PROMPT, config)]) == want
    assert await llm.ainvoke(kit.PROMPT, config) == want
