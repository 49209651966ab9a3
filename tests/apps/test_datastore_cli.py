"""``metasd datastore``: what it indexes, what it says, what it refuses, and that an answer is drafted from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metasd_langchain.cli import app
from metasd_langchain.corpus import Corpus
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer
from tests.bugs.kit import PROMPT, decode, ids, make, ref, rounds

RUN = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat\n" * 3)
    (folder / "deep" / "b.py").write_text("# the hat\n")
    (folder / "binary").write_bytes(b"\0\1\2the cat")
    (folder / "latin").write_bytes(b"caf\xe9 " * 10)
    (folder / "empty").write_text("")
    (folder / ".hidden" / "c").write_text("secret")
    return folder


def build(*arguments: object) -> tuple[int, str, str]:
    result = RUN.invoke(app, ["datastore", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_builds_and_says_what_is_in_it(corpus: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "text.ds"
    code, told, _ = build("build", corpus, "--out", out, "--model", model, "--licence", "CC0-1.0", "--json")
    assert code == 0
    about = json.loads(told)
    expected = [tiny_tokenizer()(text, add_special_tokens=False)["input_ids"] for text in
                ("the cat sat on the mat\n" * 3, "# the hat\n")]  # fmt: skip
    assert about["tokens"] == sum(map(len, expected))
    assert about["licence"] == "CC0-1.0"
    assert about["sources"] == [{"name": "text", "files": 3, "left_out": 2, "bytes": 79}]
    assert Corpus(out).about["model"] == model.name
    assert build("show", out, "--json")[1] == told
    assert "3 files" in build("show", out)[1]
    assert "CC0-1.0" in build("show", out)[1]


def test_an_answer_is_drafted_from_it(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "answers.txt"
    text.write_text(PROMPT + decode(ref()))
    assert build("build", text, "--out", tmp_path / "answers.ds", "--model", model)[0] == 0
    llm = make(drafters=[f"datastore:{tmp_path}/answers.ds@8"], policy="fixed")
    assert ids(llm) == ref()
    played = rounds(llm)
    assert {record.arm for record in played} <= {"datastore-answers@8", "plain"}
    assert sum(record.drafted for record in played) > 0


def test_a_long_file_is_read_in_pieces_and_is_one_document(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("metasd_langchain.cli.datastore._PIECE", 20)
    (tmp_path / "long").write_text("the cat\nand the hat\n" * 40)
    assert build("build", tmp_path / "long", "--out", tmp_path / "x.ds", "--model", model)[0] == 0
    whole = tiny_tokenizer()("the cat\nand the hat\n" * 40, add_special_tokens=False)["input_ids"]
    (segment,) = Corpus(tmp_path / "x.ds").segments
    assert segment.tokens(0, len(whole)).tolist() == whole
    assert len(segment) == len(whole) + 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "a file or folder that exists"),
        (["empty"], "the corpus holds no text"),
        (["binary"], "the corpus holds no text"),
    ],
)
def test_what_cannot_be_built_is_said(
    tmp_path: Path, model: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\0")
    old = tmp_path / "x.ds"
    old.write_text("old")
    code, _, error = build("build", *arguments, "--out", old, "--model", model)
    assert code != 0
    assert said in error
    assert old.read_text() == "old"
    assert {file.name for file in tmp_path.iterdir()} == {"empty", "binary", "x.ds"}


def test_a_model_without_a_tokenizer_and_a_file_that_is_none_are_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat")
    code, _, error = build("build", tmp_path / "text", "--out", tmp_path / "x", "--model", tmp_path)
    assert code == 1
    assert "holds no tokenizer" in error
    code, _, error = build("show", tmp_path / "text")
    assert code == 1
    assert "text is no datastore" in error
