"""A22: objects that hold a lock, a thread or loaded weights cannot be pickled or deep-copied, also inside a chain or
when a tracer copies a call's inputs; or the copy is another model, or a second set of weights.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel, RunnablePassthrough

from metasd_langchain import MetaSDLLM, errors
from metasd_langchain.bandits.policies import ucb
from metasd_langchain.drafters import lookup, recycling, recycling_tree, suffix
from tests.bugs import kit

COUNT = 12
REF = kit.ref(count=COUNT)
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 7}
TOKENS = kit.ids(kit.make(drafters=["plain"], max_tokens=COUNT), **HOT)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "plain": {"drafters": ["plain"]},
    "perfect": {"drafters": [(kit.perfect("tree"), 8)], "policy": "fixed"},
    "hostile": {"drafters": [(kit.hostile(), 8)], "policy": "fixed"},
    "half": {"drafters": [(kit.half("tree"), 4), "plain"], "policy": "ucb"},
    "our drafters as objects": {
        "drafters": [(suffix.create({}), 16), (recycling_tree.create({}), 6), lookup.create({}), recycling.create({})]
    },
    "a policy object": {"policy": ucb.create({})},
    "the rest": {"memory": "request", "reward": "bd", "scope": "me", "memory_key": "k", "timeout": 30.0, "tags": ["t"]},
}


def thawed(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own bytes


def make(**options: Any) -> MetaSDLLM:
    return kit.make(**{"max_tokens": COUNT, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("tiny")
    kit.MODEL.save_pretrained(where)
    kit.TOKENIZER.save_pretrained(where)
    return str(where)


def named(folder: str, **options: Any) -> MetaSDLLM:
    return MetaSDLLM(model=folder, dtype="float32", max_tokens=COUNT, **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pickled_object_gives_the_answers_of_the_original(name: str, folder: str) -> None:
    fresh, used = named(folder, **OPTIONS[name]), named(folder, **OPTIONS[name])
    assert kit.ids(used) == REF
    for llm in (fresh, used):
        revived = thawed(llm)
        assert (kit.ids(revived), kit.ids(revived, **HOT)) == (REF, TOKENS)
        assert revived._load() is used._load()  # the same folder, so the same weights
        assert revived.tags == llm.tags


@pytest.mark.parametrize("name", OPTIONS)
async def test_every_copy_shares_the_engine_and_gives_the_same_answers(name: str) -> None:
    llm = make(**OPTIONS[name])
    for copied in (copy.deepcopy(llm), copy.copy(llm), llm.model_copy(), llm.model_copy(deep=True)):
        assert copied._load() is llm._load()
        assert copied.model[0] is kit.MODEL
        assert kit.ids(copied) == REF
    answers = (await kit.every_way(copy.deepcopy(llm), **HOT)).values()
    assert [answer.text for answer in answers] == [kit.decode(TOKENS)] * 6


@pytest.mark.parametrize("name", OPTIONS)
def test_a_copy_is_cached_and_traced_under_the_parameters_of_the_original(name: str) -> None:
    llm = MetaSDLLM(model="named/only", **OPTIONS[name])
    assert copy.deepcopy(llm)._identifying_params == llm._identifying_params
    assert " at 0x" not in str(llm._identifying_params)  # an address is another one in the next process


def test_a_deep_copy_is_an_object_of_its_own() -> None:
    llm = make(stop=["a"], metadata={"b": 1}, model_kwargs={"c": [2]}, tags=["d"])
    other = copy.deepcopy(llm)
    other.max_tokens, other.temperature = 3, 0.5
    other.stop.append("x")
    other.tags.append("x")
    other.metadata["b"] = 0
    other.model_kwargs["c"].append(0)
    assert (llm.max_tokens, llm.temperature) == (12, 0.0)
    assert (llm.stop, llm.metadata["b"], llm.model_kwargs, llm.tags) == (["a"], 1, {"c": [2]}, ["d"])


def first(answers: dict[str, Any]) -> Any:
    return answers["a"]


def chains(llm: MetaSDLLM) -> dict[str, Any]:
    prompt = PromptTemplate.from_template("{x}")
    return {
        "sequence": prompt | llm | StrOutputParser(),
        "bind": prompt | llm.bind(stop=["no such"]),
        "config": prompt | llm.with_config(tags=["t"], run_name="step"),
        "retry": prompt | llm.with_retry(stop_after_attempt=2),
        "fallbacks": prompt | llm.with_fallbacks([llm]),
        "map": RunnableParallel(a=prompt | llm, b=RunnablePassthrough()) | RunnableLambda(first),
    }


@pytest.mark.parametrize("kind", list(chains(make())))
async def test_chains_with_the_model_in_them_are_pickled_and_copied(kind: str, folder: str) -> None:
    given = {"x": kit.PROMPT}
    want = kit.decode(TOKENS)
    for llm in (named(folder, **HOT), make(**HOT)):
        chain = chains(llm)[kind]
        for other in (chain, copy.deepcopy(chain), thawed(chain)):
            assert other.invoke(given) == await other.ainvoke(given) == "".join(other.stream(given)) == want


def test_a_live_pair_is_pickled_with_its_weights_and_an_engine_asks_for_a_name(folder: str) -> None:
    revived = thawed(make())
    assert revived.model[0] is not kit.MODEL
    assert kit.ids(revived) == REF
    engine = make()._load()
    with pytest.raises(errors.BadOption, match="pickled"):
        pickle.dumps(MetaSDLLM(engine=engine))
    assert copy.deepcopy(MetaSDLLM(engine=engine))._load() is engine
    assert kit.ids(thawed(named(folder, engine=engine))) == REF


def test_pickling_loads_nothing_and_works_while_a_stream_runs(tmp_path: Path) -> None:
    revived = thawed(MetaSDLLM(model=str(tmp_path / "nothing here"), temperature=0.5, stop=["\n"]))
    assert (revived.temperature, revived.stop) == (0.5, ["\n"])
    llm = make()
    stream = llm.stream(kit.PROMPT)
    head = next(stream)
    assert kit.ids(thawed(llm)) == kit.ids(copy.deepcopy(llm)) == REF
    assert head + "".join(stream) == kit.decode(REF)


class CopyingTracer(BaseCallbackHandler):
    """Deep-copies and pickles whatever it hears, as some tracers do."""

    raise_error = True
    run_inline = True

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def keep(self, *args: Any, **kwargs: Any) -> None:
        self.copies.append((copy.deepcopy((args, kwargs)), thawed((args, kwargs))))

    on_llm_start = on_llm_new_token = on_llm_end = on_llm_error = keep


async def test_a_tracer_may_copy_everything_it_hears(folder: str) -> None:
    for llm in (named(folder), make()):
        tracer = CopyingTracer()
        config: Any = {"callbacks": [tracer]}
        text = llm.invoke(kit.PROMPT, config)
        assert text == "".join(llm.stream(kit.PROMPT, config))
        assert text == "".join([piece async for piece in llm.astream(kit.PROMPT, config)])
        for bad, options in (("", {}), ("x" * 600, {}), (kit.PROMPT, {"timeout": 1e-9})):
            with pytest.raises(errors.MetaSDError):
                llm.invoke(bad, config, **options)
        assert len(tracer.copies) > 12
