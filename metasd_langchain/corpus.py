"""The file behind the ``datastore`` drafter: token ids of a corpus with a suffix array, in segments.

Layout, numbers little-endian: ``METASDDS``, version (uint32), place and length in bytes of the description (uint64
each), 4 bytes of padding; then per segment its tokens (big-endian uint32) and the order of their places (uint32); then
the description, JSON: whose ids they are, how many, where the segments lie, what the text was and under which licence.

A segment is sorted in memory (some 100 bytes a token), the corpus never is: memory is bounded however long it is.
Documents are parted by the id 2^32 - 1, so that no match and no continuation runs from one into the next.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from metasd_langchain.errors import BadDatastore
from metasd_langchain.suffix_array import SuffixArray, encoded, suffix_order

__all__ = ["END", "SEGMENT", "VERSION", "Corpus", "CorpusWriter"]

END = 2**32 - 1  # parts documents; no token id
SEGMENT = 2**21  # tokens a segment
VERSION = 1
_MAGIC = b"METASDDS"
_HEAD = struct.Struct("<8sIQQ4x")
_WIDTH = 4


class CorpusWriter:
    """Writes a file, segment by segment; used as a context. The file appears when it is complete.

    Args:
        file: where to.
        fingerprint: of the tokenizer, see ``models.vocabulary.fingerprint``.
        about: more for the description: model, sources, licence.
        segment: tokens a segment.
    """

    def __init__(
        self, file: Path, fingerprint: str, about: Mapping[str, Any] | None = None, segment: int = SEGMENT
    ) -> None:
        self._file, self._limit = file, segment
        self._about: dict[str, Any] = {**(about or {}), "fingerprint": fingerprint}
        self._waiting: list[int] = []
        self._segments: list[dict[str, int]] = []
        self._highest = -1
        self.tokens = 0

    def __enter__(self) -> Self:
        """Open a temporary file beside the final one."""
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".datastore-", dir=self._file.parent)
        except OSError as cause:
            raise BadDatastore(f"{self._file.name} cannot be written: {cause.strerror}") from cause
        self._work = Path(name)
        self._out: BinaryIO = os.fdopen(handle, "wb")
        self._out.write(b"\0" * _HEAD.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the file, or drop what was written."""
        try:
            if kind is None:
                self._finish()
        finally:
            with contextlib.suppress(OSError):  # a disk that is full stays full
                self._out.close()
            self._work.unlink(missing_ok=True)

    def add(self, document: Sequence[int], *, last: bool = True) -> None:
        """Append a document, or a piece of one that is not its `last`."""
        if document:
            self._waiting += document
            self.tokens += len(document)
            self._highest = max(self._highest, *document)
        if last and self._waiting and self._waiting[-1] != END:
            self._waiting.append(END)
        while len(self._waiting) >= self._limit:
            cut = self._cut()
            self._write(self._waiting[:cut])
            del self._waiting[:cut]

    def _cut(self) -> int:
        """Where a segment ends: behind a document where that leaves at least half of it, else inside one."""
        ends = (at for at in range(self._limit, self._limit // 2, -1) if self._waiting[at - 1] == END)
        return next(ends, self._limit)

    def describe(self, **about: Any) -> None:
        """Add to the description."""
        self._about |= about

    def _write(self, tokens: list[int]) -> None:
        text = np.array(tokens, dtype=np.uint32)
        try:
            self._segments.append({"start": self._out.tell(), "tokens": len(text)})
            self._out.write(encoded(text))
            self._out.write(suffix_order(text).astype("<u4").tobytes())
        except OSError as cause:
            raise BadDatastore(f"{self._file.name} cannot be written: {cause.strerror}") from cause

    def _finish(self) -> None:
        if not self.tokens:
            raise BadDatastore("the corpus holds no text", hint="give files or folders with UTF-8 text")
        if self._waiting:
            self._write(self._waiting)
        self._about |= {"tokens": self.tokens, "highest": self._highest, "segments": self._segments}
        description = json.dumps(self._about, ensure_ascii=False).encode()
        try:
            place = self._out.tell()
            self._out.write(description)
            self._out.seek(0)
            self._out.write(_HEAD.pack(_MAGIC, VERSION, place, len(description)))
            self._out.flush()
            os.fsync(self._out.fileno())
            self._out.close()
            self._work.chmod(0o644)  # as any other file; temporary ones are for their owner only
            self._work.replace(self._file)
        except OSError as cause:
            raise BadDatastore(f"{self._file.name} cannot be written: {cause.strerror}") from cause


class Corpus:
    """A file, mapped into memory: pages are read when they are looked at.

    Attributes:
        about: its description.
        segments: one suffix array each.
        nbytes: size of the file.

    Raises:
        BadDatastore: not there, foreign, truncated, or of a newer format.
    """

    def __init__(self, file: Path) -> None:
        self._name = file.name
        try:
            with file.open("rb") as stream:
                self.nbytes = stream.seek(0, os.SEEK_END)
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) if self.nbytes else None
        except OSError as cause:
            raise BadDatastore(f"datastore {file.name} cannot be read: {cause.strerror}") from cause
        self.about = self._describe()
        self.segments = [self._segment(entry) for entry in self.about["segments"]]

    def _describe(self) -> dict[str, Any]:
        if self._map is None or self._map[: len(_MAGIC)] != _MAGIC:
            raise BadDatastore(
                f"{self._name} is no datastore", hint="build one: metasd datastore build PATH --out FILE"
            )
        if self.nbytes < _HEAD.size:
            raise self._truncated()
        _, version, place, length = _HEAD.unpack(self._map[: _HEAD.size])
        if version > VERSION:
            raise BadDatastore(
                f"datastore {self._name} has format {version}, this release reads up to {VERSION}",
                hint="upgrade metasd-langchain or build it again",
            )
        if place + length != self.nbytes:
            raise self._truncated()
        try:
            about: dict[str, Any] = json.loads(self._map[place:])
            ends = [int(entry["start"]) + 2 * _WIDTH * int(entry["tokens"]) for entry in about["segments"]]
            str(about["fingerprint"]), int(about["highest"]), int(about["tokens"])
        except (ValueError, KeyError, TypeError) as cause:
            raise BadDatastore(f"datastore {self._name}: its description is damaged") from cause
        if not ends or max(ends) > place:
            raise self._truncated()
        return about

    def _segment(self, entry: Mapping[str, int]) -> SuffixArray:
        if self._map is None:
            raise self._truncated()
        start, count = entry["start"], entry["tokens"]
        order = np.frombuffer(self._map, dtype="<u4", count=count, offset=start + count * _WIDTH)
        return SuffixArray(self._map, start, order)

    def _truncated(self) -> BadDatastore:
        return BadDatastore(f"datastore {self._name} is truncated ({self.nbytes} bytes)", hint="build it again")
