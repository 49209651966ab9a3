"""Presets: several drafters at once, into the user's cache, where ``eagle:five-domains/math`` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from metasd_langchain.errors import UnknownName
from metasd_langchain.models.checkpoints import preset_folder
from metasd_langchain.models.load import Target
from metasd_langchain.training.places import DOMAINS, OFA, PRESETS
from metasd_langchain.training.run import Settings, Watcher, train

__all__ = ["preset_settings", "train_preset"]


def preset_settings(domain: str, settings: Settings) -> Settings:
    """Settings of one of a preset's drafters: OFA gets the sum of the five budgets.

    It sees five domains' data as often as a specialist sees its own, so it makes five times the steps; a bound on the
    minutes is five times as long. Its vocabulary is a third larger, since it has to speak of everything.
    """
    if domain != OFA:
        return settings
    longer = replace(settings.fit, minutes=settings.fit.minutes * len(DOMAINS))
    return replace(settings, fit=longer, vocabulary=settings.vocabulary * 4 // 3)


def train_preset(
    target: Target,
    name: str,
    data: Path | None,
    settings: Settings,
    *,
    watcher: Watcher,
    out: Path | None = None,
    root: Path | None = None,
) -> Mapping[str, dict[str, Any]]:
    """Train all drafters of a preset; finished ones stay, an interrupted one goes on.

    Args:
        target: the model.
        name: one of PRESETS.
        data: folder of the development files, or None.
        settings: of a specialist.
        watcher: told what goes on.
        out: folder for the drafters, one subfolder each; default in the user's cache.
        root: folder of teacher data; default in the user's cache.

    Returns:
        domain -> recipe.

    Raises:
        UnknownName: no such preset.
    """
    if name not in PRESETS:
        raise UnknownName("preset", name, PRESETS)
    folder = out or preset_folder(target.name, name)
    return {
        domain: train(
            target, domain, folder / domain, data, preset_settings(domain, settings), watcher=watcher, root=root
        )
        for domain in (*DOMAINS, OFA)
    }
