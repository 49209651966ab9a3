"""Bandit memory: nothing learned is lost or found under another key, and no bad file goes unnamed. No torch in here:
processes of their own import this module.
"""

import gc
import json
import math
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from metasd_langchain.assemble import make_pool
from metasd_langchain.bandits import shelf as shelf_module
from metasd_langchain.bandits.joining import FILE_ROUNDS, START_ROUNDS, Learned, evidence, joined, started
from metasd_langchain.bandits.memory import Change, Key, SqliteMemory, memory_named
from metasd_langchain.bandits.policies import ucb
from metasd_langchain.bandits.registry import policy_factory, policy_names, reward_named
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.bandits.shelf import save_all
from metasd_langchain.errors import BadOption, BanditMemoryError
from metasd_langchain.testing.policy_contract import ARMS as CONTRACT_ARMS
from metasd_langchain.testing.policy_contract import play
from metasd_langchain.values import PLAIN, Arm, Choice, Situation

ARMS = (Arm("suffix@8", "suffix", 8), Arm("lookup@8", "lookup", 8), Arm(PLAIN, PLAIN, 0))
KEY = Key("model", "ucb", "pool", "be", "", "step")
NONE = Learned({"policy": "ucb", "arms": {}}, 0)


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "bandit.sqlite")


@pytest.fixture(autouse=True)
def _nothing_pending():
    yield
    save_all()


def sums(rounds, /, **arms):
    """A state of `ucb`: arm -> (count, sum)."""
    rows = {arm: {"count": float(count), "sum": float(total)} for arm, (count, total) in arms.items()}
    return Learned({"policy": "ucb", "arms": rows}, rounds)


def selector(memory, policy="ucb", reward="be", target="model", arms=ARMS, **options):
    made = Selector(arms, policy_factory(policy), reward_named(reward), memory=memory, **options)
    made.bind(target)
    return made


def teach(made, key, rounds, arm="suffix@8", accepted=4):
    seat = made.open(key, np.random.default_rng(0))
    for _ in range(rounds):
        seat._situation = Situation(tuple(one.name for one in made.arms))
        counts = {"drafted": 8, "accepted": accepted, "committed": accepted + 1}
        seat.learn(Choice(arm), **counts, agreement=(0.5,) * 8, draft_s=0.001, score_s=0.05, width=9)
    return seat


def counts_of(made, key):
    return made.open(key, np.random.default_rng(0))._policy.dump()["arms"]


def stored(file, step="step"):
    return next(row.learned for row in SqliteMemory(file).rows() if row.key.step == step)


# -- joining -----------------------------------------------------------------------------------------------------------


def test_what_two_writers_learned_from_one_base_adds_up():
    base = sums(10, a=(10, 5))
    first = joined(base, sums(17, a=(15, 8), b=(2, 1)), base)
    second = joined(first, sums(13, a=(13, 5)), base)
    assert second == sums(20, a=(18, 8), b=(2, 1))


def test_what_was_saved_before_does_not_count_again():
    once = joined(None, sums(5, a=(5, 2)), NONE)
    assert joined(once, sums(8, a=(8, 4)), sums(5, a=(5, 2))) == sums(8, a=(8, 4))


def test_a_warm_start_is_not_stored_as_rounds_of_the_key():
    warm = Learned(sums(0, a=(25, 20)).state, 0)
    assert joined(None, sums(4, a=(29, 21)), warm) == sums(4, a=(4, 1))


def test_a_key_that_was_reset_gets_the_new_rounds_only():
    assert joined(None, sums(103, a=(103, 53)), sums(100, a=(100, 50))) == sums(3, a=(3, 3))


@pytest.mark.parametrize(
    "extra", [{"regrets": {"a": 1.5, "b": -1.5}}, {"squares": {"a": 2.0}}, {"regrets": {"a": 1.0}, "squares": {}}]
)
def test_regrets_and_squares_add_up_too(extra):
    base = Learned({**sums(0, a=(2, 1)).state, **extra}, 2)
    now = Learned({**sums(0, a=(3, 1)).state, **{name: dict.fromkeys("ab", 3.0) for name in extra}}, 3)
    twice = joined(joined(base, now, base), now, base)
    for name, table in extra.items():
        assert twice.state[name] == {arm: pytest.approx(6.0 - table.get(arm, 0.0)) for arm in "ab"}
    assert twice.rounds == 4


