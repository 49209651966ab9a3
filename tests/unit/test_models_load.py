"""Finding, loading and caching models: what is missing or broken says so; what is converted is converted once."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from metasd_langchain.errors import BadOption, LoadError, MissingExtra
from metasd_langchain.models import embedded
from metasd_langchain.models.load import load_target, pick_dtype
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_a_folder_is_loaded_in_the_dtype_asked_for(folder: Path) -> None:
    said: list[str] = []
    target = load_target(str(folder), dtype="float32", device="cpu", progress=said.append)
    assert (target.name, target.lm.dtype, target.lm.window, target.stop_ids) == ("tiny", torch.float32, 512, {1})
    assert said == ["loading tiny"]
    assert load_target(folder, dtype="bfloat16").lm.dtype == torch.bfloat16


def test_every_stop_id_counts(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "many")
    settings = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [7, 9]}))
    assert load_target(str(copy)).stop_ids == {1, 7, 9}


def test_what_is_missing_or_broken_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such folder: nowhere"):
        load_target(str(tmp_path / "nowhere"))
    with pytest.raises(LoadError, match=r"no such file: none\.gguf"):
        load_target(str(tmp_path / "none.gguf"))
    bare = tmp_path / "bare"
    tiny_model().save_pretrained(bare)
    with pytest.raises(LoadError, match=r"bare holds no tokenizer.*save_pretrained"):
        load_target(str(bare))
    broken = shutil.copytree(folder, tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(LoadError, match="could not load broken") as caught:
        load_target(str(broken))
    assert caught.value.__cause__ is not None
    with pytest.raises(BadOption, match="dtype='int8'"):
        pick_dtype("int8", "cpu")
    with pytest.raises(BadOption, match="pair"):
        load_target((1, 2))


class FakeConversion:
    """Stands in for the minute of reading GGUF; counts how often it runs."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, work: Path) -> tuple[Any, Any]:
        with self.log.open("a") as log:
            log.write("converted\n")
        return tiny_model(), tiny_tokenizer()

    @property
    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    fake = FakeConversion(tmp_path / "log")
    monkeypatch.setattr(embedded, "_read_gguf", fake)
    return fake


def test_the_embedded_model_is_converted_once(conversion: FakeConversion) -> None:
    said: list[str] = []
    first = embedded.embedded_folder(said.append)
    assert embedded.embedded_folder(said.append) == first
    assert conversion.count == 1
    assert len(said) == 1
    assert [path.name for path in first.parent.iterdir() if path.name.startswith(".")] == []  # no half-made folders
    assert load_target("gemma-3-270m", dtype="float32").name == "gemma-3-270m"


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "empty"])
def test_a_damaged_cache_is_rebuilt_with_a_message(conversion: FakeConversion, damage: str) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    weights = folder / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "remove":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        (folder / "metasd.json").write_text("{")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    said: list[str] = []
    embedded.embedded_folder(said.append)
    assert conversion.count == 2
    assert "damaged" in said[0]


def test_a_failed_conversion_leaves_nothing_behind(conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(work: Path) -> Any:
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_read_gguf", fail)
    with pytest.raises(LoadError, match="disk full"):
        embedded.embedded_folder(lambda _: None)
    assert [path for path in embedded.cache_root().iterdir() if path.suffix != ".lock"] == []


def test_threads_and_processes_that_start_at_once_convert_once(conversion: FakeConversion) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(embedded.embedded_folder(lambda _: None))) for _ in range(3)
    ]
    forks = [
        multiprocessing.get_context("fork").Process(target=embedded.embedded_folder, args=(print,)) for _ in range(2)
    ]
    for worker in (*forks, *threads):
        worker.start()
    for worker in (*forks, *threads):
        worker.join(60)
    assert [fork.exitcode for fork in forks] == [0, 0]
    assert len(set(folders)) == 1
    assert conversion.count == 1


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtra, match=r"metasd-langchain\[demo\]"):
        embedded.embedded_folder(lambda _: None)
