"""C5: a seed has no effect, changes greedy answers, or resets the process's random generators.
The same seed gives the same sampled answer whatever else runs or drafts; nobody else's generator is touched.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import tiny_model
from tests.bugs import kit

MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)  # tied, it says one token for ever
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 16
HOT: dict[str, Any] = {"temperature": 0.9}
PROMPTS = (kit.PROMPT, "AB", "ABCDEFG", "0123456789")


def make(drafters: Any = None, **options: Any) -> MetaSDLLM:
    return kit.make(**{"model": PAIR, "drafters": drafters, "max_tokens": COUNT, **options})


PLAIN = make(["plain"])
SEVEN = {kit.encode(prompt): kit.ids(PLAIN, prompt, seed=7, **HOT) for prompt in PROMPTS}


def all_blocks(drafter: Any) -> list[tuple[Any, int]]:
    """Arms that play one drafter with every block length."""
    return [(drafter, block) for block in kit.BLOCKS]


DRAFTERS: dict[str, Any] = {
    **{
        f"{quality.__name__} {shape}": all_blocks(quality(shape, SEVEN.__getitem__))
        for quality in (kit.perfect, kit.half, kit.hostile)
        for shape in ("chain", "tree")
    },
    "raising": [(RaisingDrafter(at=1), 4), "lookup@8"],
    **{name: [name] for name in ("lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain")},
    "default pool": None,
}


def states() -> tuple[Any, ...]:
    """Of all generators that others in the process may rely on."""
    legacy = np.random.get_state()  # noqa: NPY002 - the one not to touch
    return random.getstate(), tuple(torch.get_rng_state().tolist()), str(legacy), legacy[1].tobytes()  # type: ignore[index]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_fixes_the_answer_and_drafters_do_not_show(name: str) -> None:
    llm = make(DRAFTERS[name], policy="random")
    for prompt in PROMPTS:
        assert kit.ids(llm, prompt, seed=7, **HOT) == SEVEN[kit.encode(prompt)]
        assert kit.ids(llm, prompt, seed=7, **HOT) == SEVEN[kit.encode(prompt)]
    assert kit.ids(llm, seed=8, **HOT) == kit.ids(PLAIN, seed=8, **HOT) != SEVEN[kit.encode(kit.PROMPT)]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 + 5, -3])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    want = kit.ids(PLAIN, seed=seed, **HOT)
    assert kit.ids(make(seed=seed, **HOT)) == want  # as a field
    assert kit.ids(make(), seed=seed, **HOT) == want
    assert want != kit.ids(PLAIN, seed=seed + 1, **HOT)


async def test_every_way_of_calling_gives_the_seeds_answer() -> None:
    for seed in (7, 8):
        answers = (await kit.every_way(make(), seed=seed, **HOT)).values()
        assert len({answer.text for answer in answers}) == 1
        assert next(iter(answers)).text == kit.decode(kit.ids(PLAIN, seed=seed, **HOT))


def test_other_calls_in_between_or_beside_do_not_show() -> None:
    llm, want = make(), SEVEN[kit.encode(kit.PROMPT)]
    for other in range(5):
        kit.ids(llm, seed=other, **HOT)
        kit.ids(llm, PROMPTS[other % 4], temperature=1.5)
        kit.ids(llm)
        random.random(), torch.rand(1)
        assert kit.ids(llm, seed=7, **HOT) == want
    beside = [llm.steps(prompt, seed=seed, **HOT) for seed, prompt in enumerate(PROMPTS)]
    assert kit.ids(llm, seed=7, **HOT) == want
    assert all(list(steps) for steps in beside)
    found: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(kit.ids(llm, seed=7, **HOT))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [want] * 6


def test_no_seed_means_another_answer_each_time_and_not_from_the_global_generators() -> None:
    llm, answers = make(**HOT), set()
    for _ in range(6):
        random.seed(1)
        torch.manual_seed(1)
        answers.add(kit.ids(llm))
    assert len(answers) == 6
    assert len(set(llm.batch([kit.PROMPT] * 4))) == 4


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 1}])
def test_a_seed_does_not_change_greedy_answers(options: dict[str, Any]) -> None:
    want = kit.ids(PLAIN)
    for seed in (None, 0, 7, 8):
        assert kit.ids(make(), seed=seed, **options) == want


@pytest.mark.parametrize("policy", ["hinted_ucb", "ucb", "random", "fixed"])
@pytest.mark.parametrize("verify", ["invariant", "rejection"])
async def test_the_generators_of_the_process_are_left_alone(policy: str, verify: str) -> None:
    drafters = [*DRAFTERS["half tree"], "lookup@8", "suffix@16", "recycling@4", "recycling_tree@12", "plain"]
    llm = make(drafters, policy=policy, verify=verify, **HOT)
    before = states()
    for seed in (None, 7):
        await kit.every_way(llm, seed=seed)
        kit.ids(llm, seed=seed, temperature=0.0)
        assert states() == before
