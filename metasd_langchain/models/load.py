"""Finding and loading the target: a folder, a hub id, a GGUF file, live objects or the embedded model.

Importing this module loads no torch, so that a caller can take `uncollected` before that begins.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metasd_langchain.errors import BadOption, LoadError, MissingExtra
from metasd_langchain.models.defaults import generation_defaults
from metasd_langchain.models.embedded import EMBEDDED, MANIFEST, embedded_folder, half_weights, read_tokenizer, rebuild

if TYPE_CHECKING:
    from metasd_langchain.models.lm import CausalLM

__all__ = ["Progress", "Target", "load_target", "load_tokenizer", "pick_device", "pick_dtype", "uncollected"]

logger = logging.getLogger("metasd_langchain")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
Progress = Callable[[str], None]  # told what is being waited for


class _Uncollected:
    """Cyclic garbage collection rests until the last of those inside has left. Any number of threads may enter.

    Importing torch and transformers makes a million objects, and all of them stay. The collector would go through them
    a dozen times meanwhile: 0.7 s of 4.
    """

    def __init__(self) -> None:
        self._alone()
        self._inside = 0
        self._enabled = False  # before the first entered
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _alone(self) -> None:
        self._lock = threading.Lock()

    def _forked(self) -> None:
        """Who was inside is not in the child."""
        self._alone()
        if self._inside:
            self._inside = 0
            self._resume()

    def _resume(self) -> None:
        if not self._enabled:
            return
        if not gc.get_freeze_count():
            gc.freeze()  # there and back they become old objects,
            gc.unfreeze()  # which the next quick collection leaves alone
        gc.enable()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._resume()


uncollected = _Uncollected()


@dataclass(frozen=True, slots=True)
class Target:
    """The model that answers, with what is needed to talk to it.

    Attributes:
        name: how spans and metadata call it.
        lm: packed forwards.
        tokenizer: transformers tokenizer.
        stop_ids: ids that end an answer: the generation config's, the model config's and the tokenizer's, joined.
        source: the live pair it was made from, if it was.
        defaults: options of the model's generation config, by our names.
    """

    name: str
    lm: CausalLM
    tokenizer: Any
    stop_ids: frozenset[int]
    source: object = field(default=None, repr=False)  # a live pair stays alive, so that its id names nothing else
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """Ids of a text as a prompt: the tokenizer's special tokens, with exactly one BOS if it uses one."""
        with self.lock:  # a fast tokenizer cannot be borrowed twice when it changes its padding or truncation
            ids: list[int] = list(self.tokenizer(text)["input_ids"])
        bos = self.tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def token_text(self, token: int) -> tuple[str, bytes]:
        """A single token's text and bytes; the text of a token that is part of a character is its name."""
        with self.lock:
            name = str(self.tokenizer.convert_ids_to_tokens(token))
            # Of two in a row the second: some decoders drop a space at the beginning of what they are given.
            both, one = (
                self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                for ids in ([token, token], [token])
            )
        byte = _BYTE.fullmatch(name)
        if byte:
            return name, bytes([int(byte[1], 16)])
        text: str = both[len(one) :]
        if "\ufffd" in text:
            from transformers.convert_slow_tokenizer import bytes_to_unicode

            alphabet = {character: value for value, character in bytes_to_unicode().items()}
            if all(character in alphabet for character in name):
                return name, bytes(alphabet[character] for character in name)
        return text, text.encode()


