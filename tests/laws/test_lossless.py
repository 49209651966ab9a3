"""The promise: whatever is drafted, however it is chosen and batched, the ids are those of plain decoding."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.models.load import Target
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter, RaisingDrafter
from metasd_langchain.testing.models import reference_tokens, tiny_model
from metasd_langchain.values import Request, Sampling, Step

LENGTHS = (1, 5, 7, 8, 9, 30)  # the tiny model's window is 8
COUNT = 20
SAMPLINGS = {
    "greedy": Sampling(),
    "t0.7": Sampling(temperature=0.7, top_p=0.9, seed=3),
    "t1": Sampling(temperature=1.0, seed=4),
    "t1 min_p top_k": Sampling(temperature=1.0, top_k=20, min_p=0.05, seed=5),
}


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(1)
    made = [tuple(rng.randrange(4, 500) for _ in range(n)) for n in LENGTHS]
    repeated = tuple([40, 41, 42, 43, 44, 45] * 5)  # something for lookup drafters to find
    return [*made, repeated]


def reference(prompt: tuple[int, ...], sampling: Sampling) -> tuple[int, ...]:
    """Cache-free forwards of the unwrapped model; the draw alone is ours when sampling."""
    model = tiny_model()
    if sampling.greedy:
        return tuple(reference_tokens(model, list(prompt), COUNT))
    draws, tokens = Draws(sampling.seed or 0), list(prompt)
    for position in range(COUNT):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(TargetRows(logits, sampling).token(0, position, draws))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def truths() -> dict[str, dict[tuple[int, ...], tuple[int, ...]]]:
    return {name: {prompt: reference(prompt, sampling) for prompt in prompts()} for name, sampling in SAMPLINGS.items()}


def answer(steps: Any) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.tokens)


def drafter_arms(kind: str, truth: dict[tuple[int, ...], tuple[int, ...]]) -> list[Any]:
    fakes = {
        "perfect": lambda shape: PerfectDrafter(truth, shape=shape, vocab=512),
        "half": lambda shape: HalfDrafter(truth, 512, shape=shape),
        "hostile": lambda shape: HostileDrafter(512, truth, shape=shape),
    }
    name, _, shape = kind.partition("-")
    if name in fakes:
        return [(fakes[name](shape), 6)]
    if name == "raising":
        return [(RaisingDrafter(at=2), 4), "lookup@4"]
    return [kind]


KINDS = [
    "perfect-chain", "perfect-tree", "half-chain", "half-tree", "hostile-chain", "hostile-tree", "raising",
    "lookup@4", "suffix@16", "recycling@4", "recycling_tree@8", "plain",
]  # fmt: skip


@pytest.mark.parametrize("mode", sorted(SAMPLINGS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_alone_gives_the_reference_ids(
    engine: Engine, truths: dict[str, Any], kind: str, mode: str
) -> None:
    pool = make_pool(drafter_arms(kind, truths[mode]), "fixed")
    requests = [Request(prompt, SAMPLINGS[mode], max_tokens=COUNT) for prompt in prompts()]
    for request in requests:  # a batch of one
        assert answer(engine.generate(request, pool)) == truths[mode][request.prompt]
    runs = [engine.generate(request, pool) for request in requests]  # packed with the others
    assert [answer(run) for run in runs] == [truths[mode][request.prompt] for request in requests]


@pytest.mark.parametrize("policy", ["random", "ucb", "hinted_ucb"])
@pytest.mark.parametrize("reward", ["throughput", "bd", "be"])
@pytest.mark.parametrize("mode", ["greedy", "t0.7"])
def test_every_policy_over_a_mixed_pool_gives_the_reference_ids(
    engine: Engine, truths: dict[str, Any], policy: str, reward: str, mode: str
) -> None:
    truth = truths[mode]
    arms = [
        (PerfectDrafter(truth, name="good"), 5),
        (HostileDrafter(512, truth, shape="tree", name="bad"), 7),
        (RaisingDrafter(at=1, name="broken"), 3),
        "suffix@8",
        "lookup@3",
        "recycling_tree@6",
        "plain",
    ]
    pool = make_pool(arms, policy, reward)
    runs = [engine.generate(Request(prompt, SAMPLINGS[mode], max_tokens=COUNT), pool) for prompt in prompts()]
    assert [answer(run) for run in runs] == [truth[prompt] for prompt in prompts()]


def test_rejection_mode_is_greedy_at_temperature_zero(engine: Engine, truths: dict[str, Any]) -> None:
    truth = truths["greedy"]
    for drafter in (PerfectDrafter(truth), HalfDrafter(truth, 512, shape="tree"), HostileDrafter(512, truth)):
        pool = make_pool([(drafter, 4)], "fixed")
        for prompt in prompts():
            assert answer(engine.generate(Request(prompt, max_tokens=COUNT, verify="rejection"), pool)) == truth[prompt]


def test_a_prompt_read_in_pieces_beside_running_answers(target: Target, truths: dict[str, Any]) -> None:
    engine = Engine(target, prefill_tokens=4, max_batch=3)
    try:
        pool = make_pool(["suffix@8", "plain"], "random")
        runs = [engine.generate(Request(prompt, max_tokens=COUNT), pool) for prompt in prompts()]
        assert [answer(run) for run in runs] == [truths["greedy"][prompt] for prompt in prompts()]
    finally:
        engine.close()


class _OutOfRange:
    """Drafts ids that do not exist between ids that do."""

    name, candidates, prompt_rows, hidden_layers = "range", 0, 0, ()

    def open(self, request: Request) -> _OutOfRange:
        return self

    def hint(self) -> float:
        return 1.0

    def propose(self, tokens: Any, budget: int, draws: Any) -> Any:
        from metasd_langchain.values import Draft

        return Draft((10**6, 7, -1, 8), (-1, 0, -1, -1))

    def observe(self, round: Any) -> None: ...

    def close(self) -> None: ...

    def forget(self, scope: str | None = None) -> None: ...


def test_ids_outside_the_vocabulary_are_rejected_not_indexed(engine: Engine, truths: dict[str, Any]) -> None:
    pool = make_pool([(_OutOfRange(), 4)], "fixed")
    prompt = prompts()[2]
    steps: list[Step] = list(engine.generate(Request(prompt, max_tokens=COUNT), pool))
    assert answer(steps) == truths["greedy"][prompt]
    summary = steps[-1].summary
    assert summary is not None
    assert summary.rounds[0].drafted == 1  # only the token 8, whose parent is the trunk, was left


def test_a_perfect_draft_is_accepted_whole_and_a_hostile_one_never(engine: Engine, truths: dict[str, Any]) -> None:
    truth, prompt = truths["greedy"], prompts()[3]
    good = list(engine.generate(Request(prompt, max_tokens=COUNT), make_pool([(PerfectDrafter(truth), 4)], "fixed")))
    assert [len(step.tokens) for step in good] == [5, 5, 5, 5]
    bad = list(
        engine.generate(Request(prompt, max_tokens=COUNT), make_pool([(HostileDrafter(512, truth), 1)], "fixed"))
    )
    assert [step.accepted for step in bad] == [0] * COUNT


def test_the_global_generators_are_left_alone(engine: Engine) -> None:
    state, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002 - the one not to touch
    python = random.getstate()
    list(engine.generate(Request((5, 6), Sampling(1.0), max_tokens=5), make_pool(["lookup", "plain"], "random")))
    assert torch.equal(state, torch.get_rng_state())
    assert (legacy == np.random.get_state()[1]).all()  # noqa: NPY002
    assert python == random.getstate()
