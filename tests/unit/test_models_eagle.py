"""Heads as modules: training and drafting compute the same; checkpoints of every layout are read, wrong ones named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from metasd_langchain.errors import BadCheckpoint, BadOption, IncompatibleVocabulary, LoadError
from metasd_langchain.models.checkpoints import drafter_path
from metasd_langchain.models.eagle import EagleConfig, EagleHead, TargetParts, rotary_frequencies
from metasd_langchain.models.eagle_format import load_eagle, read_config, save_eagle
from metasd_langchain.models.eagle_step import EagleStep, HeadCache, load_step
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from tests.eagles import KINDS, parts, random_head, saved

N, STEPS = 13, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model(), tiny_tokenizer()))


def sequence(config: EagleConfig, n: int = N) -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 500, (n,), generator=generator).tolist()
    return tokens, torch.randn(n, config.feature_size, generator=generator)


def layered(config: EagleConfig, hidden: torch.Tensor) -> list[torch.Tensor]:
    return list(hidden.split(config.target_hidden_size, -1))


# -- mathematics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_drafting_computes_what_training_does(target: Target, kind: str) -> None:
    head = random_head(target, kind)
    tokens, hidden = sequence(head.config)
    with torch.no_grad():
        unrolled = [step[0] for step in head(torch.tensor([tokens]), hidden[None], STEPS)]
    step = EagleStep(head, torch.float32, CPU)
    states = layered(head.config, hidden)
    for last in range(N - STEPS):
        for pieces in ([0, last + 1], [0, (last + 1) // 2, last + 1]):
            cache = HeadCache()
            for start, stop in itertools.pairwise(pieces):
                if stop > start:
                    feature = step.read(cache, tokens[start + 1 : stop + 1], [state[start:stop] for state in states])
            assert torch.allclose(feature[0], unrolled[0][last], atol=1e-4)
            for ahead in range(1, STEPS):
                feature = step.guess(cache, [tokens[last + ahead + 1]], feature, ahead)
                assert torch.allclose(feature[0], unrolled[ahead][last + ahead], atol=1e-4)
    assert torch.allclose(step.logits(unrolled[0]), head.logits(unrolled[0]), atol=1e-4)


def test_a_future_token_changes_nothing(target: Target) -> None:
    head = random_head(target)
    tokens, hidden = sequence(head.config)
    other = [*tokens[:8], *reversed(tokens[8:])]
    changed = torch.cat([hidden[:8], hidden[8:].flip(0)])
    with torch.no_grad():
        one, two = head(torch.tensor([tokens]), hidden[None], 3), head(torch.tensor([other]), changed[None], 3)
    for step, (mine, theirs) in enumerate(zip(one, two, strict=True)):
        assert torch.allclose(mine[0, step:7], theirs[0, step:7], atol=1e-5)
        assert not torch.allclose(mine[0, 8:], theirs[0, 8:], atol=1e-2)


def test_a_tree_is_each_of_its_paths(target: Target) -> None:
    head = random_head(target, "eagle3 last state")
    tokens, hidden = sequence(head.config)
    step = EagleStep(head, torch.float32, CPU, window=9)
    states = layered(head.config, hidden[:-1])

    def along(*path: int) -> torch.Tensor:
        cache = HeadCache()
        feature = step.read(cache, tokens[1:], states)
        for depth, token in enumerate(path, 1):
            feature = step.guess(cache, [token], feature, depth)
        return feature[0]

    cache = HeadCache()
    root = step.read(cache, tokens[1:], states)
    first = step.guess(cache, [50, 60], root[[0, 0]], 1, np.eye(2, dtype=bool))
    sees = np.array(
        [[True, False, True, False, False], [False, True, False, True, False], [True, False, False, False, True]]
    )
    second = step.guess(cache, [70, 80, 90], first[[0, 1, 0]], 2, sees)
    assert torch.allclose(first, torch.stack([along(50), along(60)]), atol=1e-5)
    assert torch.allclose(second, torch.stack([along(50, 70), along(60, 80), along(50, 90)]), atol=1e-5)


def test_what_lies_beyond_the_window_changes_nothing_and_is_dropped(target: Target) -> None:
    head = random_head(target)
    tokens, hidden = sequence(head.config, 700)
    step = EagleStep(head, torch.float32, CPU, window=40)
    states = layered(head.config, hidden)
    whole, late = HeadCache(), HeadCache()
    for end in range(1, 700):  # one a round
        feature = step.read(whole, [tokens[end]], [state[end - 1 : end] for state in states])
    late.restart(659)
    alone = step.read(late, tokens[660:], [state[659:699] for state in states])
    assert torch.allclose(feature, alone, atol=1e-4)
    assert whole.end == late.end == 699
    assert whole.keys.shape[1] < 700


def test_a_new_head_starts_from_the_targets_rows(target: Target) -> None:
    mine = parts(target)
    ids = torch.arange(0, 400, 2)
    config = EagleConfig.of_target(mine, draft_vocab_size=200)
    state = torch.random.get_rng_state()
    head = EagleHead.initialised(config, mine, ids, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, mine.head[ids])
    assert torch.equal(head.draft_ids, ids)
    assert torch.allclose(mine.norm, 1 + tiny_model().model.norm.weight)  # Gemma writes the factor less one
    assert "embed_tokens.weight" not in head.state_dict()
    assert torch.equal(head.embed(torch.tensor([7])), mine.embedding[[7]])
    assert config.heads == 4
    assert config.intermediate_size == 64


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}])
def test_scaled_rotations_are_those_of_transformers(target: Target, scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters={**scaling, "rope_theta": 10000.0}
    )
    want, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, CPU)
    config = EagleConfig.of_target(parts(target), rope_scaling=scaling)
    assert torch.allclose(rotary_frequencies(config), want)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", "eagle9"), ("kv_heads", 3), ("head_dim", 7), ("draft_vocab_size", 0), ("draft_vocab_size", 513),
     ("activation", "sine"), ("aux_layers", ()), ("hidden_size", 0)],
)  # fmt: skip
def test_impossible_shapes_are_named(target: Target, field: str, value: Any) -> None:
    with pytest.raises(BadOption) as caught:
        EagleConfig.of_target(parts(target), **{field: value})
    assert caught.value.option == field


@pytest.mark.parametrize("ids", [[1, 2], [1, 1, 2], [3, 2, 1]])
def test_draft_ids_are_ascending_and_as_many_as_said(target: Target, ids: list[int]) -> None:
    config = EagleConfig.of_target(parts(target), draft_vocab_size=3)
    with pytest.raises(BadOption):
        EagleHead.initialised(config, parts(target), torch.tensor(ids))


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_written_is_read(target: Target, tmp_path: Path, kind: str) -> None:
    head = random_head(target, kind)
    save_eagle(head, tmp_path, dtype=torch.float32, recipe={"tokens": 3})
    again = load_eagle(tmp_path, parts(target))
    assert again.config == head.config
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), head.parameters(), strict=True))
    assert torch.equal(again.d2t, head.d2t)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["metasd"]["recipe"] == {"tokens": 3}


def test_the_layout_is_that_of_speculators(target: Target, tmp_path: Path) -> None:
    save_eagle(random_head(target), tmp_path)
    raw, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert raw["speculators_model_type"] == "eagle3"
    assert raw["architectures"] == ["Eagle3DraftModel"]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == target.name
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert raw["transformer_layer_config"]["model_type"] == "llama"
    assert raw["draft_vocab_size"] == 300
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["t2d"].sum() == 300
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], torch.arange(300) + tensors["d2t"])
    assert not any(name.startswith("embed_tokens") for name in tensors)


def safe_ai_lab(head: EagleHead, folder: Path, *, binary: bool = False, own_embedding: bool = False) -> Path:
    """The checkpoint in the layout of SafeAILab's repository."""
    config, state = head.config, dict(head.state_dict())
    third = config.version == "eagle3"
    raw = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "num_hidden_layers": 1,
        "vocab_size": config.target_vocab_size, "rms_norm_eps": config.eps, "hidden_act": config.activation,
        "rope_theta": config.rope_theta, "head_dim": config.head_dim, "bias": True,
    }  # fmt: skip
    if third:
        raw["draft_vocab_size"] = config.draft_vocab_size
        t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool)
        t2d[head.draft_ids] = True
        state |= {"d2t": head.d2t, "t2d": t2d}
        state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in state.items()}
    else:
        del state["lm_head.weight"]  # the target's is used
    if own_embedding:
        state["embed_tokens.weight"] = torch.randn(config.target_vocab_size, config.hidden_size)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if binary:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("binary", [False, True])
