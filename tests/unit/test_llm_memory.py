"""Memory on disk behind MetaSDLLM: a second object starts where the first stopped, another model does not, and no
answer changes, whatever becomes of the file.
"""

import json
import logging
import pickle
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from metasd_langchain import MetaSDLLM
from metasd_langchain.bandits.memory import SqliteMemory
from metasd_langchain.bandits.shelf import save_all
from metasd_langchain.errors import BanditMemoryError
from metasd_langchain.testing.models import tiny_model
from metasd_langchain.values import PLAIN
from tests.bugs import kit
from tests.unit.test_bandits_memory import stored


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "bandit.sqlite")


@pytest.fixture(autouse=True)
def _nothing_pending():
    yield
    save_all()


def values(llm, **options):
    """What the bandit holds of each arm before a call: a call of no rounds tells."""
    llm._prepared(kit.PROMPT, None, None, 0)
    scope = options.get("scope", llm._shared.scope)
    return llm._pool().selector.open(f"{scope}/{llm.memory_key}", np.random.default_rng(0)).values()


def learned(llm, **options):
    return [step.summary for step in llm.steps(kit.PROMPT, **options)][-1].values


@pytest.mark.parametrize("policy", ["hinted_ucb", "ucb"])
@pytest.mark.parametrize("wrap", [str, SqliteMemory, Path])
def test_a_second_object_starts_with_the_statistics_of_the_first(file, policy, wrap):
    options = {"policy": policy, "memory_key": "step", "memory": wrap(file)}
    known = learned(kit.make(**options))
    assert len(known) > 1
    assert values(kit.make(**options)) == pytest.approx(dict(known))
    fresh = values(kit.make(**{**options, "memory": "process"}))
    assert set(fresh) <= {PLAIN}


@pytest.mark.parametrize(
    "other",
    [
        {"model": (tiny_model(seed=1), kit.TOKENIZER)},
        {"model": (tiny_model("llama"), kit.TOKENIZER)},
        {"policy": "thompson"},
        {"reward": "be"},
        {"drafters": ["suffix@8", "plain"]},
        {"memory_key": "another", "scope": "ann"},
    ],
    ids=["weights", "family", "policy", "reward", "arms", "scope"],
)
def test_what_one_learned_is_not_given_to_another(file, other):
    options = {"policy": "ucb", "memory_key": "step", "memory": file}
    learned(kit.make(**options))
    assert values(kit.make(**{**options, **other}), **{k: v for k, v in other.items() if k == "scope"}) == {}


def test_a_folder_is_known_again_and_its_copy_in_another_dtype_is_not(file, tmp_path):
    kit.MODEL.save_pretrained(tmp_path / "tiny")
    kit.TOKENIZER.save_pretrained(tmp_path / "tiny")
    options = {"model": str(tmp_path / "tiny"), "policy": "ucb", "memory_key": "step", "memory": file, "max_tokens": 24}
    first = MetaSDLLM(dtype="float32", **options)
    known = learned(first)
    first.close()
    assert values(MetaSDLLM(dtype="float32", **options)) == pytest.approx(dict(known))
    assert values(MetaSDLLM(dtype="bfloat16", **options)) == {}


def test_a_user_s_scope_is_found_again_and_by_nobody_else(file):
    options = {"policy": "ucb", "memory_key": "c", "memory": file}
    known = learned(kit.make(**options), scope="a/b")
    again = kit.make(**options)
    assert values(again, scope="a%2Fb") == pytest.approx(dict(known))
    odd = kit.make(**{**options, "memory_key": "b/c"})
    assert values(odd, scope="a") == {}
    assert values(kit.make(**options)) == {}


async def test_answers_are_the_same_with_and_without_memory(file):
    hot = {"temperature": 1.0, "seed": 7}
    tokens = kit.ids(kit.make(), **hot)
    for _ in range(2):
        for policy in ("hinted_ucb", "random"):
            llm = kit.make(memory=file, policy=policy)
            assert kit.ids(llm) == kit.ref()
            assert kit.ids(llm, **hot) == tokens
            texts = {answer.text for answer in (await kit.every_way(llm)).values()}
            assert texts == {kit.decode(kit.ref())}
        save_all()


def test_nothing_touches_the_disk_while_an_answer_runs(file, monkeypatch):
    threads = []
    connect = SqliteMemory._connect

    def watched(self, mode, timeout):
        threads.append((threading.current_thread().name, mode))
        return connect(self, mode, timeout)

    learned(kit.make(memory=file, memory_key="step"))
    save_all()
    monkeypatch.setattr(SqliteMemory, "_connect", watched)
    llm = kit.make(memory=file)
    learned(llm, memory_key="step")
    assert [what for what in threads if what[0] == "metasd-engine"] == [("metasd-engine", "rw")] * 2  # two keys, read
    threads.clear()
    learned(llm, memory_key="step")
    assert not [what for what in threads if what[0] == "metasd-engine"]


