"""Finding, loading and caching models: what is missing or broken says so; what is converted is converted once."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, models
from transformers import AutoModelForCausalLM

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


def as_version_1_left_it(folder: Path) -> tuple[str, dict[str, Any]]:
    """The folder with its tokenizer as transformers writes it; returns the tokenizer's own account of itself."""
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.save(str(folder / "tokenizer.json"), pretty=True)
    manifest = {"format": 1, "sizes": {file.name: file.stat().st_size for file in folder.iterdir()}}
    del manifest["sizes"]["metasd.json"]
    (folder / "metasd.json").write_text(json.dumps(manifest))
    return raw.to_str(), manifest


def check_up_to_date(folder: Path, account: str) -> None:
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == account
    assert type(json.loads((folder / "tokenizer.json").read_text())["model"]["merges"][0]) is str  # the quick form
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.name != "metasd.json"}
    assert json.loads((folder / "metasd.json").read_text()) == {"format": 2, "sizes": sizes}


def test_a_fresh_conversion_has_the_quick_tokenizer(conversion: FakeConversion) -> None:
    check_up_to_date(embedded.embedded_folder(lambda _: None), tiny_tokenizer()._tokenizer.to_str())


def test_an_older_cache_is_brought_up_to_date_without_a_conversion(conversion: FakeConversion) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    account, _ = as_version_1_left_it(folder)
    weights = (folder / "model.safetensors").stat()
    said: list[str] = []
    assert embedded.embedded_folder(said.append) == folder
    check_up_to_date(folder, account)
    assert (folder / "model.safetensors").stat().st_ino == weights.st_ino
    assert conversion.count == 1
    assert len(said) == 1
    assert "tokenizer" in said[0]
    embedded.embedded_folder(said.append)
    assert len(said) == 1
    assert load_target("gemma-3-270m", dtype="float32").encode("the cat") == tiny_tokenizer()("the cat")["input_ids"]


class Killed(BaseException):
    """What a kill looks like from inside: nothing handles it."""


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_kill_while_a_cache_is_brought_up_to_date_costs_no_conversion(
    conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    account, _ = as_version_1_left_it(folder)
    real, done = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if len(done) == after:
            raise Killed
        done.append(target)
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        if after == 3:
            embedded.embedded_folder(lambda _: None)  # so it is three steps
        else:
            with pytest.raises(Killed):
                embedded.embedded_folder(lambda _: None)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).to_str() == account  # whole at any moment
    said: list[str] = []
    embedded.embedded_folder(said.append)
    check_up_to_date(folder, account)
    assert conversion.count == 1
    assert not any("damaged" in words for words in said)


