"""The file and the drafter over it: what is drafted, what is refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from metasd_langchain.corpus import VERSION, Corpus, CorpusWriter
from metasd_langchain.drafters.datastore import DatastoreDrafter, create
from metasd_langchain.errors import BadDatastore, BadOption, DrafterError, IncompatibleVocabulary
from metasd_langchain.models.load import Target, load_target
from metasd_langchain.models.vocabulary import fingerprint
from metasd_langchain.testing.drafter_contract import DrafterContract
from metasd_langchain.testing.drafters import NoDraws
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from metasd_langchain.values import EMPTY_DRAFT, Draft, Request, Round

DRAWS = NoDraws()


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target((tiny_model("llama"), tiny_tokenizer()))


def written(folder: Path, *documents: Sequence[int], segment: int = 1000, mark: str | None = None) -> Path:
    file = folder / "text.ds"
    with CorpusWriter(file, mark or fingerprint(tiny_tokenizer()), {"licence": "own"}, segment) as writer:
        for document in documents:
            writer.add(list(document))
    return file


def session(file: Path, target: Target, prompt: Sequence[int], **options: Any) -> Any:
    return DatastoreDrafter(file, **options).bind(target).open(Request(prompt=tuple(prompt)))


def test_drafts_what_followed_the_longest_match(tmp_path: Path, target: Target) -> None:
    file = written(tmp_path, [1, 2, 3, 4, 5], [9, 3, 7, 7])
    opened = session(file, target, [8, 2, 3])
    assert opened.hint() == 2
    assert opened.propose([8, 2, 3], 8, DRAWS) == Draft.chain([4, 5])
    opened.observe(Round(committed=(4,)))
    assert opened.hint() == 3
    assert opened.propose([8, 2, 3, 4], 8, DRAWS) == Draft.chain([5])


def test_the_most_frequent_continuations_are_a_tree(tmp_path: Path, target: Target) -> None:
    file = written(tmp_path, *[[1, 2, 10, 11]] * 3, *[[1, 2, 10, 12]] * 2, [1, 2, 20, 21])
    opened = session(file, target, [1, 2])
    draft = opened.propose([1, 2], 3, DRAWS)
    assert draft == Draft((10, 11, 12), (-1, 0, 0))
    assert opened.propose([1, 2], 1, DRAWS) == Draft.chain([10])
    everything = opened.propose([1, 2], 16, DRAWS)
    assert sorted(everything.tokens) == [10, 11, 12, 20, 21]
    assert 20 not in session(file, target, [1, 2], min_share=0.3).propose([1, 2], 16, DRAWS).tokens


def test_no_match_runs_from_one_document_into_the_next(tmp_path: Path, target: Target) -> None:
    file = written(tmp_path, [1, 2], [3, 4])
    assert session(file, target, [2, 3]).hint() == 0
    opened = session(file, target, [1, 2])
    assert opened.hint() == 2
    assert opened.propose([1, 2], 8, DRAWS) == EMPTY_DRAFT


def test_segments_are_one_corpus(tmp_path: Path, target: Target) -> None:
    documents = [[1, 2, at + 10, at + 11] for at in range(30)] + [[5, 6, 7, 8, 9]]
    file = written(tmp_path, *documents, segment=16)
    assert len(Corpus(file).segments) > 5
    assert session(file, target, [5, 6, 7]).propose([5, 6, 7], 4, DRAWS).tokens[0] == 8
    drafted = session(file, target, [1, 2], min_share=0.0).propose([1, 2], 60, DRAWS)
    first = {token for token, parent in zip(drafted.tokens, drafted.parents, strict=True) if parent < 0}
    assert first == set(range(10, 40))


def test_pieces_of_a_document_are_one_document(tmp_path: Path, target: Target) -> None:
    file = tmp_path / "pieces.ds"
    with CorpusWriter(file, fingerprint(target.tokenizer)) as writer:
        writer.add([1, 2], last=False)
        writer.add([3, 4])
    assert session(file, target, [1, 2]).propose([1, 2], 4, DRAWS) == Draft.chain([3, 4])


def test_not_before_it_is_bound(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="not bound"):
        DatastoreDrafter(tmp_path / "none").open(Request(prompt=(1,)))


def test_reports_what_it_holds(tmp_path: Path, target: Target) -> None:
    file = written(tmp_path, [1, 2, 3])
    assert DatastoreDrafter(file).bind(target).memory_bytes == file.stat().st_size
    about = Corpus(file).about
    assert (about["tokens"], about["highest"], about["licence"]) == (3, 3, "own")


def test_another_tokenizer_is_refused(tmp_path: Path, target: Target) -> None:
    file = written(tmp_path, [1, 2, 3], mark="another")
    with pytest.raises(IncompatibleVocabulary, match=r"text\.ds was built with another tokenizer"):
        DatastoreDrafter(file).bind(target)


def test_an_empty_corpus_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(BadDatastore, match="no text"):
        written(tmp_path, [], [])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_finished_is_none(tmp_path: Path) -> None:
    file = written(tmp_path, [1, 2, 3])
    before = file.read_bytes()

    def break_off() -> None:
        with CorpusWriter(file, "f") as writer:
            writer.add([4, 5, 6])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, [1, 2, 3])
    before = file.read_bytes()

    def full(**_: object) -> tuple[int, str]:
        name = tmp_path / "full"
        name.symlink_to("/dev/full")
        return os.open("/dev/full", os.O_WRONLY), str(name)

    monkeypatch.setattr("metasd_langchain.corpus.tempfile.mkstemp", full)
    with pytest.raises(BadDatastore, match=r"text\.ds cannot be written"), CorpusWriter(file, "f") as writer:
        writer.add([4, 5, 6])
    assert file.read_bytes() == before


def damaged(file: Path, change: str) -> None:
    data = file.read_bytes()
    magic, _, place, length = struct.unpack_from("<8sIQQ", data)
    if change == "cut":
        data = data[:-3]
    if change == "cut early":
        data = data[:40]
    if change == "cut in the head":
        data = data[:20]
    if change == "empty":
        data = b""
    if change == "foreign":
        data = b"PK" + data[2:]
    if change == "newer":
        data = struct.pack("<8sIQQ", magic, VERSION + 1, place, length) + data[28:]
    if change == "description":
        data = data[:place] + b"?" * length
    if change == "segments":
        about = json.loads(data[place:])
        about["segments"][0]["tokens"] = 10**6
        text = json.dumps(about).encode()
        data = struct.pack("<8sIQQ", magic, VERSION, place, len(text)) + data[28:place] + text
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cut", "truncated"),
        ("cut early", "truncated"),
        ("cut in the head", "truncated"),
        ("empty", "is no datastore"),
        ("foreign", "is no datastore"),
        ("newer", "has format 2, this release reads up to 1"),
        ("description", "damaged"),
        ("segments", "truncated"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, target: Target, change: str, said: str) -> None:
    file = written(tmp_path, [1, 2, 3, 4])
    damaged(file, change)
    with pytest.raises(BadDatastore, match=said) as caught:
        DatastoreDrafter(file).bind(target)
    assert "text.ds" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, target: Target) -> None:
    with pytest.raises(BadDatastore, match=r"none\.ds cannot be read"):
        DatastoreDrafter(tmp_path / "none.ds").bind(target)


@pytest.mark.parametrize(
    "options",
    [{}, {"path": ""}, {"path": "x", "min_match": 0}, {"path": "x", "min_match": 9, "max_match": 8},
     {"path": "x", "max_match": 33}, {"path": "x", "min_share": 2}, {"path": "x", "nonsense": 1}],
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadOption):
        create(options)


class TestContract(DrafterContract):
    from_text = False

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path, target: Target) -> None:
        self._made = written(tmp_path, *(self.texts(seed)[0] + self.texts(seed)[1] for seed in range(3)))
        self._target = target

    def make(self) -> Any:
        return DatastoreDrafter(self._made, name="datastore-text").bind(self._target)
