"""Calls as lines of a trace file, for ``metasd trace`` and for whoever likes JSON.

``record(...)`` or the variable METASD_TRACE_FILE switches it on for the process. A call that begins then is watched by
an engine observer of its own; when it ends, a thread writes its line. Calls that nobody records cost a look at a list
and at the environment. Text, and token ids, which are text in another alphabet, are kept only where content is
captured.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from metasd_langchain.events import CallEnded, CallStarted, Event, Observer, RoundPlayed
from metasd_langchain.telemetry.runs import ancestors
from metasd_langchain.telemetry.texts import Texts, TokenText
from metasd_langchain.telemetry.traced import Trace, TracedCall, TracedRound, TracedToken, read_trace
from metasd_langchain.telemetry.tracefile import Writer, trace_path
from metasd_langchain.values import PLAIN, RoundRecord, Summary

__all__ = ["About", "CallRecorder", "Recording", "record", "recording", "refused", "watch"]

TRACE_ENV = "METASD_TRACE_FILE"
CAPTURE_ENV = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
ROUNDS_CAP = 20_000  # of a call; what came later is counted, not kept
PROMPT_CAP = 65_536  # characters of a prompt
_SWITCH = frozenset({"1", "true", "on", "yes", "auto"})


@dataclass(frozen=True, slots=True)
class About:
    """What the side that calls knows of a call.

    Attributes:
        operation: "text_completion" or "chat".
        model: name of the target model.
        policy: name of the bandit's policy.
        arms: names of the arms on offer.
        stream: whether the caller sees the answer piece by piece.
        run: LangChain's id of the run, "" outside LangChain.
        parent: the id of the run around it, "" when there is none.
        prompt: text, kept only where content is captured.
        token_text: a token's text and bytes.
        capture_content: the model object's own wish; None: whatever the recording says.
    """

    operation: str
    model: str
    policy: str = ""
    arms: Sequence[str] = ()
    stream: bool = False
    run: str = ""
    parent: str = ""
    prompt: str = ""
    token_text: TokenText | None = None
    capture_content: bool | None = None


class Recording:
    """Writes every call of this process to a file until it is closed.

    Args:
        path: file to append to, or a folder for a new file; None: a new file in the user's cache folder, where
            ``metasd trace --last`` looks.
        capture_content: whether prompt, token ids and token texts are kept; None asks the OpenTelemetry variable
            OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT, at each call.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, capture_content: bool | None = None) -> None:
        self.path = trace_path(path)
        self._capture = capture_content

    def captures(self, wish: bool | None = None) -> bool:
        """Whether text is kept.

        Args:
            wish: of the model object, where it has one.
        """
        for said in (self._capture, wish):
            if said is not None:
                return said
        return os.environ.get(CAPTURE_ENV, "").strip().upper() in {"SPAN_ONLY", "SPAN_AND_EVENT", "TRUE"}

    def trace(self) -> Trace:
        """What is in the file by now."""
        flush()
        return read_trace(self.path)

    def close(self) -> None:
        """Record no further calls, and wait, for a few seconds at most, until what was recorded is written."""
        with _lock:
            if self in _open:
                _open.remove(self)
        flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r})"


def record(path: str | os.PathLike[str] | None = None, *, capture_content: bool | None = None) -> Recording:
    """Record the calls of this process from now on.

    ``with record("run.jsonl"): chain.invoke(...)``; or keep what it returns and close that. Arguments as for
    `Recording`. Several recordings may run at the same time, and several threads and processes may
    share a file: lines are appended whole.
    """
    made = Recording(path, capture_content=capture_content)
    with _lock:
        _open.append(made)
    return made


def recording() -> bool:
    """Whether a call that begins now is recorded."""
    return bool(_open) or bool(os.environ.get(TRACE_ENV))


def watch(about: Callable[[], About]) -> list[Observer]:
    """Observers for a call that begins now; none when nobody records.

    Args:
        about: asked only when somebody does.
    """
    return list(_recorders(about)) if recording() else []


def refused(about: Callable[[], About], error: BaseException) -> None:
    """Record a call that failed before the engine had it."""
    if recording():
        for recorder in _recorders(about):
            recorder.on(CallEnded(-1, None, error))


def flush(seconds: float = 5.0) -> bool:
    """Wait until everything is written; False when the time did not do."""
    return _writer.flush(seconds)


def _recorders(about: Callable[[], About]) -> list[CallRecorder]:
    with _lock:
        live = list(_open)
    named = os.environ.get(TRACE_ENV)
    if named:
        live.append(_by_environment(named))
    known = about()
    return [CallRecorder(known, one.path, captures=one.captures(known.capture_content)) for one in live]


