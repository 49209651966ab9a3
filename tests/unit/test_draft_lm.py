"""The small model over a part of the vocabulary: shapes, start, round trip, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from metasd_langchain.errors import BadCheckpoint, BadOption, IncompatibleVocabulary
from metasd_langchain.models.draft_lm import VOCABULARY_FILE, DraftLM, DraftLMConfig
from metasd_langchain.models.footprint import weight_bytes
from metasd_langchain.models.vocabulary import DraftVocabulary, fingerprint, refuse_other_meanings
from metasd_langchain.testing.models import tiny_tokenizer

CONFIG = DraftLMConfig(hidden_size=16, intermediate_size=32, layers=2, heads=2, kv_heads=1, window=64)
IDS = [3, 8, 20, 21, 300]


def small(seed: int = 0, embedding: torch.Tensor | None = None) -> DraftLM:
    return DraftLM.fresh(DraftVocabulary(IDS, 512, "mark"), CONFIG, embedding=embedding, seed=seed)


def test_reads_target_ids_and_writes_columns() -> None:
    model = small()
    tokens = torch.tensor([[3, 300, 21], [5, 5, 5]])
    assert model(tokens).shape == (2, 3, len(IDS))
    assert torch.equal(model(torch.tensor([[5, 9]])), model(torch.tensor([[6, 511]])))  # all unknown ones look alike
    assert not torch.equal(model(torch.tensor([[3]])), model(torch.tensor([[8]])))
    assert (model(tokens)[0, :2] == model(tokens[:, :2])[0]).all()  # the future changes nothing


def test_the_seed_decides_the_weights_and_nothing_else() -> None:
    state = torch.get_rng_state()
    one, two, other = small(1), small(1), small(2)
    assert torch.equal(state, torch.get_rng_state())
    tokens = torch.tensor([[3, 8, 20]])
    assert torch.equal(one(tokens), two(tokens))
    assert not torch.equal(one(tokens), other(tokens))


@pytest.mark.parametrize("width", [8, 16, 40])
def test_rows_start_as_the_targets(width: int) -> None:
    rows = torch.randn(512, width, generator=torch.Generator().manual_seed(0))
    own = small(embedding=rows).model.get_input_embeddings().weight.detach()[: len(IDS)]
    wanted = rows[IDS] - rows[IDS].mean(0)
    # Inner products are what an embedding means; projected to no fewer directions than there are rows they stay.
    start = own[:, :width]
    scale = (start @ start.T).norm() / (wanted @ wanted.T).norm()
    assert torch.allclose(start @ start.T, scale * (wanted @ wanted.T), rtol=1e-3, atol=1e-5)


def test_a_checkpoint_reads_as_it_was_written(tmp_path: Path) -> None:
    model = small()
    (tmp_path / "recipe.json").write_text("{}")
    model.save(tmp_path)
    small(5).save(tmp_path)
    model.save(tmp_path)
    loaded = DraftLM.load(tmp_path)
    tokens = torch.tensor([[3, 8, 20, 7]])
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.vocabulary.d2t.tolist() == IDS
    assert (loaded.vocabulary.target_size, loaded.vocabulary.fingerprint) == (512, "mark")
    assert loaded.parameter_count == model.parameter_count
    assert weight_bytes(loaded.model) >= 4 * loaded.parameter_count
    names = {"recipe.json", "config.json", "model.safetensors", VOCABULARY_FILE}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_what_cannot_be_written_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model.save(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("metasd_langchain.models.draft_lm.save_weights", full)
    with pytest.raises(BadCheckpoint, match="No space left"):
        small(7).save(tmp_path)
    tokens = torch.tensor([[3, 8, 20, 7]])
    assert torch.equal(DraftLM.load(tmp_path)(tokens), model(tokens))
    assert len(list(tmp_path.iterdir())) == 3


def spoil(folder: Path, what: str) -> None:
    weights, vocabulary, config = folder / "model.safetensors", folder / VOCABULARY_FILE, folder / "config.json"
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    if what == "no weights":
        weights.unlink()
    if what == "no config":
        config.unlink()
    if what == "config":
        config.write_text("{")
    if what == "shape":
        config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 48}))
    if what == "layers":
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 3}))
    if what == "no map":
        vocabulary.unlink()
    if what == "map truncated":
        vocabulary.write_bytes(vocabulary.read_bytes()[:-3])
    if what == "map twice":
        about = {"format": "1", "target_size": "512", "fingerprint": "mark"}
        save_file({"d2t": np.array([1, 2, 2, 3, 4])}, str(vocabulary), about)
    if what == "map outside":
        save_file(load_file(str(vocabulary)), str(vocabulary), {"format": "1", "target_size": "9"})
    if what == "map newer":
        save_file(load_file(str(vocabulary)), str(vocabulary), {"format": "2", "target_size": "512"})


@pytest.mark.parametrize(
    ("what", "file", "field"),
    [
        ("truncated", "folder", ""),
        ("no weights", "folder", ""),
        ("no config", "folder", "config.json"),
        ("config", "folder", ""),
        ("shape", "folder", "model.layers.0.mlp.down_proj.weight"),
        ("layers", "folder", "model.layers.2.input_layernorm.weight"),
        ("no map", VOCABULARY_FILE, ""),
        ("map truncated", VOCABULARY_FILE, ""),
        ("map twice", VOCABULARY_FILE, "d2t"),
        ("map outside", VOCABULARY_FILE, "d2t"),
        ("map newer", VOCABULARY_FILE, "format"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, what: str, file: str, field: str) -> None:
    folder = tmp_path / "folder"
    small().save(folder)
    spoil(folder, what)
    with pytest.raises(BadCheckpoint) as caught:
        DraftLM.load(folder)
    assert caught.value.file == file
    assert caught.value.field == field
    assert file in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"hidden_size": 0}, {"layers": -1}, {"heads": 3}, {"hidden_size": 30, "heads": 4}, {"heads": 2, "kv_heads": 3}],
)
def test_a_shape_that_is_none_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadOption):
        DraftLMConfig(**{"hidden_size": 16, "heads": 2, "kv_heads": 1, **wrong})


@pytest.mark.parametrize("ids", [[], [1, 1], [-1, 2], [3, 512]])
def test_a_map_that_is_none_is_refused(ids: list[int]) -> None:
    with pytest.raises(BadOption, match="d2t"):
        DraftVocabulary(ids, 512)


def test_tokenizers_are_told_apart_by_what_ids_mean() -> None:
    one, two = tiny_tokenizer(), tiny_tokenizer()
    assert fingerprint(one) == fingerprint(two)
    two.add_tokens(["xyzzy"])
    assert fingerprint(one) != fingerprint(two)
    vocabulary = one.get_vocab()
    refuse_other_meanings("it", two.get_vocab(), vocabulary)  # one more is no other meaning
    refuse_other_meanings("it", {"a": 512, **vocabulary}, vocabulary)
    swapped = {token: (2 if number == 1 else 1 if number == 2 else number) for token, number in vocabulary.items()}
    with pytest.raises(IncompatibleVocabulary, match=r"it has another tokenizer than the target: 2 of 512.*1, 2"):
        refuse_other_meanings("it", swapped, vocabulary)
