"""Teacher data on disk: shards of rows, each a safetensors file that is whole or not there.

A shard holds ``tokens`` (int32, all rows one behind the other), ``hidden`` (``[tokens, layers * width]``, bfloat16,
float32 for a float32 target), ``starts`` (int64 ``[rows + 1]``), ``prompts`` (int32 ``[rows]``, lengths) and, where
the whole vocabulary was computed, ``normalisers`` (float32 ``[tokens]``: its logsumexp at the shard's temperature, at
1 when greedy; nan where not known). Its metadata say temperature, version and what it took to make. Distributions are
not stored: they follow from hidden states and rows of the output layer.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from metasd_langchain.errors import TrainingError
from metasd_langchain.training.decode import Decoded

__all__ = ["Row", "check_space", "read_shard", "replace_file", "shard_seconds", "write_shard"]

_FORMAT = "1"
_SPARE = 200 * 2**20  # bytes that are left free


@dataclass(frozen=True, slots=True)
class Row:
    """One text with what the target thought of it.

    Attributes:
        tokens: ``[n]`` int64.
        hidden: ``[n, layers * width]``, states after each token; the target's last layer comes last.
        prompt: tokens of the prompt.
        temperature: the answer was drawn at; 0 is greedy.
        normalisers: ``[n]`` or None.
    """

    tokens: Tensor
    hidden: Tensor
    prompt: int
    temperature: float
    normalisers: Tensor | None = None


def write_shard(
    file: Path, rows: Sequence[Decoded], layers: Sequence[int], temperature: float, **seconds: float
) -> None:
    """Write a shard in one step.

    Args:
        file: to be written.
        rows: its rows.
        layers: hidden states to write, in this order.
        temperature: the answers were drawn at.
        seconds: what it took, by name; kept in the metadata.

    Raises:
        TrainingError: it cannot be written; names the file.
    """
    lengths = [len(row.hidden[layers[-1]]) for row in rows]  # an answer's last token was not read
    hidden = torch.cat([torch.cat([row.hidden[layer] for layer in layers], 1) for row in rows])
    dtype = torch.bfloat16 if hidden.dtype != torch.float32 else torch.float32
    state = {
        "tokens": torch.tensor(
            [token for row, n in zip(rows, lengths, strict=True) for token in row.tokens[:n]], dtype=torch.int32
        ),
        "hidden": hidden.to("cpu", dtype).contiguous(),
        "starts": torch.tensor([0, *lengths]).cumsum(0),
        "prompts": torch.tensor([row.prompt for row in rows], dtype=torch.int32),
    }
    if rows[0].normalisers is not None:
        state["normalisers"] = torch.cat([_aligned(row, n) for row, n in zip(rows, lengths, strict=True)])
    about = {"format": _FORMAT, "temperature": repr(temperature)}
    about |= {name: f"{value:.3f}" for name, value in seconds.items()}
    replace_file(file, lambda path: save_file(state, path, about))


def _aligned(row: Decoded, n: int) -> Tensor:
    """Normalisers by position; nan for the prompt's inner ones."""
    known = torch.full((n,), torch.nan)
    if row.normalisers is not None:
        part = row.normalisers[: n - row.prompt + 1].cpu()
        known[row.prompt - 1 : row.prompt - 1 + len(part)] = part
    return known


def read_shard(file: Path) -> list[Row]:
    """Rows of a shard.

    Raises:
        TrainingError: truncated or foreign; names file and field.
    """
    try:
        with safe_open(str(file), framework="pt") as stored:
            about = stored.metadata() or {}
            names = set(stored.keys())
            state = {name: stored.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as cause:
        raise _damaged(file, "", str(cause)) from cause
    if about.get("format") != _FORMAT:
        raise _damaged(file, "format", f"{about.get('format')!r} is not {_FORMAT!r}")
    for name in ("tokens", "hidden", "starts", "prompts"):
        if name not in state:
            raise _damaged(file, name, "is missing")
    starts = state["starts"].tolist()
    if starts[-1] != len(state["tokens"]) or len(state["hidden"]) != len(state["tokens"]):
        raise _damaged(file, "starts", "does not fit the number of tokens")
    temperature = float(about.get("temperature", "1.0"))
    normalisers = state.get("normalisers")
    rows = []
    for start, stop, prompt in zip(starts, starts[1:], state["prompts"].tolist(), strict=False):
        own = None if normalisers is None else normalisers[start:stop]
        rows.append(Row(state["tokens"][start:stop].long(), state["hidden"][start:stop], prompt, temperature, own))
    return rows


def shard_seconds(files: Sequence[Path]) -> dict[str, float]:
    """What shards took to make: wall and processor seconds."""
    total = {"wall_s": 0.0, "cpu_s": 0.0}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as stored:
                about = stored.metadata() or {}
        except (OSError, SafetensorError) as cause:
            raise _damaged(file, "", str(cause)) from cause
        for name in total:
            total[name] += float(about.get(name, 0.0))
    return {name: round(value, 3) for name, value in total.items()}


def _damaged(file: Path, field: str, problem: str) -> TrainingError:
    where = f"{file.name}, {field}" if field else file.name
    return TrainingError(f"{where}: {problem}", hint="delete the file; it is made again")


def replace_file(file: Path, write: Callable[[Path], object]) -> None:
    """Make a file by writing another beside it and renaming that: a kill leaves the old one, or none.

    Raises:
        TrainingError: it cannot be written.
    """
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(part)
        part.replace(file)
    except (OSError, SafetensorError, RuntimeError) as cause:  # torch and safetensors report a full disk as their own
        with suppress(OSError):
            part.unlink()
        raise TrainingError(
            f"{file.name} cannot be written: {cause}", hint="is the disk full? what was saved before is kept"
        ) from cause


def check_space(folder: Path, wanted: int) -> None:
    """Raise before anything is computed when a folder's disk has no room.

    Args:
        folder: may not exist yet.
        wanted: bytes.

    Raises:
        TrainingError: says how much is missing.
    """
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < wanted + _SPARE:
        raise TrainingError(
            f"the disk of {folder.name!r} has {free / 1e9:.1f} GB free, {(wanted + _SPARE) / 1e9:.1f} are needed",
            hint="fewer --tokens, or METASD_CACHE on another disk",
        )
