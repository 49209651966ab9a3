"""Names become things: one lookup for policies, rewards and drafters, so that one file adds one thing.

A name is, in this order: a built-in name, a module of the kind's package folder (its ``create`` is the factory), an
entry point of the kind's group, or ``package.module:factory`` from anywhere.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from metasd_langchain.errors import BadOption, UnknownName

__all__ = ["find", "known_names", "known_options", "number", "resolve"]

Factory = Callable[..., Any]


def known_names(
    package: str | None, group: str | None, built_in: Mapping[str, Factory] | None = None
) -> tuple[str, ...]:
    """Every name that `find` resolves without a dotted path, sorted. Imports no module of the folder."""
    names = set(built_in or ())
    if package is not None:
        path = importlib.import_module(package).__path__
        names |= {module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")}
    if group is not None:
        names |= {point.name for point in entry_points(group=group)}
    return tuple(sorted(names))


def find(
    kind: str, name: str, package: str | None, group: str | None, built_in: Mapping[str, Factory] | None = None
) -> Factory:
    """The factory behind a name.

    Args:
        kind: what is looked up, for messages ("policy").
        name: built-in, module, entry point or ``package.module:factory``.
        package: folder whose modules each offer ``create``, or None.
        group: entry point group, or None.
        built_in: factories by name that need no module of their own.

    Raises:
        UnknownName: nobody registered the name; lists the names that exist.
        BadOption: a dotted name that cannot be imported, or a module without ``create``.
    """
    if ":" in name:
        return _dotted(kind, name)
    if built_in and name in built_in:
        return built_in[name]
    if package is not None and name in known_names(package, None):
        return _callable(kind, name, importlib.import_module(f"{package}.{name}"), "create")
    if group is not None:
        for point in entry_points(group=group):
            if point.name == name:
                return _dotted(kind, point.value)
    raise UnknownName(kind, name, known_names(package, group, built_in))


def resolve(
    kind: str, name: str, package: str | None, group: str | None, options: Mapping[str, object] | None, *arguments: Any
) -> Any:
    """Find a factory and call it as ``factory(options, *arguments)``. Errors as in `find`, plus the factory's own."""
    return find(kind, name, package, group)(dict(options or {}), *arguments)


def known_options(owner: str, options: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, Any]:
    """`defaults` overlaid with `options`. An option that has no default raises UnknownName and lists those that do."""
    for option in options:
        if option not in defaults:
            raise UnknownName(f"option of {owner}", option, defaults)
    return {**defaults, **options}


def number(option: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """`value` as a float in [low, high], else BadOption naming the option."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise BadOption(option, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _dotted(kind: str, name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as cause:
        raise BadOption(kind, name, f"an importable 'package.module:factory' ({cause})") from cause
    return _callable(kind, name, module, attribute)


def _callable(kind: str, name: str, module: object, attribute: str) -> Factory:
    found = getattr(module, attribute, None)
    if not callable(found):
        raise BadOption(kind, name, f"a module with a callable {attribute!r}")
    factory: Factory = found
    return factory