def test_of_states_that_are_no_sums_the_one_of_more_rounds_stays():
    few, many = Learned({"policy": "x", "clock": 1.0, "arms": {}}, 5), Learned({"policy": "x", "clock": 2.0}, 9)
    assert joined(few, many, few) == joined(many, few, NONE) == joined(None, many, few) == many
    shrunk = sums(30, a=(3, 1))
    assert joined(sums(20, a=(20, 9)), shrunk, sums(10, a=(10, 5))) == shrunk  # discounted: a difference says nothing


def test_a_policy_may_say_itself_how_states_join():
    def join(stored, now, since):
        return {"best": max(0 if stored is None else stored["best"], now["best"])}

    one, other, base = (Learned({"best": best}, rounds) for best, rounds in ((3, 7), (9, 5), (1, 4)))
    assert joined(one, other, base, join) == Learned({"best": 9}, 8)
    assert joined(None, other, base, join) == Learned({"best": 9}, 1)  # it was reset: only the new comes back


def _hinted(base, arm, rounds, reward):
    made = policy_factory("hinted_ucb")()
    if base is not None:
        made.load(base)
    for _ in range(rounds):
        made.update(Situation(("one@8", "two@8"), {"one@8": 3.0, "two@8": 9.0}), Choice(arm), {arm: reward})
    return json.loads(json.dumps(made.dump()))


def _up_to_date(state):
    for arm in state["arms"].values():
        for cell in arm["cells"].values():
            left = math.exp(arm["clock"] - cell["clock"])
            cell.update(count=cell["count"] * left, total=cell["total"] * left, clock=arm["clock"])
    return {(name, field): row[field] for name, row in state["arms"].items() for field in row if field != "cells"} | {
        (name, label, field): cell[field]
        for name, row in state["arms"].items()
        for label, cell in row["cells"].items()
        for field in cell
    }


def test_the_default_policy_s_states_join_as_if_played_one_after_another():
    base = _hinted(_hinted(None, "one@8", 30, 0.3), "two@8", 5, 0.1)
    join = policy_factory("hinted_ucb")().join
    middle = _hinted(base, "one@8", 4, 0.4)
    end = _hinted(middle, "one@8", 6, 0.2)
    alone = join(join(base, middle, base), end, middle)  # nobody else wrote: its own state
    assert _up_to_date(alone) == pytest.approx(_up_to_date(end))
    other = _hinted(base, "two@8", 20, 0.25)
    both = join(join(base, end, base), other, base)
    assert both["rounds"] == 35 + 10 + 20
    wanted = {**_up_to_date(end), **{path: value for path, value in _up_to_date(other).items() if path[0] == "two@8"}}
    found = _up_to_date(both)
    assert found.pop(("two@8", "seen")) == wanted.pop(("two@8", "seen")) + 10
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("policy", policy_names())
def test_what_is_joined_loads_into_its_policy(policy):
    make, rng = policy_factory(policy), np.random.default_rng(0)

    def learned(base, rounds):
        made = make()
        if base is not None:
            made.load(base.state)
        play(made, lambda arm: 0.2 + 0.1 * CONTRACT_ARMS.index(arm), rounds, rng)
        return Learned(json.loads(json.dumps(made.dump())), rounds + (0 if base is None else base.rounds))

    base = joined(None, learned(None, 30), Learned(make().dump(), 0))
    whole = joined(joined(base, learned(base, 40), base), learned(base, 20), base)
    reader = make()
    reader.load(started(make().dump(), whole.state))
    assert reader.select(Situation(CONTRACT_ARMS), rng).arm in CONTRACT_ARMS
    assert whole.rounds in {90, 70}  # joined, or the larger of the two
    if policy in {"ucb", "ucbspec", "fixed", "random", "thompson", "exp3", "exp3spec"}:  # as joining.py says
        assert evidence(whole.state) == pytest.approx(90)


