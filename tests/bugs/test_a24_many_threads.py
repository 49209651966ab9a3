"""A24: one model asked from many threads crashes, mixes answers up, or says "Already borrowed", because the state of a
request, of a draft or of the tokenizer is kept on an object that all of them share.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from tests.bugs import kit

COUNT = 8
PROMPTS = [kit.PROMPT[n : n + 7 + 4 * n] + str(n) for n in range(10)]
HOT: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.2},
]
POOLS: list[dict[str, Any]] = [
    {},
    {"drafters": ["plain"]},
    {"drafters": [(kit.perfect("tree"), 8)], "policy": "fixed"},
    {"drafters": [(kit.hostile(), 4), (kit.half("tree"), 4)], "policy": "random"},
    {"drafters": ["lookup@8", "recycling@4"], "memory": "request"},
    {"drafters": ["suffix@16"], "scope": "shared"},
]
JOBS: list[tuple[str, dict[str, Any]]] = [(prompt, HOT[n % 3]) for n, prompt in enumerate(PROMPTS)]


def make(**options: Any) -> MetaSDLLM:
    return kit.make(**{"max_tokens": COUNT, **options})


@pytest.fixture(scope="module")
def single() -> list[tuple[int, ...]]:
    """Ids of each job, asked alone."""
    plain = make(drafters=["plain"])
    answers = [kit.ids(plain, prompt, **options) for prompt, options in JOBS]
    assert [a for a, (_, o) in zip(answers, JOBS, strict=True) if not o] == [kit.ref(p, COUNT) for p in PROMPTS[::3]]
    assert len(set(answers)) == len(JOBS)  # so that no answer passes for another
    return answers


@pytest.fixture(autouse=True)
def hurry() -> Iterator[None]:
    """Threads take turns two hundred times as often as usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 200)
    yield
    sys.setswitchinterval(usual)


def run_in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Results of functions that start at the same moment, each on its own thread; the first error is raised."""
    gate, results = threading.Barrier(len(works)), [None] * len(works)
    failures: list[BaseException] = []

    def start(n: int) -> None:
        gate.wait(60)
        try:
            results[n] = works[n]()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            failures.append(error)

    threads = [threading.Thread(target=start, args=(n,), daemon=True) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]
    return results


def ids_of(llm: MetaSDLLM) -> list[tuple[int, ...]]:
    return [kit.ids(llm, prompt, **options) for prompt, options in JOBS]


async def together(ask: Callable[..., Any]) -> list[str]:
    return list(await asyncio.gather(*(ask(prompt, **options) for prompt, options in JOBS)))


def texts_of(llm: MetaSDLLM, way: str) -> list[str]:
    """Every job's text, by one way of asking."""
    if way == "invoke":
        return [llm.invoke(prompt, **options) for prompt, options in JOBS]
    if way == "stream":
        return ["".join(llm.stream(prompt, **options)) for prompt, options in JOBS]
    if way == "ainvoke":
        return asyncio.run(together(llm.ainvoke))  # an event loop of the thread's own
    several = {n: llm.batch(PROMPTS[n::3], **HOT[n]) for n in range(3)}
    return [several[n % 3][n // 3] for n in range(len(JOBS))]


@pytest.mark.parametrize("pool", range(len(POOLS)))
def test_eight_threads_get_the_ids_of_their_own_single_calls(pool: int, single: list[tuple[int, ...]]) -> None:
    llm = make(**POOLS[pool])
    assert run_in_threads([lambda: ids_of(llm)] * 8) == [single] * 8


async def test_every_way_at_once_on_objects_that_share_an_engine(single: list[tuple[int, ...]]) -> None:
    want = [kit.decode([token for token in answer if token != 1]) for answer in single]
    one = make()
    objects = [one, copy.deepcopy(one), one.model_copy(), *(make(**options) for options in POOLS[1:])]
    assert {id(llm._load()) for llm in objects} == {id(one._load())}
    ways = ["invoke", "stream", "ainvoke", "batch"] * 2
    works = [lambda llm=llm, way=way: texts_of(llm, way) for llm, way in zip(objects, ways, strict=True)]

    async def astream(prompt: str, **options: Any) -> str:
        return "".join([piece async for piece in one.astream(prompt, **options)])

    streamed, others = await asyncio.gather(together(astream), asyncio.to_thread(run_in_threads, works))
    assert streamed == want
    assert others == [want] * 8


def test_counting_copying_and_forgetting_meanwhile_change_nothing(single: list[tuple[int, ...]]) -> None:
    llm = make()
    counts = [len(kit.encode(prompt)) for prompt in PROMPTS]

    def around() -> list[list[int]]:
        found = []
        for _ in range(40):
            found.append([llm.get_num_tokens(prompt) for prompt in PROMPTS])
            llm.forget()
            assert copy.deepcopy(llm)._load() is llm._load()
        return found

    results = run_in_threads([lambda: ids_of(llm)] * 6 + [around] * 2)
    assert results == [single] * 6 + [[counts] * 40] * 2


def test_the_application_may_pad_and_cut_with_the_same_tokenizer_meanwhile(single: list[tuple[int, ...]]) -> None:
    llm, over = make(), threading.Event()
    counts = [len(kit.encode(prompt)) for prompt in PROMPTS]
    llm._load()

    def application() -> None:
        while not over.is_set():
            kit.TOKENIZER([kit.PROMPT, "d"], padding=True, truncation=True, max_length=5)

    def ours() -> list[Any]:
        try:
            counted = [[llm.get_num_tokens(prompt) for prompt in PROMPTS] for _ in range(200)]
            return [ids_of(llm), counted]
        finally:
            over.set()

    try:
        results = run_in_threads([application, application, ours])
    finally:
        kit.TOKENIZER("a")  # as it was: neither padding nor cutting
    assert results[2] == [single, [counts] * 200]
