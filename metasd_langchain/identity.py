"""Telling live objects apart: an id names another object as soon as the first is gone, these names never do."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
import weakref
from typing import Any

__all__ = ["Same", "name_of"]


class Same:
    """An object as part of a key: equal to itself alone, and alive as long as the key."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


_PROCESS = uuid.uuid4().hex[:12]  # a cache on disk outlives us
_count = itertools.count()
_names: dict[int, tuple[weakref.ref[Any], str]] = {}
_lock = threading.RLock()  # a collection inside may call _drop


def name_of(thing: object) -> str:
    """A name that no other object ever has, in this process or another; the object is not kept alive.

    An object that cannot be referred to weakly has a new name each time: no cache serves it, and none serves it wrong.
    A bound method is named by its object and function.
    """
    owner = getattr(thing, "__self__", None)
    function = getattr(thing, "__func__", None)
    if owner is not None and function is not None:
        return f"{name_of(owner)}.{name_of(function)}"
    with _lock:
        found = _names.get(id(thing))
        if found is not None and found[0]() is thing:
            return found[1]
        name = f"{type(thing).__name__}-{_PROCESS}-{next(_count)}"
        with contextlib.suppress(TypeError):
            _names[id(thing)] = (weakref.ref(thing, _dropper(id(thing), name)), name)
        return name


def _dropper(key: int, name: str) -> Any:
    def drop(_: object) -> None:
        with _lock:
            if _names.get(key, (None, ""))[1] == name:
                del _names[key]

    return drop