def test_reads_eagle_3_of_safe_ai_lab(target: Target, tmp_path: Path, binary: bool) -> None:
    three = load_target((tiny_model(num_hidden_layers=8, layer_types=None), tiny_tokenizer()))
    head = random_head(three, aux_layers=(2, 4, 5))
    again = load_eagle(safe_ai_lab(head, tmp_path, binary=binary), parts(three))
    assert again.config.aux_layers == (2, 4, 5)  # second, middle, and third from the end
    assert all(torch.equal(one, two) for one, two in zip(again.parameters(), head.parameters(), strict=True))
    assert torch.equal(again.draft_ids, head.draft_ids)


@pytest.mark.parametrize("own_embedding", [False, True])
def test_reads_eagle_1_of_safe_ai_lab_and_drafts_with_the_targets_output_rows(
    target: Target, tmp_path: Path, own_embedding: bool
) -> None:
    head = random_head(target, "eagle", draft_vocab_size=512)
    folder = safe_ai_lab(head, tmp_path, own_embedding=own_embedding)
    again = load_eagle(folder, parts(target))
    assert again.config.version == "eagle"
    assert again.lm_head is None
    assert (again.embed_tokens is not None) == own_embedding
    step = load_step(folder, target)
    feature = torch.randn(2, 32)
    assert torch.allclose(step.logits(feature), feature @ tiny_model().lm_head.weight.T, atol=1e-5)
    assert step.draft_ids.tolist() == list(range(512))


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    for field, value in changes.items():
        place = raw["transformer_layer_config"] if field in raw["transformer_layer_config"] else raw
        place[field] = value
    path.write_text(json.dumps(raw))


