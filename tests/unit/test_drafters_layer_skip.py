"""Skipping layers: what is left out, that the target's own state is never touched, the search, and when it rests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters._skip_search import Costs, Search, speed
from metasd_langchain.drafters.layer_skip import LayerSkipDrafter, create
from metasd_langchain.engine.draws import Draws
from metasd_langchain.engine.loop import Engine
from metasd_langchain.errors import BadOption, DrafterError, UnsupportedModel
from metasd_langchain.models.layer_skip import SkippingLM, scratch
from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.drafter_contract import DrafterContract
from metasd_langchain.testing.models import FAMILIES, reference_tokens, tiny_model, tiny_tokenizer
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Sampling

TEXT = [int(token) for token in np.random.default_rng(2).integers(4, 500, 60)]


def made(family: str = "llama", layers: int = 5) -> Any:
    types = {"layer_types": ["sliding_attention"] * (layers - 1) + ["full_attention"]}
    return tiny_model(family, num_hidden_layers=layers, **(types if family.startswith("gemma") else {}))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((made(), tiny_tokenizer()))


@pytest.fixture
def engine(target: Target) -> Iterator[Engine]:
    engine = Engine(target)
    yield engine
    engine.close()


def read(target: Target, tokens: list[int]) -> Slot:
    """The target's keys and values of some tokens."""
    slot = Slot()
    feed = Feed(slot, tuple(tokens))
    target.lm.score([feed])
    target.lm.keep(feed)
    return slot


def without(model: Any, parts: set[int]) -> Any:
    """A model whose own forward leaves parts out: the truth the packed one is compared with."""
    for number, layer in enumerate(model.model.layers):
        for part, module in ((2 * number, layer.self_attn), (2 * number + 1, layer.mlp)):
            if part in parts:
                module.register_forward_hook(
                    lambda _module, _inputs, output: (
                        (torch.zeros_like(output[0]), *output[1:])
                        if isinstance(output, tuple)
                        else torch.zeros_like(output)
                    )
                )
    return model


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("parts", [set(), {2}, {3}, {4, 5}, {2, 3, 4, 5, 7}])
def test_it_computes_the_model_without_those_parts(family: str, parts: set[int]) -> None:
    model = SkippingLM(load_target((made(family), tiny_tokenizer())).lm)
    model.leave_out(parts)
    slot = Slot()
    with torch.inference_mode():
        expected = without(made(family), parts)(torch.tensor([TEXT[:20]]), use_cache=False).logits[0]
    assert torch.allclose(model.step(slot, TEXT[:12]), expected[11], atol=1e-4)
    assert torch.allclose(model.step(slot, TEXT[12:13]), expected[12], atol=1e-4)
    assert torch.allclose(model.step(slot, TEXT[13:20]), expected[19], atol=1e-4)
    assert slot.length == 20


def test_with_nothing_left_out_it_goes_on_from_the_targets_state(target: Target) -> None:
    slot = read(target, TEXT[:10])
    model = SkippingLM(target.lm)
    truth = target.lm.score([Feed(slot, tuple(TEXT[10:13]))]).logits[-1]
    assert torch.equal(model.step(scratch(slot), TEXT[10:13]), truth)
    model.leave_out({2, 3, 5})
    assert not torch.allclose(model.step(scratch(slot), TEXT[10:13]), truth)
    assert torch.equal(target.lm.score([Feed(slot, tuple(TEXT[10:13]))]).logits[-1], truth)  # the target skips nothing


