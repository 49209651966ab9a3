"""The page that shows which drafter wrote each token: one HTML file that needs no network and trusts no text.

Text of a trace reaches the document as JSON in a block that is not run, and from there as text nodes. A content policy
lets exactly our own scripts and styles run (by their hashes) and nothing be fetched, so even a mistake stays harmless.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from metasd_langchain.errors import MissingExtra
from metasd_langchain.telemetry.attributes import speedup_estimate
from metasd_langchain.telemetry.traced import Trace, TracedCall, TracedToken
from metasd_langchain.values import PLAIN, RoundRecord

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["fragment", "render"]

_SCRIPTS = (("uPlot.iife.min.js",), ("page.js", "tokens.js", "charts.js"))  # ours share names, so they are one script
_STYLES = (("uPlot.min.css",), ("page.css",))
_FRAGMENT_TOKENS = 600  # a notebook's cell is small, and stays in the notebook's file
# Okabe and Ito, as in cli/screen.py; with a third of their strength behind text of any colour
_COLOURS = {"suffix": "86,180,233", "lookup": "230,159,0", "recycling": "204,121,167", "recycling_tree": "204,121,167"}
_HIDDEN = dict.fromkeys(
    (*range(9), *range(11, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)
_OTHERS = ("0,158,115", "213,94,0", "0,114,178", "240,228,66")


def render(trace: Trace) -> str:
    """The page of a trace.

    Raises:
        MissingExtra: Jinja2 is not installed (extra "page").
    """
    template = _environment().get_template("page.html")
    from markupsafe import Markup  # comes with Jinja2

    scripts = [_asset(*names) for names in _SCRIPTS]
    styles = [_asset(*names) for names in _STYLES]
    return template.render(
        name=_visible(trace.name),
        policy=_policy(scripts, styles),
        data=Markup(_json(_data(trace))),  # noqa: S704 - escaped for a script block below
        scripts=[Markup(one) for one in scripts],  # noqa: S704 - our own files
        styles=[Markup(one) for one in styles],  # noqa: S704 - our own files
    )


def fragment(trace: Trace) -> str:
    """The last answer, coloured, and a row an arm, as HTML without scripts, for notebooks.

    Raises:
        MissingExtra: as `render`.
    """
    template = _environment().get_template("fragment.html")
    call = next((one for one in reversed(trace.calls) if one.rounds), trace.calls[-1] if trace.calls else None)
    tokens = () if call is None else call.tokens
    shown = tokens[:_FRAGMENT_TOKENS]
    arms = {} if call is None else _by_arm(call)
    return template.render(
        calls=len(trace.calls),
        call=call,
        label="" if call is None else _visible(call.label),
        model="" if call is None else _visible(call.model),
        tokens=[(_shown(token), _style(token), _title(token)) for token in shown],
        hidden=len(tokens) - len(shown),
        arms=[(_visible(arm), f"rgba({_rgb(arm)},.35)", *figures) for arm, figures in arms.items()],
    )


# -- assets ------------------------------------------------------------------------------------------------------------


@functools.cache
def _asset(*names: str) -> str:
    folder = resources.files("metasd_langchain.telemetry") / "page_assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@functools.cache
def _environment() -> Environment:
    try:
        import jinja2
    except ImportError as cause:
        raise MissingExtra("Jinja2", "page") from cause
    return jinja2.Environment(loader=jinja2.FunctionLoader(_asset), autoescape=True, undefined=jinja2.StrictUndefined)


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A content policy: our own blocks, by their hashes, and nothing from anywhere."""

    def hashes(blocks: Sequence[str]) -> str:
        digests = (base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _json(data: object) -> str:
    """JSON that no browser can take for markup."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# -- data --------------------------------------------------------------------------------------------------------------


def _data(trace: Trace) -> dict[str, Any]:
    notes = []
    if trace.left_out:
        notes.append(f"{trace.left_out} older calls of the file are not shown.")
    if trace.unreadable:
        notes.append(f"{trace.unreadable} lines of the file are no calls and were left out.")
    longest = max(range(len(trace.calls)), key=lambda at: len(trace.calls[at].rounds), default=0)
    return {"name": trace.name, "notes": notes, "first": longest, "calls": [_call(call) for call in trace.calls]}


def _call(call: TracedCall) -> dict[str, Any]:
    """A call in columns: a tenth of the size of what is in the file."""
    rounds = call.rounds
    played = (name for one in rounds for name in (one.arm, one.chosen) if name)
    names = list(dict.fromkeys((*call.arms, *played)))
    at = {name: index for index, name in enumerate(names)}
    told = sorted({name for one in rounds for name in one.values} & set(at), key=at.__getitem__)
    return {
        "label": call.label,
        "step": call.step,
        "model": call.model,
        "operation": call.operation,
        "policy": call.policy,
        "started": call.started,
        "pid": call.pid,
        "stream": call.stream,
        "path": [[one.id, one.name] for one in call.path],
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "finish_reason": call.finish_reason,
        "error": call.error,
        "first_token_s": call.first_token_s,
        "prefill_s": call.prefill_s,
        "total_s": call.total_s,
        "left_out": call.left_out,
        "prompt": call.prompt,
        "speedup": speedup_estimate(_records(call)),
        "names": names,
        "r": {
            "arm": [at[r.arm] for r in rounds],
            "chosen": [at[r.chosen] if r.chosen else -1 for r in rounds],
            "p": [r.probability for r in rounds],
            "d": [r.drafted for r in rounds],
            "a": [r.accepted for r in rounds],
            "c": [r.committed for r in rounds],
            "b": [int(r.bonus) for r in rounds],
            "at": [r.at_s for r in rounds],
            "ds": [r.draft_s for r in rounds],
            "ss": [r.score_s for r in rounds],
            "ts": [r.total_s for r in rounds],
        },
        "values": {name: [_short(one.values.get(name)) for one in rounds] for name in told},
        "t": _tokens(call.tokens),
    }


def _tokens(tokens: Sequence[TracedToken]) -> dict[str, Any]:
    def column(name: str) -> list[Any] | None:
        values = [getattr(token, name) for token in tokens]
        return values if any(value is not None for value in values) else None

    return {
        "r": [token.round for token in tokens],
        "k": "".join(token.kind[0] for token in tokens),  # the kinds begin with letters of their own
        "lp": column("logprob"),
        "id": column("id"),
        "x": column("text"),
    }


def _records(call: TracedCall) -> list[RoundRecord]:
    return [
        RoundRecord(r.arm, r.drafted, r.accepted, r.committed, r.draft_s, r.score_s, r.total_s, r.bonus)
        for r in call.rounds
    ]


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


# -- the notebook's piece ----------------------------------------------------------------------------------------------


def _rgb(arm: str) -> str:
    drafter = arm.partition("@")[0]
    if drafter == PLAIN:
        return "128,128,128"
    return _COLOURS.get(drafter) or _OTHERS[sum(drafter.encode(errors="replace")) % len(_OTHERS)]


def _style(token: TracedToken) -> str:
    rgb = _rgb(token.arm)
    return {
        "accepted": f"background:rgba({rgb},.35)",
        "forced": f"background:rgba({rgb},.18)",
        "correction": f"text-decoration:underline wavy rgb({rgb})",
        "bonus": f"text-decoration:underline double rgb({rgb})",
    }.get(token.kind, "")


def _shown(token: TracedToken) -> str:
    if token.text is not None:
        return _visible(token.text)
    return {"accepted": "\u25a0", "correction": "\u00d7", "bonus": "+"}.get(token.kind, "\u25a1")


def _title(token: TracedToken) -> str:
    return f"{_visible(token.arm)}, {token.kind}, position {token.position + 1}, round {token.round + 1}"


def _visible(text: str) -> str:
    """Text without controls, without what reorders its neighbours, and without half characters."""
    return text.translate(_HIDDEN).encode(errors="replace").decode()


def _by_arm(call: TracedCall) -> Mapping[str, tuple[int, int, int, str]]:
    """Rounds, drafted, accepted and tokens a round of each arm."""
    found: dict[str, tuple[int, int, int, str]] = {}
    for arm in dict.fromkeys(r.arm for r in call.rounds):
        mine = [r for r in call.rounds if r.arm == arm]
        a_round = sum(r.committed for r in mine) / len(mine)
        found[arm] = (len(mine), sum(r.drafted for r in mine), sum(r.accepted for r in mine), f"{a_round:.2f}")
    return found
