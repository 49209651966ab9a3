"""The settings file that ``metasd tune`` writes and ``MetaSDLLM(settings=...)`` reads. No text of a prompt, no path."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metasd_langchain._version import __version__
from metasd_langchain.assemble import DEFAULT_POLICY, DEFAULT_REWARD
from metasd_langchain.cli.tuning import Kept, Score, Verdict, speedup
from metasd_langchain.errors import BadOption

if TYPE_CHECKING:
    from metasd_langchain.cli.tune_runs import Curve

__all__ = ["check", "contents", "cores", "curve_of", "load_average", "machine", "save", "score_of"]

_KEYS = frozenset({"drafters", "policy", "reward", "memory", "measured"})
_DIGITS = 4


def check(path: Path) -> None:
    """Raise when `path` cannot be written, or holds something that we did not write.

    Raises:
        BadOption: no such folder, no right to write, or a file other than a settings file.
    """
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadOption("output", str(path), "a file in a folder that exists and can be written to")
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not found.keys() <= _KEYS:
        raise BadOption("output", str(path), "a new file, or a settings file, which is overwritten")


def save(path: Path, settings: Mapping[str, Any]) -> None:
    """Write all of it or nothing.

    Raises:
        BadOption: see `check`; or the disk is full and the like.
    """
    check(path)
    place = path.resolve()  # a link stays a link
    draft = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(settings, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
    except OSError as cause:
        raise BadOption("output", str(path), "a file that can be written") from cause
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def contents(kept: Kept, found: Verdict, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The whole file: options of MetaSDLLM, and what they rest on."""
    gained = None if kept.speedup is None else {key: _short(value) for key, value in asdict(kept.speedup).items()}
    return {
        "drafters": list(kept.drafters),
        "policy": DEFAULT_POLICY,
        "reward": DEFAULT_REWARD,
        "memory": "process",
        "measured": {"verdict": found.kind, "reason": found.reason, "speedup": gained, **measured},
    }


def score_of(own: Score, plain: Score) -> dict[str, Any]:
    """A candidate in numbers."""
    return {
        "tokens_per_s": _short(own.tokens_per_s),
        "speedup": {key: _short(value) for key, value in asdict(speedup(own, plain)).items()},
        "accepted_length": _short(own.accepted_length),
        "acceptance": _short(own.acceptance),
        "answers_that_differ": len(own.different),
    }


def curve_of(curve: Curve) -> dict[str, Any]:
    """Costs by context and width."""
    return {
        str(context): {
            str(width): {key: _short(value) for key, value in asdict(cost).items()} for width, cost in costs.items()
        }
        for context, costs in curve.items()
    }


def load_average() -> list[float] | None:
    """Processes running or waiting, mean of the last 1, 5 and 15 minutes. Ask before anything heavy starts."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(threads: int, device: str, gpu: str | None) -> dict[str, Any]:
    """Where and when: processor and versions, not the machine's name."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": cores(),
        "threads": threads,
        "device": device,
        "gpu": gpu,
        "system": platform.system(),
        "versions": {
            "metasd_langchain": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "transformers": version("transformers"),
        },
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