def test_closing_saves(file):
    llm = kit.make(memory=file, memory_key="step")
    kit.ids(llm)
    llm._shared._engines.clear()  # the others of this file go on with it
    llm.close()
    assert stored(file).rounds > 0


def test_forget_starts_cold_and_stays_so(file):
    llm = kit.make(memory=file, policy="ucb", memory_key="step")
    known = learned(llm)
    save_all()
    llm.forget()
    assert values(llm) == {}
    assert values(kit.make(memory=file, policy="ucb", memory_key="step")) == pytest.approx(dict(known))


def test_a_pickled_object_takes_the_path_along(file):
    llm = kit.make(memory=SqliteMemory(file), policy="ucb", memory_key="step")
    known = learned(llm)
    save_all()
    revived = pickle.loads(pickle.dumps(llm))  # noqa: S301 - our own bytes
    assert revived.memory == llm.memory
    assert kit.ids(revived) == kit.ref()
    again = pickle.loads(pickle.dumps(llm))  # noqa: S301
    assert set(values(again)) == set(known)
    assert llm._identifying_params["memory"] == revived._identifying_params["memory"] == file
    assert json.dumps(llm._identifying_params["memory"])


def test_one_call_may_use_another_memory(file):
    llm = kit.make(policy="ucb", memory_key="step")
    assert kit.ids(llm, memory=file) == kit.ref()
    assert kit.ids(llm, memory=Path(file)) == kit.ref()
    save_all()
    assert stored(file).rounds > 0


# -- bad files ---------------------------------------------------------------------------------------------------------


def test_a_bad_file_is_an_error_before_a_model_is_loaded(file):
    Path(file).write_text("a shopping list, not a database\n" * 9)
    with pytest.raises(BanditMemoryError, match="not a database"):
        MetaSDLLM(model="no such model", memory=file)


@pytest.mark.parametrize(
    "state", ["{", "[]", "null", '{"policy": "fixed", "arms": {}}', '{"policy": "ucb", "arms": 3}']
)
def test_a_row_that_is_no_state_is_an_error_at_the_first_call(file, state):
    llm = kit.make(memory=file, policy="ucb", memory_key="step")
    kit.ids(llm)
    save_all()
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE learned SET state = ?", (state,))
    connection.close()
    again = kit.make(memory=file, policy="ucb", memory_key="step")
    for _ in range(2):  # and at the next
        with pytest.raises(BanditMemoryError, match=r"bandit\.sqlite"):
            again.invoke(kit.PROMPT)
    assert kit.ids(again, memory="process") == kit.ref()  # the engine lives on


def _read_only(monkeypatch):
    monkeypatch.setattr(SqliteMemory, "_connect", lambda self, mode, timeout: _connected(self, "ro"))
    return "readonly"


def _full(monkeypatch):
    def connect(self, mode, timeout):
        connection = _connected(self, mode)
        connection.execute("PRAGMA max_page_count = 1")
        return connection

    monkeypatch.setattr(SqliteMemory, "_connect", connect)
    return "full"


def _locked(monkeypatch):
    monkeypatch.setattr("metasd_langchain.bandits.memory._WRITE_S", 0.01)
    return "locked"


def _connected(memory, mode):
    return sqlite3.connect(f"{Path(memory.path).as_uri()}?mode={mode}", isolation_level=None, uri=True)


@pytest.mark.parametrize("trouble", [_read_only, _full, _locked])
def test_a_save_that_fails_warns_once_and_the_answers_go_on(file, monkeypatch, caplog, trouble):
    llm = kit.make(memory=file, policy="ucb", memory_key="step")
    kit.ids(llm)
    save_all()
    with monkeypatch.context() as patch:
        says = trouble(patch)
        other = sqlite3.connect(file, isolation_level=None)
        if trouble is _locked:
            other.execute("BEGIN IMMEDIATE")
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                prompt = "a" * 200  # a long state to write, where there is no room
                assert kit.ids(llm) == kit.ref()
                kit.ids(llm, prompt, memory_key="x" * 9000)
                save_all()
        other.close()
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == 1
        assert says in warned[0]
        assert "bandit.sqlite" in warned[0]
        assert prompt not in warned[0]
    kit.ids(llm)
    save_all()
    kept = {entry.key.step: entry.rounds for entry in llm._pool().selector._shelf._entries.values()}
    assert {row.key.step: row.learned.rounds for row in SqliteMemory(file).rows()} == kept  # nothing was lost by it
