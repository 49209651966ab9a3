"""The evaluators' commands on a tiny model: what they write and print. Timings mean nothing here."""

from __future__ import annotations

import json
import sys

import pytest

from evaluators.__main__ import main
from evaluators.spans import KINDS, SPANS
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings(
    # economize 0.3.2 calls transformers' layers by the old name
    "ignore:`past_key_values` is deprecated:FutureWarning"
)
TEXTS = {
    "copy": ["the cat and the hat and the cat and", "one two three one two three"],
    "open": ["in the end there is an end", "here is that"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(made)
    tiny_tokenizer().save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"task": task, "prompt": text} for task, texts in TEXTS.items() for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def evaluate(command, folder, out, *options):
    small = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--repetitions", "2", "--json", str(out)]
    assert main([command, *small, *map(str, options)]) == 0
    return json.loads(out.read_text())


def test_speed_greedy(folder, prompts, tmp_path, capsys):
    methods = "plain,hf,hf-lookup,metasd,suffix@16"
    options = ("--prompts", prompts, "--methods", methods, "--max-tokens", 16, "--overhead-prompts", 1)
    told = evaluate("speed", folder, tmp_path / "out.json", *options)
    results = told["results"]
    assert list(results) == methods.split(",")
    for name, result in results.items():
        ratio = result["speedup_vs_hf"]
        assert set(ratio) == {"geomean", "low", "high", "min", "tasks"}
        assert set(ratio["tasks"]) == {"copy", "open"}
        assert ratio["min"] == min(ratio["tasks"].values())
        assert ratio["low"] <= ratio["high"]
        # float32: no excuse, whoever answers
        assert (result["prompts"], result["identical_to_hf"], result["near_ties"], result["wrong"]) == (4, 4, 0, 0), (
            name
        )
        assert result["tokens_per_s"] > 0
        assert ("overhead_share" in result) == (not name.startswith("hf"))
    assert results["hf"]["speedup_vs_hf"]["geomean"] == 1.0
    assert results["hf"]["tokens_per_forward"] == results["plain"]["tokens_per_forward"] == 1.0
    assert results["suffix@16"]["tokens_per_forward"] > 1.0
    assert results["metasd"]["speedup_vs_plain"]["geomean"] > 0
    assert sum(arm["share"] for arm in results["metasd"]["arms"].values()) == pytest.approx(1.0)
    assert set(results["metasd"]["shares"]) == {"copy", "open"}
    assert told["machine"]["dtype"] == "float32"
    assert {"cpu", "cores", "ram_gib", "torch", "transformers", "threads", "load_average"} <= set(told["machine"])
    assert told["arguments"]["prompts"] == prompts.name  # no path of this machine
    assert str(folder.parent) not in json.dumps(told)
    assert "metasd: arms played" in capsys.readouterr().out


def test_speed_sampled_without_eos_gives_every_side_the_same_number_of_tokens(folder, prompts, tmp_path):
    pytest.importorskip("economize")
    sampled = ("--temperature", 0.8, "--top-p", 0.9, "--ignore-eos", "--max-tokens", 8, "--overhead-prompts", 0)
    methods = ("--methods", "hf,hf-lookup,economize,metasd")
    told = evaluate("speed", folder, tmp_path / "out.json", "--prompts", prompts, "--limit", 2, *methods, *sampled)
    assert {cell["tokens"] for cell in told["cells"]} == {8}
    assert {(cell["method"], cell["group"]) for cell in told["cells"]} == {
        (method, group) for method in ("hf", "hf-lookup", "economize", "metasd") for group in TEXTS
    }
    assert "identical_to_hf" not in told["results"]["metasd"]


def test_stream_plays_every_prompt_once_and_quick_keeps_the_keys(folder, prompts, tmp_path):
    options = ("--prompts", prompts, "--methods", "hf,metasd", "--max-tokens", 8, "--stream", "--quick")
    told = evaluate("speed", folder, tmp_path / "out.json", *options)
    assert {cell["repetition"] for cell in told["cells"]} == {0}
    assert {"speedup_vs_hf", "overhead_share", "arms"} <= set(told["results"]["metasd"])


def test_an_absent_peer_is_skipped_with_a_line(folder, prompts, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "economize", None)
    options = ("--prompts", prompts, "--limit", 1, "--methods", "economize,plain", "--max-tokens", 4)
    told = evaluate("speed", folder, tmp_path / "out.json", *options, "--overhead-prompts", 0)
    assert list(told["results"]) == ["plain"]
    assert told["results"]["plain"]["speedup_vs_hf"] is None
    assert "economize is skipped: not installed" in capsys.readouterr().err


def test_cost(folder, tmp_path, capsys):
    told = evaluate("cost", folder, tmp_path / "out.json", "--contexts", "8,20", "--widths", "1,4,8")
    assert set(told["forward_ms"]) == {"8", "20"}
    cost = told["forward_ms"]["8"]["4"]
    assert cost["ratio"] == pytest.approx(cost["ours"] / cost["hf"])
    for who in ("hf", "ours"):
        parts = told["split"]["1"][who]
        assert sum(parts[part] for part in ("head", "body", "attention", "other", "python")) == pytest.approx(
            parts["total"]
        )
        assert all(parts[part] > 0 for part in ("head", "body", "attention"))
    assert main(["cost", "--model", str(folder), "--dtype", "float32", "--contexts", "600"]) == 2
    assert "window has 512" in capsys.readouterr().err


def test_hostile(folder, prompts, tmp_path):
    told = evaluate("hostile", folder, tmp_path / "out.json", "--prompts", prompts, "--limit", 2, "--max-tokens", 24)
    assert told["arms"]["hostile@8"]["rounds"] > 0
    assert told["arms"]["hostile@8"]["accepted"] == 0
    assert told["ratio"]["geomean"] > 0


def test_spans(folder, prompts, tmp_path, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace

    # the real setter works once a process, and would switch spans on for other tests
    monkeypatch.setattr(
        trace, "set_tracer_provider", lambda one: monkeypatch.setattr(trace, "get_tracer_provider", lambda: one)
    )
    told = evaluate("spans", folder, tmp_path / "out.json", "--prompts", prompts, "--limit", 2, "--max-tokens", 8)
    assert told["spans"] == SPANS * KINDS + 2 * 2  # only the calls that were to have one
    assert told["metrics"] == 11
    assert 0 < told["span_off_us"] < told["span_on_us"]
    assert told["share"] < 1
    assert told["collect_us"] > 0


def test_wrong_requests_end_with_a_message(folder, prompts, capsys, tmp_path):
    told = {
        "no nothing_humaneval.jsonl here": ["--prompts", "nothing_humaneval.jsonl", "--data", str(tmp_path)],
        "openai/human-eval": ["--prompts", "nothing_humaneval.jsonl", "--data", str(tmp_path)],
        "unknown drafter 'oracle'": ["--prompts", str(prompts), "--methods", "oracle@4"],
        "temperature=-1.0": ["--prompts", str(prompts), "--temperature", "-1"],
        "names hf twice": ["--prompts", str(prompts), "--methods", "hf,hf"],
        "--shared goes with --stream": ["--prompts", str(prompts), "--shared"],
    }
    for message, options in told.items():
        assert main(["speed", "--model", str(folder), *options]) == 2
        assert message in capsys.readouterr().err