def test_old_evidence_is_capped_and_its_means_stay():
    old = sums(50_000, a=(30_000, 15_000), b=(20_000, 2_000))
    new = joined(old, sums(1_000, a=(1_000, 900)), NONE)
    assert new.rounds == 51_000
    assert evidence(new.state) == pytest.approx(FILE_ROUNDS)
    assert new.state["arms"]["b"]["sum"] / new.state["arms"]["b"]["count"] == pytest.approx(0.1)
    begun = started(NONE.state, old.state)
    assert evidence(begun) == pytest.approx(START_ROUNDS)
    assert begun["arms"]["a"]["sum"] / begun["arms"]["a"]["count"] == pytest.approx(0.5)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_as_it_was(file):
    memory = SqliteMemory(file)
    assert memory.load(KEY) is None
    memory.save([Change(KEY, sums(3, a=(3, 0.1 + 0.2)), NONE)])
    assert memory.load(KEY) == sums(3, a=(3, 0.1 + 0.2))
    assert SqliteMemory(file).load(KEY) == memory.load(KEY)


@pytest.mark.parametrize("field", ["target", "policy", "arms", "reward", "scope", "step"])
@pytest.mark.parametrize("value", ["other", "", None])
def test_every_part_of_a_key_tells_keys_apart(file, field, value):
    fields = {name: getattr(KEY, name) for name in ("target", "policy", "arms", "reward", "scope", "step")}
    if fields[field] == value:
        value = "more"
    memory = SqliteMemory(file)
    memory.save([Change(KEY, sums(3, a=(3, 1)), NONE)])
    assert memory.load(Key(**{**fields, field: value})) is None


def test_the_file_forgets_keys_long_unsaved(file, monkeypatch):
    monkeypatch.setattr("metasd_langchain.bandits.memory._MOST_KEYS", 3)
    memory = SqliteMemory(file)
    for step in "abcde":
        memory.save([Change(Key("model", "ucb", "pool", "be", "", step), sums(1, a=(1, 1)), NONE)])
    assert [row.key.step for row in memory.rows()] == ["c", "d", "e"]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({}, True),
        ({"arms": ARMS[::-1]}, True),
        ({"target": "other"}, False),
        ({"policy": "fixed"}, False),
        ({"reward": "bd"}, False),
        ({"arms": ARMS[:2]}, False),
    ],
)
def test_a_selector_finds_its_own_and_no_other(file, options, same):
    teach(selector(SqliteMemory(file)), "step", 20)
    save_all()
    found = counts_of(selector(SqliteMemory(file), **options), "step")
    assert found == ({"suffix@8": {"count": 25.0, "sum": 12.5}} if same else {})  # 20 of its own, 5 of all steps


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"policy": "ucb"}, {"policy": "ucb", "policy_options": {"beta": 0.5}}),
        ({"policy": ucb.create({"beta": 0.5})}, {"policy": ucb.create({"beta": 0.7})}),
        ({"reward": "be"}, {"reward": Reward("be", 0.0, 2.0, False, len)}),
        ({"arms": ["lookup@8", "plain"]}, {"arms": ["lookup@4", "plain"]}),
        ({"target": "one"}, {"target": "two"}),
    ],
)
def test_a_pool_with_other_options_has_another_key(file, first, second):
    keys = []
    for options in (first, first, second):
        pool = make_pool(**{"policy": "ucb", "target": "model", **options}, memory=file)
        keys.append(pool.selector._stored.digest)
    assert keys[0] == keys[1] != keys[2]


def test_any_policy_object_makes_a_pool():
    policy = ucb.create({})
    policy.odd = {(1, 2): object(), 3: "x", "y": np.zeros(2)}
    policy.odd["itself"] = policy.odd
    assert make_pool(["plain"], policy, memory="process").selector.policy_name == "ucb"


def test_a_new_step_begins_with_what_all_steps_of_its_scope_taught(file):
    made = selector(SqliteMemory(file))
    teach(made, "ann/one", 200)
    save_all()
    again = selector(SqliteMemory(file))
    assert counts_of(again, "ann/two") == {"suffix@8": {"count": 25.0, "sum": 12.5}}
    assert counts_of(again, "ben/two") == counts_of(again, "two") == {}


