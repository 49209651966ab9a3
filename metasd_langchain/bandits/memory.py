"""Where statistics outlive a process: the seam `Memory`, and `SqliteMemory`.

What is stored lies under a `Key`: model, policy with its options, arms, reward, scope and pipeline step. What was
learned for one of them is never found under another. No text is stored: a scope is a hash, and so is the name of a step
that nobody named. ``joining.py`` says how the rounds of several writers come together.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from metasd_langchain.bandits.joining import Join, Learned, joined
from metasd_langchain.errors import BadOption, BanditMemoryError

__all__ = [
    "SCHEMA",
    "Change",
    "Key",
    "Memory",
    "SqliteMemory",
    "Stored",
    "memory_named",
    "scope_id",
]

_ENDINGS = (".sqlite", ".sqlite3", ".db")
_EXPECTED = "'process', 'request', a file such as 'bandit.sqlite', or an object with load and save"


@dataclass(frozen=True, slots=True)
class Key:
    """What statistics belong to.

    Attributes:
        target: the model, as exactly as the caller can say.
        policy: its name with its options.
        arms: hash of the pool.
        reward: its name with its range.
        scope: hash of the scope, see `scope_id`; "" for no scope.
        step: pipeline step; None for what all steps of the scope taught together, which new steps start from.
    """

    target: str
    policy: str
    arms: str
    reward: str
    scope: str = ""
    step: str | None = None

    @property
    def digest(self) -> str:
        """The key as one word."""
        return hashlib.blake2s(json.dumps(astuple(self)).encode(), digest_size=16).hexdigest()


class Change(NamedTuple):
    """A key's state `now`, and as it was when its writer last loaded or saved it; the arguments of `joined`."""

    key: Key
    now: Learned
    since: Learned
    join: Join | None = None


class Stored(NamedTuple):
    """A row of a file: under which key what was saved when (seconds since 1970)."""

    key: Key
    learned: Learned
    saved: float


@runtime_checkable
class Memory(Protocol):
    """Keeps statistics by key. Called from several threads; objects travel by pickle where models do."""

    def load(self, key: Key) -> Learned | None:
        """What is stored for a key; called at most once for each, when its first call is admitted (aim: 5 ms)."""
        ...

    def save(self, changes: Sequence[Change]) -> None:
        """Store `joined` of what is stored and each change, all or nothing. Called on a thread of its own."""
        ...


def memory_named(memory: object) -> str | Memory:
    """What an option means: "process", "request", or a memory, given or behind a path (a string with a separator, or
    an ending such as ``.sqlite``).

    Raises:
        BadOption: none of these.
        BanditMemoryError: a file that cannot be read.
    """
    if isinstance(memory, str):
        if memory in ("process", "request"):
            return memory
        if not (memory.endswith(_ENDINGS) or any(mark in memory for mark in ("/", os.sep))):
            raise BadOption("memory", memory, _EXPECTED)
        return SqliteMemory(memory)
    if isinstance(memory, Memory):
        return memory
    if isinstance(memory, os.PathLike):
        return SqliteMemory(memory)
    raise BadOption("memory", memory, _EXPECTED)


def scope_id(scope: str) -> str:
    """What is stored of a scope, which may be a user's name."""
    return hashlib.blake2s(scope.encode(), digest_size=8).hexdigest() if scope else ""


# -- a file ------------------------------------------------------------------------------------------------------------

