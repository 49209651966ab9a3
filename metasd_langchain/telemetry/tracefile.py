"""Where trace files are, and how lines are appended to them: whole, from a thread of its own."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from metasd_langchain.errors import BadOption
from metasd_langchain.models.embedded import cache_root
from metasd_langchain.telemetry.traced import TracedCall

__all__ = ["Writer", "last_trace", "trace_path"]

if sys.platform != "win32":  # a write that appends is whole there as long as the disk is not full
    import fcntl

_WAITING = 1024  # calls not yet written; further ones are lost, and said to be
_KEPT = 100  # traces in the cache folder
_AT_EXIT_S = 3.0
_log = logging.getLogger("metasd_langchain")
_numbers = itertools.count()


def trace_path(path: str | os.PathLike[str] | None) -> Path:
    """The file that a recording appends to.

    Args:
        path: a file, an existing folder for a new file, or None for a new file in the cache folder.
    """
    folder = _cache() if path is None else Path(path).expanduser()
    if path is not None and not folder.is_dir():
        return folder.absolute()
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    return folder.absolute() / f"{moment}-{os.getpid()}-{next(_numbers)}.jsonl"


def last_trace() -> Path:
    """The newest trace in the cache folder.

    Raises:
        BadOption: there is none.
    """
    found = _cached()
    if not found:
        raise BadOption("last", True, f"a trace in {_cache()}; record one with METASD_TRACE_FILE=1, or record()")
    return found[-1]


def _cache() -> Path:
    return cache_root() / "traces"


def _cached() -> list[Path]:
    """Traces in the cache folder, oldest first."""
    found: list[tuple[float, Path]] = []
    for path in _cache().glob("*.jsonl"):
        with suppress(OSError):  # another process has just pruned it
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


# -- writing -----------------------------------------------------------------------------------------------------------


class Writer:
    """Appends calls to their files from a thread of its own. A failed write is told once a file; answers go on."""

    def __init__(self) -> None:
        self._warned: set[Path] = set()
        self._reset()
        atexit.register(self.flush, _AT_EXIT_S)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._wake = threading.Condition()
        self._due: deque[tuple[Path, Callable[[], TracedCall]]] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None

    def put(self, path: Path, call: Callable[[], TracedCall]) -> None:
        """Queue a call; `call` is asked on the writer's thread."""
        with self._wake:
            if len(self._due) >= _WAITING:
                self._warn(path, "too many calls wait to be written")
                return
            self._due.append((path, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="metasd-trace", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending; `flush` comes
                    self._thread.start()
            self._wake.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until the queue is empty; False when it was not within `seconds`."""
        with self._wake:
            if self._thread is not None and not self._thread.is_alive():
                self._thread = None
            orphaned = self._thread is None
        if orphaned:  # no thread, or one that never could start
            while self._next(wait=False):
                pass
            return True
        with self._wake:
            return self._wake.wait_for(lambda: not self._due and not self._busy, seconds)

    def _run(self) -> None:
        while True:
            self._next(wait=True)

    def _next(self, *, wait: bool) -> bool:
        with self._wake:
            while wait and not self._due:
                self._wake.wait()
            if not self._due:
                return False
            path, call = self._due.popleft()
            self._busy = True
        try:
            self._write(path, call)
        finally:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
        return True

    def _write(self, path: Path, call: Callable[[], TracedCall]) -> None:
        try:
            _append(path, call().line())
        except Exception as error:  # noqa: BLE001 - nothing about a trace may cost an answer
            self._warn(path, type(error).__name__)

    def _warn(self, path: Path, why: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            _log.warning("trace %s was not written, answers go on: %s", path.name, why)


def _append(path: Path, line: bytes) -> None:
    """Add a line, whole, after whatever a process that was killed may have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)  # it may hold text
    try:
        with _locked(handle):
            if os.fstat(handle).st_size:
                os.lseek(handle, -1, os.SEEK_END)
                if os.read(handle, 1) != b"\n":
                    line = b"\n" + line
            while line:
                line = line[os.write(handle, line) :]
    finally:
        os.close(handle)
    if new and path.parent == _cache().absolute():
        for old in _cached()[:-_KEPT]:
            old.unlink(missing_ok=True)


@contextmanager
def _locked(handle: int) -> Iterator[None]:
    if sys.platform == "win32":
        yield
    else:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
