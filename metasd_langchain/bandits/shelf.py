"""Between live policies and a `Memory`: loads a key when it is first opened, saves from a thread of its own.

Nothing here writes while a round runs: a round marks its policies, and two seconds later, or at exit, the saver stores
what they have learned since. A save that fails is told once and tried again with the next; answers do not notice.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.joining import Joining, Learned, started
from metasd_langchain.bandits.memory import Change, Key, Memory
from metasd_langchain.errors import BanditMemoryError

__all__ = ["Shelf", "save_all"]

logger = logging.getLogger("metasd_langchain")
_EVERY_S = 2.0
_RETRY_S = 30.0  # after a save that failed
_UNSAVED = 1024  # policies kept for a memory that cannot be written, though no call comes to them any more


class _Entry:
    """A live policy: its key, its state when last loaded or saved, the rounds behind it now."""

    __slots__ = ("key", "left", "policy", "rounds", "since")

    def __init__(self, key: Key, policy: Policy, since: Learned) -> None:
        self.key, self.policy, self.since = key, policy, since
        self.rounds = since.rounds
        self.left = False  # no new call can come to it

    @property
    def changed(self) -> bool:
        return self.rounds != self.since.rounds


class Shelf:
    """The policies of one selector that a memory keeps.

    Attributes:
        lock: held while policies learn, and while their state is read.
    """

    def __init__(self, memory: Memory) -> None:
        self.lock = threading.Lock()
        self._memory = memory
        self._entries: dict[int, _Entry] = {}  # by id: policies may be unhashable, and entries keep them alive
        self._waiting = False
        self._warned = False
        _saver.shelves.add(self)

    def open(self, key: Key, policy: Policy, *, load: bool = True) -> None:
        """Keep a new policy under a key, and let it begin with what is stored there.

        Raises:
            BanditMemoryError: what is stored cannot be read; nothing is kept then.
        """
        found = self._memory.load(key) if load else None
        if found is not None:
            try:
                policy.load(started(policy.dump(), found.state))
            except BanditMemoryError as error:
                raise BanditMemoryError(f"{self._memory!r}: {error}") from error
        since = Learned(_state(policy), 0 if found is None else found.rounds)
        with self.lock:
            self._entries[id(policy)] = _Entry(key, policy, since)

    def note(self, policies: Iterable[Policy]) -> None:
        """Each has learned a round. The caller holds the lock."""
        for policy in policies:
            entry = self._entries.get(id(policy))
            if entry is not None:
                entry.rounds += 1
        if not self._waiting:
            self._waiting = True
            _saver.soon(self)

    def leave(self, policies: Iterable[Policy]) -> None:
        """No new call comes to these: once saved, they need not be kept."""
        with self.lock:
            for policy in policies:
                entry = self._entries.get(id(policy))
                if entry is not None:
                    entry.left = True
                    if not entry.changed:
                        del self._entries[id(policy)]

    def save(self) -> None:
        """Store what was learned since the last time. One thread at a time."""
        with self.lock:
            self._waiting = False
            changed = [entry for entry in self._entries.values() if entry.changed]
        changes: list[Change] = []
        try:
            for entry in changed:
                join = entry.policy.join if isinstance(entry.policy, Joining) else None
                with self.lock:
                    now = Learned(_state(entry.policy), entry.rounds)
                changes.append(Change(entry.key, now, entry.since, join))
            if changes:
                self._memory.save(changes)
        except Exception as error:  # noqa: BLE001 - a user's memory may raise anything
            if not self._warned:
                self._warned = True
                logger.warning("bandit memory was not saved, answers go on: %s", error)
            self._put_off()
            return
        with self.lock:
            for entry, change in zip(changed, changes, strict=True):
                entry.since = change.now
                if entry.left and not entry.changed:
                    self._entries.pop(id(entry.policy), None)

    def _put_off(self) -> None:
        """Try again later, and at exit; what has waited longest goes when too much waits."""
        with self.lock:
            self._waiting = True
            left = [key for key, entry in self._entries.items() if entry.left]
            for key in left[: max(0, len(left) - _UNSAVED)]:
                del self._entries[key]
        _saver.soon(self, _RETRY_S)

    def forked(self) -> None:
        """In the child of a fork: what is unsaved is the parent's to save."""
        self.lock = threading.Lock()
        self._waiting = False
        for entry in self._entries.values():
            if entry.changed:
                entry.since = Learned(_state(entry.policy), entry.rounds)


def _state(policy: Policy) -> dict[str, object]:
    """A copy of a policy's state that later rounds cannot change."""
    copied: dict[str, object] = json.loads(json.dumps(policy.dump(), allow_nan=False))
    return copied


class _Saver:
    """One daemon thread a process. Holds on to a shelf until it is saved, so that a dropped model loses nothing."""

    def __init__(self) -> None:
        self.shelves: weakref.WeakSet[Shelf] = weakref.WeakSet()
        self._reset()

    def _reset(self) -> None:
        self._wake = threading.Condition()
        self._saving = threading.Lock()
        self._due: dict[Shelf, float] = {}
        self._thread: threading.Thread | None = None
        self._paused = threading.local()  # each thread that forks lets go of what it took itself

    def soon(self, shelf: Shelf, seconds: float = _EVERY_S) -> None:
        with self._wake:
            self._due[shelf] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="metasd-memory", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending; `flush` comes
                    self._thread.start()
            self._wake.notify()

    def flush(self) -> None:
        """Save everything now; a save that is under way is waited for."""
        with self._saving:
            with self._wake:
                due = list(self._due)
                self._due.clear()
            for shelf in due:
                shelf.save()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._due:
                    self._wake.wait()
                left = min(self._due.values()) - time.monotonic()
                if left > 0.0:
                    self._wake.wait(left)
                    continue
            with self._saving:
                self._save_due()

    def _save_due(self) -> None:
        with self._wake:
            now = time.monotonic()
            due = [shelf for shelf, at in self._due.items() if at <= now]
            for shelf in due:
                del self._due[shelf]
        for shelf in due:
            shelf.save()

    def before_fork(self) -> None:
        """SQLite's own locks, held at a fork, would stay held in the child: wait for a save that is under way."""
        self._paused.taken = self._saving.acquire(timeout=_EVERY_S)

    def after_fork(self) -> None:
        if self._paused.taken:
            self._saving.release()

    def forked(self) -> None:
        self._reset()
        for shelf in list(self.shelves):
            shelf.forked()


_saver = _Saver()
save_all = _saver.flush
atexit.register(save_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_saver.before_fork, after_in_parent=_saver.after_fork, after_in_child=_saver.forked)