def retensored(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", None), ("hidden_size", "wide"), ("num_hidden_layers", 2), ("target_hidden_size", 64),
     ("speculators_model_type", "mtp"), ("eagle_aux_hidden_state_layer_ids", [99]), ("hidden_act", "sine"),
     ("intermediate_size", 7), ("num_key_value_heads", 3)],
)  # fmt: skip
def test_a_wrong_field_of_the_config_is_named_with_its_file(
    target: Target, tmp_path: Path, field: str, value: Any
) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    edited(folder, **{field: value})
    with pytest.raises(BadCheckpoint) as caught:
        load_eagle(folder, parts(target))
    assert str(folder) in caught.value.file
    names = {"hidden_act": "activation", "num_key_value_heads": "kv_heads", "intermediate_size": "layers.0.mlp"}
    assert caught.value.field.startswith(names.get(field, field))


@pytest.mark.parametrize("name", ["fc.weight", "layers.0.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("how", ["missing", "another shape", "nan"])
def test_a_wrong_tensor_is_named_with_its_file(target: Target, tmp_path: Path, name: str, how: str) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    tensor = load_file(folder / "model.safetensors")[name]
    wrong = {"missing": None, "another shape": torch.zeros(3, 5), "nan": torch.full_like(tensor, torch.nan)}
    retensored(folder, name, wrong[how])
    with pytest.raises(BadCheckpoint) as caught:
        load_eagle(folder, parts(target))
    assert caught.value.field == name
    assert caught.value.file.endswith("model.safetensors")


def test_a_tensor_that_is_not_understood_is_refused(target: Target, tmp_path: Path) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    retensored(folder, "layers.1.mlp.up_proj.weight", torch.zeros(2, 2))
    with pytest.raises(BadCheckpoint, match=r"layers\.1\.mlp"):
        load_eagle(folder, parts(target))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("left", [0, 40])
def test_a_truncated_file_is_named(target: Target, tmp_path: Path, file: str, left: int) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    (folder / file).write_bytes((folder / file).read_bytes()[:left])
    with pytest.raises(BadCheckpoint) as caught:
        load_eagle(folder, parts(target))
    assert caught.value.file.endswith(file)


def test_a_missing_file_is_named(target: Target, tmp_path: Path) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
        load_eagle(folder, parts(target))
    (folder / "config.json").unlink()
    with pytest.raises(BadCheckpoint, match=r"config\.json"):
        read_config(folder, 3)


def test_a_full_disk_keeps_the_old_checkpoint(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(state: Any, path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("metasd_langchain.models.eagle_format.save_file", full)
    with pytest.raises(BadCheckpoint, match="No space left"):
        save_eagle(random_head(target, seed=1), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    "wrong",
    [{"d2t": None}, {"d2t": torch.zeros(300)}, {"d2t": torch.zeros(3, dtype=torch.int64)},
     {"d2t": torch.full((300,), 400)}, {"d2t": -torch.arange(300)}, {"t2d": torch.ones(512, dtype=torch.bool)}],
)  # fmt: skip
def test_a_wrong_vocabulary_map_is_refused(
    target: Target, tmp_path: Path, wrong: dict[str, torch.Tensor | None]
) -> None:
    folder = Path(saved(random_head(target), tmp_path))
    for name, tensor in wrong.items():
        retensored(folder, name, tensor)
        if name == "d2t" and tensor is None:
            retensored(folder, "t2d", None)
    with pytest.raises(IncompatibleVocabulary, match=r"d2t|t2d"):
        load_eagle(folder, parts(target))


def test_a_head_for_another_width_says_for_which_target(target: Target, tmp_path: Path) -> None:
    folder = saved(random_head(target), tmp_path)
    wide = tiny_model(hidden_size=64)
    other = TargetParts.of(load_target((wide, tiny_tokenizer())).lm)
    with pytest.raises(BadCheckpoint, match=r"width 32, the target's are 64 wide .*gemma3") as caught:
        load_eagle(folder, other)
    assert caught.value.field == "target_hidden_size"


def test_a_path_is_a_folder_or_a_preset_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what else lies on this machine is not looked at
    folder = tmp_path / "drafters" / "tiny" / "five-domains" / "math"
    folder.mkdir(parents=True)
    assert drafter_path("five-domains/math", "tiny") == folder
    assert drafter_path("five-domains/math", "owner/tiny") == folder
    assert drafter_path(str(folder), "another") == folder
    with pytest.raises(LoadError, match="metasd train preset five-domains"):
        drafter_path("five-domains/physics", "tiny")
    for path in ("nowhere", "/no/such/folder", "../x", "~/nothing-there"):
        with pytest.raises(LoadError, match=r"no such|no drafter"):
            drafter_path(path, "tiny")
