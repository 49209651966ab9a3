"""Traces as page tests need them: calls that look like real ones, of any length, and hostile ones."""

from __future__ import annotations

import random

from metasd_langchain.telemetry.traced import Ancestor, Trace, TracedCall, TracedRound, TracedToken

ARMS = ("suffix@16", "suffix@6", "recycling_tree@12", "plain")
WORDS = ("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "was", "with", "be", "by", "on", "not", "he")
HOSTILE = (
    '</script><script>window.broken=1</script><img src=x onerror="window.broken=2">'
    "<style>*{display:none}</style>{{7*7}}\u202e\x07&amp;'\"\ud800"
)


def call(
    rounds: int = 40,
    *,
    seed: int = 0,
    text: bool = True,
    step: str = "rewrite",
    path: tuple[Ancestor, ...] = (),
    arms: tuple[str, ...] = ARMS,
    model: str = "gemma-3-270m",
    word: str | None = None,
    error: str = "",
) -> TracedCall:
    """A call; arms take turns at random, with drafts that are accepted for a while."""
    rng = random.Random(seed)
    played: list[TracedRound] = []
    tokens: list[TracedToken] = []
    at = 0.4
    for index in range(rounds):
        arm = rng.choice(arms)
        budget = int(arm.rpartition("@")[2]) if "@" in arm else 0
        accepted = min(budget, int(rng.expovariate(0.5)))
        bonus = budget > 0 and accepted == budget
        seconds = 0.04 + 0.001 * budget
        at += seconds
        values = {name: 1.0 + rng.random() for name in arms}
        played.append(
            TracedRound(
                arm, arm, 0.5, budget, accepted, accepted + 1, bonus, at, 0.0004 * budget, 0.035, seconds, values
            )
        )
        last = "bonus" if bonus else "correction" if budget else "plain"
        for kind in (*["accepted"] * accepted, last):
            said = f" {rng.choice(WORDS)}" if word is None else word
            tokens.append(
                TracedToken(
                    position=len(tokens),
                    round=index,
                    arm=arm,
                    kind=kind,
                    latency_s=seconds / (accepted + 1),
                    logprob=-rng.random(),
                    id=rng.randrange(500) if text else None,
                    text=said if text else None,
                )
            )
    return TracedCall(
        id=f"call{seed}",
        started=1.8e9 + seed,
        pid=1,
        operation="text_completion",
        model=model,
        policy="hinted_ucb",
        step=step,
        stream=False,
        arms=arms,
        run="run",
        path=path,
        prompt_tokens=100,
        completion_tokens=len(tokens),
        finish_reason="error" if error else "length",
        error=error,
        first_token_s=0.5,
        prefill_s=0.4,
        total_s=at + 0.02,
        rounds=tuple(played),
        tokens=tuple(tokens),
        prompt="a prompt" if text else None,
    )


def pipeline(calls: int = 20) -> Trace:
    """Calls of three nodes of a graph; every fourth without text, the last one failed."""
    graph = Ancestor("g", "agent graph")
    nodes = [Ancestor(f"n{index}", name) for index, name in enumerate(("plan", "act", "reflect"))]
    made = [
        call(20 + seed, seed=seed, text=seed % 4 > 0, step=f"step {seed}", path=(graph, nodes[seed % 3]))
        for seed in range(calls - 1)
    ]
    return Trace("pipeline.jsonl", (*made, call(0, seed=calls, step="broken", error="PromptTooLong", path=(graph,))))


def hostile() -> Trace:
    """Markup, control characters and half a character in every place where a text can be."""
    arms = (f"{HOSTILE}@8", "plain")
    path = (Ancestor(HOSTILE, HOSTILE),)
    made = call(30, step=HOSTILE, path=path, arms=arms, model=HOSTILE, word=HOSTILE)
    failed = call(0, seed=1, step=HOSTILE, path=path, arms=arms, model=HOSTILE, error=HOSTILE)
    return Trace(HOSTILE, (made, failed), unreadable=2, left_out=3)
