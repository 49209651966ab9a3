"""What ``metasd tune`` measures: the cost of a forward by width, and every candidate on every prompt.

All that is compared is measured alternately, in changing order, after a warm-up that does not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from metasd_langchain.cli.tune_prompts import Prompt
from metasd_langchain.cli.tuning import Run
from metasd_langchain.llm import MetaSDLLM
from metasd_langchain.models.lm import Feed, Slot
from metasd_langchain.values import Draft

__all__ = ["BOUNDS", "Cost", "Curve", "Tick", "gap", "measure_curve", "order", "play", "sizes", "warm_up"]

_CONTEXTS = (128, 512)
_WIDTHS = (1, 2, 4, 8, 16, 32)
_WARM = 2  # forwards of a width before its first measured one
_LEAST = 3  # measurements of a width, however slow the machine is
_PIECE = 1024  # prompt tokens read in one forward, as the engine does
_WARM_TOKENS = 16
# Two units in the last place of a bfloat16 between 16 and 32, where top logits of small models lie; float16 has three
# bits more. In float32 the same sums in another order differ by less than this.
BOUNDS = {"bfloat16": 0.25, "float16": 0.03125, "float32": 1e-3}

Tick = Callable[[str], None]  # told after each thing that was measured


@dataclass(frozen=True, slots=True)
class Cost:
    """One forward of some width.

    Attributes:
        ms: median milliseconds.
        relative: median of its ratios to the forward of one token measured beside it.
        low, high: quartiles of these ratios.
    """

    ms: float
    relative: float
    low: float
    high: float


Curve = dict[int, dict[int, Cost]]  # context -> width -> cost


def sizes(window: int) -> tuple[list[int], list[int]]:
    """Contexts and widths that a model's window has room for."""
    widths = [width for width in _WIDTHS if width <= max(1, window // 2)]
    return sorted({max(1, min(context, window - widths[-1])) for context in _CONTEXTS}), widths


def measure_curve(lm: Any, repetitions: int, seconds: float, tick: Tick) -> Curve:
    """Milliseconds of one forward by context and width; every new token gets logits, as in verification.

    Args:
        lm: the target's. Nobody else may use it meanwhile.
        repetitions: of each width.
        seconds: after which a context is not measured any further.
        tick: told once for each context and repetition.
    """
    contexts, widths = sizes(lm.window)
    rng = random.Random(0)
    tokens = [rng.randrange(lm.vocab_size) for _ in range(contexts[-1] + widths[-1])]  # any: all take the same time
    return {context: _by_width(lm, tokens, context, widths, repetitions, seconds, tick) for context in contexts}


def _by_width(
    lm: Any, tokens: list[int], context: int, widths: list[int], repetitions: int, seconds: float, tick: Tick
) -> dict[int, Cost]:
    slot = _filled(lm, tokens[:context])
    feeds = {}
    for width in widths:
        new = tokens[context : context + width]
        feeds[width] = Feed(slot, (new[0],), Draft.chain(new[1:]))
        for _ in range(_WARM):
            _seconds(lm, feeds[width])
    deadline = time.perf_counter() + seconds
    rows: list[dict[int, float]] = []
    for repetition in range(repetitions):
        if len(rows) < _LEAST or time.perf_counter() < deadline:
            turn = widths if repetition % 2 == 0 else widths[::-1]
            rows.append({width: _seconds(lm, feeds[width]) for width in turn})
        tick(f"{context} tokens of context")
    return {width: _cost([row[width] for row in rows], [row[1] for row in rows]) for width in widths}


def _cost(own: Sequence[float], one: Sequence[float]) -> Cost:
    ratios = [a / b for a, b in zip(own, one, strict=True)]
    low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Cost(1e3 * median(own), median(ratios), low, high)


def _seconds(lm: Any, feed: Feed) -> float:
    start = time.perf_counter()
    lm.score([feed])
    lm.synchronize()
    return max(time.perf_counter() - start, 1e-9)


def _filled(lm: Any, tokens: Sequence[int]) -> Slot:
    slot = Slot()
    for start in range(0, len(tokens), _PIECE):
        feed = Feed(slot, tuple(tokens[start : start + _PIECE]), scored=0)
        lm.score([feed])
        lm.keep(feed)
    return slot


def warm_up(llms: Mapping[str, MetaSDLLM], prompts: Sequence[tuple[Prompt, str]], max_tokens: int) -> None:
    """Everyone answers the longest prompt, which does not count: kernels are chosen, costs of forwards are known."""
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index][1]))
    for name in llms:
        _answer(llms[name], name, longest, prompts[longest], min(max_tokens, _WARM_TOKENS))


def play(
    llms: Mapping[str, MetaSDLLM],
    prompts: Sequence[tuple[Prompt, str]],
    max_tokens: int,
    repetitions: int,
    seconds: float,
    tick: Tick,
) -> list[Run]:
    """Every candidate answers every prompt, cold; one prompt's answers come one after the other.

    Args:
        llms: candidates by name.
        prompts: and the texts the model reads.
        max_tokens: most tokens of an answer.
        repetitions: of everything; the first of all prompts before the second of any.
        seconds: after which no further prompt is begun.
        tick: told after each prompt.
    """
    deadline = time.perf_counter() + seconds
    runs: list[Run] = []
    for repetition in range(repetitions):
        for index, prompt in enumerate(prompts):
            if runs and time.perf_counter() > deadline:
                return runs
            names = order(list(llms), repetition + index)
            now = {name: _answer(llms[name], name, index, prompt, max_tokens) for name in names}
            runs += [now[name] for name in llms]
            pace = "  ".join(f"{name} {len(now[name].ids) / now[name].seconds:.1f}" for name in llms)
            tick(f"{prompt[0].name}, tokens/s: {pace}")
    return runs


def order(names: Sequence[str], turn: int) -> list[str]:
    """Another order for every turn: everybody begins in turn, and every second time it goes backwards, so that nobody
    always follows the same one.
    """
    way = -1 if turn % 2 else 1
    return [names[(turn + way * step) % len(names)] for step in range(len(names))]


def _answer(llm: MetaSDLLM, name: str, index: int, prompt: tuple[Prompt, str], max_tokens: int) -> Run:
    asked, text = prompt
    llm.forget()
    cap = max_tokens if asked.cap is None else min(asked.cap, max_tokens)
    steps = list(llm.steps(text, stop=list(asked.stop) or None, max_tokens=cap))
    summary = steps[-1].summary
    if summary is None:
        raise RuntimeError("a call ended without a summary")
    return Run(
        candidate=name,
        prompt=index,
        ids=tuple(token for step in steps for token in step.tokens),
        seconds=max(summary.total_s, 1e-9),
        reading_s=summary.prefill_s,
        rounds=len(summary.rounds),
        drafted=sum(record.drafted for record in summary.rounds),
        accepted=sum(record.accepted for record in summary.rounds),
    )


def gap(target: Any, text: str, one: Sequence[int], two: Sequence[int]) -> float | None:
    """Distance of two answers' logits at their first difference; None when one is a beginning of the other."""
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    if at is None:
        return None
    tokens = [*target.encode(text), *one[:at]]
    slot = _filled(target.lm, tokens[:-1])
    logits = target.lm.score([Feed(slot, (tokens[-1],))]).logits[-1].float()
    return abs(float(logits[one[at]] - logits[two[at]]))
