"""The training loop: AdamW, warm-up and cosine, measured on held-out rows, goes on after a kill with equal weights.

Order of batches follows from seed and pass, so a checkpoint is weights, optimiser, step and what was measured. It lies
beside the drafter as ``training.pt`` until the end, each time replaced in one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metasd_langchain.errors import BadOption, CorpusError, TrainingError
from metasd_langchain.training.batches import batches, padded
from metasd_langchain.training.shards import Row, replace_file
from metasd_langchain.training.students import Student, Tally

__all__ = ["CHECKPOINT", "FitOptions", "Fitted", "fit"]

CHECKPOINT = "training.pt"
_PROBE = 4  # steps that are timed to see how many fit into the minutes


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How it is trained.

    Attributes:
        passes: over the data, at most.
        minutes: of training, at most; 0 = no bound. What fits is found out once and kept.
        batch_tokens: of a step, padding included.
        learning_rate: the highest.
        warmup: share of the steps in which it rises.
        floor: what is left of it at the end, as a share.
        weight_decay, clip: of AdamW; the norm to which gradients are cut.
        measures: how often held-out rows are measured.
        patience: measurements without a gain after which it stops; 0 = never.
        save_s: seconds between checkpoints.
        seed: of the order.
    """

    passes: float = 6.0
    minutes: float = 0.0
    batch_tokens: int = 768
    learning_rate: float = 1e-3
    warmup: float = 0.05
    floor: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    measures: int = 8
    patience: int = 4
    save_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("passes", "batch_tokens", "learning_rate", "measures", "clip"):
            if getattr(self, name) <= 0:
                raise BadOption(name, getattr(self, name), "above 0")
        if self.minutes < 0:
            raise BadOption("minutes", self.minutes, "at least 0")


@dataclass(slots=True)
class Fitted:
    """How it went.

    Attributes:
        curve: a point a measurement: step, loss (mean since the last point, None at first), figures of held-out rows.
        steps: planned.
        step: done.
        best: highest tokens a round at the data's temperature, and its step.
        wall_s, cpu_s: seconds of training, over all starts.
    """

    curve: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    step: int = 0
    best: tuple[float, int] = (0.0, 0)
    wall_s: float = 0.0
    cpu_s: float = 0.0


def fit(
    student: Student,
    rows: Sequence[Row],
    held_out: Sequence[Row],
    folder: Path,
    options: FitOptions | None = None,
    *,
    run: str = "",
    say: Callable[[Fitted], None] = lambda fitted: None,
) -> Fitted:
    """Train; the student's module holds the best weights afterwards.

    Args:
        student: what is trained.
        rows: for training.
        held_out: for measuring.
        folder: of the checkpoint.
        options: see FitOptions.
        run: what tells this run from another in the same folder (settings, data); part of the checkpoint.
        say: told after every step.

    Raises:
        CorpusError: no rows.
        TrainingError: the checkpoint cannot be written or read, or is another run's.
    """
    options = options or FitOptions()
    if not batches(rows, options.batch_tokens, 0) or not held_out:
        raise CorpusError("no teacher data to train on", hint="more --tokens")
    return _Run(student, rows, held_out, folder, options, run).go(say)