def load_target(
    model: str | Path | tuple[Any, Any],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Target:
    """Load the target.

    Args:
        model: folder or hub id in transformers format, a ``.gguf`` file, "gemma-3-270m" for the embedded model, or a
            live pair ``(model, tokenizer)``, which is neither moved nor changed.
        revision: of a hub id.
        dtype: "auto" (bfloat16 where the device multiplies it natively, else as stored), or a torch name.
        device: "auto", "cpu", "cuda", "cuda:1", "mps".
        compile: hand the packed forward to ``torch.compile``.
        model_kwargs: passed through to ``from_pretrained``, e.g. ``device_map``, ``quantization_config``.
        progress: told in words what takes long.

    Raises:
        LoadError: nothing there, no tokenizer, a broken checkpoint. The cause is chained.
        UnsupportedModel: see CausalLM.
        MissingExtra: embedded model or GGUF support not installed.
    """
    if isinstance(model, tuple):
        live, tokenizer = _pair(model)
        name = str(getattr(live.config, "_name_or_path", "") or live.config.model_type)
        # The application may use its tokenizer at any time, with truncation of its own: our lock does not reach there.
        tokenizer = copy.deepcopy(tokenizer)
        return replace(_target(name, live, tokenizer, False, compile), source=model)
    say = progress or logger.info
    device = pick_device(device)
    options = {"dtype": pick_dtype(dtype, device), **dict(model_kwargs or {})}
    if revision:
        options["revision"] = revision
    name, where, extra = _locate(str(model), say)
    say(f"loading {name}")
    with uncollected if Path(where).is_dir() else nullcontext():  # not for as long as a download takes
        try:
            live, tokenizer = _read(where, {**extra, **options}, say)
        except LoadError as error:
            # A wrong option, or no memory, is no damaged file; what is whole must not be converted again.
            if name != EMBEDDED or isinstance(error.__cause__, (TypeError, MemoryError, RuntimeError, AssertionError)):
                raise
            where = str(rebuild(say))  # damaged without a change of size
            live, tokenizer = _read(where, {**extra, **options}, say)
        if "device_map" not in options and device != "cpu":
            live = _moved(live, device)
        return _target(name, live, tokenizer, True, compile)


def load_tokenizer(model: str, progress: Progress | None = None) -> tuple[str, Any]:
    """A model's name and tokenizer, without its weights.

    Raises:
        LoadError: nothing there, no tokenizer.
        MissingExtra: the embedded model is not installed, or support for GGUF files.
    """
    name, where, extra = _locate(model, progress or logger.info)
    if "gguf_file" in extra and not all(importlib.util.find_spec(part) for part in ("gguf", "accelerate")):
        raise MissingExtra("support for GGUF files", "gguf")
    if (Path(where) / MANIFEST).is_file():
        return name, read_tokenizer(Path(where))
    from transformers import AutoTokenizer

    try:
        return name, AutoTokenizer.from_pretrained(where, **extra)
    except Exception as cause:  # transformers raises many kinds, all meaning the same to our caller
        raise LoadError(f"could not load the tokenizer of {name}: {type(cause).__name__}: {cause}") from cause


def pick_device(device: str) -> str:
    """Resolve "auto" to cuda, mps or cpu, in this order of preference."""
    if device != "auto":
        return device
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def pick_dtype(dtype: str, device: str) -> Any:
    """Resolve a dtype name; "auto" on a CPU is bfloat16 only where the processor multiplies it natively."""
    import torch

    from metasd_langchain.models.packed_linear import native_bfloat16

    if dtype == "auto":
        if device != "cpu":
            return "auto"
        return torch.bfloat16 if native_bfloat16() else torch.float32
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise BadOption("dtype", dtype, "auto, float32, bfloat16 or float16")
    return found


def _pair(model: tuple[Any, Any]) -> tuple[Any, Any]:
    try:
        live, tokenizer = model
        live.config, tokenizer.encode  # noqa: B018 - duck typing, once, with a clear error
    except (TypeError, ValueError, AttributeError) as cause:
        raise BadOption("model", type(model).__name__, "a pair (transformers model, tokenizer)") from cause
    return live, tokenizer


def _locate(model: str, say: Progress) -> tuple[str, str, dict[str, Any]]:
    """Name, place for ``from_pretrained`` and extra options of a model given as text."""
    if model == EMBEDDED:
        return EMBEDDED, str(embedded_folder(say)), {"local_files_only": True}
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadError(f"no such file: {path.name}", hint="give the path of a .gguf file")
        return path.stem, str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
            raise LoadError(
                f"the folder {path.name} holds no tokenizer", hint="save it with tokenizer.save_pretrained(folder)"
            )
        return path.name, str(path), {"local_files_only": True}
    if model.startswith((".", "/", "~")) or model.count("/") > 1:  # a hub id is "name" or "owner/name"
        raise LoadError(f"no such folder: {path.name}", hint="give a model folder, a hub id or a .gguf file")
    return model, model, {}


def _moved(live: Any, device: str) -> Any:
    try:
        return live.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as cause:  # not there, or no memory left
        raise LoadError(f"the model does not go to {device}: {type(cause).__name__}: {cause}") from cause


def _read(where: str, options: dict[str, Any], say: Progress) -> tuple[Any, Any]:
    if "gguf_file" in options and not all(importlib.util.find_spec(name) for name in ("gguf", "accelerate")):
        raise MissingExtra("support for GGUF files", "gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shared = {
        key: options[key]
        for key in ("revision", "local_files_only", "gguf_file", "trust_remote_code", "token", "cache_dir", "proxies")
        if key in options
    }
    weights = where
    read = partial(AutoTokenizer.from_pretrained, where, **shared)
    if (Path(where) / MANIFEST).is_file():
        read = partial(read_tokenizer, Path(where))
        if options["dtype"] is torch.bfloat16:
            weights = str(half_weights(Path(where), say))
    try:
        with ThreadPoolExecutor(1, "metasd-tokenizer") as thread:  # a large vocabulary takes as long as the weights
            tokenizer = thread.submit(read)
            live: Any = AutoModelForCausalLM.from_pretrained(weights, **options)
            return live, tokenizer.result()
    except Exception as cause:  # transformers raises many kinds, all meaning the same to our caller
        raise LoadError(f"could not load {Path(where).name}: {type(cause).__name__}: {cause}") from cause


def _target(name: str, live: Any, tokenizer: Any, owned: bool, compile: bool) -> Target:
    from metasd_langchain.models.lm import CausalLM

    lm = CausalLM(live, owned=owned, compile=compile)
    stops: set[int] = set()
    generation = getattr(live, "generation_config", None)
    for source in (getattr(generation, "eos_token_id", None), live.config.eos_token_id, tokenizer.eos_token_id):
        stops.update([source] if isinstance(source, int) else source or ())
    return Target(name, lm, tokenizer, frozenset(stops), defaults=generation_defaults(live))
