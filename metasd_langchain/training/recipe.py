"""What is written beside a trained drafter: how it was made, how it went, and what may be done with it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metasd_langchain.errors import MissingExtra
from metasd_langchain.training.shards import replace_file
from metasd_langchain.training.split import RULE

__all__ = ["RECIPE", "digest", "draw_curves", "finished", "licence_note", "need_matplotlib", "write_recipe"]

RECIPE = "recipe.json"
_GEMMA = (
    "The target is a Gemma model: this drafter was trained on its outputs, and parts of it start from its weights. It "
    "is a Model Derivative under the Gemma Terms of Use (https://ai.google.dev/gemma/terms), which apply to it, the "
    "Prohibited Use Policy included (https://ai.google.dev/gemma/prohibited_use_policy)."
)
_OTHER = (
    "This drafter was trained on the target's outputs, and parts of it start from the target's weights. The target's "
    "licence says what may be done with it."
)


def digest(value: Mapping[str, Any]) -> str:
    """A short name of anything JSON-able."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def write_recipe(folder: Path, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``recipe.json``; written last, it says that the drafter is complete. Returns what a reader gets."""
    text = json.dumps(recipe, indent=1, ensure_ascii=False) + "\n"
    replace_file(folder / RECIPE, lambda path: path.write_text(text, encoding="utf-8"))
    written: dict[str, Any] = json.loads(text)
    return written


def finished(folder: Path, run: str) -> dict[str, Any] | None:
    """The recipe of a complete drafter that this very run made, else None."""
    try:
        recipe = json.loads((folder / RECIPE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return recipe if isinstance(recipe, dict) and recipe.get("run") == run else None


def licence_note(folder: Path, model_type: str, sources: Sequence[Mapping[str, Any]]) -> None:
    """Write ``LICENSE.md``: the target's terms, and the licences of the texts that prompts were made of."""
    lines = ["# Licence of these weights", "", _GEMMA if model_type.startswith("gemma") else _OTHER, ""]
    lines += ["Prompts were made of these texts; their answers are the target's:", ""]
    named = {(one["name"], one["licence"]) for one in sources if one["count"]}
    lines += [f"- {name}: {licence}" for name, licence in sorted(named)]
    lines += ["", f"Of the development prompts only these rows were used: {RULE}.", ""]
    text = "\n".join(lines)
    replace_file(folder / "LICENSE.md", lambda path: path.write_text(text, encoding="utf-8"))


def need_matplotlib() -> None:
    """Raise before hours of training when the curves could not be drawn.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "train")


def draw_curves(file: Path, title: str, curve: Sequence[Mapping[str, Any]]) -> None:
    """Loss and held-out acceptance by step, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, kept = figure.subplots(1, 2)
    steps = [point["step"] for point in curve]
    loss.plot(steps[1:], [point["loss"] for point in curve[1:]], color="#0072b2")
    loss.set(title=f"{title}: loss", xlabel="step", ylabel="cross entropy, summed over steps ahead")
    for ahead, colour in enumerate(("#0072b2", "#e69f00", "#009e73", "#d55e00")):
        line = [point["acceptance_t08"][ahead] for point in curve]
        kept.plot(steps, line, color=colour, label=f"{ahead + 1} ahead")
    kept.set(title="held-out acceptance, T = 0.8", xlabel="step", ylabel="1 - TV(p, q)", ylim=(0, 1))
    kept.legend()
    replace_file(file, lambda path: figure.savefig(path, format="png", dpi=110))