class _Run:
    def __init__(
        self,
        student: Student,
        rows: Sequence[Row],
        held_out: Sequence[Row],
        folder: Path,
        options: FitOptions,
        run: str,
    ) -> None:
        self._student, self._rows, self._held_out, self._options = student, rows, held_out, options
        self._file = folder / CHECKPOINT
        self._run = f"{run} {sorted(asdict(options).items())}"
        self._parameters = [one for one in student.module.parameters() if one.requires_grad]
        matrices = [one for one in self._parameters if one.ndim > 1]
        others = [one for one in self._parameters if one.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self._best: dict[str, torch.Tensor] = {}
        self._fitted = Fitted()
        self._losses: list[float] = []
        self._per_pass = len(batches(rows, options.batch_tokens, 0))

    def go(self, say: Callable[[Fitted], None]) -> Fitted:
        fitted = self._fitted
        if not self._resume():
            fitted.steps = max(1, int(self._per_pass * self._options.passes))
            self._measure()
        started = last = time.perf_counter()
        busy = time.process_time()
        while fitted.step < fitted.steps and not self._stopped():
            order = batches(self._rows, self._options.batch_tokens, self._options.seed + fitted.step // self._per_pass)
            for group in order[fitted.step % self._per_pass :]:
                self._step(group)
                now = time.perf_counter()
                fitted.wall_s += now - last
                last = now
                if fitted.step == _PROBE:
                    self._bound((now - started) / _PROBE)
                if self._due():
                    self._measure()
                fitted.cpu_s += time.process_time() - busy
                busy = time.process_time()
                if now - started > self._options.save_s:
                    self._save()
                    started = now
                say(fitted)
                if fitted.step >= fitted.steps or self._stopped():
                    break
        self._save()
        self._student.module.load_state_dict(self._best, strict=False)
        return fitted

    def _step(self, group: Sequence[Row]) -> None:
        fitted = self._fitted
        rate = self._rate()
        for part in self._optimizer.param_groups:
            part["lr"] = rate
        loss = self._student.loss(padded(group))
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._options.clip)
        self._optimizer.step()
        self._losses.append(float(loss.detach()))
        fitted.step += 1

    def _rate(self) -> float:
        """Learning rate of the next step."""
        options, fitted = self._options, self._fitted
        done = fitted.step / fitted.steps
        rising = min(1.0, (fitted.step + 1) / max(1.0, options.warmup * fitted.steps))
        falling = options.floor + (1 - options.floor) * 0.5 * (1 + math.cos(math.pi * done))
        return options.learning_rate * rising * falling

    def _bound(self, seconds: float) -> None:
        """Plan no more steps than fit into the minutes; once, so that a run that goes on keeps its schedule."""
        if self._options.minutes:
            fits = int(self._options.minutes * 60 / seconds)
            self._fitted.steps = max(_PROBE, min(self._fitted.steps, fits))

    def _due(self) -> bool:
        fitted = self._fitted
        every = max(1, fitted.steps // self._options.measures)
        return fitted.step % every == 0 or fitted.step == fitted.steps

    def _measure(self) -> None:
        fitted = self._fitted
        tally = Tally.empty()
        for group in batches(self._held_out, self._options.batch_tokens * 2, 0):
            tally = tally + self._student.tally(padded(group))
        loss = round(sum(self._losses) / len(self._losses), 4) if self._losses else None
        figures = tally.figures()
        fitted.curve.append({"step": fitted.step, "loss": loss, **figures})
        self._losses = []
        reached = float(figures["tokens_per_round_t08"])
        if not self._best or reached > fitted.best[0]:
            fitted.best = reached, fitted.step
            state = {name: value.detach() for name, value in self._student.module.named_parameters()}
            self._best = {name: value.clone() for name, value in state.items()}

    def _stopped(self) -> bool:
        """Whether the last measurements brought nothing."""
        patience = self._options.patience
        if not patience or len(self._fitted.curve) <= patience:
            return False
        return bool(self._fitted.best[1] < self._fitted.curve[-patience]["step"])

    def _save(self) -> None:
        state = {
            "run": self._run,
            "module": dict(self._student.module.named_parameters()),
            "best": self._best,
            "optimizer": self._optimizer.state_dict(),
            "losses": self._losses,
            "fitted": asdict(self._fitted),
        }
        replace_file(self._file, lambda path: torch.save(state, path))

    def _resume(self) -> bool:
        """Take up a checkpoint that is there."""
        if not self._file.is_file():
            return False
        try:
            state = torch.load(self._file, weights_only=True)
            other = state["run"] != self._run
        except Exception as cause:  # a pickle can fail in any way
            raise TrainingError(
                f"{self._file.name}: cannot be read: {cause}", hint="delete it to begin anew"
            ) from cause
        if other:
            raise TrainingError(
                f"{self._file.parent.name} holds a training run with other settings or data",
                hint=f"another --out, the same settings, or delete {CHECKPOINT} there to begin anew",
            )
        with torch.no_grad():
            for name, value in self._student.module.named_parameters():
                value.copy_(state["module"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._best, self._losses = state["best"], state["losses"]
        for name, value in state["fitted"].items():
            setattr(self._fitted, name, tuple(value) if name == "best" else value)
        return True
