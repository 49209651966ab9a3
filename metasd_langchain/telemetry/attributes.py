"""What a call's span says, as plain attributes. No OpenTelemetry in here, and no text of prompt, answer or error.

The ``gen_ai.*`` names are those of the OpenTelemetry GenAI conventions for an inference span, spelled out because the
Python package marks its own constants as moved. No key is a prefix of another: backends nest keys at the dots.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, cast, get_args

from metasd_langchain.values import RoundRecord, Sampling, Summary

__all__ = [
    "Attributes",
    "Message",
    "RoundDetail",
    "Said",
    "content",
    "identity",
    "keep",
    "kind",
    "plain_pace",
    "request",
    "round_attributes",
    "round_detail",
    "round_times",
    "speedup_estimate",
    "summary_attributes",
]

Attribute = str | bool | int | float | list[str] | list[int] | list[float]
Attributes = dict[str, Attribute]
Message = Mapping[str, Any]
Said = str | Sequence[Message]
RoundDetail = Literal["off", "summary", "arrays", "events", "spans"]

PROVIDER = "metasd"
ROUNDS_CAP = 256  # 25-30 bytes a round on the wire
EVENTS_CAP = 32  # the SDK keeps the last 128 events of a span and drops the first ones silently
CONTENT_CAP = 8192  # bytes of UTF-8, each of prompt and answer
PLAIN_ROUNDS_NEEDED = 3  # fewer undrafted rounds say too little about the cost of one

_log = logging.getLogger(__name__)


def identity(operation: str, model: str) -> Attributes:
    """What a sampler may look at when the span starts."""
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}


def request(
    sampling: Sampling, max_tokens: int | None, stream: bool, policy: str, span_kind: str, batch: tuple[int, int] | None
) -> Attributes:
    """What was asked for. Stop strings are text and stay out.

    Args:
        span_kind: see `kind`.
        batch: index of the prompt in its batch and the batch's size.
    """
    attributes: Attributes = {
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.stream": stream,
        "metasd.bandit.policy": policy,
        **kind(span_kind),
    }
    options = {
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "metasd.request.min_p": sampling.min_p,
    }
    attributes.update({key: value for key, value in options.items() if value is not None})
    if batch is not None:
        attributes["metasd.batch.index"], attributes["metasd.batch.size"] = batch
    return attributes


def kind(name: str) -> Attributes:
    """What backends take the span for. They add up the tokens of "LLM" spans: where another span of the call holds
    them, ours is a "CHAIN".
    """
    return {"openinference.span.kind": name, "mlflow.spanType": name}


def summary_attributes(summary: Summary, arms: Sequence[str], detail: RoundDetail) -> Attributes:
    """What happened, in numbers: totals, then sums by arm unless `detail` is "off", then rounds if it is "arrays"."""
    rounds = summary.rounds
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    attributes: Attributes = {
        "gen_ai.usage.input_tokens": summary.prompt_tokens,
        "gen_ai.usage.output_tokens": summary.completion_tokens,
        "gen_ai.response.finish_reasons": [str(summary.finish_reason)],
        "metasd.round_count": len(rounds),
        "metasd.tokens.drafted": drafted,
        "metasd.tokens.accepted": accepted,
        "metasd.latency.total_s": summary.total_s,
        "metasd.latency.first_token_s": summary.first_token_s,
        "metasd.latency.prefill_s": summary.prefill_s,
        "metasd.latency.draft_s": sum(r.draft_s for r in rounds),
        "metasd.latency.verify_s": sum(r.score_s for r in rounds),
    }
    scoring = sum(r.scoring_s for r in rounds)
    if scoring:
        attributes["metasd.latency.scoring_s"] = scoring  # of draft_s
    if summary.step:
        attributes["metasd.step"] = summary.step
    if rounds:
        attributes["metasd.accepted_length.mean"] = 1.0 + accepted / len(rounds)
    speedup = speedup_estimate(rounds)
    if speedup is not None:
        attributes["metasd.speedup_estimate"] = speedup
    names = _names(arms, rounds)
    if detail != "off":
        attributes.update(_by_arm(rounds, names))
    if detail == "arrays":
        attributes.update(_by_round(rounds, names))
    return attributes


def speedup_estimate(rounds: Sequence[RoundRecord]) -> float | None:
    """How many times faster the call decoded than undrafted rounds alone would have; see `plain_pace`."""
    pace = plain_pace(rounds)
    return None if pace is None else pace[0] * pace[1] / pace[2]


def plain_pace(rounds: Sequence[RoundRecord]) -> tuple[float, int, float] | None:
    """By the call's own clock: seconds of an undrafted round, tokens committed after the first round, their seconds.

    The cost of an undrafted round is the median of those in this very call; the first round is left out on both sides,
    as it holds the prompt. None when the call has too few undrafted rounds to tell.
    """
    later = rounds[1:]
    undrafted = [r.total_s - r.draft_s for r in later if r.drafted == 0]  # a drafter that found nothing cost time, too
    spent = sum(r.total_s for r in later)
    if len(undrafted) < PLAIN_ROUNDS_NEEDED or spent <= 0.0:
        return None
    return median(undrafted), sum(r.committed for r in later), spent


def _names(arms: Sequence[str], rounds: Iterable[RoundRecord]) -> dict[str, int]:
    """Arm name -> index: the arms on offer, then whatever else played."""
    names: dict[str, int] = {}
    for name in itertools.chain(arms, (r.arm for r in rounds)):
        names.setdefault(name, len(names))
    return names


def _by_arm(rounds: Iterable[RoundRecord], names: Mapping[str, int]) -> Attributes:
    count, drafted, accepted = [0] * len(names), [0] * len(names), [0] * len(names)
    seconds = [0.0] * len(names)
    for record in rounds:
        arm = names[record.arm]
        count[arm] += 1
        drafted[arm] += record.drafted
        accepted[arm] += record.accepted
        seconds[arm] += record.draft_s - record.scoring_s  # scoring is of all drafters
    return {
        "metasd.drafters.names": list(names),
        "metasd.drafters.rounds": count,
        "metasd.drafters.drafted_tokens": drafted,
        "metasd.drafters.accepted_tokens": accepted,
        "metasd.drafters.draft_time_s": seconds,
    }


def _by_round(rounds: Sequence[RoundRecord], names: Mapping[str, int]) -> Attributes:
    kept = [rounds[i] for i in keep(len(rounds), ROUNDS_CAP)]
    return {
        "metasd.rounds.drafter": [names[r.arm] for r in kept],
        "metasd.rounds.accepted": [r.accepted for r in kept],
        "metasd.rounds.drafted": [r.drafted for r in kept],
        "metasd.rounds.duration_ms": [round(r.total_s * 1e3, 3) for r in kept],
        "metasd.rounds.truncated": len(kept) < len(rounds),
    }


def round_attributes(index: int, record: RoundRecord) -> Attributes:
    """One round, for an event or a child span."""
    return {
        "metasd.round.index": index,
        "metasd.round.drafter": record.arm,
        "metasd.round.drafted": record.drafted,
        "metasd.round.accepted": record.accepted,
        "metasd.round.duration_ms": round(record.total_s * 1e3, 3),
    }


def round_times(summary: Summary) -> list[tuple[float, float]]:
    """Start and end of each round in seconds after the call's start.

    Records hold durations only, so rounds are laid end to end from the first token on.
    """
    times: list[tuple[float, float]] = []
    end = summary.first_token_s
    for index, record in enumerate(summary.rounds):
        start = max(0.0, end - record.total_s) if index == 0 else end
        end = end if index == 0 else start + record.total_s
        times.append((start, end))
    return times


def keep(count: int, cap: int) -> list[int]:
    """Indices of the first and last ``cap / 2`` of `count` things; all of them when they fit."""
    if count <= cap:
        return list(range(count))
    half = cap // 2
    return [*range(half), *range(count - half, count)]


def content(asked: Said, answered: Said, finish_reason: str) -> Attributes:
    """Prompt and answer, for those who switched content on; each cut after CONTENT_CAP bytes of its text.

    Given twice: ``gen_ai.*.messages`` by the conventions, ``input.value``/``output.value`` for the lists of Phoenix and
    MLflow, which do not read the former.

    Args:
        asked, answered: a text, or messages as the conventions have them, whose newest are kept first.
        finish_reason: written on an answer given as text.
    """
    before, said, mime = _shown(asked, "user")
    reply, replied, reply_mime = _shown(answered, "assistant", finish_reason=finish_reason)
    return {
        "gen_ai.input.messages": json.dumps(before, ensure_ascii=False),
        "gen_ai.output.messages": json.dumps(reply, ensure_ascii=False),
        "input.value": said,
        "input.mime_type": mime,
        "output.value": replied,
        "output.mime_type": reply_mime,
        "metasd.content.truncated": _cut_short(asked, before, said) or _cut_short(answered, reply, replied),
    }


def _shown(said: Said, role: str, **more: str) -> tuple[list[Any], str, str]:
    """Messages, the same as one value for a list, and that value's MIME type."""
    if isinstance(said, str):
        text = _cut(said, CONTENT_CAP)
        return [{"role": role, "parts": [{"type": "text", "content": text}], **more}], text, "text/plain"
    messages = _newest(said)
    return messages, json.dumps(messages, ensure_ascii=False), "application/json"


