"""B1: assisted answers differ from plain greedy ones: positions off by one, keys of rejected drafts left in the cache.
Every drafter, block length, shape and policy must give the ids of one forward without cache a token.
"""

from __future__ import annotations

import functools
import random
import string
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from tests.bugs import kit

# Tied to its embeddings a random model says one token for ever, and a slip of position would not show.
MODEL = tiny_model(seed=1, tie_word_embeddings=False, initializer_range=0.5)
PAIR = (MODEL, kit.TOKENIZER)
COUNT = 12  # answers of the short prompts cross the window of 8, too
EDGES = (1, 2, 6, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 63, 64)
REAL = (["lookup@8"], ["suffix@16"], ["recycling@4"], ["recycling_tree@8"])


def ids_of(prompt: str) -> tuple[int, ...]:
    """Ids of a prompt; "<bos>" is the shortest there is."""
    return (2,) if prompt == "<bos>" else kit.encode(prompt)


def random_prompts() -> list[str]:
    """Fifty, of 1 to 64 ids; a small alphabet gives lookup drafters something to find."""
    rng = random.Random(11)
    lengths = [*EDGES, *(rng.randint(1, 64) for _ in range(50 - len(EDGES)))]
    alphabets = ("AB", "ABCDE", string.ascii_uppercase + string.digits)  # each character is one id
    return [
        "<bos>" if length == 1 else "".join(rng.choices(alphabets[n % 3], k=length - 1))
        for n, length in enumerate(lengths)
    ]


PROMPTS = random_prompts()


@functools.cache
def truth(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The greedy answer, EOS ignored."""
    return tuple(reference_tokens(MODEL, list(prompt), COUNT))


def ref(prompt: str) -> tuple[int, ...]:
    """The greedy answer up to EOS or the cap."""
    answer = truth(ids_of(prompt))
    return answer[: answer.index(1) + 1] if 1 in answer else answer


def make(drafters: Any, **options: Any) -> MetaSDLLM:
    return kit.make(**{"model": PAIR, "drafters": drafters, "policy": "fixed", "max_tokens": COUNT, **options})


def side_by_side(llm: MetaSDLLM, prompts: list[str], **options: Any) -> list[tuple[int, ...]]:
    """Ids of answers that run at the same time."""
    started = [llm.steps(prompt, **options) for prompt in prompts]
    return [tuple(token for step in steps for token in step.tokens) for steps in started]


def test_the_prompts_and_answers_are_fit_to_show_a_slip() -> None:
    assert [len(ids_of(prompt)) for prompt in PROMPTS[: len(EDGES)]] == list(EDGES)
    assert max(len(ids_of(prompt)) for prompt in PROMPTS) == 64
    assert sum(len(set(ref(prompt))) >= COUNT // 2 for prompt in PROMPTS) > 40


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("quality", [kit.perfect, kit.half, kit.hostile])
def test_scripted_drafts_of_every_length_give_the_greedy_ids(quality: Any, shape: str) -> None:
    for place, block in enumerate(kit.BLOCKS):
        llm = make([(quality(shape, truth), block)])
        assert kit.ids(llm, PROMPTS[place]) == ref(PROMPTS[place]), block  # alone
        prompts = PROMPTS[place :: len(kit.BLOCKS)]
        assert side_by_side(llm, prompts) == [ref(prompt) for prompt in prompts], block


@pytest.mark.parametrize("drafters", REAL, ids=str)
def test_real_drafters_give_the_greedy_ids_for_all_prompts(drafters: Any) -> None:
    llm = make(drafters)
    for prompt in PROMPTS[1::10]:
        assert kit.ids(llm, prompt) == ref(prompt), prompt
    assert side_by_side(llm, PROMPTS) == [ref(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["random", "ucb", "hinted_ucb"])
def test_all_drafters_mixed_by_a_bandit_give_the_greedy_ids(policy: str) -> None:
    arms = [
        (kit.perfect("chain", truth), 5),
        (kit.half("tree", truth), 8),
        (kit.hostile("chain", truth), 3),
        (RaisingDrafter(at=1), 4),
        *(arm for real in REAL for arm in real),
        "suffix@3",
        "plain",
    ]
    llm = make(arms, policy=policy)
    played = {record.arm for prompt in PROMPTS[:5] for record in kit.rounds(llm, prompt)}
    assert len(played) > 2
    assert side_by_side(llm, PROMPTS) == [ref(prompt) for prompt in PROMPTS]
    assert side_by_side(llm, PROMPTS[:10], verify="rejection") == [ref(prompt) for prompt in PROMPTS[:10]]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_sampled_ids_are_those_without_drafts_whatever_is_drafted(shape: str) -> None:
    hot: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    plain, prompts = make(["plain"]), PROMPTS[::10]
    want = side_by_side(plain, prompts, **hot)
    sampled = dict(zip(map(ids_of, prompts), want, strict=True))
    assert sum(one != ref(prompt) for one, prompt in zip(want, prompts, strict=True)) > len(prompts) // 2
    for block in kit.BLOCKS:
        for quality in (kit.perfect, kit.half, kit.hostile):
            assert side_by_side(make([(quality(shape, sampled.get), block)]), prompts, **hot) == want
    for drafters in REAL:
        assert side_by_side(make(drafters), prompts, **hot) == want
