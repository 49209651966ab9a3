"""Every example runs, on a tiny model here, and is short."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding

from metasd_langchain import ChatMetaSD

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 80
    assert f"python examples/{path.name}" in text


def test_extraction_gives_valid_objects_whatever_the_model(tiny_folder):
    done = subprocess.run(
        [sys.executable, "examples/extraction.py", tiny_folder],
        check=False, capture_output=True, text=True, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert set(row) == {"place", "kind", "hour", "injured"}
        assert row["kind"] in ("leak", "fire", "power cut", "other")
        assert 0 <= row["hour"] <= 23


def test_rag_answers_every_question(tiny_folder):
    module = load("rag")
    chain = module.make_chain(ChatMetaSD(model=tiny_folder, max_tokens=8), DeterministicFakeEmbedding(size=8))
    assert isinstance(chain.invoke("When?"), str)


def test_the_agent_ends(tiny_folder):
    module = load("agent")
    asked = {"messages": [("human", "How many rolls?")]}
    told = module.make_agent(ChatMetaSD(model=tiny_folder, max_tokens=48)).invoke(asked, {"recursion_limit": 40})
    assert told["messages"][0].type == "human"
    assert told["messages"][-1].type == "ai"


def test_the_fan_out_prints_an_answer_a_question(tiny_folder, capsys):
    load("async_fan_out").main(tiny_folder)
    assert capsys.readouterr().out.count("->") == 3
