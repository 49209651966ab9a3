"""B7: once the sliding window is passed, a rejected draft cannot be taken back, or mask and keys differ in length.
Answers at the window's edge are the greedy ones whatever is rejected, and a query sees its window, no more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.testing.drafters import PerfectDrafter
from metasd_langchain.testing.models import FAMILIES, reference_tokens, tiny_model
from tests.bugs import kit

WINDOW = 8
BLOCK = 8
COUNT = 12
TEXT = "A0B1C2D3E4F5G6H7I8J9K0L1"
PROMPTS = [TEXT[: length - 1] for length in (7, 8, 9, 20)]  # BOS is one more
SLIDING = sorted(name for name, (_, _, own) in FAMILIES.items() if own.get("sliding_window") == WINDOW)
# transformers offers no sdpa for gemma2, whose scores are capped
KINDS = [(family, kind) for family in SLIDING for kind in ("eager", "sdpa") if (family, kind) != ("gemma2", "sdpa")]


@functools.cache
def model_of(family: str, kind: str = "eager", single: bool = False) -> Any:
    """Three layers as the family has them, or a single sliding one."""
    changes: dict[str, Any] = {"num_hidden_layers": 1} if single else {}
    if single and family.startswith("gemma"):
        changes["layer_types"] = ["sliding_attention"]
    # Tied to its embeddings it would say one token for ever, and no slip would show.
    model = tiny_model(family, seed=1, tie_word_embeddings=False, initializer_range=0.5, **changes)
    model.set_attn_implementation(kind)
    return model


@functools.cache
def truth_of(family: str, kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(reference_tokens(model_of(family, kind), list(prompt), COUNT))


class Until(PerfectDrafter):
    """Right in the first `right` tokens of a draft, wrong from there."""

    def __init__(self, answers: Any, right: int, shape: Any) -> None:
        super().__init__(answers, shape=shape, vocab=kit.VOCAB)
        self.right = right

    def line(self, truth: Sequence[int], budget: int) -> list[int]:
        return [token if n < self.right else self.wrong(token) for n, token in enumerate(truth[:budget])]


def make(family: str, kind: str, drafters: Any, **options: Any) -> MetaSDLLM:
    pair = (model_of(family, kind), kit.TOKENIZER)
    return kit.make(**{"model": pair, "drafters": drafters, "policy": "fixed", "max_tokens": COUNT, **options})


def side_by_side(llm: MetaSDLLM, prompts: Sequence[str] = PROMPTS) -> list[tuple[int, ...]]:
    """Ids of answers that share their forwards."""
    started = [llm.steps(prompt) for prompt in prompts]
    return [tuple(token for step in steps for token in step.tokens) for steps in started]


def wanted(family: str, kind: str) -> list[tuple[int, ...]]:
    answers = [truth_of(family, kind, kit.encode(prompt)) for prompt in PROMPTS]
    return [answer[: answer.index(1) + 1] if 1 in answer else answer for answer in answers]


def test_all_families_with_a_window_are_here() -> None:
    assert {"gemma2", "gemma3", "mistral", "phi3"} <= set(SLIDING)
    assert [len(kit.encode(prompt)) for prompt in PROMPTS] == [7, 8, 9, 20]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_ids_are_the_greedy_ones_for_every_count_of_rejected_tokens(family: str, kind: str, shape: str) -> None:
    answers = functools.partial(truth_of, family, kind)
    want = wanted(family, kind)
    for right in range(BLOCK + 1 if shape == "chain" else BLOCK // 2 + 1):
        llm = make(family, kind, [(Until(answers, right, shape), BLOCK)])
        assert side_by_side(llm) == want, right
        alone = right % len(PROMPTS)
        assert kit.ids(llm, PROMPTS[alone]) == want[alone], right


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_ids_are_the_greedy_ones_under_a_bandit_and_real_drafters(family: str, kind: str) -> None:
    answers = functools.partial(truth_of, family, kind)
    arms = [(kit.perfect("chain", answers), 3), (kit.half("tree", answers), 16), (kit.hostile("chain", answers), 12)]
    mixed = [*arms, "lookup@8", "suffix@16", "recycling@4", "recycling_tree@8", "plain"]
    assert side_by_side(make(family, kind, mixed, policy="random")) == wanted(family, kind)
    assert side_by_side(make(family, kind, None, policy="hinted_ucb")) == wanted(family, kind)


@pytest.mark.parametrize("family", SLIDING)
def test_a_sliding_layer_attends_to_the_last_window_positions_and_no_others(family: str) -> None:
    pair = (model_of(family, single=True), kit.TOKENIZER)
    tails = [TEXT[n : n + WINDOW - 1] for n in range(8)]  # the last 7 of 8 positions
    near, far, other = ([start + tail for tail in tails] for start in ("ABX", "YZX", "ABY"))
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 5}  # distributions that differ give different draws somewhere
    plain = kit.make(model=pair, drafters=["plain"], max_tokens=COUNT, **hot)
    answers = side_by_side(plain, near)
    assert side_by_side(plain, far) == answers  # the ninth and tenth position from the end are out of sight
    firsts = [answer[0] for answer in answers]
    assert [answer[0] for answer in side_by_side(plain, other)] != firsts  # the eighth is not
    knows = dict(zip(map(kit.encode, far), answers, strict=True))
    for block in kit.BLOCKS:
        for shape in ("chain", "tree"):
            llm = kit.scripted(kit.half(shape, knows.get), block, model=pair, max_tokens=COUNT, **hot)
            assert side_by_side(llm, far) == answers