def test_the_targets_keys_and_values_are_never_touched(target: Target) -> None:
    slot = read(target, TEXT[:50])
    before = [tensor[:, :50].clone() for tensor in (*slot.keys, *slot.values)]
    model = SkippingLM(target.lm)
    model.leave_out({2, 5})
    model.agreement(slot, TEXT[:51], 32)
    model.seconds(slot, 5, 5)
    view = scratch(slot)
    for token in TEXT[50:]:
        model.step(view, [token])
    assert slot.length == 50
    after = [tensor[:, :50] for tensor in (*slot.keys, *slot.values)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_agreement_is_the_share_of_tokens_it_would_have_drafted(target: Target) -> None:
    model = SkippingLM(target.lm)
    model.leave_out({5})
    text = [*TEXT[:10], *reference_tokens(made(), TEXT[:10], 30)]
    slot = read(target, text[:-1])
    # as when drafting: the target's keys and values before the last 16, those of the skipping model from there on
    hits, view = 0, scratch(slot)
    view.length = 23
    view.keys, view.values = [k.clone() for k in slot.keys], [v.clone() for v in slot.values]
    for place in range(23, 39):
        hits += int(model.step(view, [text[place]]).argmax()) == text[place + 1]
    assert 0 < hits < 16
    assert model.agreement(slot, text, 16) == pytest.approx(hits / 16)
    model.leave_out(())
    assert model.agreement(slot, text, 16) == 1.0


def test_a_model_of_another_make_is_refused(target: Target) -> None:
    class Other:
        config = target.lm.config
        _twin = target.lm._twin

    twin = made()
    twin.model.layers[1].mlp = torch.nn.Identity()
    del twin.model.layers[1]._modules["mlp"]
    other = Other()
    other._twin = twin
    with pytest.raises(UnsupportedModel, match="no attention and feed-forward part"):
        SkippingLM(other)  # type: ignore[arg-type]


# -- the search --------------------------------------------------------------------------------------------------------


def test_first_and_last_layers_stay_and_sets_have_one_size() -> None:
    search = Search(6, 0.4, 0)
    while not search.frozen:
        parts = search.suggest()
        assert len(parts) == search.size == 5
        assert parts <= set(range(2, 10))
        search.learn(parts, 0.5)
    assert search.trials == 48
    assert len(search.best()) == 5


def test_it_finds_the_parts_that_matter_least() -> None:
    rng = np.random.default_rng(0)
    effects = rng.uniform(0.0, 0.15, 20)
    found = []
    for seed in range(5):
        search = Search(12, 0.25, seed)
        while not search.frozen:
            parts = search.suggest()
            loss = sum(effects[part - 2] for part in parts)
            search.learn(parts, round(max(0.0, 1.0 - loss + rng.normal(0, 0.05)) * 32) / 32)
        found.append(sum(effects[part - 2] for part in search.best()))
    ideal, usual = float(np.sort(effects)[:6].sum()), 6 * float(effects.mean())
    assert np.mean(found) < ideal + 0.35 * (usual - ideal)


def test_the_same_seed_searches_alike() -> None:
    one, two, other = Search(8, 0.4, 1), Search(8, 0.4, 1), Search(8, 0.4, 2)
    suggested = [[each.suggest() for _ in range(3)] for each in (one, two, other)]
    assert suggested[0] == suggested[1] != suggested[2]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_with_nothing_between_its_ends_has_nothing_to_skip(layers: int) -> None:
    search = Search(layers, 0.5, 0)
    assert search.frozen
    assert search.best() == frozenset()


def test_speed_is_leviathans() -> None:
    assert speed(0.0, 4, 0.5, 0.0) == pytest.approx(1 / 1.5)
    assert speed(1.0, 4, 0.1, 0.0) == pytest.approx(5 / 1.4)
    by_length = [(1 - 0.7 ** (n + 1)) / 0.3 / (1 + n * 0.15) for n in range(1, 9)]
    assert speed(0.7, 8, 0.12, 0.03) == pytest.approx(max(by_length))


def test_costs_are_medians_of_shares() -> None:
    costs = Costs()
    assert not costs.known
    for plain, wide in ((0.1, 0.12), (0.1, 0.12), (5.0, 5.0)):
        costs.note(plain, wide, 4)
    for seconds in (0.05, 0.06, 7.0):
        costs.note_draft(seconds)
    assert costs.known
    assert costs.shares == pytest.approx((0.6, 0.05))


# -- the drafter -------------------------------------------------------------------------------------------------------


def clock(monkeypatch: pytest.MonkeyPatch, draft: float, plain: float = 1.0) -> None:
    """Make draft steps and plain steps take what a test says."""
    monkeypatch.setattr(Costs, "note", lambda self, *_: (self._plain.append(plain), self._wide.append(0.0)))
    monkeypatch.setattr(Costs, "note_draft", lambda self, _: self._draft.append(draft))


def played(engine: Engine, pool: Any, sampling: Sampling | None = None) -> tuple[list[int], list[Any]]:
    steps = list(engine.generate(Request(tuple(TEXT[:20]), sampling or Sampling(), 120), pool))
    summary = steps[-1].summary
    assert summary is not None
    return [token for step in steps for token in step.tokens], list(summary.rounds)


def test_it_rests_when_it_does_not_pay_and_the_answer_stays(
    engine: Engine, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, draft=0.9)
    pool = make_pool([(LayerSkipDrafter(confidence=0.0), 4), "plain"], "random")
    plain, _ = played(engine, make_pool(["plain"], "fixed"))
    tokens, rounds = played(engine, pool)
    assert tokens == plain
    shared = pool.bound(target).drafters["layer_skip"]._shared  # type: ignore[attr-defined]
    assert shared.rests
    assert 0 < shared.search.trials < 10  # hopeless sets are not tried on and on
    assert all(record.drafted == 0 for record in rounds[-40:])
    session = pool.bound(target).drafters["layer_skip"].open(Request((1,)))
    session.attach(read(target, TEXT[:5]))  # type: ignore[attr-defined]
    assert session.hint() == 0
    assert session.propose(TEXT[:6], 4, Draws(0)) == EMPTY_DRAFT


def test_it_plays_on_when_it_pays(engine: Engine, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, draft=0.0)
    pool = make_pool([(LayerSkipDrafter(ratio=0.2, confidence=0.0), 4)], "fixed")
    played(engine, pool)
    shared = pool.bound(target).drafters["layer_skip"]._shared  # type: ignore[attr-defined]
    assert shared.search.frozen
    assert not shared.rests
    assert math.isnan(shared_hint(pool, target))


def shared_hint(pool: Any, target: Target) -> float:
    session = pool.bound(target).drafters["layer_skip"].open(Request((1,)))
    session.attach(read(target, TEXT[:5]))
    return float(session.hint())


def test_a_rest_ends_and_the_next_is_longer(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, draft=2.0)
    shared = LayerSkipDrafter().bind(target)._shared
    for _ in range(3):
        shared.costs.note(1.0, 1.0, 4)
        shared.costs.note_draft(2.0)
    lengths = []
    for _ in range(3):
        shared._judge(0.5, 4)
        count = 0
        while shared.rests:
            shared.count()
            count += 1
        lengths.append(count)
    assert lengths == [256, 512, 1024]
    shared.reset()
    assert not shared.rests
    assert shared.search.trials == 0


def test_it_drafts_what_the_model_without_those_parts_says(target: Target) -> None:
    drafter = LayerSkipDrafter(confidence=0.0).bind(target)
    parts = set(drafter._shared.played)
    assert parts
    session = drafter.open(Request(tuple(TEXT[:20])))
    session.attach(read(target, TEXT[:20]))
    draft = session.propose(TEXT[:21], 1, Draws(0))
    expected = SkippingLM(target.lm)
    expected.leave_out(parts)
    token = int(expected.step(scratch(read(target, TEXT[:20])), [TEXT[20]]).argmax())
    assert draft == Draft.chain([token])


def test_nothing_before_the_prompt_is_read_or_after_the_end(target: Target) -> None:
    drafter = LayerSkipDrafter().bind(target)
    session = drafter.open(Request((1, 2, 3)))
    assert session.hint() == 0
    assert session.propose([1, 2, 3], 4, Draws(0)) == EMPTY_DRAFT
    session.attach(read(target, TEXT[:5]))
    assert session.propose(TEXT[:30], 4, Draws(0)) == EMPTY_DRAFT  # most of the text waits to be read
    session.close()
    assert session.propose(TEXT[:6], 4, Draws(0)) == EMPTY_DRAFT
    assert drafter.memory_bytes == 0
    with pytest.raises(DrafterError, match="not bound"):
        LayerSkipDrafter().open(Request((1,)))


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": 1}, {"confidence": -1}, {"seed": -1}, {"path": "x"}])
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadOption):
        create(options)


class TestContract(DrafterContract):
    vocab = 512
    from_text = False

    @pytest.fixture(autouse=True)
    def _target(self, target: Target) -> None:
        self._bound_to = target

    def make(self) -> Any:
        return LayerSkipDrafter(confidence=0.0).bind(self._bound_to)