def test_a_scope_is_stored_as_a_hash_and_the_nameless_one_not_at_all(file):
    for nameless in ("4f1a", "77bc"):
        made = selector(SqliteMemory(file))
        made.bind("model", nameless)
        teach(made, f"{nameless}/step", 3)
        teach(made, "dr-jekyll/step", 3)
        save_all()
    data = b"".join(path.read_bytes() for path in Path(file).parent.iterdir())
    assert b"step" in data
    assert b"jekyll" not in data
    assert b"4f1a" not in data
    assert [row.learned.rounds for row in SqliteMemory(file).rows()] == [6] * 4  # two scopes, each a step and all steps


def test_a_memory_asks_for_the_model(file):
    made = Selector(ARMS, policy_factory("ucb"), reward_named("be"), memory=SqliteMemory(file))
    with pytest.raises(BadOption, match="target"):
        made.open("step", np.random.default_rng(0))


def test_another_target_starts_anew_and_spoils_nothing(file):
    made = selector(SqliteMemory(file))
    teach(made, "step", 10)
    made.bind("another")
    assert counts_of(made, "step") == {}
    teach(made, "step", 5)
    made.bind("model")
    assert counts_of(made, "step")["suffix@8"]["count"] == 12.5
    rounds = {row.key.target: row.learned.rounds for row in SqliteMemory(file).rows()}
    save_all()
    assert rounds == {"model": 10, "another": 5}


# -- several writers ---------------------------------------------------------------------------------------------------


