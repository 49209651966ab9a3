"""``metasd datastore``: text or code becomes a file that the datastore drafter quotes from."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from metasd_langchain.cli.screen import output, tell
from metasd_langchain.corpus import Corpus, CorpusWriter
from metasd_langchain.errors import BadOption

__all__ = ["build", "show"]

_PIECE = 2**18  # characters tokenised at once
_PEEK = 8192  # bytes that say whether a file is text


@dataclass(slots=True)
class _Count:
    """What was read under one of the given paths."""

    name: str
    files: int = 0
    left_out: int = 0
    bytes: int = 0


def build(paths: Sequence[Path], out: Path, *, model: str | None, licence: str, as_json: bool) -> None:
    """Tokenise, index, write, and say what is in the file.

    Raises:
        BadOption: a path that does not exist.
        LoadError: no tokenizer.
        BadDatastore: no text, or a file that cannot be written; an older file is kept.
    """
    for path in paths:
        if not path.exists():
            raise BadOption("PATH", str(path), "a file or folder that exists")
    from metasd_langchain.models.load import load_tokenizer
    from metasd_langchain.models.vocabulary import fingerprint

    name, tokenizer = load_tokenizer(model or os.environ.get("METASD_MODEL") or "gemma-3-270m")
    files = [(path, found) for path in paths for found in _files(path)]
    counts = {path: _Count(path.name or str(path)) for path in paths}
    about = {"model": name, "licence": licence, "made": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
    with CorpusWriter(out, fingerprint(tokenizer), about) as writer, _progress() as progress:
        task = progress.add_task("indexing", total=sum(_size(file) for _, file in files))
        for path, file in files:
            _add(writer, tokenizer, file, counts[path])
            progress.update(task, advance=_size(file))
        writer.describe(sources=[_row(count) for count in counts.values()])
    show(out, as_json=as_json)


def show(file: Path, *, as_json: bool) -> None:
    """Print what a datastore says of itself.

    Raises:
        BadDatastore: it cannot be read.
    """
    corpus = Corpus(file)
    about = {key: value for key, value in corpus.about.items() if key != "segments"}
    about |= {"segments": len(corpus.segments), "bytes": corpus.nbytes}
    if as_json:
        print(json.dumps(about, ensure_ascii=False, indent=2))
        return
    console = output()
    console.print(f"{file.name}: {about['tokens']:,} tokens of {about.get('model', '?')}, {corpus.nbytes / 1e6:.1f} MB")
    for source in about.get("sources", []):
        rest = f", {source['left_out']} left out" if source["left_out"] else ""
        console.print(f"  {source['name']}: {source['files']} files, {source['bytes'] / 1e6:.1f} MB of text{rest}")
    console.print(f"  licence: {about.get('licence') or 'not given'}")
    tell(f'draft from it with drafters=["datastore:{file}@16", ...]')


def _row(count: _Count) -> dict[str, Any]:
    return {"name": count.name, "files": count.files, "left_out": count.left_out, "bytes": count.bytes}


def _progress() -> Progress:
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def _files(path: Path) -> list[Path]:
    """The file itself, or all files below a folder in order; hidden ones and links to folders are left out."""
    if not path.is_dir():
        return [path]
    found: list[Path] = []
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(folder) / name for name in sorted(names) if not name.startswith(".")]
    return [file for file in found if file.is_file()]


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _add(writer: CorpusWriter, tokenizer: Any, file: Path, count: _Count) -> None:
    """Tokenise a file in pieces that end with a line; a file that is no text, or cannot be read, is counted as that."""
    read = 0
    try:
        for piece in _pieces(file):
            writer.add(tokenizer(piece, add_special_tokens=False)["input_ids"], last=False)
            read += len(piece.encode())
    except (OSError, UnicodeDecodeError):
        if not read:
            count.left_out += 1
            return
    writer.add((), last=True)
    count.files += 1
    count.bytes += read


def _pieces(file: Path) -> Iterator[str]:
    with file.open("rb") as stream:
        if b"\0" in stream.read(_PEEK):
            raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "binary")
    with file.open(encoding="utf-8", newline="") as stream:
        while lines := stream.readlines(_PIECE):
            piece = "".join(lines)
            for at in range(0, len(piece), 4 * _PIECE):  # a line may be endless
                yield piece[at : at + 4 * _PIECE]
