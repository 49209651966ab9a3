"""C15: an answer that is broken off leaves keys and values, a seat or half a state behind, and the next one is wrong.
After any kind of abort the engine is empty within two rounds, its memory is free, and everyone else's answer is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.errors import DeadlineExceeded, TargetError
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
MODEL.lm_head.weight.data[:260] = 0  # neither EOS nor bytes that are no text
PAIR = (MODEL, kit.TOKENIZER)
LONG, COUNT = 450, 16
OTHER = "ABCDEFGHIJ"


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


DRAFTERS: dict[str, Any] = {
    **{f"perfect chain@{block}": [(kit.perfect("chain", truth), block)] for block in kit.BLOCKS},
    "perfect tree@16": [(kit.perfect("tree", truth), 16)],
    "half tree@8": [(kit.half("tree", truth), 8)],
    "hostile chain@16": [(kit.hostile("chain", truth), 16)],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


class Watch:
    """Sees every forward: knows when one began, and whether its keys are still somewhere."""

    def __init__(self, lm: Any) -> None:
        self.began = threading.Event()
        self.lm, self.keys, self._score = lm, list[Any](), lm.score

    def score(self, feeds: Any, *args: Any) -> Any:
        self.began.set()
        scores = self._score(feeds, *args)
        self.keys += [weakref.ref(feed.slot.keys[0]) for feed in feeds]
        return scores

    def freed(self) -> bool:
        end = time.monotonic() + 5.0
        while any(ref() is not None for ref in self.keys) and time.monotonic() < end:
            time.sleep(0.002)  # the worker is about to leave the last round
            if time.monotonic() > end - 4.9:
                gc.collect()  # a traceback may hold a round's variables
        return all(ref() is None for ref in self.keys)


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    llm = kit.make(model=PAIR)
    kit.ids(llm)
    watch = Watch(llm._load().target.lm)
    watch.lm.score = watch.score
    yield watch
    del watch.lm.score


def break_off(llm: MetaSDLLM, watch: Watch) -> None:
    for n, _ in enumerate(llm.stream(kit.PROMPT)):
        if n == 2:
            break


def close_at_once(llm: MetaSDLLM, watch: Watch) -> None:
    for _ in range(12):  # more than run at once: some still wait for their turn
        llm.steps(kit.PROMPT).close()  # type: ignore[attr-defined]


def run_out_of_time(llm: MetaSDLLM, watch: Watch) -> None:
    with pytest.raises(DeadlineExceeded):
        llm.invoke(kit.PROMPT, timeout=0.01)


def cancel_invoke(llm: MetaSDLLM, watch: Watch) -> None:
    async def main() -> None:
        watch.began.clear()
        task = asyncio.create_task(llm.ainvoke(kit.PROMPT))
        await asyncio.to_thread(watch.began.wait, 5)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())


def leave_astream(llm: MetaSDLLM, watch: Watch) -> None:
    async def main() -> None:
        chunks = llm.astream(kit.PROMPT)
        async for _ in chunks:
            break
        await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(main())


def fail_in_a_forward(llm: MetaSDLLM, watch: Watch) -> None:
    forwards = itertools.count()
    watch.lm.score = lambda *args: watch.score(*args) if next(forwards) < 3 else 1 / 0
    try:
        with pytest.raises(TargetError):
            llm.invoke(kit.PROMPT)
    finally:
        watch.lm.score = watch.score


WAYS = (break_off, close_at_once, run_out_of_time, cancel_invoke, leave_astream, fail_in_a_forward)


def check(llm: MetaSDLLM, watch: Watch, abort: Callable[..., None]) -> None:
    threads = threading.active_count()
    abort(llm, watch)
    engine = llm._load()
    most = engine.rounds + 2
    for prompt in (kit.PROMPT, OTHER):
        steps = list(llm.steps(prompt, max_tokens=COUNT))
        assert tuple(token for step in steps for token in step.tokens) == truth(kit.encode(prompt))
        assert steps[-1].summary is not None
        most += len(steps[-1].summary.rounds)
    assert engine.live == 0
    assert engine.rounds <= most
    assert watch.freed()
    assert threading.active_count() <= threads + 1  # a thread of asyncio's may be about to end


@pytest.mark.parametrize("name", DRAFTERS)
def test_after_an_abort_the_engine_is_empty_and_the_next_answers_are_right(name: str, watch: Watch) -> None:
    llm, place = kit.make(model=PAIR, drafters=DRAFTERS[name], max_tokens=LONG), list(DRAFTERS).index(name)
    for step in (0, 2):
        check(llm, watch, WAYS[(place + step) % len(WAYS)])


@pytest.mark.parametrize("abort", WAYS[:-1])  # a forward that fails may fail for all its rows
def test_answers_that_run_beside_an_aborted_one_are_right(abort: Callable[..., None], watch: Watch) -> None:
    for name in ("half tree@8", "default pool"):
        llm = kit.make(model=PAIR, drafters=DRAFTERS[name], max_tokens=LONG)
        beside = [llm.steps(prompt, max_tokens=COUNT) for prompt in (kit.PROMPT, OTHER) * 2]
        abort(llm, watch)
        got = [tuple(token for step in steps for token in step.tokens) for steps in beside]
        assert got == [truth(kit.encode(prompt)) for prompt in (kit.PROMPT, OTHER) * 2]
        check(llm, watch, abort)
