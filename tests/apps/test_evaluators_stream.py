"""The evaluators of choosing: stream, record, replay and the theory's toy. Timings mean nothing here."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from evaluators.__main__ import main
from evaluators.errors import EvaluatorError
from evaluators.figures import Cell, even
from evaluators.information import gross
from evaluators.methods import Ours
from evaluators.record import read, scoring_seconds
from evaluators.replay import _answers, _How, _Prices, stream
from evaluators.stream import BY_STEP, COLD, POLICY, ratios, summary
from evaluators.theory import regret, signals
from metasd_langchain.bandits.registry import policy_names
from metasd_langchain.bandits.rewards import LENGTH

ARMS = ("suffix@16", "suffix@6", "recycling_tree@12", "recycling_tree@6", "plain")
RATIOS = {"vs_best_single", "vs_median_single", "vs_task_oracle", "vs_prompt_oracle", "cold_start"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"task": task, "prompt": f"the {task} and the hat and the {task}"} for task in ("one", "two", "one", "two")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def small(folder):
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu"]


# -- stream ------------------------------------------------------------------------------------------------------------


def test_ratios_by_hand():
    # seconds a token; b is faster over all, a on the first task
    paces = {
        POLICY: np.array([1.0, 1.0, 2.0]),
        COLD: np.array([2.0, 2.0, 2.0]),
        "a": np.array([1.0, 1.0, 8.0]),
        "b": np.array([2.0, 2.0, 2.0]),
        "c": np.array([8.0, 8.0, 8.0]),
    }
    found = ratios(paces, ["x", "x", "y"])
    assert found["vs_best_single"] == pytest.approx(2**0.5)  # b: 2 and 1 times the policy's
    assert found["vs_median_single"] == pytest.approx(2.0)  # a: 1 and 4 times
    assert found["vs_task_oracle"] == pytest.approx(1.0)
    assert found["vs_prompt_oracle"] == pytest.approx(1.0)
    assert found["cold_start"] == pytest.approx(1.0)


def test_tasks_count_alike_however_many_prompts_they_have():
    paces = {name: np.ones(4) for name in (POLICY, COLD, "b")} | {"a": np.array([4.0, 4.0, 4.0, 0.5])}
    found = ratios(paces, ["x", "x", "x", "y"])
    assert found["vs_best_single"] == pytest.approx(1.0)
    assert found["vs_median_single"] == pytest.approx(
        2**0.25
    )  # a's tasks: 4 and 1/2, so 2 over all: the middle of 1 and 2^0.5


def test_prompts_answered_at_different_length_are_left_out_and_counted():
    def cell(prompt, method, tokens, seconds):
        return Cell(prompt, "x", method, 0, (1,) * tokens, seconds, tokens)

    methods = (POLICY, COLD, "a", "b")
    cells = [cell(0, method, 64, 2.0 if method == "a" else 1.0) for method in methods]
    cells += [cell(1, method, 52, 1.0) for method in methods[:3]] + [cell(1, "b", 64, 1.0)]  # 1.23 times as long
    cells += [cell(2, method, 10 if method == POLICY else 64, 1.0) for method in methods]  # a near-tie ended it
    kept, uneven = even(cells)
    assert uneven == [2]
    assert {one.prompt for one in kept} == {0, 1}
    told = summary(cells, 0)
    assert told["uneven"] == 1
    assert told["vs_best_single"] == pytest.approx((52 / 64) ** 0.5)
    assert told["of_all"]["vs_best_single"] == pytest.approx((52 / 64 * 10 / 64) ** (1 / 3))
    assert even(cells[-4:]) == (cells[-4:], [])  # nothing would be left


def test_stream_plays_policy_and_every_arm(folder, prompts, tmp_path, capsys):
    out, drawn = tmp_path / "out.json", tmp_path / "curves.svg"
    options = ["--prompts", str(prompts), "--max-tokens", "12", "--json", str(out), "--curves", str(drawn), "--quick"]
    assert main(["stream", *small(folder), *options]) == 0
    told = json.loads(out.read_text())
    assert set(told) >= RATIOS
    assert set(told["intervals"]) == RATIOS
    assert told["pool"] == list(ARMS)
    assert set(told["tokens_per_s"]) == {POLICY, COLD, *ARMS}
    assert set(told["tokens_per_s_by_task"]) == {"one", "two"}
    assert told["best_single"] in ARMS
    assert told["relative"][told["best_single"]] == 1.0
    assert max(told["relative"].values()) == 1.0
    assert told["vs_prompt_oracle"] <= told["vs_task_oracle"] + 1e-9
    assert told["vs_prompt_oracle"] <= told["vs_best_single"] + 1e-9
    assert all(low <= high for low, high in told["intervals"].values())
    assert drawn.read_text().lstrip().startswith("<?xml")
    assert "vs_best_single" in capsys.readouterr().out


def test_with_steps_each_task_has_a_memory_of_its_own(folder, prompts, tmp_path, monkeypatch):
    out, asked = tmp_path / "out.json", []
    answer = Ours.answer

    def watched(self, prompt, seed):
        asked.append((self.name, self.step))
        return answer(self, prompt, seed)

    monkeypatch.setattr(Ours, "answer", watched)
    options = ["--prompts", str(prompts), "--max-tokens", "8", "--json", str(out), "--quick", "--steps"]
    assert main(["stream", *small(folder), *options]) == 0
    told = json.loads(out.read_text())
    assert set(told["intervals"]) == {*RATIOS, "by_step"}
    assert told["by_step"] > 0.0
    assert BY_STEP not in told["relative"]
    assert {step for name, step in asked if name == POLICY} == {"stream"}
    assert {step for name, step in asked if name == BY_STEP} >= {"one", "two"}


# -- record and replay -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(folder, prompts, tmp_path_factory):
    file = tmp_path_factory.mktemp("record") / "rounds.jsonl"
    assert main(["record", *small(folder), "--prompts", str(prompts), "--max-tokens", "24", "--out", str(file)]) == 0
    return file


def test_a_record_covers_every_answer_of_every_arm(record):
    head, rows = read(str(record))
    assert head["arms"] == list(ARMS)
    alone = [row for row in rows if "arm" in row]
    assert len(alone) == 4 * len(ARMS)
    for row in alone:
        at = 0
        for one in row["rounds"]:
            assert one["at"] == at
            assert one["accepted"] <= one["drafted"] <= int(row["arm"].partition("@")[2] or 0)
            assert len(one["agreement"]) in (0, one["drafted"])
            assert one["accepted"] <= one["committed"] <= one["accepted"] + 1
            at += one["committed"]
    lengths = {row["prompt"]: set() for row in alone}
    for row in alone:
        lengths[row["prompt"]].add(sum(one["committed"] for one in row["rounds"]))
    assert all(len(own) == 1 for own in lengths.values())  # float32: the answer does not depend on the arm
    live = [row for row in rows if "live" in row]
    assert [sum(one[3] for one in row["live"]) for row in live] == [lengths[row["prompt"]].copy().pop() for row in live]


def test_what_is_noted_of_a_round_is_of_that_round(record):
    """A drafter whose hint is 0 drafts nothing, and one that drafts said so: with notes of other rounds both fail."""
    _, rows = read(str(record))
    known = [(row["arm"], one) for row in rows if "arm" in row for one in row["rounds"] if one["hints"]]
    assert {bool(one["drafted"]) for arm, one in known if arm != "plain"} == {True, False}
    for arm, one in known:
        if arm != "plain":
            assert bool(one["hints"][arm]) == bool(one["drafted"]), (arm, one)
    backed = [one for _, one in known if one["seconded"]]
    assert backed
    for one in backed:
        assert one["seconded"]["suffix@16"] == one["seconded"]["suffix@6"]
        assert all(one["hints"][name] for name in one["seconded"])


def test_an_arm_with_a_path_is_recorded_under_its_name(folder, prompts, heads, tmp_path):
    file, out = tmp_path / "rounds.jsonl", tmp_path / "out.json"
    arms = f"suffix@6,eagle:{heads}/math@4,plain"
    options = ["--prompts", str(prompts), "--max-tokens", "12", "--arms", arms, "--out", str(file)]
    assert main(["record", *small(folder), *options]) == 0
    head, rows = read(str(file))
    assert head["arms"] == ["suffix@6", "eagle-math@4", "plain"]
    assert {row["arm"] for row in rows if "arm" in row} == set(head["arms"])
    assert any(one["drafted"] for row in rows if row.get("arm") == "eagle-math@4" for one in row["rounds"])
    assert main(["replay", "--record", str(file), "--policies", "ucb+bd", "--quick", "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["policies"]["ucb+bd"]["shares"]) == set(head["arms"])


def test_a_fixed_arm_replays_to_its_own_rounds(record):
    _, rows = read(str(record))
    answers = _answers(rows, ARMS)
    for arm in ARMS:
        played = stream(answers, range(len(answers)), _Prices({1: 1.0, 17: 2.0}, {}), [arm], _How("fixed", LENGTH), 0)
        alone = [len(row["rounds"]) for row in rows if row.get("arm") == arm]
        assert played.rounds.tolist() == alone
        assert set(played.arms) == {arm}


def test_replay_ranks_policies_and_says_how_far_it_is_from_life(record, tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--policies", "hinted_ucb+throughput,ucb+bd,random+bd", "--json", str(out), "--quick"]
    assert main(["replay", "--record", str(record), *options]) == 0
    told = json.loads(out.read_text())
    assert set(told["policies"]) == {"hinted_ucb+throughput", "ucb+bd", "random+bd"}
    for figures in told["policies"].values():
        assert sum(figures["shares"].values()) == pytest.approx(1.0)
        assert {"rounds", "regret", "ln_b_slope", "ln_b_residual", "speed_vs_best_single"} <= set(figures)
    assert told["live"]["ratio"] == pytest.approx(told["live"]["rounds_replayed"] / told["live"]["rounds_live"])
    assert "replay / live" in capsys.readouterr().err


def test_full_information_in_a_replay_hears_of_every_arm_and_pays_for_it(record, tmp_path):
    out = tmp_path / "out.json"
    options = ["--policies", "normalhedge+expected_length,hedge+throughput,ucb+length", "--json", str(out), "--quick"]
    assert main(["replay", "--record", str(record), *options]) == 0
    told = json.loads(out.read_text())["policies"]
    for spec in ("normalhedge+expected_length", "hedge+throughput"):
        assert 0.0 < told[spec]["net"] < told[spec]["speed_vs_best_single"]
    assert told["ucb+length"]["net"] == told["ucb+length"]["speed_vs_best_single"]
    _, rows = read(str(record))
    assert sum(len(row["scoring"]) for row in rows if "scoring" in row) > 0
    assert scoring_seconds(rows) > 0.0
    assert math.isnan(scoring_seconds([row for row in rows if "scoring" not in row]))  # an older record


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no record of"),
        ('{"format": "something else"}\n', "no record of"),
        ('{"format": "metasd-rounds 1"}\n{"prompt": 0, "ro', "line 2"),
    ],
)
def test_what_is_no_record_is_named(tmp_path, content, message):
    file = tmp_path / "rounds.jsonl"
    file.write_text(content)
    with pytest.raises(EvaluatorError, match=message):
        read(str(file))


def test_replay_names_an_arm_that_was_not_recorded(record, capsys):
    assert main(["replay", "--record", str(record), "--arms", "suffix@99"]) == 2
    assert "suffix@99" in capsys.readouterr().err


# -- theory ------------------------------------------------------------------------------------------------------------


def test_the_means_are_those_of_the_papers_and_bd_has_the_stronger_signal():
    arms = signals([0.8, 0.5, 0.3], 5, seed=0)["arms"]
    for arm in arms:
        assert arm["bd"] == pytest.approx(arm["alpha"], abs=0.01)  # M3
        assert arm["be"] == pytest.approx(arm["be_formula"], abs=0.01)
        assert arm["be_zeros"] == pytest.approx(1 - arm["alpha"], abs=0.02)
    assert all(arm["bd_signal"] > arm["be_signal"] for arm in arms[1:])  # M2


def test_ucb_needs_fewer_rounds_with_bd_than_with_be_and_than_exp3():
    def mean(policy, reward):
        return np.mean([regret(policy, reward, [0.75, 0.5, 0.3], 5, [1024], seed)[0] for seed in range(4)])

    assert mean("ucb", "bd") <= mean("ucb", "be")  # M1
    assert mean("ucb", "bd") < mean("exp3", "bd") < mean("random", "bd")  # M4


def test_full_information_is_worth_more_the_more_drafters_there_are():
    def mean(policy, count):
        return np.mean([gross(policy, count, 5, 150, 4, seed) for seed in range(6)])

    gaps = [mean("normalhedge", count) - mean("exp3", count) for count in (2, 8)]  # H1
    assert 0.0 < gaps[0] < gaps[1]
    assert mean("normalhedge", 8) > max(0.9, mean("ucb", 8))


def test_theory_prints_what_full_information_costs(tmp_path, capsys):
    out = tmp_path / "out.json"
    options = ["--policies", "ucb+bd", "--tokens", "64", "--drafters", "2,4", "--rounds", "20", "--score-cost", "0.1"]
    assert main(["theory", *options, "--quick", "--json", str(out)]) == 0
    told = json.loads(out.read_text())["information"]
    assert told["hedge"]["4"]["net"] == pytest.approx(told["hedge"]["4"]["gross"] / 1.1)  # 4 drafters every 4 rounds
    assert told["ucb"]["4"]["net"] == told["ucb"]["4"]["gross"]
    assert "N=4 net" in capsys.readouterr().out
    assert main(["theory", "--drafters", "1"]) == 2


def test_wrong_acceptances_are_named(capsys):
    assert main(["theory", "--alphas", "0.5,2"]) == 2
    assert "between 0 and 1" in capsys.readouterr().err


# -- cost of a choice --------------------------------------------------------------------------------------------------


def test_policies_times_every_policy_and_the_memory(tmp_path):
    out = tmp_path / "out.json"
    assert main(["policies", "--repetitions", "1", "--arms", "4", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert set(told["policies"]) == set(policy_names())
    assert len(told["contextual"]) == 3
    assert all(0 < one["microseconds"] <= one["most"] for one in told["policies"].values())
    assert told["memory_load_ms"] > 0
