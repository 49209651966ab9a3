"""``evaluators drafters`` with tiny random heads: keys, whose prompts are used, what a replay finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evaluators.__main__ import main
from evaluators.methods import Limits
from evaluators.playback import record, replay
from evaluators.prompts import encode
from evaluators.switching import switch_costs
from metasd_langchain.assemble import make_pool
from metasd_langchain.drafters.eagle import Eagle
from metasd_langchain.engine.loop import Engine
from metasd_langchain.models.eagle_format import save_eagle
from metasd_langchain.models.load import Target
from metasd_langchain.testing.models import reference_tokens, tiny_model
from metasd_langchain.training.split import held_out
from metasd_langchain.values import Request, Sampling
from tests.eagles import learned_head

HEADS = ("code", "translation", "summarization", "qa", "math", "ofa")
CATEGORIES = ("translation", "summarization", "qa", "math_reasoning", "rag", "writing")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "the", "hat", "ran", "to", "an", "end"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    rows, codes = [], []
    for number in range(60):
        text = " ".join(WORDS[(number + k) % len(WORDS)] for k in range(6))
        rows.append({"question_id": number, "category": CATEGORIES[number % 6], "turns": [text]})
        codes.append({"task_id": f"Code/{number}", "prompt": text})
    (made / "spec_bench_dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "humaneval_dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in codes))
    return made


def evaluate(folder: Path, data: Path, *options: object) -> int:
    small = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--data", str(data)]
    return main(["drafters", *small, "--max-tokens", "8", *map(str, options)])


@pytest.mark.parametrize("quick", [True, False])
def test_every_figure_is_there(folder: Path, data: Path, heads: Path, tmp_path: Path, quick: bool) -> None:
    out = tmp_path / "out.json"
    options = ["--quick"] if quick else ["--repetitions", 2, "--limit", 6, "--domain-prompts", 1, "--contexts", "16,64"]
    assert evaluate(folder, data, "--heads", heads, "--json", out, "--budget", 3, *options) == 0
    told: dict[str, Any] = json.loads(out.read_text())
    for mode in ("greedy", "t08"):
        assert set(told["matrix"][mode]) == set(HEADS)
        for by_domain in told["matrix"][mode].values():
            assert set(by_domain) == set(HEADS) - {"ofa"}
            assert all(1 <= own["tokens_per_round"] <= 4 and own["speed"] > 0 for own in by_domain.values())
        assert told[f"pool_gain_{mode}"] > 0
        assert told["vs_ofa"][mode] > 0
        low, high = told["gain_intervals"][mode]["pool"]
        assert low <= high
        assert told["arms"][mode]["arms"]
    assert 0 <= told["diagonal_wins"] <= 5
    assert told["diagonal_wins"] == sum(told["diagonal"]["both"].values())
    assert set(told["heads"]) == set(HEADS)
    for own in told["heads"].values():
        assert own["parameters"] > 1000
        assert own["tokens_per_round_greedy"] >= 1
        assert own["tokens_per_round_t08"] >= 1
        assert own["draft_step_share"] > 0
    for by_drafter in told["switch_cost"].values():
        assert set(by_drafter) == {"eagle", "eagle_full", "small_lm_full", "small_lm_window"}
        assert all({"back", "first", "stay_s", "plain_s"} == set(own) for own in by_drafter.values())
    assert told["arguments"]["heads"] == heads.name  # no path of this machine
    assert str(heads.parent) not in out.read_text()


def test_no_row_of_the_training_third_is_read(
    folder: Path, data: Path, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evaluators import drafters
    from evaluators import heads as heads_module

    seen: list[str] = []

    def listening(engine: Any, prompt: Any) -> Any:
        seen.append(prompt.name)
        return encode(engine, prompt)

    for module in (drafters, heads_module):
        monkeypatch.setattr(module, "encode", listening)
    assert evaluate(folder, data, "--heads", heads, "--quick", "--budget", 2, "--contexts", 16) == 0
    assert seen
    assert all(held_out(name) for name in seen)
    assert not all(held_out(number) for number in range(60))


def test_speed_plays_a_trained_drafter_on_held_out_rows_only(folder: Path, heads: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "rows.jsonl", tmp_path / "out.json"
    rows = [{"question_id": number, "category": "qa", "turns": [f"the cat and {number}"]} for number in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = sum(held_out(number) for number in range(24))
    assert 0 < kept < 24
    options = [
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--prompts",
        str(file),
        "--json",
        str(out),
    ]
    options += ["--limit", "24", "--max-tokens", "2", "--repetitions", "1", "--overhead-prompts", "0"]
    for methods, expected in ((f"plain,hf,eagle:{heads}/qa@2", kept), ("plain,hf", 24)):
        assert main(["speed", *options, "--methods", methods]) == 0
        assert len({cell["prompt"] for cell in json.loads(out.read_text())["cells"]}) == expected


def test_heads_that_are_not_trained_are_said_with_the_command(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    assert evaluate(folder, data, "--quick") == 2
    error = capsys.readouterr().err
    assert "no trained heads for code, translation" in error
    assert "metasd train preset five-domains" in error


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=5)], ids=["greedy", "sampled"])
def test_a_replay_plays_the_rounds_the_engine_plays(target: Target, tmp_path: Path, sampling: Sampling) -> None:
    prompt = tuple(target.encode("the cat sat on the mat"))
    answer = tuple(reference_tokens(tiny_model(), list(prompt), 24))
    save_eagle(learned_head(target, {prompt: answer}), tmp_path / "head")
    engine = Engine(target)
    try:
        head = Eagle(str(tmp_path / "head"), name="head").bind(target)
        taken = record(engine, prompt, sampling, Limits(24), head.hidden_layers)
        played = replay(head, taken, 4)
        steps = list(engine.generate(Request(prompt, sampling, 24), make_pool([(head, 4)], "fixed")))
    finally:
        engine.close()
    assert tuple(token for step in steps for token in step.tokens) == taken.answer
    assert played.committed == tuple(len(step.tokens) for step in steps[1:])
    summary = steps[-1].summary
    assert summary is not None
    assert played.drafted == tuple(each.drafted for each in summary.rounds[1:])
    assert max(played.committed) > 1 or not sampling.greedy  # the head knows the greedy answer by heart


def test_switching_reads_what_was_missed(target: Target, heads: Path) -> None:
    engine = Engine(target)
    try:
        costs = switch_costs(engine, {"head": Eagle(str(heads / "qa")).bind(target)}, [16, 100], 1)
    finally:
        engine.close()
    assert set(costs) == {"16", "100"}
    assert all(own["head"]["plain_s"] > 0 for own in costs.values())
