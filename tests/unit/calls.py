"""Calls as telemetry tests play them: a summary with four arms, and a span started with every option."""

from __future__ import annotations

from metasd_langchain.telemetry.otel import CallSpan
from metasd_langchain.values import RoundRecord, Sampling, Summary

CANARY = "xyzzy-canary"
ARMS = ("suffix@16", "lookup@8", "plain")
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


def record(arm="plain", drafted=0, accepted=0, total_s=0.05) -> RoundRecord:
    return RoundRecord(arm, drafted, accepted, accepted + 1, 0.001 if drafted else 0.0, 0.04, total_s)


ROUNDS = (
    record("plain", total_s=0.2),
    record("suffix@16", 10, 7),
    record("suffix@16", 4, 0),
    record("plain"),
    record("plain"),
    record("plain"),
    record("recycling@4", 4, 2),
)


def summary(rounds=ROUNDS, finish_reason="stop") -> Summary:
    return Summary(11, 16, finish_reason, rounds, 0.2, 0.21, 0.52, "hinted_ucb", "rewrite", {"plain": 1.0})


def start(**options) -> CallSpan:
    given = {
        "operation": "text_completion",
        "model": "gemma-3-270m",
        "sampling": Sampling(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=3),
        "max_tokens": 64,
        "stream": False,
        "policy": "hinted_ucb",
        "arms": ARMS,
    }
    return CallSpan.start(**given | options)


def only(spans):
    (span,) = spans.get_finished_spans()
    return span
