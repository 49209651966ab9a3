"""``metasd tune``: does drafting pay on this machine, with this model, on these prompts? And with which drafters?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from metasd_langchain.assemble import DEFAULT_ARMS
from metasd_langchain.cli import tune_file
from metasd_langchain.cli.screen import output, tell, waiting
from metasd_langchain.cli.tune_prompts import Prompt, built_in, fitting, read
from metasd_langchain.cli.tune_report import Measured, progress, relative, show_curve, show_scores
from metasd_langchain.cli.tuning import ARMS, CHOSEN, POOL, Run, propose, reason, score, settle, verdict
from metasd_langchain.values import PLAIN

if TYPE_CHECKING:
    from metasd_langchain.llm import MetaSDLLM

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class _Effort:
    """How much is measured.

    Attributes:
        max_tokens: of an answer, where the user does not say.
        repetitions: of every prompt.
        prompts: most of them.
        seconds: after which no further prompt is begun.
        forwards, forward_s: repetitions of a forward, and seconds after which they are enough.
    """

    max_tokens: int
    repetitions: int
    prompts: int
    seconds: float
    forwards: int
    forward_s: float


_THOROUGH = _Effort(max_tokens=128, repetitions=3, prompts=24, seconds=600.0, forwards=9, forward_s=20.0)
_QUICK = _Effort(max_tokens=64, repetitions=1, prompts=6, seconds=60.0, forwards=5, forward_s=6.0)
_SECOND = 0.4  # of the seconds, for measuring what was chosen once more


def run(
    *,
    prompts: Path | None,
    model: str | None,
    dtype: str,
    max_tokens: int | None,
    output_file: Path,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure, judge, show, write.

    Args:
        prompts: file of prompts, or None for the built-in ones.
        model, dtype: as in MetaSDLLM.
        max_tokens: most tokens of an answer, or None for what suits the effort.
        output_file: where the settings go.
        quick: one repetition of few prompts.
        as_json: what is written goes to standard output, too, and nothing else does.

    Raises:
        MetaSDError: as MetaSDLLM; RequestError and BadOption for the files, before any weight is loaded.
    """
    effort = _QUICK if quick else _THOROUGH
    most = effort.max_tokens if max_tokens is None else max_tokens
    asked = built_in() if prompts is None else read(prompts)
    tune_file.check(output_file)
    load = tune_file.load_average()
    if load and load[0] > tune_file.cores():
        tell(f"the machine is busy (load {load[0]:.1f}): times will be rough, and this takes longer")
    with waiting():
        # inside, because these imports take as long as loading a small model
        from metasd_langchain.llm import MetaSDLLM

        def make(drafters: Sequence[str] | None) -> MetaSDLLM:
            arms = None if drafters is None else list(drafters)
            return MetaSDLLM(model=model, dtype=dtype, max_tokens=most, drafters=arms, memory_key="tune")

        llms = {PLAIN: make([PLAIN]), **{arm: make([arm]) for arm in ARMS}, POOL: make(None)}
        target = llms[PLAIN]._load().target  # noqa: SLF001 - forwards are timed one by one
        chosen, skipped = fitting(asked, target, effort.prompts)
    _say_which(len(asked), len(chosen), skipped, target.lm.window)
    measured = _measure(llms, make, target, chosen, effort, most)
    found = verdict(measured.kept, measured.why_not, "these prompts" if prompts is None else "your prompts")
    facts = {
        **_facts(target),
        "load_average": load,
        "prompts": {"source": "built-in" if prompts is None else "file", "count": len(measured.first[PLAIN].paces)},
        "max_tokens": most,
        "forward_ms": tune_file.curve_of(measured.curve),
        "candidates": measured.in_numbers(),
        "answers_beyond_rounding": measured.beyond,
    }
    settings = tune_file.contents(measured.kept, found, facts)
    tune_file.save(output_file, settings)
    if as_json:
        print(json.dumps(settings))
        return
    console = output()
    show_curve(console, measured.curve)
    show_scores(console, measured)
    console.print(Text(found.words, "bold"))
    console.print(Text(f"saved {output_file.name}: {' '.join(measured.kept.drafters)}"))
    console.print(Text(f'Use it: MetaSDLLM(..., settings="{output_file.name}")'))


def _measure(
    llms: dict[str, MetaSDLLM],
    make: Callable[[Sequence[str]], MetaSDLLM],
    target: Any,
    prompts: Sequence[tuple[Prompt, str]],
    effort: _Effort,
    max_tokens: int,
) -> Measured:
    from metasd_langchain.cli.tune_runs import BOUNDS, measure_curve, play, sizes, warm_up

    with progress("forwards", len(sizes(target.lm.window)[0]) * effort.forwards, lines=False) as tick:
        curve = measure_curve(target.lm, effort.forwards, effort.forward_s, tick)
    with waiting("warming up", still=True):
        warm_up(llms, prompts, max_tokens)
    with progress("prompts", len(prompts) * effort.repetitions) as tick:
        runs = play(llms, prompts, max_tokens, effort.repetitions, effort.seconds, tick)
    first, fresh = score(runs), None
    if len(first[PLAIN].paces) < len(prompts):
        tell(f"out of time after {len(first[PLAIN].paces)} of {len(prompts)} prompts")
    proposed = propose(first)
    if proposed not in ((PLAIN,), DEFAULT_ARMS):
        again = {PLAIN: llms[PLAIN], POOL: llms[POOL], CHOSEN: make(proposed)}
        warm_up({CHOSEN: again[CHOSEN]}, prompts, max_tokens)
        with progress(f"once more with {' '.join(proposed)}", len(prompts) * effort.repetitions) as tick:
            later = play(again, prompts, max_tokens, effort.repetitions, _SECOND * effort.seconds, tick)
        fresh = score(later)
        runs += later
    why_not = reason(first, relative(curve))
    dtype = str(target.lm.dtype).removeprefix("torch.")
    gaps = _gaps(target, prompts, runs)
    bound = BOUNDS.get(dtype, BOUNDS["bfloat16"])
    beyond = sum(gap is None or gap > bound for gap in gaps)
    kept = settle(proposed, first, fresh)
    return Measured(curve, first, proposed, fresh, kept, why_not, gaps, beyond)


def _gaps(target: Any, prompts: Sequence[tuple[Prompt, str]], runs: Sequence[Run]) -> list[float | None]:
    """One for every answer that is not plain's; equal ones of several candidates count once."""
    from metasd_langchain.cli.tune_runs import gap

    truth: dict[int, tuple[int, ...]] = {}
    for run in runs:
        if run.candidate == PLAIN:
            truth.setdefault(run.prompt, run.ids)
    others = dict.fromkeys((run.prompt, run.ids) for run in runs if run.ids != truth[run.prompt])
    return [gap(target, prompts[prompt][1], truth[prompt], ids) for prompt, ids in others]


def _facts(target: Any) -> dict[str, Any]:
    import torch

    device = target.lm.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        **tune_file.machine(torch.get_num_threads(), device.type, gpu),
        "model": target.name,
        "dtype": str(target.lm.dtype).removeprefix("torch."),
    }


def _say_which(asked: int, chosen: int, skipped: int, window: int) -> None:
    if skipped:
        tell(f"{skipped} {'prompt is' if skipped == 1 else 'prompts are'} skipped: longer than the window of {window}")
    if chosen + skipped < asked:
        tell(f"measuring {chosen} of {asked} prompts, drawn from all over the file")
