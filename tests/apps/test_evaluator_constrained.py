"""``python -m evaluators constrained`` on a tiny model: what it writes and prints. Timings mean nothing here."""

from __future__ import annotations

import json

import pytest

from evaluators import constrained
from evaluators.__main__ import main
from metasd_langchain.engine.guide import RowMasks
from metasd_langchain.testing.models import tiny_model, tiny_tokenizer


def test_constrained(tmp_path, capsys, monkeypatch):
    folder, out = tmp_path / "tiny", tmp_path / "out.json"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    monkeypatch.setattr(constrained, "_QUICK_CASES", 2)
    legal = RowMasks.legal
    small = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--repetitions", "1", "--json", str(out)]
    assert main(["constrained", *small, "--quick", "--schemas", "3"]) == 0
    told = json.loads(out.read_text())
    results = told["results"]
    assert (results["cases"], results["identical_to_plain"]) == (2, 2)  # float32: no excuse
    assert set(results["speedup_vs_plain"]["tasks"]) == {"person", "weather call"}
    assert results["plain"]["tokens_per_forward"] == 1.0
    assert results["metasd"]["tokens_per_forward"] > 1.0
    assert 0 < results["forced_share"] < 1
    assert 0 < results["mask_share"]["median"] < 1
    assert results["validity"] == {"schemas": 3, "answers": 6, "valid": 6, "failed": []}
    assert len(told["cells"]) == 4
    assert RowMasks.legal is legal  # nothing stays wrapped
    assert "valid under random schemas" in capsys.readouterr().out


def test_time_inside_nested_calls_counts_once(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(constrained.time, "perf_counter", lambda: next(now))
    clock = constrained._Clock()
    inner = clock.around(lambda: None)
    clock.around(inner)()
    assert clock.seconds == pytest.approx(1)
    inner()
    assert clock.seconds == pytest.approx(2)