def test_an_older_cache_that_can_only_be_read_is_used_as_it_is(
    conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    _, manifest = as_version_1_left_it(folder)

    def refuse(self: Path, *arguments: Any, **options: Any) -> int:  # whoever runs tests may be allowed everything
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert embedded.embedded_folder(lambda _: None) == folder
    assert json.loads((folder / "metasd.json").read_text()) == manifest
    assert conversion.count == 1
    assert load_target("gemma-3-270m", dtype="float32").name == "gemma-3-270m"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_processes_that_bring_a_cache_up_to_date_at_once_find_it_whole(conversion: FakeConversion) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    account, _ = as_version_1_left_it(folder)

    def start() -> None:
        read = embedded.read_tokenizer(embedded.embedded_folder(lambda _: None))
        assert read._tokenizer.to_str() == account

    forks = [multiprocessing.get_context("fork").Process(target=start) for _ in range(4)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(60)
    assert [fork.exitcode for fork in forks] == [0] * 4
    check_up_to_date(folder, account)
    assert conversion.count == 1


def test_a_damaged_tokenizer_of_an_older_cache_is_converted_anew(conversion: FakeConversion) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    account, manifest = as_version_1_left_it(folder)
    (folder / "tokenizer.json").write_text(" " * manifest["sizes"]["tokenizer.json"])  # the size is right
    said: list[str] = []
    assert load_target("gemma-3-270m", dtype="float32", progress=said.append).name == "gemma-3-270m"
    assert any("damaged" in words for words in said)
    check_up_to_date(folder, account)
    assert conversion.count == 2


def rounded(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of the folder's weights when bfloat16 is asked for."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def test_bfloat16_weights_are_written_once_and_are_those_that_transformers_rounds(conversion: FakeConversion) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    said: list[str] = []
    load_target("gemma-3-270m", dtype="float32", progress=said.append)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []  # nobody asked for them
    (folder.parent / ".gemma-3-270m-v1-killed").mkdir()  # goes too: it may hold gigabytes
    load_target("gemma-3-270m", dtype="bfloat16", progress=said.append)
    load_target("gemma-3-270m", dtype="bfloat16", progress=said.append)
    assert len([words for words in said if "bfloat16" in words]) == 1
    half = folder / "bfloat16"
    assert {str(tensor.dtype) for tensor in load_file(half / "model.safetensors").values()} == {"torch.bfloat16"}
    want, got = rounded(folder), rounded(half)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for name in ("config.json", "generation_config.json"):
        assert (half / name).read_bytes() == (folder / name).read_bytes()
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    assert conversion.count == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "header"])
def test_damaged_bfloat16_weights_are_written_again(conversion: FakeConversion, damage: str) -> None:
    folder = embedded.embedded_folder(lambda _: None)
    want = rounded(folder)
    half = embedded.half_weights(folder, lambda _: None)
    weights = half / "model.safetensors"
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "remove":
        (half / "config.json").unlink()
    elif damage == "manifest":
        (half / "metasd.json").write_text("{")
    else:
        weights.write_bytes(bytes(weights.stat().st_size))  # the size is right: found out by loading, as elsewhere
    assert load_target("gemma-3-270m", dtype="bfloat16").lm.dtype == torch.bfloat16
    assert all(torch.equal(tensor, want[name]) for name, tensor in rounded(half).items())
    assert conversion.count == (2 if damage == "header" else 1)


@pytest.mark.parametrize("error", [PermissionError(13, "read-only"), SafetensorError("no space left on device")])
def test_where_bfloat16_weights_cannot_be_written_they_are_rounded(
    conversion: FakeConversion, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    folder = embedded.embedded_folder(lambda _: None)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", refuse)
    said: list[str] = []
    assert load_target("gemma-3-270m", dtype="bfloat16", progress=said.append).lm.dtype == torch.bfloat16
    assert any(type(error).__name__ in words for words in said)
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_processes_that_want_bfloat16_weights_at_once_write_them_once(
    conversion: FakeConversion, tmp_path: Path
) -> None:
    folder = embedded.embedded_folder(lambda _: None)

    def start(index: int) -> None:
        half = embedded.half_weights(folder, lambda _: (tmp_path / f"said{index}").touch())
        assert len(load_file(half / "model.safetensors")) > 10

    forks = [multiprocessing.get_context("fork").Process(target=start, args=(index,)) for index in range(4)]
    for fork in forks:
        fork.start()
    for fork in forks:
        fork.join(60)
    assert [fork.exitcode for fork in forks] == [0] * 4
    assert len(list(tmp_path.glob("said*"))) == 1


def test_the_quick_form_is_the_same_tokenizer() -> None:
    raw = tiny_tokenizer()._tokenizer
    raw.add_tokens([AddedToken("cat sat", special=False), AddedToken("<end>", special=True)])
    quick = Tokenizer.from_str(embedded.quick_form(raw.to_str(pretty=True)))
    assert quick.to_str() == raw.to_str()
    generator = random.Random(0)
    alphabet = "the cat sat on the mat  \n\t\u2581\u00e9\u4f60\U0001f600<end><bos>0x41"
    for _ in range(300):
        text = "".join(generator.choices(alphabet, k=generator.randrange(40)))
        ids = raw.encode(text).ids
        assert quick.encode(text).ids == ids
        assert quick.decode(ids, skip_special_tokens=False) == raw.decode(ids, skip_special_tokens=False)
    for _ in range(300):
        ids = generator.choices(range(raw.get_vocab_size()), k=20)
        assert quick.decode(ids) == raw.decode(ids)


def test_a_tokenizer_without_a_quick_form_stays_as_it_is() -> None:
    spaced = Tokenizer(models.BPE({"a": 0, " ": 1, "a ": 2, "a a": 3}, [("a", " "), ("a ", "a")]))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    for raw in (spaced, words):
        text = raw.to_str(pretty=True)
        assert embedded.quick_form(text) == text


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
