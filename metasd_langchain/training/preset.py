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

__all__ = ["TOKENS", "preset_settings", "train_preset"]

TOKENS = 60_000  # of a domain: six heads within two hours of two cores
_PASSES = 5.0
# of a specialist, which goes on from OFA, beside OFA, which starts from nothing: passes, learning rate
_SHORTER, _SLOWER = 0.5, 0.5


def preset_settings(domain: str, settings: Settings) -> Settings:
    """Settings of one of a preset's drafters: OFA gets the sum of the five budgets.

    It sees five domains' data, so a pass is five times as long; a bound on the minutes is, too. Its vocabulary is a
    third larger, since it has to speak of everything. A specialist begins with OFA's weights, so it makes half the
    passes at half the rate.
    """
    fit = replace(settings.fit, passes=min(settings.fit.passes, _PASSES))
    if domain != OFA:
        fit = replace(fit, passes=fit.passes * _SHORTER, learning_rate=fit.learning_rate * _SLOWER)
        return replace(settings, fit=fit)
    longer = replace(fit, minutes=fit.minutes * len(DOMAINS))
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

    OFA comes first, and every specialist goes on from it: what all texts have in common is learned once, from five
    times the data. So a specialist has OFA's budget behind it besides its own; to train one from nothing, train it
    alone.

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
            target,
            domain,
            folder / domain,
            data,
            preset_settings(domain, settings),
            watcher=watcher,
            root=root,
            start=None if domain == OFA else folder / OFA,
        )
        for domain in (OFA, *DOMAINS)
    }
