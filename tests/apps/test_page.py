"""The page as a file: nothing from outside, nothing believed, everything in it. What a browser makes of it is tested in
``test_page_chromium.py``."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from importlib import resources

import pytest

from metasd_langchain.errors import MissingExtra
from metasd_langchain.telemetry.page import fragment, render
from metasd_langchain.telemetry.traced import Trace
from tests.apps.traces import HOSTILE, call, hostile, pipeline

ASSETS = resources.files("metasd_langchain.telemetry") / "page_assets"


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: list[tuple[str, str | None, str]] = []
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in {"script", "style"}:
            self._open = [tag, dict(attrs).get("type"), ""]

    def handle_data(self, data):
        if self._open:
            self._open[2] += data

    def handle_endtag(self, tag):
        if self._open and tag == self._open[0]:
            self.blocks.append(tuple(self._open))
            self._open = []


def sources(policy, directive):
    (found,) = re.findall(rf"{directive} ([^;]*)", policy)
    return found.split()


@pytest.mark.parametrize("trace", [pipeline(3), hostile()], ids=["pipeline", "hostile"])
def test_the_policy_lets_exactly_the_pages_own_blocks_run(trace):
    page = Page(render(trace))
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        texts = [text for name, kind, text in page.blocks if name == tag and kind is None]
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert len(texts) == 2
        assert sources(policy, directive) == hashes


def test_nothing_is_fetched_and_no_attribute_runs():
    page = Page(render(hostile()))
    for tag, attributes in page.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base", "a"}
        assert not any(name.startswith("on") or name in {"src", "style"} for name in attributes)
        assert tag != "link" or attributes["href"] == "data:,"


def test_data_survives_and_cannot_end_its_block():
    trace = hostile()
    page = Page(render(trace))
    (data,) = [text for _, kind, text in page.blocks if kind == "application/json"]
    assert not set(data) & set("<>&")
    told = json.loads(data)
    assert told["name"] == HOSTILE
    assert told["calls"][0]["label"] == HOSTILE
    assert "".join(told["calls"][0]["t"]["x"]) == "".join(token.text for token in trace.calls[0].tokens)
    assert [len(note) > 0 for note in told["notes"]] == [True, True]


def test_a_call_in_columns_says_what_its_rounds_say():
    made = call(30)
    (data,) = [text for _, kind, text in Page(render(Trace("t", (made,)))).blocks if kind == "application/json"]
    (told,) = json.loads(data)["calls"]
    rounds = told["r"]
    assert [told["names"][arm] for arm in rounds["arm"]] == [one.arm for one in made.rounds]
    assert rounds["a"] == [one.accepted for one in made.rounds]
    assert rounds["at"] == [one.at_s for one in made.rounds]
    assert told["t"]["r"] == [token.round for token in made.tokens]
    assert told["t"]["k"] == "".join(token.kind[0] for token in made.tokens)
    assert set(told["values"]) == set(made.arms)
    assert told["values"]["plain"] == pytest.approx([one.values["plain"] for one in made.rounds], rel=1e-3)


def test_without_content_the_page_has_neither_ids_nor_texts():
    (data,) = [t for _, kind, t in Page(render(Trace("t", (call(text=False),)))).blocks if kind == "application/json"]
    (told,) = json.loads(data)["calls"]
    assert told["t"]["x"] is told["t"]["id"] is told["prompt"] is None


def test_vendored_files_are_the_ones_written_down():
    sums = dict(
        reversed(line.split()) for line in (ASSETS / "VENDORED.md").read_text().splitlines() if line[:4] == "    "
    )
    assert set(sums) == {"uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"}
    for name, expected in sums.items():
        assert hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() == expected


def test_scripts_and_styles_cannot_end_their_blocks():
    for path in ASSETS.iterdir():
        if path.name.endswith((".js", ".css")):
            assert "</s" not in path.read_text(encoding="utf-8").lower()


def test_without_jinja_the_error_names_the_extra_and_a_notebook_shows_the_plain_name(monkeypatch):
    from metasd_langchain.telemetry import page

    page._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    trace = Trace("t", (call(),))
    try:
        with pytest.raises(MissingExtra, match=r"metasd-langchain\[page\]"):
            render(trace)
        assert trace._repr_html_() is None
    finally:
        page._environment.cache_clear()


def test_the_notebooks_piece_is_static_and_escaped():
    shown = Page(fragment(hostile()))
    assert {tag for tag, _ in shown.tags} <= {"div", "b", "span", "table", "tr", "td", "th"}
    assert not any(name.startswith("on") for _, attributes in shown.tags for name in attributes)
    assert fragment(hostile()).encode()
    long = fragment(Trace("t", (call(2000),)))
    assert "more" in long
    assert len(long) < 200_000


def test_a_trace_without_calls_is_a_page_too():
    assert render(Trace("empty", ()))
    assert "without calls" in fragment(Trace("empty", ()))


def test_a_saved_page_is_the_rendered_one(tmp_path):
    trace = pipeline(2)
    assert trace.save(tmp_path / "page.html").read_text(encoding="utf-8") == render(trace)