def _cut_short(said: Said, messages: list[Any], value: str) -> bool:
    return said != value if isinstance(said, str) else messages != list(said)


def _newest(messages: Sequence[Message]) -> list[Any]:
    """The newest messages whose text fits; the oldest of them is cut."""
    kept: list[Any] = []
    left = CONTENT_CAP
    for message in reversed(messages):
        if left <= 0:
            break
        cut, left = _fitting(message, left)
        kept.append(cut)
    return kept[::-1]


def _fitting(value: Any, left: int) -> tuple[Any, int]:
    """A JSON value with at most `left` bytes of text in it, and how many are left after it."""
    if isinstance(value, str):
        text = _cut(value, max(0, left))
        return text, left - len(text.encode())
    if isinstance(value, Mapping):
        pairs = {}
        for key, item in value.items():
            pairs[str(key)], left = _fitting(item, left - len(str(key)))
        return pairs, left
    if isinstance(value, list | tuple):
        items = []
        for item in value:
            if left <= 0:
                break
            cut, left = _fitting(item, left - 1)
            items.append(cut)
        return items, left
    if value is None or isinstance(value, bool | int | float):
        return value, left - 1
    return type(value).__name__, left - 1  # whatever it is, JSON has no word for it


def _cut(text: str, size: int) -> str:
    """The text's first `size` bytes, no character split. A lone surrogate becomes "?": no exporter takes one."""
    return text[:size].encode(errors="replace")[:size].decode(errors="ignore")


@functools.cache
def round_detail(value: str) -> RoundDetail:
    """The mode METASD_TRACE_ROUNDS asks for; an unknown one is logged once and means "arrays"."""
    mode = value.strip().lower() or "arrays"
    if mode in get_args(RoundDetail):
        return cast("RoundDetail", mode)
    _log.warning("METASD_TRACE_ROUNDS is none of %s: using arrays", "|".join(get_args(RoundDetail)))
    return "arrays"
