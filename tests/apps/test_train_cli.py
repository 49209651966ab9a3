"""``metasd train`` on a tiny model: what it writes, how it goes on, what it says to bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from metasd_langchain.cli import app
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer

RUNNER = CliRunner()
SMALL = ["--tokens", "300", "--dtype", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tiny")
    tiny_model("llama").save_pretrained(where)
    tiny_tokenizer().save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("data")
    rows = [{"question": f"how many are {n} and {n + 1}?", "answer": str(2 * n + 1)} for n in range(200)]
    (where / "gsm8k_train_1500.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return where


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("METASD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def train(*arguments: object) -> Any:
    return RUNNER.invoke(app, ["train", *map(str, arguments)])


def test_a_head_is_trained_and_reported(model: Path, data: Path, tmp_path: Path) -> None:
    asked = ("eagle", "--domain", "math", "--out", tmp_path / "math", "--model", model, "--data", data, *SMALL)
    done = train(*asked)
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "math" / "recipe.json").read_text())
    assert made["data"]["answer_tokens"] >= 300
    assert made["settings"]["tokens"] == 300
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("math ")]
    assert f"{made['held_out']['tokens_per_round_t08']:.2f}" in line
    assert "data, tokens: 300 of 300" in done.stderr
    again = train(*asked)
    assert again.exit_code == 0
    assert "already trained" in again.stderr


def test_what_is_wrong_is_one_line_and_a_hint(model: Path, data: Path, tmp_path: Path) -> None:
    common = ("--model", model, *SMALL)
    (tmp_path / "file").write_text("")
    for arguments, code, said in (
        (("--domain", "maths", "--out", "o", "--data", data), 2, "unknown domain 'maths'"),
        (("--domain", "math", "--out", "o", "--data", tmp_path / "gone"), 2, "data folder 'gone' does not exist"),
        (("--domain", "math", "--out", "o", "--data", data, "--tokens", "0"), 2, "--tokens"),
        (("--domain", "math", "--out", tmp_path / "file", "--data", data), 2, "--out"),
    ):
        done = train("eagle", *common, *arguments)
        assert done.exit_code == code, done.output
        assert said in " ".join(done.stderr.split())
        assert "Traceback" not in done.output
    missing = train("preset", "six-domains", *common)
    assert missing.exit_code == 2
    assert "five-domains" in missing.stderr


def test_the_data_folder_of_the_environment_is_checked_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METASD_DATA", str(tmp_path / "gone"))
    done = train("eagle", "--domain", "math", "--out", tmp_path / "o", "--model", model)
    assert done.exit_code == 2
    assert "METASD_DATA" in done.stderr


@pytest.mark.slow
def test_a_kill_costs_what_was_not_saved_and_nothing_else(model: Path, data: Path, tmp_path: Path, cache: Path) -> None:
    asked = ["eagle", "--domain", "math", "--model", str(model), "--data", str(data), "--dtype", "float32"]
    asked += ["--tokens", "1500"]
    whole = train(*asked, "--out", tmp_path / "whole")
    assert whole.exit_code == 0, whole.output
    shards = {path.name: path.stat().st_mtime_ns for path in cache.rglob("[0-9]*.safetensors")}
    for path in sorted(cache.rglob("[0-9]*.safetensors"))[4:]:
        path.unlink()
    command = [
        sys.executable,
        "-c",
        "from metasd_langchain.cli import main; main()",
        "train",
        *asked,
        "--out",
        str(tmp_path / "cut"),
    ]
    with subprocess.Popen(command, env={**os.environ}, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2]) as one:
        while one.poll() is None and len(list(cache.rglob("[0-9]*.safetensors"))) < 6:
            time.sleep(0.01)
        one.send_signal(signal.SIGKILL)
    done = train(*asked, "--out", tmp_path / "cut")
    assert done.exit_code == 0, done.output
    now = {path.name: path.stat().st_mtime_ns for path in cache.rglob("[0-9]*.safetensors")}
    assert now.keys() == shards.keys()
    assert [now[name] for name in sorted(now)[:4]] == [shards[name] for name in sorted(shards)[:4]]
    first, second = (json.loads((tmp_path / name / "recipe.json").read_text()) for name in ("whole", "cut"))
    assert first["curve"] == second["curve"]
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "cut" / "model.safetensors"
    ).read_bytes()