SCHEMA = 1
_OURS = 0x4D455441  # "META", so that we never write into somebody else's database
_CREATE = """
CREATE TABLE IF NOT EXISTS learned (
    id TEXT PRIMARY KEY, target TEXT NOT NULL, policy TEXT NOT NULL, arms TEXT NOT NULL, reward TEXT NOT NULL,
    scope TEXT NOT NULL, step TEXT, rounds INTEGER NOT NULL, saved REAL NOT NULL, state TEXT NOT NULL
)"""
_GET = "SELECT state, rounds FROM learned WHERE id = ?"
_PUT = "INSERT OR REPLACE INTO learned VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_ALL = """
SELECT target, policy, arms, reward, scope, step, rounds, saved, state FROM learned
ORDER BY target, scope, policy, reward, arms, step"""  # a step of NULL comes first
_RESET = "DELETE FROM learned WHERE (:scope IS NULL OR scope = :scope) AND (:step IS NULL OR step = :step)"
_TRIM = "DELETE FROM learned WHERE id NOT IN (SELECT id FROM learned ORDER BY saved DESC, id LIMIT ?)"
_READ_S, _WRITE_S = 1.0, 10.0  # longest wait for another process's lock
_MOST_KEYS = 2000  # steps nobody named come and go; the longest unsaved go first


class SqliteMemory:
    """Statistics in a SQLite file, for any number of threads and processes at once.

    A connection lives for one operation: nothing is shared with threads or over a fork, and pickling takes the path
    along and no more. The file is made by the first save.

    Args:
        path: the file; its folder exists.

    Raises:
        BanditMemoryError: no folder, a directory, not a database, another program's database, a newer schema, damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or os.fspath(path) in ("", ":memory:"):
            raise BadOption("path", path, "the path of a file")
        self.path = str(Path(path).expanduser().absolute())
        if not os.path.isdir(os.path.dirname(self.path)):  # noqa: PTH112, PTH120 - False where Path would raise
            raise BanditMemoryError(f"bandit memory {self.path}: there is no such folder")
        with self._reading() as connection:
            if connection is not None and connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise self._damaged()

    def __repr__(self) -> str:
        return f"SqliteMemory({self.path!r})"

    def __fspath__(self) -> str:
        return self.path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SqliteMemory) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def load(self, key: Key) -> Learned | None:
        """See `Memory`. BanditMemoryError: as at construction, or a row that is no state."""
        with self._reading() as connection:
            row = None if connection is None else connection.execute(_GET, (key.digest,)).fetchone()
        return None if row is None else self._learned(*row)

    def save(self, changes: Sequence[Change]) -> None:
        """See `Memory`: one transaction. BanditMemoryError: read-only, disk full, locked and the like."""
        with self._writing() as connection:
            for key, now, since, join in changes:
                row = connection.execute(_GET, (key.digest,)).fetchone()
                learned = joined(None if row is None else self._learned(*row), now, since, join)
                state = json.dumps(learned.state)
                connection.execute(_PUT, (key.digest, *astuple(key), learned.rounds, time.time(), state))
            if connection.execute("SELECT count(*) FROM learned").fetchone()[0] > _MOST_KEYS:
                connection.execute(_TRIM, (_MOST_KEYS,))

    def rows(self) -> list[Stored]:
        """Everything stored, by model, scope and policy; what all steps taught comes before the steps."""
        with self._reading() as connection:
            found = [] if connection is None else connection.execute(_ALL).fetchall()
        return [Stored(Key(*row[:6]), self._learned(row[8], row[6]), row[7]) for row in found]

    def reset(self, *, scope: str | None = None, step: str | None = None) -> int:
        """Delete what was learned; a missing file holds nothing.

        Args:
            scope: of this scope only, as its user wrote it; "" is no scope.
            step: of this pipeline step only. What all steps taught together stays then.

        Returns:
            Rows deleted.
        """
        with self._told():
            if not self._exists():
                return 0
        wanted = {"scope": None if scope is None else scope_id(scope), "step": step}
        with self._writing() as connection:
            return connection.execute(_RESET, wanted).rowcount

    # -- connections --------------------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A checked connection; None where nothing was saved yet."""
        file = Path(self.path)
        with self._told():
            if not self._exists():
                yield None
                return
            connection = self._connect("rw", _READ_S)
            try:
                try:
                    ours = self._check(connection)
                except sqlite3.OperationalError:
                    if os.access(file.parent, os.W_OK) and os.access(file, os.W_OK):
                        raise
                    connection.close()  # WAL wants files beside it; where nothing can be written, nothing changes
                    connection = self._connect("ro&immutable=1", _READ_S)
                    ours = self._check(connection)
                yield connection if ours else None
            finally:
                connection.close()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A checked connection inside a transaction, committed unless the block raises."""
        with self._told():
            connection = self._connect("rwc", _WRITE_S)
            try:
                self._check(connection)
                _write_ahead(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    if not self._check(connection):
                        connection.execute(f"PRAGMA application_id = {_OURS}")
                        connection.execute(f"PRAGMA user_version = {SCHEMA}")
                        connection.execute(_CREATE)
                    yield connection
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
            finally:
                connection.close()

    def _exists(self) -> bool:
        try:
            Path(self.path).stat()
        except FileNotFoundError:  # and nothing else: what may not be seen is there all the same
            return False
        return True

    def _connect(self, mode: str, timeout: float) -> sqlite3.Connection:
        return sqlite3.connect(f"{Path(self.path).as_uri()}?mode={mode}", timeout, isolation_level=None, uri=True)

    def _check(self, connection: sqlite3.Connection) -> bool:
        """Whether the file holds our table; False for a database without any."""
        owner = connection.execute("PRAGMA application_id").fetchone()[0]
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        if owner == _OURS and schema == SCHEMA:
            return True
        if owner == _OURS:
            raise BanditMemoryError(
                f"bandit memory {self.path} has schema {schema}, this version reads schema {SCHEMA}",
                hint="upgrade metasd-langchain, or name another file",
            )
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] or owner or schema:
            raise BanditMemoryError(
                f"bandit memory {self.path} is another program's database", hint="name another file"
            )
        return False

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's and the system's errors as ours, with the file's name."""
        try:
            if Path(self.path).is_dir():
                raise BanditMemoryError(f"bandit memory {self.path} is a directory, expected a file")
            yield
        except (sqlite3.Error, OSError) as cause:
            if "malformed" in str(cause):
                raise self._damaged() from cause
            hint = "it is not of our making; name another file" if "not a database" in str(cause) else ""
            raise BanditMemoryError(f"bandit memory {self.path}: {cause}", hint=hint) from cause

    def _damaged(self) -> BanditMemoryError:
        return BanditMemoryError(
            f"bandit memory {self.path} is damaged or was cut short",
            hint="delete it (only learned statistics are lost) or restore a copy",
        )

    def _learned(self, state: object, rounds: object) -> Learned:
        try:
            found = json.loads(state) if isinstance(state, str) else None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(rounds, int):
            raise self._damaged()
        return Learned(found, rounds)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Readers do not wait for writers then. Where it cannot be had (network disks), the file works without."""
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as busy:
            if "locked" not in str(busy):
                raise  # read-only, full; another process that is just making the file will set it
    connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last save, never the file
