"""``metasd train``: what it prints; the work is done in ``metasd_langchain.training``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from metasd_langchain.cli.screen import tell, waiting
from metasd_langchain.errors import CorpusError, UnknownName
from metasd_langchain.training.places import DOMAINS, OFA, PRESETS

if TYPE_CHECKING:
    from metasd_langchain.models.load import Target
    from metasd_langchain.training.loop import Fitted
    from metasd_langchain.training.run import Settings

__all__ = ["Asked", "data_folder", "run", "run_preset"]

_EMBEDDED = "gemma-3-270m"
_DEFAULT_DATA = "../shared/data"
_LINE_S = 30.0  # seconds between lines where nothing can move


def data_folder(named: Path | None) -> Path | None:
    """``--data``, else METASD_DATA, else ``../shared/data`` where it exists.

    Raises:
        CorpusError: a folder that was named does not exist.
    """
    given = named or os.environ.get("METASD_DATA")
    if given:
        folder = Path(given)
        if not folder.is_dir():
            raise CorpusError(f"the data folder {folder.name!r} does not exist", hint="--data DIR or METASD_DATA")
        return folder
    folder = Path(_DEFAULT_DATA)
    return folder if folder.is_dir() else None


@dataclass(frozen=True, slots=True)
class Asked:
    """What every command takes.

    Attributes:
        data: folder of the development files.
        model, dtype: as in MetaSDLLM.
        tokens: generated for each domain; None = the default.
        minutes: of training at most; 0 = no bound.
        seed: of everything.
    """

    data: Path | None = None
    model: str | None = None
    dtype: str = "auto"
    tokens: int | None = None
    minutes: float = 0.0
    seed: int = 0


def run(kind: str, domain: str, out: Path, asked: Asked, start: Path | None = None) -> None:
    """Train one drafter.

    Args:
        kind: "eagle" or "small_lm".
        domain: one of the five, or "ofa".
        out: its folder.
        asked: the rest.
        start: folder of a trained head that it goes on from.
    """
    if domain not in (*DOMAINS, OFA):
        raise UnknownName("domain", domain, (*DOMAINS, OFA))
    folder, target, settings = _prepared(kind, asked)
    from metasd_langchain.training.run import train

    with _Screen() as screen:
        recipe = train(target, domain, out, folder, settings, watcher=screen, start=start)
    _report({domain: recipe})


def run_preset(name: str, out: Path | None, asked: Asked) -> None:
    """Train all drafters of a preset; `out` defaults to the user's cache."""
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    folder, target, settings = _prepared("eagle", asked)
    from metasd_langchain.training.preset import TOKENS, train_preset

    if asked.tokens is None:
        settings = replace(settings, tokens=TOKENS)

    with _Screen() as screen:
        recipes = train_preset(target, name, folder, settings, watcher=screen, out=out)
    _report(recipes)


def _prepared(kind: str, asked: Asked) -> tuple[Path | None, Target, Settings]:
    """What the user gave is checked before weights are loaded."""
    folder = data_folder(asked.data)
    with waiting():
        from metasd_langchain.models.load import load_target
        from metasd_langchain.training.run import Settings

        given = Settings(kind=kind)
        settings = replace(
            given,
            tokens=given.tokens if asked.tokens is None else asked.tokens,
            fit=replace(given.fit, minutes=asked.minutes, seed=asked.seed),
            teacher=replace(given.teacher, seed=asked.seed),
        )
        target = load_target(asked.model or os.environ.get("METASD_MODEL") or _EMBEDDED, dtype=asked.dtype)
    if folder is None:
        tell("no data folder (--data, METASD_DATA): only texts of this machine are used")
    return folder, target, settings


class _Screen:
    """Bars on a terminal, else a line now and then; on standard error."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False, emoji=False, markup=False)
        self._moving = self._console.is_terminal and not self._console.is_dumb_terminal
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        more = (TimeRemainingColumn(), TextColumn("{task.fields[note]}", markup=False))
        self._progress = Progress(*columns, *more, console=self._console, disable=not self._moving)
        self._tasks: dict[str, TaskID] = {}
        self._said = 0.0
        self._begun: dict[str, tuple[float, float]] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def data(self, domain: str, done: int, wanted: int) -> None:
        """See Watcher."""
        self._show(f"{domain}: data, tokens", done, wanted, "")

    def training(self, name: str, fitted: Fitted) -> None:
        """See Watcher."""
        note = f"{fitted.curve[-1]['tokens_per_round_t08']:.2f} tokens a round held out" if fitted.curve else ""
        self._show(f"{name}: training, steps", fitted.step, fitted.steps, note)

    def say(self, message: str) -> None:
        """See Watcher."""
        self._progress.console.print(message, soft_wrap=True)

    def _show(self, what: str, done: int, wanted: int, note: str) -> None:
        if self._moving:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=wanted, note=note)
            self._progress.update(self._tasks[what], completed=done, total=wanted, note=note)
            return
        now = time.monotonic()
        start, first = self._begun.setdefault(what, (now, done))
        if now - self._said < _LINE_S and done < wanted and done != first:
            return
        self._said = now
        left = (now - start) / (done - first) * (wanted - done) if done > first else None
        eta = "" if left is None else f", {left / 60:.0f} min to go"
        self.say(f"{what}: {done} of {wanted}{eta}{', ' if note else ''}{note}")


def _report(recipes: Mapping[str, Mapping[str, Any]]) -> None:
    """Machine time of data and of training apart; held-out figures."""
    print("domain         held-out tokens a round   parameters   data wall/cpu s    training wall/cpu s")
    print("               T = 0.8    greedy")
    for domain, recipe in recipes.items():
        figures, seconds = recipe["held_out"], recipe["seconds"]
        data, training = seconds["data"], seconds["training"]
        print(
            f"{domain:14} {figures['tokens_per_round_t08']:7.2f} {figures['tokens_per_round_greedy']:9.2f}"
            f"   {recipe['parameters'] / 1e6:16.1f} M"
            f"   {data['wall_s']:6.0f} / {data['cpu_s']:<6.0f}   {training['wall_s']:7.0f} / {training['cpu_s']:.0f}"
        )
