"""One drafter from end to end: data, draft vocabulary, training, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from metasd_langchain._version import __version__
from metasd_langchain.errors import BadOption, TrainingError
from metasd_langchain.models.draft_lm import DraftLMConfig
from metasd_langchain.models.eagle import EagleConfig, TargetParts
from metasd_langchain.models.embedded import cache_root
from metasd_langchain.models.load import Target
from metasd_langchain.models.vocabulary import fingerprint
from metasd_langchain.training.batches import batches, padded
from metasd_langchain.training.loop import CHECKPOINT, FitOptions, Fitted, fit
from metasd_langchain.training.places import DOMAINS, OFA
from metasd_langchain.training.prompts import corpus
from metasd_langchain.training.recipe import (
    digest,
    draw_curves,
    finished,
    licence_note,
    need_matplotlib,
    write_recipe,
)
from metasd_langchain.training.shards import Row, check_space, shard_seconds
from metasd_langchain.training.start import head_digest, load_start, take_over
from metasd_langchain.training.students import EagleStudent, SmallLMStudent, Student
from metasd_langchain.training.teacher import Data, TeacherOptions, make_data

__all__ = ["KINDS", "Settings", "Watcher", "draft_vocabulary", "gather", "head_shape", "train"]

KINDS = ("eagle", "small_lm")


class Watcher(Protocol):
    """Is told what goes on."""

    def data(self, domain: str, done: int, wanted: int) -> None:
        """Tokens generated of a domain."""
        ...

    def training(self, name: str, fitted: Fitted) -> None:
        """After every step."""
        ...

    def say(self, message: str) -> None:
        """A line for a person."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What is trained and how.

    Attributes:
        kind: "eagle" or "small_lm".
        tokens: generated for each domain.
        vocabulary: draft tokens.
        unroll: steps ahead that a head is trained on its own features.
        regression: weight of the distance between a head's features and the target's last states.
        prompt_weight: of positions in prompts; None = what suits the kind.
        head: changes to the shape of a head (EagleConfig) over `head_shape`; ``aux_layers`` decide what the data hold.
        small: shape of a small model.
        teacher: see TeacherOptions; its `layers` follow from `head`.
        fit: see FitOptions.
        half: products in bfloat16; None = where the target's are.
    """

    kind: str = "eagle"
    tokens: int = 100_000
    vocabulary: int = 6144
    unroll: int = 2
    regression: float = 1.0
    prompt_weight: float | None = None
    head: dict[str, Any] = field(default_factory=dict)
    small: DraftLMConfig = field(default_factory=DraftLMConfig)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    fit: FitOptions = field(default_factory=FitOptions)
    half: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadOption("kind", self.kind, " or ".join(KINDS))
        for name in ("tokens", "vocabulary", "unroll"):
            if getattr(self, name) < 1:
                raise BadOption(name, getattr(self, name), "at least 1")


def draft_vocabulary(data: Data, rows: Sequence[Row], size: int, always: Sequence[int]) -> Tensor:
    """The ids a drafter may propose, ascending: those the target is expected to say most often.

    The expectation is the mean of its distributions over the calibration batches, which knows of likely tokens that
    chance left out of the samples, added to the share in the answers of all rows.

    Args:
        data: has the expected counts.
        rows: whose answers are counted.
        size: how many; all when there are no more.
        always: ids that are in, such as those that end an answer.
    """
    counts = torch.zeros(len(data.mass), dtype=torch.float64)
    for row in rows:
        counts += torch.bincount(row.tokens[row.prompt :], minlength=len(counts)).double()
    share = data.mass / data.mass.sum().clamp_min(1e-12) + counts / counts.sum().clamp_min(1.0)
    share[list(always)] = torch.inf
    return share.topk(min(size, len(share))).indices.sort().values


def gather(
    target: Target, domain: str, data: Path | None, settings: Settings, watcher: Watcher, root: Path | None = None
) -> Data:
    """Teacher data of a domain; of "ofa" that of all five, each as large as for a specialist.

    Args:
        target: the model.
        domain: one of DOMAINS, or OFA.
        data: folder of the development files, or None.
        settings: how much and how.
        watcher: told how far it is.
        root: folder of all teacher data; default in the user's cache.
    """
    root = root or cache_root() / "teacher" / target.name
    layers = tuple(settings.head.get("aux_layers", ())) if settings.kind == "eagle" else ()
    options = replace(settings.teacher, layers=layers)
    parts = []
    for name in DOMAINS if domain == OFA else (domain,):
        texts = corpus(name, data, seed=options.seed)
        watcher.say(f"{name}: " + ", ".join(f"{one.count} {one.name}" for one in texts.sources))
        done = _Told(watcher, name)
        parts.append(make_data(target, texts, root, settings.tokens, options, say=done))
    return parts[0] if len(parts) == 1 else Data.joined(parts)


@dataclass(frozen=True, slots=True)
class _Told:
    watcher: Watcher
    domain: str

    def __call__(self, done: int, wanted: int) -> None:
        self.watcher.data(self.domain, done, wanted)


def train(
    target: Target,
    domain: str,
    out: Path,
    data: Path | None,
    settings: Settings | None = None,
    *,
    watcher: Watcher,
    root: Path | None = None,
    start: Path | None = None,
) -> dict[str, Any]:
    """Train a drafter for a domain into a folder; goes on where an earlier call was interrupted.

    Args:
        target: the model it is to draft for.
        domain: one of DOMAINS, or OFA.
        out: its folder: checkpoint, ``recipe.json``, ``curves.png``, ``LICENSE.md``.
        data: folder of the development files, or None.
        settings: what and how.
        watcher: told what goes on.
        root: folder of all teacher data; default in the user's cache.
        start: folder of a trained head of the same shape whose weights this one begins with; its draft vocabulary may
            be another.

    Returns:
        The recipe.

    Raises:
        CorpusError, TrainingError, BadOption, MissingExtra: see the parts; a drafter that was there stays.
        BadCheckpoint, IncompatibleVocabulary: of `start`.
    """
    settings = settings or Settings()
    need_matplotlib()
    if start is not None and settings.kind != "eagle":
        raise BadOption("start", start.name, "nothing: only heads begin with another's weights")
    begun = {} if start is None else {"start": head_digest(start)}
    run = digest({"settings": asdict(settings), "domain": domain, "target": target.name, "layout": 1, **begun})
    known = finished(out, run)
    if known is not None:
        watcher.say(f"{out.name}: already trained with these settings")
        return known
    parts = TargetParts.of(target.lm, target.name)
    first = None if start is None else load_start(start, _head_config(parts, settings, 1), parts)
    teacher = gather(target, domain, data, settings, watcher, root)
    rows, held_out = teacher.rows(), teacher.rows(held_out=True)
    data_s = shard_seconds((*teacher.held_out, *teacher.shards))
    ids = draft_vocabulary(teacher, rows, settings.vocabulary, sorted(target.stop_ids))
    scale = float(torch.cat([row.hidden[:, -parts.hidden_size :] for row in held_out]).float().square().mean().sqrt())
    student = _student(target, parts, ids, teacher, settings, scale)
    if first is not None:
        take_over(student.module, first)
    count = sum(one.numel() for one in student.module.parameters())
    check_space(out, count * 22)  # weights, their best, two moments, each written beside the one it replaces
    said = _Fitting(watcher, domain)
    fitted = fit(student, rows, held_out, out, settings.fit, run=run + _names(teacher), say=said)
    student.calibrate(padded(group) for group in batches(held_out, settings.fit.batch_tokens * 2, 0))
    recipe = {
        "run": run,
        "target": target.name,
        "domain": domain,
        "kind": settings.kind,
        "settings": asdict(settings),
        "start": None if start is None else {"name": start.name, "weights": begun["start"]},
        "parameters": count,
        **_went(teacher, ids, rows, fitted, data_s),
        "versions": {
            "metasd-langchain": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    return _write(out, student, recipe, domain, str(target.lm.config.model_type))


@dataclass(frozen=True, slots=True)
class _Fitting:
    watcher: Watcher
    name: str

    def __call__(self, fitted: Fitted) -> None:
        self.watcher.training(self.name, fitted)


def _student(
    target: Target, parts: TargetParts, ids: Tensor, teacher: Data, settings: Settings, scale: float
) -> Student:
    softcap = getattr(target.lm.config, "final_logit_softcapping", None)
    half = target.lm.dtype == torch.bfloat16 if settings.half is None else settings.half
    common: dict[str, Any] = {"seed": settings.fit.seed, "softcap": softcap, "half": half}
    if settings.prompt_weight is not None:
        common["prompt_weight"] = settings.prompt_weight
    if settings.kind == "small_lm":
        return SmallLMStudent(settings.small, parts, ids, fingerprint=fingerprint(target.tokenizer), **common)
    config = _head_config(parts, settings, len(ids))
    common |= {"layers": teacher.layers, "unroll": settings.unroll}
    return EagleStudent(config, parts, ids, regression=settings.regression, scale=scale, **common)


def _head_config(parts: TargetParts, settings: Settings, vocabulary: int) -> EagleConfig:
    return EagleConfig.of_target(parts, **{**head_shape(parts), "draft_vocab_size": vocabulary, **settings.head})


def head_shape(parts: TargetParts) -> dict[str, Any]:
    """Shape of a head where nothing else is asked for: half the target's layer, which learns as much from few data."""
    return {
        "join_residual": True,
        "intermediate_size": max(1, int(parts.shape["intermediate_size"]) // 2),
        "head_dim": min(64, int(parts.shape["head_dim"])),
    }


def _names(teacher: Data) -> str:
    """Tells data apart: folders are named by their plan."""
    return " ".join(f"{folder.name}:{len(teacher.shards)}" for folder in teacher.folders)


def _went(
    teacher: Data, ids: Tensor, rows: Sequence[Row], fitted: Fitted, data_s: Mapping[str, float]
) -> dict[str, Any]:
    """What the data were and how training went."""
    answers = torch.cat([row.tokens[row.prompt :] for row in rows])
    best = next(point for point in fitted.curve if point["step"] == fitted.best[1])
    return {
        "held_out": {name: value for name, value in best.items() if name not in ("step", "loss")},
        "draft_vocabulary": {
            "tokens": len(ids),
            "covers": round(float(torch.isin(answers, ids).double().mean()), 4),
        },
        "data": {
            "domains": list(teacher.about),
            "rows": len(rows),
            "answer_tokens": len(answers),
            "prompt_tokens": sum(row.prompt for row in rows),
        },
        "seconds": {
            "data": dict(data_s),
            "training": {"wall_s": round(fitted.wall_s, 3), "cpu_s": round(fitted.cpu_s, 3)},
        },
        "steps": {"planned": fitted.steps, "done": fitted.step, "best": fitted.best[1]},
        "curve": fitted.curve,
    }


def _write(out: Path, student: Student, recipe: dict[str, Any], domain: str, model_type: str) -> dict[str, Any]:
    sources = [source for about in recipe["data"]["domains"] for source in about["sources"]]
    notes: dict[str, Any] = {"domain": domain, "licence": "see LICENSE.md", "recipe": "see recipe.json"}
    student.save(out, notes)
    licence_note(out, model_type, sources)
    draw_curves(out / "curves.png", f"{recipe['kind']}, {domain}", recipe["curve"])
    written = write_recipe(out, recipe)
    try:
        (out / CHECKPOINT).unlink(missing_ok=True)  # of no use now, and larger than the drafter
    except OSError as cause:
        raise TrainingError(f"{CHECKPOINT} cannot be removed: {cause}") from cause
    return written
