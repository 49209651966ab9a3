"""What a trace holds: calls, their rounds and tokens, as values, as lines of JSON, and read back.

Nothing of a file is believed when it is read: a line that does not fit is counted and left out, so that a page can be
made of a file that a crash cut short or somebody else wrote.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metasd_langchain.errors import BadOption

__all__ = ["KINDS", "Ancestor", "Trace", "TracedCall", "TracedRound", "TracedToken", "read_trace"]

FORMAT, VERSION = "metasd-trace", 1
KINDS = ("accepted", "correction", "bonus", "plain", "forced")
CALLS_CAP = 2000  # of a file, the newest
_HASHED = re.compile(r"(^|:)[0-9a-f]{12}$")  # of a step that nobody named, see local.py


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A run around a call: a chain, a graph's node, a tool."""

    id: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class TracedRound:
    """A round. Fields as in `RoundRecord`, and some more.

    Attributes:
        chosen: arm that the policy chose, "" when there was nothing to choose; `arm` is "plain" where it drafted
            nothing.
        probability: with which it was chosen.
        at_s: seconds from the call's start to the end of the round.
        values: the policy's value of each arm after the round.
    """

    arm: str
    chosen: str
    probability: float | None
    drafted: int
    accepted: int
    committed: int
    bonus: bool
    at_s: float
    draft_s: float
    score_s: float
    total_s: float
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A committed token.

    Attributes:
        position: in the answer, from 0.
        round: index of its round.
        arm: that played the round.
        kind: one of KINDS; who supplied it.
        latency_s: the round's seconds, shared by its tokens.
        logprob: under the target, where the call asked for it.
        id, text: None where no content was captured; text is "" for a token that only begins a character.
    """

    position: int
    round: int
    arm: str
    kind: str
    latency_s: float
    logprob: float | None = None
    id: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call.

    Attributes:
        started: Unix time, seconds.
        run: LangChain's id of the run, "" outside LangChain.
        path: the runs around it, outermost first.
        finish_reason: as in `Summary`.
        error: class of the error, "" when there was none.
        left_out: rounds beyond what a line holds.
        prompt: None where no content was captured.
    """

    id: str
    started: float
    pid: int
    operation: str
    model: str
    policy: str
    step: str
    stream: bool
    arms: tuple[str, ...]
    run: str
    path: tuple[Ancestor, ...]
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    error: str
    first_token_s: float
    prefill_s: float
    total_s: float
    rounds: tuple[TracedRound, ...] = ()
    tokens: tuple[TracedToken, ...] = ()
    left_out: int = 0
    prompt: str | None = None

    @property
    def label(self) -> str:
        """What to call it: its step, or, where that is only a hash of the prompt, the run around it; perhaps ""."""
        if self.step and not _HASHED.search(self.step):
            return self.step
        return next((run.name for run in reversed(self.path) if run.name), self.step)

    @property
    def accepted_length(self) -> float:
        """Tokens a round, 1 + accepted / rounds; 0 without rounds."""
        return 1.0 + sum(r.accepted for r in self.rounds) / len(self.rounds) if self.rounds else 0.0

    def line(self) -> bytes:
        """The call as a line of a trace file."""
        told = {"format": FORMAT, "version": VERSION, **_plain(self)}
        return json.dumps(told, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(thing: Any) -> Any:
    """A value as JSON takes it: floats finite and to the microsecond, what is None left out."""
    if dataclasses.is_dataclass(thing):
        named = {one.name: getattr(thing, one.name) for one in dataclasses.fields(thing)}
        return {name: _plain(value) for name, value in named.items() if value is not None}
    if isinstance(thing, float):
        return round(thing, 6) if math.isfinite(thing) else None
    if isinstance(thing, Mapping):
        return {str(key): _plain(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_plain(one) for one in thing]
    return thing


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace file holds.

    Attributes:
        name: of the file.
        calls: in the order in which they began.
        unreadable: lines that are no calls.
        left_out: older calls beyond the newest two thousand.
    """

    name: str
    calls: tuple[TracedCall, ...]
    unreadable: int = 0
    left_out: int = 0

    def html(self) -> str:
        """One self-contained page. Raises MissingExtra without Jinja2 (extra "page")."""
        from metasd_langchain.telemetry.page import render

        return render(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file. Errors as `html`, and OSError."""
        target = Path(path)
        target.write_text(self.html(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str | None:
        """For notebooks: the last answer, coloured, and who drafted how well; None without Jinja2."""
        from metasd_langchain.errors import MissingExtra
        from metasd_langchain.telemetry.page import fragment

        try:
            return fragment(self)
        except MissingExtra:
            return None

    def __repr__(self) -> str:
        tokens = sum(call.completion_tokens for call in self.calls)
        return f"Trace({self.name!r}, {len(self.calls)} calls, {tokens} tokens)"


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace file.

    Raises:
        BadOption: no such file, or none of its lines is a call.
    """
    calls: deque[TracedCall] = deque(maxlen=CALLS_CAP)
    fit = unreadable = 0
    try:
        with Path(path).open("rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                call = _call(line)
                if call is None:
                    unreadable += 1
                else:
                    calls.append(call)
                    fit += 1
    except OSError as cause:
        raise BadOption("file", str(path), "a trace file that can be read") from cause
    if not fit:
        raise BadOption("file", str(path), "a trace file with at least one call")
    ordered = tuple(sorted(calls, key=lambda call: call.started))
    return Trace(Path(path).name, ordered, unreadable, fit - len(calls))


def _call(line: bytes) -> TracedCall | None:
    """The call in a line; None when it is none."""
    try:
        told = json.loads(line)
        if told.get("format") != FORMAT or told.get("version") != VERSION:
            return None
        rounds = tuple(_round(one) for one in told["rounds"])
        simple: dict[str, Any] = {name: _text(told.get(name, "")) for name in _CALL_TEXTS}
        simple |= {name: _number(told.get(name, 0.0)) for name in _CALL_NUMBERS}
        simple |= {name: _whole(told.get(name, 0)) for name in _CALL_COUNTS}
        return TracedCall(
            **simple,
            stream=told.get("stream") is True,
            arms=tuple(_text(arm) for arm in told.get("arms", ())),
            path=tuple(Ancestor(_text(one["id"]), _text(one.get("name", ""))) for one in told.get("path", ())),
            rounds=rounds,
            tokens=tuple(_token(one, len(rounds)) for one in told["tokens"]),
            prompt=None if told.get("prompt") is None else _text(told["prompt"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


_CALL_TEXTS = ("id", "operation", "model", "policy", "step", "run", "finish_reason", "error")
_CALL_NUMBERS = ("started", "first_token_s", "prefill_s", "total_s")
_CALL_COUNTS = ("pid", "prompt_tokens", "completion_tokens", "left_out")


def _round(told: Mapping[str, Any]) -> TracedRound:
    counts: dict[str, Any] = {name: _whole(told[name]) for name in ("drafted", "accepted", "committed")}
    times: dict[str, Any] = {name: _number(told[name]) for name in ("at_s", "draft_s", "score_s", "total_s")}
    return TracedRound(
        arm=_text(told["arm"]),
        chosen=_text(told.get("chosen", "")),
        probability=None if told.get("probability") is None else _number(told["probability"]),
        bonus=told.get("bonus") is True,
        values={_text(arm): _number(value) for arm, value in dict(told.get("values", {})).items() if value is not None},
        **counts,
        **times,
    )


def _token(told: Mapping[str, Any], rounds: int) -> TracedToken:
    kind, at = _text(told["kind"]), _whole(told["round"])
    if kind not in KINDS or at >= rounds:
        raise ValueError
    return TracedToken(
        position=_whole(told["position"]),
        round=at,
        arm=_text(told["arm"]),
        kind=kind,
        latency_s=_number(told["latency_s"]),
        logprob=None if told.get("logprob") is None else _number(told["logprob"]),
        id=None if told.get("id") is None else _whole(told["id"]),
        text=None if told.get("text") is None else _text(told["text"]),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise TypeError
    return value
