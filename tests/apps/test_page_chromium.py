"""The page in a real, headless Chromium: drawn, hovered, walked by keyboard, in both themes, large, and hostile.

Skipped where Chromium is not installed; with METASD_BACKENDS=1 (``make test-backends``) its absence fails.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from metasd_langchain.telemetry.traced import Trace
from tests.apps.chromium import Chromium, installed
from tests.apps.traces import HOSTILE, call, hostile, pipeline

Open = Callable[..., Chromium]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    chromium = Chromium(installed(), tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def show(browser: Chromium, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of a trace; afterwards nothing may have been complained about or asked of a network."""

    def opened(trace: Trace, **options: object) -> Chromium:
        browser.open(trace.save(tmp_path / "page.html"), **options)
        return browser

    yield opened
    assert browser.complaints == []
    assert browser.requests == [(tmp_path / "page.html").as_uri()]


def texts(browser: Chromium, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")


def test_every_token_is_there_with_its_arm_and_kind(show):
    made = call(60)
    page = show(Trace("one.jsonl", (made,)))
    assert "".join(texts(page, "#answer .t")) == "".join(token.text for token in made.tokens)
    kinds = page.run("[...document.querySelectorAll('#answer .t')].map(node => node.classList[1])")
    assert kinds == [token.kind for token in made.tokens]
    colours = page.run("[...document.querySelectorAll('#answer .t')].map(node => node.classList[2])")
    known = {"suffix": "d0", "recycling_tree": "d2", "plain": "dp"}
    assert colours == [known[token.arm.partition("@")[0]] for token in made.tokens]


def test_kinds_differ_in_shape_and_not_in_colour_alone(show):
    page = show(Trace("one.jsonl", (call(400),)))
    shape = "(s => [s.textDecorationStyle, s.textDecorationLine, s.boxShadow === 'none'].join())"
    shapes = [
        page.run(f"{shape}(getComputedStyle(document.querySelector('#answer .{kind}')))")
        for kind in ("accepted", "correction", "bonus", "plain")
    ]
    assert len(set(shapes)) == 4
    page = show(Trace("boxes.jsonl", (call(400, text=False),)))
    glyphs = {kind: set(texts(page, f"#answer .box.{kind}")) for kind in ("accepted", "correction", "bonus", "plain")}
    assert all(len(found) == 1 for found in glyphs.values())
    assert len(set.union(*glyphs.values())) == 4


def test_hovering_a_token_tells_what_is_known_of_it(show):
    made = call(60)
    page = show(Trace("one.jsonl", (made,)))
    at = next(index for index, token in enumerate(made.tokens) if token.kind == "accepted")
    token, played = made.tokens[at], made.rounds[made.tokens[at].round]
    page.hover(f"#answer .t[data-i='{at}']")
    assert page.run("!document.querySelector('#tip').hidden")
    told = dict(
        page.run("[...document.querySelectorAll('#tip tr')].map(row => [...row.cells].map(c => c.textContent))")
    )
    assert told["what"].startswith("accepted")
    assert told["arm"] == token.arm
    assert told["chosen with"] == "probability 0.500"
    assert told["position"] == f"{at + 1} of {len(made.tokens)}"
    assert told["round"] == f"{token.round + 1}: {played.accepted} of {played.drafted} drafted accepted"
    assert told["latency"].startswith(f"{played.total_s / played.committed * 1e3:.1f} ms")
    assert told["token id"] == str(token.id)
    assert "token probability" in told
    same = page.run("[...document.querySelectorAll('#answer .same')].map(node => Number(node.dataset.i))")
    assert same == [index for index, other in enumerate(made.tokens) if other.round == token.round]


def test_the_answer_is_walked_by_keyboard_and_read_out(show):
    made = call(60)
    page = show(Trace("one.jsonl", (made,)))
    page.run("document.querySelector('#answer').focus({focusVisible: true})")
    page.press("Home")
    page.press("ArrowRight")
    assert page.run("document.querySelector('#answer').getAttribute('aria-activedescendant')") == "token-now"
    assert page.run("Number(document.querySelector('#token-now').dataset.i)") == 1
    page.press("ArrowDown")
    first = next(i for i, token in enumerate(made.tokens) if token.round == made.tokens[1].round + 1)
    assert page.run("Number(document.querySelector('#token-now').dataset.i)") == first
    assert f"position {first + 1} of" in texts(page, "#spoken")[0]
    page.press("End")
    assert page.run("Number(document.querySelector('#token-now').dataset.i)") == len(made.tokens) - 1
    page.press("Escape")
    assert page.run("document.querySelector('#tip').hidden")


def test_a_drafters_tokens_can_be_singled_out(show):
    made = call(60)
    page = show(Trace("one.jsonl", (made,)))
    page.click("#drafters button[data-name='suffix']")
    kept = page.run("[...document.querySelectorAll('#answer .kept')].map(node => Number(node.dataset.i))")
    assert kept == [i for i, token in enumerate(made.tokens) if token.arm.startswith("suffix")]
    page.click("#drafters button[data-name='suffix']")
    assert page.run("document.querySelector('.filtered')") is None


def test_calls_are_a_tree_and_each_can_be_selected(show):
    trace = pipeline(20)
    page = show(trace)
    assert texts(page, "#tree > li > .run") == ["agent graph"]
    assert texts(page, "#tree ul > li > .run") == ["plan", "act", "reflect"]
    assert len(texts(page, ".leaf")) == 20
    longest = max(trace.calls, key=lambda one: len(one.rounds))
    assert texts(page, "#step") == [longest.label]
    page.click(".leaf[data-call='3']")
    assert texts(page, "#step") == [trace.calls[3].label]
    assert len(texts(page, "#answer .t")) == len(trace.calls[3].tokens)
    page.press("ArrowDown")
    assert texts(page, ".leaf[aria-selected=true] b") == texts(page, "#step") != [trace.calls[3].label]
    page.click(".leaf[data-call='19']")
    assert texts(page, "#facts .error") == ["PromptTooLong"]


def test_numbers_of_the_table_and_the_costs_are_the_traces(show):
    made = call(200)
    page = show(Trace("one.jsonl", (made,)))
    rows = page.run("[...document.querySelectorAll('#arms tbody tr')].map(r => [...r.cells].map(c => c.textContent))")
    for row, arm in zip(rows, made.arms, strict=True):
        mine = [one for one in made.rounds if one.arm == arm]
        assert row[0] == arm
        assert row[2:4] == [str(len(mine)), f"{sum(one.drafted for one in mine):,}"]
        assert float(row[5]) == pytest.approx(sum(one.committed for one in mine) / len(mine), abs=0.006)
    parts = dict(page.run("costs(state.call)"))
    assert sum(parts.values()) == pytest.approx(made.total_s)
    assert parts["drafting"] == pytest.approx(sum(one.draft_s for one in made.rounds))
    assert parts["verifying"] == pytest.approx(sum(one.score_s for one in made.rounds[1:]))


INKS = """(() => {
  const canvas = document.querySelector('#timeline canvas'), data = canvas.getContext('2d')
    .getImageData(0, 0, canvas.width, canvas.height).data, found = {};
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 250) {
    const key = [data[i], data[i + 1], data[i + 2]].join(); found[key] = (found[key] || 0) + 1; }
  const ink = (name) => {
    const probe = document.body.appendChild(document.createElement('i'));
    probe.style.color = css(name);
    const rgb = getComputedStyle(probe).color.match(/\\d+/g).slice(0, 3).join();
    probe.remove();
    return found[rgb] || 0; };
  return {d0: ink('--d0'), d2: ink('--d2'), d1: ink('--d1'), plain: ink('--plain')};
})()"""


def test_the_timeline_is_painted_in_the_arms_colours_and_leads_to_tokens(show):
    made = call(60)
    page = show(Trace("one.jsonl", (made,)))
    painted = page.run(INKS)
    assert min(painted["d0"], painted["d2"], painted["plain"]) > 100
    assert painted["d1"] < 20  # no arm of that colour played
    page.run("document.querySelector('#timeline').scrollIntoView({block: 'center'})")
    page.hover("#timeline .u-over")
    assert page.run("!document.querySelector('#tip').hidden")
    pointed = int(texts(page, "#tip b")[0].removeprefix("round ")) - 1
    page.click("#timeline .u-over")
    assert made.tokens[page.run("made.now")].round == pointed


def picture(page: Chromium):
    image = pytest.importorskip("PIL.Image")
    return image.open(io.BytesIO(page.picture())).convert("RGB")


def test_light_and_dark_by_preference_and_by_button(show):
    trace = Trace("one.jsonl", (call(60),))
    grounds = {}
    for dark in (False, True):
        page = show(trace, dark=dark)
        shot = picture(page)
        grounds[dark] = shot.getpixel((600, 70))
        common = shot.getcolors(1 << 24)
        assert max(common)[1] == max(common, key=lambda pair: pair[0])[1]
        assert len(common) > 200  # text, tints and charts, not an empty sheet
    assert min(grounds[False]) > 230
    assert max(grounds[True]) < 40
    page.click("#theme")  # auto -> light, although the system is dark
    assert min(picture(page).getpixel((600, 70))) > 230
    painted = page.run(INKS)  # charts are drawn anew
    assert min(painted["d0"], painted["d2"], painted["plain"]) > 100


def test_a_narrow_window_needs_no_sideways_scrolling(show):
    page = show(pipeline(5), width=400, height=800)
    assert page.run("document.documentElement.scrollWidth") <= 400


def test_hostile_text_stays_text(show):
    trace = hostile()
    page = show(trace)
    assert page.run("window.broken") is None
    assert page.run("document.querySelectorAll('img, iframe, script').length") == page.run("document.scripts.length")
    assert page.run("document.scripts.length") == 3
    assert page.run("getComputedStyle(document.body).display") != "none"
    for selector in ("#step", ".leaf b", ".run", "#arms td", "#answer .t"):
        (shown, *_) = texts(page, selector)
        assert "<script>window.broken=1" in shown
        assert "{{7*7}}" in shown
        assert "\u202e" not in shown
        assert "\x07" not in shown
    page.hover("#answer .t[data-i='1']")
    assert HOSTILE[:20] in texts(page, "#tip b")[0]
    page.click(".leaf[data-call='1']")
    assert "<style>" in texts(page, "#facts .error")[0]
    assert page.run("window.broken") is None


def test_five_thousand_rounds_are_drawn_in_pieces_and_all_within_reach(show):
    made = call(5000)
    page = show(Trace("long.jsonl", (made,)))
    # in one look: a further piece may be made between two
    begun, whole = page.run("['#answer .t', '*'].map((what) => document.querySelectorAll(what).length)")
    assert begun < len(made.tokens) / 2  # the rest is made when it is scrolled to
    assert whole < begun + 700  # rounds cost canvas, not elements
    page.run("answer.scrollTop = answer.scrollHeight")
    page.wait(f"document.querySelectorAll('#answer .t').length > {begun}")
    page.run("find(4990)")
    assert made.tokens[page.run("made.now")].round == 4990
    page.run("answer.focus({focusVisible: true})")
    page.press("End")
    assert page.run("made.now") == len(made.tokens) - 1
    assert len(texts(page, "#answer .t")) == len(made.tokens)


def test_a_call_without_rounds_and_a_trace_of_one_refusal_are_pages_too(show):
    page = show(Trace("refused.jsonl", (call(0, error="BadOption"),)))
    assert texts(page, "#answer .t") == []
    assert texts(page, "#facts .error") == ["BadOption"]
