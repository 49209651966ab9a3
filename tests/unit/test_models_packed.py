"""Packed rounds over own slots agree with transformers' own cache-free forward, for every supported family."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from metasd_langchain.errors import UnsupportedModel
from metasd_langchain.models.attention import Slot
from metasd_langchain.models.lm import CausalLM, Feed
from metasd_langchain.models.tree import offsets, visible
from metasd_langchain.testing.models import FAMILIES, tiny_model
from metasd_langchain.values import Draft

TREE = Draft((11, 12, 13, 14, 15), (-1, -1, 0, 0, 2))


def plain_logits(model: object, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]  # type: ignore[operator]


def ancestors(draft: Draft, node: int) -> list[int]:
    return [] if node < 0 else [*ancestors(draft, draft.parents[node]), node]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_of_different_length_and_shape_match_a_cache_free_forward(family: str) -> None:
    model = tiny_model(family)
    lm = CausalLM(model)
    rng = random.Random(0)
    history = [[rng.randrange(4, 500) for _ in range(n)] for n in (1, 7, 8, 9, 40)]  # on both sides of the window of 8
    slots = [Slot() for _ in history]
    worst = 0.0
    for turn in range(6):
        drafts = [(TREE, Draft.chain((21, 22, 23)), Draft())[(row + turn) % 3] for row in range(len(history))]
        feeds = [
            Feed(slot, tuple(tokens[slot.length :]), draft)
            for slot, tokens, draft in zip(slots, history, drafts, strict=True)
        ]
        scores = lm.score(feeds)
        for feed, tokens, draft, start in zip(feeds, history, drafts, scores.starts, strict=True):
            for node in range(-1, len(draft)):
                path = [draft.tokens[i] for i in ancestors(draft, node)]
                worst = max(
                    worst, float((scores.logits[start + node + 1] - plain_logits(model, tokens + path)).abs().max())
                )
            kept = ancestors(draft, rng.randrange(-1, len(draft))) if len(draft) else []
            lm.keep(feed, kept)
            tokens.extend([draft.tokens[i] for i in kept] + [rng.randrange(4, 500)])
    assert worst < 2e-5


def test_a_prompt_read_in_pieces_gives_the_same_logits() -> None:
    model = tiny_model()
    lm, slot, tokens = CausalLM(model), Slot(), list(range(10, 50))
    for start in range(0, 36, 9):
        feed = Feed(slot, tuple(tokens[start : start + 9]), scored=0)
        assert lm.score([feed]).logits.shape[0] == 0
        lm.keep(feed)
    logits = lm.score([Feed(slot, tuple(tokens[36:]), scored=3)]).logits
    for place in range(3):
        assert torch.allclose(logits[place], plain_logits(model, tokens[: 38 + place]), atol=2e-5)


def test_a_long_prompt_takes_the_fused_kernel_and_agrees() -> None:
    model = tiny_model("mistral", sliding_window=50)
    tokens = [4 + (7 * i) % 500 for i in range(200)]
    assert torch.allclose(
        CausalLM(model).score([Feed(Slot(), tuple(tokens))]).logits[0], plain_logits(model, tokens), atol=2e-5
    )


def test_the_callers_model_goes_on_working_untouched() -> None:
    model = tiny_model()
    before = copy.deepcopy(model.config.to_dict())
    want = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False)
    lm = CausalLM(model)
    lm.score([Feed(Slot(), (5, 6, 7))])
    assert model.config.to_dict() == before
    assert model.config._attn_implementation != "metasd"
    assert torch.equal(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False), want)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_hidden_states_of_every_new_token(family: str) -> None:
    model, layers = tiny_model(family), (0, 1, 2, 3)

    def plain(*tokens: int) -> tuple[torch.Tensor, ...]:
        with torch.inference_mode():
            return model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states  # type: ignore[no-any-return]

    one, other = plain(5, 6, 7, 8), plain(9, 10, 11, 12)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    lm = CausalLM(model)
    feeds = [Feed(Slot(), (5, 6, 7), Draft.chain((8,)), scored=2), Feed(Slot(), (9, 10, 11, 12), scored=0)]
    scores = lm.score(feeds, layers)
    assert scores.tokens == (0, 4)
    for layer in layers:
        assert torch.allclose(scores.hidden[layer], torch.cat([one[layer][0], other[layer][0]]), atol=2e-5)
    assert set(lm.score(feeds, (3,)).hidden) == {3}
    assert lm.score(feeds).hidden == {}
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks  # the owner's model is as it was


def test_half_precision_linears_are_laid_out_anew_only_when_the_model_is_ours() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    shared, owned = CausalLM(model), CausalLM(model, owned=True)
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no bfloat16 products")
    assert shared.packed_linears == 0
    assert owned.packed_linears == 3 * 7 + 1
    feeds = [Feed(Slot(), tuple(range(5, 30)), TREE)]
    assert torch.allclose(
        shared.score(feeds).logits, owned.score([Feed(Slot(), tuple(range(5, 30)), TREE)]).logits, atol=0.15, rtol=0.02
    )


@pytest.mark.parametrize(
    ("config", "model", "more"),
    [
        ("MambaConfig", "MambaForCausalLM", {}),
        ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2}),
        ("T5Config", "T5ForConditionalGeneration", {}),
        (
            "LlamaConfig",
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ),
    ],
)
def test_models_that_cannot_be_rewound_are_refused(config: str, model: str, more: dict[str, object]) -> None:
    import transformers

    small = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
    }
    small.update(more)
    built = getattr(transformers, model)(getattr(transformers, config)(**small))
    with pytest.raises(UnsupportedModel):
        CausalLM(built)


def test_tree_positions_and_visibility_by_hand() -> None:
    assert offsets(2, TREE.parents) == [0, 1, 2, 2, 3, 3, 4]
    sees = visible(2, TREE.parents).int().tolist()
    assert sees == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 1],
    ]


def test_attention_with_sinks_is_refused_not_ignored() -> None:
    import transformers

    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(UnsupportedModel):
        CausalLM(transformers.GptOssForCausalLM(config).eval())


def test_a_live_model_with_a_forward_of_its_own_is_refused_and_left_alone() -> None:
    model = tiny_model()
    layer = model.model.layers[0]
    layer.forward = layer.forward  # what torch.compile(layer.forward) or accelerate's hooks leave behind
    with pytest.raises(UnsupportedModel, match="forward or hooks"):
        CausalLM(model)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False).shape == (1, 4)
    assert CausalLM(model, owned=True).score([Feed(Slot(), (5, 6))]).logits.shape == (1, 512)


def test_compile_is_handed_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    CausalLM(tiny_model("llama"), compile=True)
    assert calls == [{"dynamic": True}]