def _credit(file, arm, rounds, ready, go):
    made = selector(SqliteMemory(file))
    teach(made, "step", 0)
    ready.release()
    go.wait(60)
    for _ in range(10):
        teach(made, "step", rounds // 10, arm)
        save_all()


def test_two_processes_writing_at_once_lose_no_round(file):
    spawn = multiprocessing.get_context("spawn")
    ready, go = spawn.Semaphore(0), spawn.Event()
    writers = [spawn.Process(target=_credit, args=(file, arm, 1000, ready, go)) for arm in ("suffix@8", "lookup@8")]
    for writer in writers:
        writer.start()
    assert all(ready.acquire(timeout=60) for _ in writers)
    go.set()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    for step in ("step", None):
        learned = stored(file, step)
        assert learned.rounds == 2000
        assert learned.state["arms"] == {arm: {"count": 1000.0, "sum": 500.0} for arm in ("suffix@8", "lookup@8")}


def test_threads_of_one_process_lose_no_round_either(file):
    def work(arm):
        made = selector(SqliteMemory(file))
        for _ in range(5):
            teach(made, "step", 20, arm)
            save_all()

    threads = [threading.Thread(target=work, args=(arm.name,)) for arm in ARMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    save_all()
    assert stored(file).rounds == 300


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_after_a_fork_each_saves_its_own_rounds(file):
    made = selector(SqliteMemory(file))
    teach(made, "step", 10)
    child = os.fork()
    if child == 0:
        try:
            teach(made, "step", 3)
            save_all()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert stored(file).rounds == 3  # the first ten are the parent's to save
    save_all()
    assert stored(file).rounds == 13
    assert stored(file).state["arms"]["suffix@8"]["count"] == 13.0


_SCRIPT = """
import sys
from tests.unit.test_bandits_memory import SqliteMemory, selector, teach
made = selector(SqliteMemory(sys.argv[1]))
teach(made, "step", 7)
if len(sys.argv) > 2:
    raise SystemExit("ends early")
"""


@pytest.mark.parametrize("early", [[], ["early"]])
def test_a_process_that_ends_saves_first(file, early):
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", _SCRIPT, file, *early], cwd=root, check=not early, stderr=subprocess.DEVNULL)
    assert stored(file).rounds == 7


def test_rounds_are_saved_soon_by_a_thread_of_their_own(file, monkeypatch):
    monkeypatch.setattr(shelf_module, "_EVERY_S", 0.01)
    threads = set()
    save = SqliteMemory.save

    def watched(self, changes):
        threads.add(threading.current_thread().name)
        save(self, changes)

    monkeypatch.setattr(SqliteMemory, "save", watched)
    made = selector(SqliteMemory(file))
    teach(made, "step", 5)
    until = time.monotonic() + 30
    while not threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threads == {"metasd-memory"}


def test_what_a_dropped_selector_learned_is_saved(file):
    teach(selector(SqliteMemory(file)), "step", 5)
    gc.collect()
    save_all()
    assert stored(file).rounds == 5


def test_a_key_that_leaves_for_others_is_saved_and_found_again(file):
    made = selector(SqliteMemory(file), capacity=1)
    for step in "abc":
        teach(made, step, 4)
    save_all()
    assert [stored(file, step).rounds for step in "abc"] == [4, 4, 4]
    assert len(made._shelf._entries) == 2  # the latest step, and all steps
    teach(made, "a", 1)
    save_all()
    assert stored(file, "a").rounds == 5


def test_forgetting_is_the_process_s_and_the_file_keeps_what_it_has(file):
    made = selector(SqliteMemory(file))
    for step in "ab":
        teach(made, step, 10)
    made.forget()
    assert counts_of(made, "a") == counts_of(made, "b") == {}
    teach(made, "a", 1)
    save_all()
    assert stored(file, "a") == sums(11, **{"suffix@8": (11, 5.5)})
    other = selector(SqliteMemory(file))
    other.forget("a")
    assert counts_of(other, "a")["suffix@8"]["count"] == pytest.approx(0.25 * 21)  # what all steps know, no more
    assert counts_of(other, "b")["suffix@8"]["count"] > 10


@pytest.mark.parametrize("policy", ["hinted_ucb", "ucb", "thompson", "linucb"])
def test_a_process_goes_on_where_the_last_one_stopped(file, policy):
    first = selector(SqliteMemory(file), policy)
    teach(first, "step", 12, "suffix@8", 6)
    known = teach(first, "step", 12, "lookup@8", 1).values()
    save_all()
    found = selector(SqliteMemory(file), policy).open("step", np.random.default_rng(0)).values()
    assert found == pytest.approx(dict(known))


class Own:
    """A user's memory."""

    def __init__(self):
        self.kept, self.loads = {}, []

    def load(self, key):
        self.loads.append(key)
        return self.kept.get(key)

    def save(self, changes):
        for key, now, since, join in changes:
            self.kept[key] = joined(self.kept.get(key), now, since, join)


def test_a_memory_of_your_own_is_asked_once_a_key():
    own = Own()
    made = selector(own)
    for _ in range(3):
        teach(made, "one", 2)
        teach(made, "two", 2)
    save_all()
    assert [key.step for key in own.loads] == [None, "one", "two"]
    assert [learned.rounds for learned in own.kept.values()] == [12, 6, 6]


# -- bad files ---------------------------------------------------------------------------------------------------------


def _filled(file):
    memory = SqliteMemory(file)
    memory.save(
        [Change(Key("model", "ucb", "pool", "be", "", str(step)), sums(3, a=(3, 1)), NONE) for step in range(99)]
    )
    return Path(file)


def _newer(file):
    _filled(file)
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _anothers(file):
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE holidays (day TEXT)")
    connection.close()


def _cut(share):
    def cut(file):
        data = _filled(file).read_bytes()
        Path(file).write_bytes(data[: int(len(data) * share)])

    return cut


def _garbled(file):
    data = bytearray(_filled(file).read_bytes())
    data[5000:9000] = bytes(4000)
    Path(file).write_bytes(bytes(data))


BAD = {
    "newer schema": (_newer, "schema 99.*schema 1"),
    "another program's": (_anothers, "another program"),
    "cut to half": (_cut(0.5), "damaged or was cut short"),
    "cut by a bit": (_cut(0.97), "damaged or was cut short"),
    "cut to its head": (_cut(0.01), "damaged|not a database"),
    "garbled": (_garbled, "damaged"),
    "text": (
        lambda file: Path(file).write_text("a shopping list, not a database, and a long one at that\n" * 9),
        "not a d",
    ),
    "directory": (lambda file: Path(file).mkdir(), "is a directory"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_at_construction_and_left_as_it_was(file, name):
    spoil, says = BAD[name]
    good = SqliteMemory(file)
    spoil(file)
    before = None if Path(file).is_dir() else Path(file).read_bytes()
    with pytest.raises(BanditMemoryError, match=says) as caught:
        SqliteMemory(file)
    assert file in str(caught.value)
    with pytest.raises(BanditMemoryError, match=says):
        make_pool(memory=file)
    if name in ("newer schema", "another program's", "text", "directory"):  # SQLite sees the rest when it reads on
        for use in (lambda: good.load(KEY), lambda: good.save([Change(KEY, sums(1, a=(1, 1)), NONE)]), good.rows):
            with pytest.raises(BanditMemoryError, match=says):
                use()
    assert before == (None if Path(file).is_dir() else Path(file).read_bytes())


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(BanditMemoryError, match=r"nowhere.*no such folder"):
        SqliteMemory(tmp_path / "nowhere" / "bandit.sqlite")


def test_an_empty_file_is_a_memory_without_content(file):
    Path(file).touch()
    memory = SqliteMemory(file)
    assert memory.load(KEY) is None
    memory.save([Change(KEY, sums(1, a=(1, 1)), NONE)])
    assert memory.load(KEY) == sums(1, a=(1, 1))


def test_constructing_and_loading_make_no_file(file):
    assert SqliteMemory(file).load(KEY) is None
    assert SqliteMemory(file).rows() == []
    assert SqliteMemory(file).reset() == 0
    assert not Path(file).exists()


_READER = """
import os, sys
from metasd_langchain.bandits.memory import Change, SqliteMemory
from tests.unit.test_bandits_memory import KEY, NONE, sums
if os.geteuid() == 0:
    os.setuid(65534)  # root may write everywhere
memory = SqliteMemory(sys.argv[1])
print(memory.load(KEY).rounds)
for use in (lambda: memory.save([Change(KEY, sums(1, a=(1, 1)), NONE)]), lambda: SqliteMemory(sys.argv[2])):
    try:
        use()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="rights of POSIX")
def test_a_file_in_a_folder_that_cannot_be_written_is_read():
    """Shipped in an image, say: WAL has no room for files of its own there."""
    folder = Path(tempfile.mkdtemp(prefix="metasd-"))
    try:
        file = folder / "bandit.sqlite"
        SqliteMemory(file).save([Change(KEY, sums(3, a=(3, 1)), NONE)])
        file.chmod(0o444)
        (folder / "private").mkdir()
        (folder / "private").chmod(0)
        folder.chmod(0o555)
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", _READER, file, folder / "private" / "b.db"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["3", "BanditMemoryError", "BanditMemoryError"], done.stderr
    finally:
        folder.chmod(0o755)
        (folder / "private").chmod(0o755)
        shutil.rmtree(folder)


# -- names, and reset -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["process", "request"])
def test_names_stay_names(value):
    assert memory_named(value) == value


@pytest.mark.parametrize("path", ["a.sqlite", "a.db", "./a", "a.sqlite3"])
def test_strings_that_look_like_files_are_files(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    made = memory_named(path)
    assert isinstance(made, SqliteMemory)
    assert made.path == str(tmp_path / "a") + Path(path).suffix


@pytest.mark.parametrize("value", ["disk", "", "sqlite", ":memory:", 3, None, ["process"], True])
def test_anything_else_is_refused_with_what_there_is(value):
    with pytest.raises(BadOption, match=r"'process', 'request', a file such as 'bandit\.sqlite'"):
        make_pool(memory=value)


def test_reset_on_disk_takes_a_scope_or_a_step(file):
    memory = SqliteMemory(file)
    made = selector(memory)
    for key in ("ann/a", "ann/b", "ben/a", "/a"):
        teach(made, key, 1)
    save_all()
    assert len(memory.rows()) == 7  # four steps, and all steps of three scopes
    assert memory.reset(scope="ann", step="a") == 1
    assert memory.reset(scope="") == 2
    assert memory.reset(step="a") == 1
    assert memory.reset(scope="nobody") == 0
    assert len(memory.rows()) == 3
    assert memory.reset() == 3
    assert memory.rows() == []
