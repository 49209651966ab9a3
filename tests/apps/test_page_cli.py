"""``metasd trace``: a table on the terminal, a page beside the trace, errors in a line."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from metasd_langchain.cli import app
from metasd_langchain.telemetry import read_trace
from metasd_langchain.telemetry.page import render
from tests.apps.traces import hostile, pipeline


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """A trace file in the cache folder, the only one."""
    monkeypatch.setenv("METASD_CACHE", str(tmp_path))
    path = tmp_path / "traces" / "run.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"".join(call.line() for call in pipeline(6).calls))
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)], env={"COLUMNS": "140"})


def test_a_summary_is_printed_and_the_page_written_beside_the_trace(trace):
    result = run(trace)
    assert result.exit_code == 0, result.output
    for word in ("step 1", "suffix", "target", "accepted length", "recycling_tree@12", "PromptTooLong"):
        assert word in result.output
    assert trace.with_suffix(".html").read_text(encoding="utf-8") == render(read_trace(trace))


def test_the_last_one_and_another_place(trace, tmp_path):
    old = trace.with_name("old.jsonl")
    old.write_text("not a trace\n")
    os.utime(old, (1, 1))
    result = run("--last", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "run.jsonl" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not trace.with_suffix(".html").exists()


def test_open_asks_the_browser_for_the_file(trace, monkeypatch):
    asked = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(asked.append(url)) or True)
    assert run(trace, "--open").exit_code == 0
    assert asked == [trace.with_suffix(".html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert "no browser" in run(trace, "--open").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "--last"), (("{trace}", "--last"), "--last"), (("nowhere.jsonl",), "can be read")],
    ids=["nothing", "both", "missing"],
)
def test_wrong_arguments_are_a_line_and_exit_code_2(trace, arguments, said):
    result = run(*(str(trace) if one == "{trace}" else one for one in arguments))
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_the_trace_itself_is_never_overwritten(trace, tmp_path):
    before = trace.read_bytes()
    assert run(trace, "--out", trace).exit_code == 2
    odd = trace.rename(tmp_path / "trace.html")
    assert run(odd).exit_code == 2
    assert odd.read_bytes() == before


def test_a_page_that_cannot_be_written_is_an_error(trace):
    assert run(trace, "--out", trace.parent / "no" / "page.html").exit_code == 2


def test_an_empty_cache_says_how_to_record(trace):
    trace.unlink()
    result = run("--last")
    assert result.exit_code == 2
    assert "METASD_TRACE_FILE" in result.output


def test_names_cannot_move_the_cursor(trace):
    trace.write_bytes(b"".join(call.line() for call in hostile().calls))
    result = run(trace)
    assert result.exit_code == 0, result.output
    assert not {"\x07", "\x1b", "\u202e"} & set(result.output)
