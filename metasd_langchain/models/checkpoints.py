"""Where drafters' checkpoints lie: a path, or a preset in the user's cache."""

from __future__ import annotations

from pathlib import Path

from metasd_langchain.errors import LoadError
from metasd_langchain.models.embedded import cache_root

__all__ = ["drafter_path", "preset_folder"]


def preset_folder(target: str, preset: str) -> Path:
    """The cache folder of a preset of drafters for a target: ``drafters/<target>/<preset>``."""
    return cache_root() / "drafters" / Path(target).name / preset


def drafter_path(path: str, target: str) -> Path:
    """The folder or file that `path` names for a target.

    Args:
        path: a folder or file, or ``PRESET/DOMAIN`` of the user's cache.
        target: the target's name.

    Raises:
        LoadError: neither is there.
    """
    direct = Path(path).expanduser()
    if direct.exists():
        return direct
    parts = path.split("/")
    if len(parts) == 2 and all(part not in ("", ".", "..", "~") for part in parts):
        cached = preset_folder(target, parts[0]) / parts[1]
        if cached.exists():
            return cached
        raise LoadError(
            f"no drafter {path!r}: neither a path nor a preset of {target}",
            hint=f"train it: metasd train preset {parts[0]}",
        )
    raise LoadError(f"no such file or folder: {path}", hint="give the path of a drafter's checkpoint")
