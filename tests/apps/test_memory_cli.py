"""``metasd memory``: the table, the JSON, what is deleted, and what is wrong with a file."""

import json
import re
import sqlite3

import numpy as np
import pytest
from typer.testing import CliRunner

from metasd_langchain.bandits.memory import Change, Key, SqliteMemory
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.bandits.shelf import save_all
from metasd_langchain.cli import app
from metasd_langchain.testing.policy_contract import play
from metasd_langchain.values import PLAIN, Arm, Situation

ARMS = ("suffix@8", "lookup@8", PLAIN)


def metasd(*arguments):
    return CliRunner().invoke(app, ["memory", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    """Two steps of no scope and one of ann's: suffix@8 earns 0.5 of 16, lookup@8 0.25, plain 1/16."""
    where = tmp_path / "bandit.sqlite"
    arms = [Arm(name, name.partition("@")[0], 8) for name in ARMS]
    key = Key("llama float32 cpu 0123abcd", "ucb", "pool", "throughput 0 to 16")
    memory = SqliteMemory(where)
    made = Selector(arms, policy_factory("ucb"), reward_named("throughput"), memory=memory, stored=key)
    worth = dict(zip(ARMS, (0.5, 0.25, 0.0625), strict=True))
    for place, rounds in (("/rewrite", 30), ("/answer", 12), ("ann@example.org/rewrite", 5)):
        seat = made.open(place, np.random.default_rng(0))
        for _ in range(rounds):
            seat.choose({})
            choice = seat._policy.select(Situation(ARMS), seat._rng)
            made.credit(seat._policies, seat._situation, choice, 16 * worth[choice.arm])
    save_all()
    return where


def lines(text):
    return [re.sub(r"\s{2,}", "  ", line).strip() for line in text.splitlines()]


def test_show_prints_steps_rounds_and_the_best_arms(file):
    done = metasd("show", file)
    assert done.exit_code == 0, done.output
    shown = lines(done.stdout)
    best = "suffix@8 8.00, lookup@8 4.00, plain 1.00"
    assert shown[:5] == [
        "llama float32 cpu, no scope",
        "step  policy  reward  rounds  best arms",
        f"(all steps)  ucb  throughput 0 to 16  42  {best}",
        "answer  ucb  throughput 0 to 16  12  suffix@8 8.00, lookup@8 4.00",  # warned of plain, it never tried it
        f"rewrite  ucb  throughput 0 to 16  30  {best}",
    ]
    assert re.fullmatch(r"llama float32 cpu, scope [0-9a-f]{16}", shown[5])
    assert shown[7:] == [f"{step}  ucb  throughput 0 to 16  5  {best}" for step in ("(all steps)", "rewrite")]
    assert "ann" not in done.stdout


def test_export_prints_everything_as_json(file):
    done = metasd("export", file)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert [(row["step"], row["rounds"]) for row in found["learned"]] == [
        *((None, 42), ("answer", 12), ("rewrite", 30)),
        *((None, 5), ("rewrite", 5)),
    ]
    row = found["learned"][2]
    assert row["target"] == "llama float32 cpu 0123abcd"
    assert row["policy"] == row["state"]["policy"] == "ucb"
    assert row["values"] == {"suffix@8": 8.0, "lookup@8": 4.0, "plain": 1.0}
    assert list(row["values"]) == list(ARMS)
    assert row["saved"].endswith("+00:00")
    # of its own; what it began with is all steps', and is not stored again
    assert sum(arm["count"] for arm in row["state"]["arms"].values()) == 30


@pytest.mark.parametrize(
    ("options", "deleted", "left"),
    [
        ([], 5, []),
        (["--step", "rewrite"], 2, [None, "answer", None]),
        (["--scope", "ann@example.org"], 2, [None, "answer", "rewrite"]),
        (["--scope", ""], 3, [None, "rewrite"]),
        (["--scope", "ann@example.org", "--step", "rewrite"], 1, [None, "answer", "rewrite", None]),
        (["--step", "no such"], 0, [None, "answer", "rewrite", None, "rewrite"]),
    ],
)
def test_reset_deletes_what_was_named_and_no_more(file, options, deleted, left):
    done = metasd("reset", *options, file)
    assert done.exit_code == 0, done.output
    word = "entry" if deleted == 1 else "entries"
    assert done.output.strip() == f"{deleted} {word} deleted, {len(left)} left"
    assert [row.key.step for row in SqliteMemory(file).rows()] == left


def test_a_memory_without_content_says_so(file):
    metasd("reset", file)
    done = metasd("show", file)
    assert (done.exit_code, done.stdout, done.output.strip()) == (0, "", "nothing is stored yet")
    assert json.loads(metasd("export", file).stdout) == {"schema": 1, "learned": []}


def test_a_policy_that_is_not_installed_is_listed_without_values(file):
    key = Key("m", "of_another_package", "pool", "their_reward 0 to 1", "", "odd\x1b[2Jname")
    state = {"policy": "of_another_package", "secret": 1}
    memory = SqliteMemory(file)
    before = memory.rows()[0].learned
    memory.save([Change(key, before._replace(state=state), before._replace(rounds=0))])
    done = metasd("show", file)
    assert done.exit_code == 0, done.output
    assert "of_another_package" in done.stdout
    assert "\x1b" not in done.stdout
    row = next(row for row in json.loads(metasd("export", file).stdout)["learned"] if row["target"] == "m")
    assert (row["values"], row["state"]) == ({}, state)


@pytest.mark.parametrize("policy", ["hinted_ucb", "linucb", "hedge", "sliding_ucb"])
def test_every_policy_is_shown_with_its_values(file, policy):
    made = policy_factory(policy)()
    play(made, lambda arm: 0.5, 20, np.random.default_rng(0))
    memory = SqliteMemory(file)
    key = Key("a 0123", policy, "pool", "bd 0 to 1", "", "step")
    begun = memory.rows()[0].learned._replace(rounds=0)
    memory.save([Change(key, begun._replace(state=json.loads(json.dumps(made.dump())), rounds=20), begun)])
    shown = lines(metasd("show", file).stdout)
    assert shown[0] == "a, no scope"
    assert shown[2].startswith(f"step  {policy}  bd 0 to 1  20  ")
    assert " 0.50" in shown[2]


@pytest.mark.parametrize("command", ["show", "export", "reset"])
def test_what_is_wrong_with_a_file_is_a_line_and_an_exit_code(tmp_path, command):
    missing, text, theirs = (tmp_path / name for name in ("missing.sqlite", "text", "theirs.db"))
    text.write_text("a shopping list, not a database, and quite a long one\n" * 20)
    with sqlite3.connect(theirs) as connection:
        connection.execute("CREATE TABLE holidays (day TEXT)")
    connection.close()
    for path, code, says in (
        (missing, 2, "a file that exists"),
        (text, 1, "not a database"),
        (theirs, 1, "another program's database"),
        (tmp_path, 1, "is a directory"),
    ):
        done = metasd(command, path)
        assert (done.exit_code, done.stdout) == (code, ""), done.output
        assert says in done.output
        assert "Traceback" not in done.output
    assert not missing.exists()
    with sqlite3.connect(theirs) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("holidays",)]
    connection.close()


def test_help_names_the_commands():
    done = CliRunner().invoke(app, ["memory", "--help"])
    assert done.exit_code == 0
    assert all(command in done.output for command in ("show", "export", "reset"))
