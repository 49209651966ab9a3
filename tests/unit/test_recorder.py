"""The recorder: what a line says is what happened, text stays out unless asked for, and nothing costs an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool

from metasd_langchain import MetaSDLLM
from metasd_langchain.assemble import make_pool
from metasd_langchain.engine.generation import Generation
from metasd_langchain.engine.loop import Engine
from metasd_langchain.errors import BadOption, DeadlineExceeded, PromptTooLong
from metasd_langchain.events import CallEnded, CallStarted, RoundPlayed
from metasd_langchain.telemetry import read_trace, record, recorder, runs, traced, tracefile
from metasd_langchain.telemetry.texts import Texts
from metasd_langchain.values import Request
from tests.apps.traces import call as made_call
from tests.bugs.kit import PROMPT, encode, hostile, make, perfect, ref, scripted
from tests.unit.calls import CANARY, CAPTURE


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("METASD_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "run.jsonl"
    assert not recorder._open


def recorded(path, work, **options):
    with record(path, **options) as recording:
        work()
        return recording.trace().calls


# -- what a line says --------------------------------------------------------------------------------------------------


def test_a_line_says_what_happened(path):
    llm = make(logprobs=True)
    steps = []
    (call,) = recorded(path, lambda: steps.extend(llm.steps(PROMPT)), capture_content=True)
    summary = steps[-1].summary
    assert tuple(token.id for token in call.tokens) == ref()
    named = [llm._load().target.token_text(token) for token in ref()]
    assert all(
        token.text.endswith(shown)
        for token, (shown, raw) in zip(call.tokens, named, strict=True)
        if shown.encode() == raw
    )
    assert [token.position for token in call.tokens] == list(range(len(ref())))
    assert [token.logprob for token in call.tokens] == pytest.approx(
        [one.logprob for step in steps for one in step.logprobs], abs=1e-5
    )
    assert call.prompt == PROMPT
    assert (call.model, call.policy, call.step) == ("gemma3_text", summary.policy, summary.step)
    assert (call.prompt_tokens, call.completion_tokens) == (len(encode(PROMPT)), len(ref()))
    assert (call.finish_reason, call.error, call.stream, call.run, call.path) == ("length", "", True, "", ())
    for line, record_ in zip(call.rounds, summary.rounds, strict=True):
        assert (line.arm, line.drafted, line.accepted) == (record_.arm, record_.drafted, record_.accepted)
        assert line.total_s == pytest.approx(record_.total_s, abs=1e-6)
    ends = [one.at_s for one in call.rounds]
    assert ends == sorted(ends)
    assert ends[-1] <= call.total_s + 1e-6


def test_rounds_carry_the_choice_its_probability_and_every_arms_value(path):
    llm = make(policy="exp3", memory="request")
    (call,) = recorded(path, lambda: llm.invoke(PROMPT))
    chosen = [one for one in call.rounds if one.chosen]
    assert len(chosen) >= len(call.rounds) - 1
    assert all(one.chosen in call.arms for one in chosen)
    assert any(one.probability < 1.0 for one in chosen)
    assert set(call.rounds[-1].values) <= set(call.arms)
    assert call.rounds[-1].values != call.rounds[0].values


@pytest.mark.parametrize(
    ("drafter", "kinds"),
    [(perfect(), {"accepted", "bonus"}), (hostile(), {"correction"}), (None, {"plain"})],
    ids=["perfect", "hostile", "nobody"],
)
def test_tokens_say_who_supplied_them(path, drafter, kinds):
    llm = make(speculative=False) if drafter is None else scripted(drafter, 4)
    (call,) = recorded(path, lambda: llm.invoke(PROMPT, max_tokens=20))
    # the last round has no room for a draft
    assert {token.kind for token in call.tokens if token.round < len(call.rounds) - 1} == kinds
    for index, one in enumerate(call.rounds):
        mine = [token.kind for token in call.tokens if token.round == index]
        assert len(mine) == one.committed
        assert mine.count("accepted") == one.accepted
        assert mine[: one.accepted] == ["accepted"] * one.accepted
        assert ("bonus" in mine) == one.bonus


def test_tokens_that_a_grammar_forces_say_so(path):
    llm = make(choices=["the cat sat on the mat and then"], max_tokens=24)
    (call,) = recorded(path, lambda: llm.invoke(PROMPT))
    kinds = [token.kind for token in call.tokens]
    assert kinds.count("forced") > 1
    assert set(kinds) <= {"forced", "plain", "accepted"}


def test_a_tree_accepted_to_a_leaf_gives_a_bonus(path):
    (call,) = recorded(path, lambda: scripted(perfect("tree"), 6).invoke(PROMPT))
    assert any(one.bonus and one.accepted < one.drafted for one in call.rounds)


def test_every_way_of_calling_leaves_one_line(path):
    llm = make()

    def work():
        llm.invoke(PROMPT)
        "".join(llm.stream(PROMPT))
        llm.batch([PROMPT, PROMPT])
        asyncio.run(llm.ainvoke(PROMPT))
        asyncio.run(llm.abatch([PROMPT]))

    calls = recorded(path, work, capture_content=True)
    assert len(calls) == 6
    assert {tuple(token.id for token in call.tokens) for call in calls} == {ref()}
    assert len({call.run for call in calls}) == 6


# -- text --------------------------------------------------------------------------------------------------------------


def test_without_content_no_text_and_no_ids(path):
    llm = make()
    llm.invoke(PROMPT)

    def work():
        llm.invoke(f"{CANARY} {PROMPT}", stop=[CANARY])
        with pytest.raises(PromptTooLong):
            llm.invoke(CANARY * 200)

    calls = recorded(path, work)
    assert CANARY not in path.read_text()
    assert all(token.id is None and token.text is None for call in calls for token in call.tokens)
    assert [call.prompt for call in calls] == [None, None]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("recording", "model", "variable", "kept"),
    [
        (None, None, "", False),
        (None, None, "SPAN_ONLY", True),
        (None, None, "true", True),
        (None, None, "NO_CONTENT", False),
        (None, True, "", True),
        (None, False, "true", False),
        (False, True, "true", False),
        (True, False, "", True),
    ],
)
def test_content_is_the_recordings_then_the_models_then_the_variables_choice(
    monkeypatch, recording, model, variable, kept
):
    monkeypatch.setenv(CAPTURE, variable)
    assert recorder.Recording("x", capture_content=recording).captures(model) is kept


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it():
    pieces = {0: ("<0xC3>", b"\xc3"), 1: ("<0xA9>", b"\xa9"), 2: (" a", b" a"), 3: ("<0xFF>", b"\xff")}
    texts = Texts(pieces.__getitem__)
    assert [texts.next(token) for token in (2, 0, 1, 3, 0, 2)] == [" a", "", "\u00e9", "\ufffd", "", "\ufffd a"]
    assert Texts(None).next(0) is None


# -- on and off --------------------------------------------------------------------------------------------------------


def test_nothing_is_asked_for_nobody(monkeypatch):
    asked = []
    monkeypatch.setattr(Generation, "last_choice", property(asked.append))
    assert recorder.watch(lambda: pytest.fail("nobody records")) == []
    make().invoke(PROMPT)
    assert asked == []


def test_a_closed_recording_hears_no_more(path):
    llm = make()
    with record(path):
        llm.invoke(PROMPT)
    llm.invoke(PROMPT)
    assert len(read_trace(path).calls) == 1


def test_the_variable_records_where_it_says(path, monkeypatch):
    monkeypatch.setenv("METASD_TRACE_FILE", str(path))
    make().invoke(PROMPT)
    assert recorder.flush()
    assert len(read_trace(path).calls) == 1


def test_without_a_path_the_newest_in_the_cache_is_the_last(path, monkeypatch):
    monkeypatch.setattr(tracefile, "_KEPT", 2)
    with pytest.raises(BadOption, match="METASD_TRACE_FILE"):
        tracefile.last_trace()
    llm = make()
    made = []
    for age in (300, 200, 100):
        with record() as recording:
            llm.invoke(PROMPT, max_tokens=2)
        made.append(recording.path)
        stamp = recording.path.stat().st_mtime - age
        os.utime(recording.path, (stamp, stamp))
    assert tracefile.last_trace() == made[-1]
    with record() as recording:
        llm.invoke(PROMPT, max_tokens=2)
    assert sorted(tracefile._cache().iterdir()) == sorted([made[-1], recording.path])  # older ones went


# -- the runs around ---------------------------------------------------------------------------------------------------


def outer(llm):
    inner = (PromptTemplate.from_template("{x} sat on the") | llm).with_config(run_name="inner")
    return (inner | RunnableLambda(lambda text: text)).with_config(run_name="outer")


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "thread", "batch"])
def test_a_call_knows_the_chains_around_it(path, way):
    chain = outer(make())

    def work():
        if way == "ainvoke":
            asyncio.run(chain.ainvoke({"x": "the cat"}))
        elif way == "batch":
            chain.batch([{"x": "the cat"}])
        elif way == "thread":
            thread = threading.Thread(target=chain.invoke, args=({"x": "the cat"},))
            thread.start()
            thread.join()
        else:
            chain.invoke({"x": "the cat"})

    (call,) = recorded(path, work)
    assert [run.name for run in call.path] == ["outer", "inner"]
    assert call.label == "inner"
    assert runs._runs == {}


def test_tools_and_failures_are_forgotten_when_they_end(path):
    llm = make()

    @tool
    def ask(text: str) -> str:
        """Ask the model."""
        return llm.invoke(text)

    def fail(_):
        llm.invoke(PROMPT)
        raise KeyError

    def work():
        ask.invoke({"text": PROMPT})
        with pytest.raises(KeyError):
            RunnableLambda(fail).with_config(run_name="fails").invoke(1)

    calls = recorded(path, work)
    assert [[run.name for run in call.path] for call in calls] == [["ask"], ["fails"]]
    assert runs._runs == {}


def test_runs_that_never_end_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(runs, "_RUNS", 10)
    for number in range(50):
        runs.note_run(f"r{number}", f"r{number - 1}", "endless")
    assert len(runs._runs) == 10
    assert len(runs.ancestors("r49")) == 11  # the last one by its id alone
    for number in range(50):
        runs.forget_run(f"r{number}")
    assert runs._runs == {}


# -- failures ----------------------------------------------------------------------------------------------------------


def test_calls_that_fail_are_lines_too(path):
    llm = make()

    def work():
        with pytest.raises(PromptTooLong):
            outer(llm).invoke({"x": "x" * 2000})
        with pytest.raises(DeadlineExceeded):
            llm.invoke(PROMPT, timeout=1e-9)
        stream = llm.stream(PROMPT, max_tokens=400)
        next(stream)
        stream.close()
        while llm._load().live:  # the engine sees it before its next round
            time.sleep(0.005)

    failed, late, left = recorded(path, work)
    assert (failed.error, failed.finish_reason, failed.rounds) == ("PromptTooLong", "error", ())
    assert [run.name for run in failed.path] == ["outer", "inner"]
    assert late.error == "DeadlineExceeded"
    assert (left.error, left.finish_reason) == ("", "cancelled")
    assert left.completion_tokens == len(left.tokens)


def test_a_request_that_never_ran_starts_and_ends_for_its_observers():
    heard = {0: [], 1: [], 2: []}

    class Ear:
        def __init__(self, name):
            self.name = name

        def on(self, event):
            heard[self.name].append(event)

    engine = Engine(make()._load().target, max_batch=1)
    pool = make_pool(("plain",), "fixed", memory="request")
    prompt = encode(PROMPT)
    first = engine.generate(Request(prompt, max_tokens=400), pool, observers=[Ear(0)])
    second = engine.generate(Request(prompt, max_tokens=4), pool, observers=[Ear(1)])
    next(first)
    second.close()
    third = engine.generate(Request(prompt, max_tokens=4, deadline_s=1e-9), pool, observers=[Ear(2)])
    with pytest.raises(DeadlineExceeded):
        list(third)
    first.close()
    engine.close()
    assert [type(event) for event in heard[1]] == [CallStarted, CallEnded]
    assert heard[1][1].summary.finish_reason == "cancelled"
    assert [type(event) for event in heard[2]] == [CallStarted, CallEnded]
    assert isinstance(heard[2][1].error, DeadlineExceeded)
    assert isinstance(heard[0][0], CallStarted)
    assert {type(event) for event in heard[0][1:-1]} == {RoundPlayed}
    assert isinstance(heard[0][-1], CallEnded)


def test_a_failed_write_is_told_once_and_answers_go_on(path, caplog):
    path.write_text("a file, not a folder")
    llm = make()
    with caplog.at_level(logging.WARNING, "metasd_langchain"), record(path / "run.jsonl"):
        texts = {llm.invoke(PROMPT) for _ in range(3)}
    assert len(texts) == 1
    told = [one.getMessage() for one in caplog.records if "was not written" in one.getMessage()]
    assert len(told) == 1


def test_a_tokenizer_that_fails_costs_the_text_and_not_the_line(path, monkeypatch):
    llm = make()
    monkeypatch.setattr(type(llm._load().target), "token_text", lambda self, token: 1 / 0)
    (call,) = recorded(path, lambda: llm.invoke(PROMPT), capture_content=True)
    assert {token.text for token in call.tokens} == {""}
    assert tuple(token.id for token in call.tokens) == ref()


def test_a_very_long_call_keeps_what_fits_and_counts_the_rest(path, monkeypatch):
    monkeypatch.setattr(recorder, "ROUNDS_CAP", 5)
    (call,) = recorded(path, lambda: make(speculative=False).invoke(PROMPT))
    assert len(call.rounds) == 5
    assert call.left_out == len(ref()) - 5
    assert call.completion_tokens == len(ref())


def test_too_many_waiting_lines_are_lost_and_said_to_be(path, monkeypatch, caplog):
    monkeypatch.setattr(tracefile, "_WAITING", 2)
    writer, hold = tracefile.Writer(), threading.Event()

    def slow():
        hold.wait(30)
        raise ValueError

    with caplog.at_level(logging.WARNING, "metasd_langchain"):
        for _ in range(6):
            writer.put(path, slow)
        hold.set()
        assert writer.flush(30)
    assert "too many calls wait" in caplog.text


# -- the file ----------------------------------------------------------------------------------------------------------


def test_threads_and_processes_append_whole_lines(path):
    script = (
        "import sys, threading\nfrom pathlib import Path\nfrom metasd_langchain.telemetry import tracefile\n"
        "def work(name):\n    for i in range(40):\n"
        "        tracefile._append(Path(sys.argv[1]), (name * 20000 + str(i)).encode() + b'\\n')\n"
        "threads = [threading.Thread(target=work, args=(name,)) for name in sys.argv[2]]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, str(path), names]) for names in ("ab", "cd")]
    assert [process.wait(60) for process in processes] == [0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(name * 20000 + str(i) for name in "abcd" for i in range(40))


def test_a_line_after_one_that_a_crash_cut_short_is_whole(path):
    path.write_text('{"format":"metasd-trace","ver')
    llm = make()
    recorded(path, lambda: llm.invoke(PROMPT))
    trace = read_trace(path)
    assert (len(trace.calls), trace.unreadable) == (1, 1)


def test_lines_that_do_not_fit_are_counted_and_left_out(path):
    recorded(path, lambda: make().invoke(PROMPT))
    good = json.loads(path.read_text())
    damage = [
        {"version": 2},
        {"rounds": "no"},
        {"started": float("nan")},
        {"tokens": [{**good["tokens"][0], "kind": "magic"}]},
        {"tokens": [{**good["tokens"][0], "round": 10_000}]},
        {"tokens": [{**good["tokens"][0], "position": -1}]},
        {"tokens": [{**good["tokens"][0], "text": 5}]},
        {"rounds": [{**good["rounds"][0], "drafted": True}]},
        {"rounds": [{**good["rounds"][0], "values": {"plain": "high"}}]},
        {"path": [{"name": "no id"}]},
        {"model": None},
        {"pid": 1e300},
    ]
    bad = [json.dumps({**good, **change}) for change in damage] + [
        "[]",
        "null",
        "{",
        '"text"',
        "[" * 100_000,
        "\x00\xff",
    ]
    path.write_text("\n".join(["", *bad, json.dumps(good), ""]))
    trace = read_trace(path)
    assert (len(trace.calls), trace.unreadable) == (1, len(bad))
    assert trace.calls[0] == traced._call(json.dumps(good).encode())


def test_a_file_without_a_call_and_no_file_are_told_apart(path):
    with pytest.raises(BadOption, match="can be read"):
        read_trace(path)
    path.write_text("hello\n")
    with pytest.raises(BadOption, match="at least one call"):
        read_trace(path)


def test_the_newest_calls_of_a_large_file_are_kept(path, monkeypatch):
    monkeypatch.setattr(traced, "CALLS_CAP", 3)
    llm = make()
    recorded(path, lambda: [llm.invoke(PROMPT, max_tokens=count) for count in range(1, 6)])
    trace = read_trace(path)
    assert [call.completion_tokens for call in trace.calls] == [3, 4, 5]
    assert trace.left_out == 2


def test_a_line_read_back_is_the_call_that_was_written():
    made = made_call(30)
    again = traced._call(made.line())
    assert [token.kind for token in again.tokens] == [token.kind for token in made.tokens]
    assert again.line() == made.line()


def test_reading_and_drawing_load_neither_torch_nor_langchain():
    script = (
        "import sys, metasd_langchain.telemetry.recorder, metasd_langchain.telemetry.page, metasd_langchain.cli.trace\n"
        "sys.exit(bool({'torch', 'transformers', 'langchain_core'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.embedded
def test_texts_of_the_embedded_models_tokens_are_the_answer(tmp_path):  # not `path`, which has a cache of its own
    llm = MetaSDLLM(max_tokens=12)
    said = []
    prompt = "\u65e5\u672c\u8a9e, \u4e2d\u6587, \U0001f600\U0001f680, na\u00efve caf\u00e9: "
    (call,) = recorded(tmp_path / "run.jsonl", lambda: said.append(llm.invoke(prompt)), capture_content=True)
    assert "".join(token.text for token in call.tokens) == said[0]