def _by_environment(named: str) -> Recording:
    with _lock:
        found = _named.get(named)
        if found is None:
            found = _named[named] = Recording(None if named.strip().lower() in _SWITCH else named)
        return found


# -- one call ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Played:
    """A round as it was heard: nothing is worked out on the engine's thread."""

    at_s: float
    event: RoundPlayed


@dataclass(slots=True)
class _Heard:
    step: str = ""
    prompt_tokens: int = 0
    rounds: list[_Played] = field(default_factory=list)
    left_out: int = 0
    summary: Summary | None = None
    error: BaseException | None = None
    total_s: float = 0.0


class CallRecorder:
    """Observes one call and hands it to the writer when it ends.

    Args:
        about: what the side that calls knows.
        path: file to append to.
        captures: whether text is kept.
    """

    def __init__(self, about: About, path: Path, *, captures: bool) -> None:
        self._about, self._path, self._captures = about, path, captures
        self._heard = _Heard()
        self._began = time.time()
        self._clock = time.perf_counter()
        self._above = ancestors(about.parent)  # now: when the call ends the runs around it may have ended, too

    def on(self, event: Event) -> None:
        """Take note of one event."""
        heard = self._heard
        if isinstance(event, CallStarted):
            heard.step, heard.prompt_tokens = event.request.step, len(event.request.prompt)
        elif isinstance(event, RoundPlayed):
            if len(heard.rounds) < ROUNDS_CAP:
                heard.rounds.append(_Played(time.perf_counter() - self._clock, event))
            else:
                heard.left_out += 1
        else:
            heard.summary, heard.error = event.summary, event.error
            heard.total_s = time.perf_counter() - self._clock
            _writer.put(self._path, self.call)

    def call(self) -> TracedCall:
        """What was heard, put in order."""
        about, heard = self._about, self._heard
        summary = heard.summary
        counted = summary.completion_tokens if summary else sum(p.event.record.committed for p in heard.rounds)
        return TracedCall(
            id=uuid.uuid4().hex,
            started=self._began,
            pid=os.getpid(),
            operation=about.operation,
            model=about.model,
            policy=about.policy,
            step=heard.step,
            stream=about.stream,
            arms=tuple(about.arms),
            run=about.run,
            path=self._above,
            prompt_tokens=heard.prompt_tokens,
            completion_tokens=counted,
            finish_reason=str(summary.finish_reason) if summary and heard.error is None else "error",
            error=type(heard.error).__qualname__ if heard.error is not None else "",
            first_token_s=summary.first_token_s if summary else 0.0,
            prefill_s=summary.prefill_s if summary else 0.0,
            total_s=heard.total_s,
            rounds=tuple(_round(played) for played in heard.rounds),
            tokens=tuple(self._tokens()),
            left_out=heard.left_out,
            prompt=about.prompt[:PROMPT_CAP] if self._captures else None,
        )

    def _tokens(self) -> list[TracedToken]:
        tokens: list[TracedToken] = []
        texts = Texts(self._about.token_text if self._captures else None)
        for index, played in enumerate(self._heard.rounds):
            record, step = played.event.record, played.event.step
            likely = [one.logprob for one in step.logprobs]
            for place, token in enumerate(step.tokens):
                tokens.append(
                    TracedToken(
                        position=len(tokens),
                        round=index,
                        arm=record.arm,
                        kind=kind_of(record, place),
                        latency_s=record.total_s / max(1, record.committed),
                        logprob=likely[place] if place < len(likely) else None,
                        id=token if self._captures else None,
                        text=texts.next(token),
                    )
                )
        return tokens


def kind_of(record: RoundRecord, place: int) -> str:
    """What the token at a place of a round is: "forced" (a grammar left no choice), "accepted" (drafted, and the
    target's own), "correction" (the target's, where the draft went wrong), "bonus" (the target's, on top of a whole
    accepted path) or "plain" (nothing was drafted).
    """
    if place < record.forced:
        return "forced"
    if place < record.forced + record.accepted:
        return "accepted"
    if record.arm == PLAIN or not record.drafted:
        return "plain"
    return "bonus" if record.bonus else "correction"


def _round(played: _Played) -> TracedRound:
    record, choice = played.event.record, played.event.choice
    return TracedRound(
        arm=record.arm,
        chosen="" if choice is None else choice.arm,
        probability=None if choice is None else choice.probability,
        drafted=record.drafted,
        accepted=record.accepted,
        committed=record.committed,
        bonus=record.bonus,
        at_s=played.at_s,
        draft_s=record.draft_s,
        score_s=record.score_s,
        total_s=record.total_s,
        values=dict(played.event.values),
    )


_lock = threading.RLock()
_open: list[Recording] = []
_named: dict[str, Recording] = {}
_writer = Writer()


def _forked() -> None:
    """In the child of a fork: another thread of the parent may have held the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
