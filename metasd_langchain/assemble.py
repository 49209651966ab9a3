"""From names to objects: arms, drafters, policies and engines. The table of defaults lives here.

=============  ==========================================================  ==================================
what           default                                                     why
=============  ==========================================================  ==================================
arms           suffix@16 suffix@6 recycling_tree@12                        long and short drafts of the two best
               recycling_tree@6 plain                                      training-free drafters (DECISIONS 14)
policy         hinted_ucb                                                  frugal exploration, hints, drift
reward         throughput                                                  ranks any budget, lets plain win
memory         process, one bandit a pipeline step                         each step learns its own drafter
=============  ==========================================================  ==================================
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from metasd_langchain.bandits import Policy
from metasd_langchain.bandits.memory import Key, Memory, memory_named
from metasd_langchain.bandits.registry import policy_factory, reward_named
from metasd_langchain.bandits.rewards import Reward
from metasd_langchain.bandits.selector import Selector
from metasd_langchain.drafters import Drafter
from metasd_langchain.engine.pool import Pool
from metasd_langchain.errors import BadOption, UnknownName
from metasd_langchain.registry import known_names, resolve
from metasd_langchain.training.places import DOMAINS, OFA, PRESETS
from metasd_langchain.values import PLAIN, Arm

if TYPE_CHECKING:
    from metasd_langchain.engine.loop import Engine
    from metasd_langchain.models.load import Progress

__all__ = ["DEFAULT_ARMS", "DEFAULT_POLICY", "DEFAULT_REWARD", "close_engine", "make_pool", "shared_engine"]

DEFAULT_ARMS: tuple[str, ...] = ("suffix@16", "suffix@6", "recycling_tree@12", "recycling_tree@6", PLAIN)
DEFAULT_POLICY = "hinted_ucb"
DEFAULT_REWARD = "throughput"
_DRAFTERS = "metasd_langchain.drafters"  # folder and entry point group
# Of an arm written without "@".
_BUDGETS = {
    "lookup": 8,
    "suffix": 16,
    "recycling": 4,
    "recycling_tree": 12,
    "eagle": 8,
    "small_lm": 5,
    "datastore": 16,
    "layer_skip": 4,
    "fused": 12,
}
_MAX_BUDGET = 128

ArmSpec = str | Drafter | tuple[Drafter, int]


def make_pool(
    arms: Sequence[ArmSpec] = DEFAULT_ARMS,
    policy: str | Policy = DEFAULT_POLICY,
    reward: str | Reward = DEFAULT_REWARD,
    *,
    memory: str | os.PathLike[str] | Memory = "process",
    policy_options: Mapping[str, object] | None = None,
    target: str = "",
) -> Pool:
    """Drafters, arms and bandit. Loads no weights and no torch.

    Args:
        arms: names such as "suffix@16" ("plain" drafts nothing), names with a path such as "eagle:five-domains/math@8",
            a whole preset such as "eagle:five-domains@8", drafter objects, or pairs (object, budget).
        policy: a policy's name, or a policy object that every pipeline step starts from a copy of.
        reward: a reward's name, or a Reward.
        memory: "process", "request", a file's path, or a Memory.
        policy_options: passed to the policy's factory.
        target: what the model is called in a file or Memory; "" when `Selector.bind` will say.

    Raises:
        UnknownName: lists what exists.
        BadOption: a budget out of range, an arm twice, no arm at all, an unknown memory.
        BanditMemoryError: the file cannot be read.
    """
    if isinstance(arms, str):
        raise BadOption("drafters", arms, "a list of arms")
    drafters: dict[str, Drafter] = {}
    given: dict[str, str] = {}  # specification of a drafter with a path -> its name
    parsed = [_arm(spec, drafters, given) for spec in _expanded(arms)]
    factory = policy_factory(policy, policy_options)
    worth = reward_named(reward)
    stored = Key(
        target,
        _policy_id(policy, policy_options),
        _digest(sorted([arm.name, type(drafters.get(arm.drafter)).__qualname__] for arm in parsed)),
        f"{worth.name} {worth.low:g} to {worth.high:g}",
    )
    return Pool(drafters, Selector(parsed, factory, worth, memory=memory_named(memory), stored=stored))


def _policy_id(policy: str | Policy, options: Mapping[str, object] | None) -> str:
    """A policy with what it was told, as far as it can be written down: under that its statistics are stored."""
    if isinstance(policy, str):
        return f"{policy} {_written(dict(sorted(options.items())))}" if options else policy
    return f"{policy.name} {_kind(policy)} {_digest(getattr(policy, '__dict__', {}))}"


def _kind(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _labelled(thing: object) -> str:
    """A live object's kind, with a hash of what is in it where it gives one."""
    return f"{_kind(thing)} {getattr(thing, 'digest', '')}".rstrip()


def _written(thing: object) -> str:
    """A thing as JSON, of live objects their kind, the same in every process."""
    try:
        return json.dumps(thing, default=_labelled, skipkeys=True)
    except (ValueError, RecursionError):  # it holds itself
        return _kind(thing)


def _digest(thing: object) -> str:
    return hashlib.blake2s(_written(thing).encode(), digest_size=6).hexdigest()


def _expanded(arms: Sequence[ArmSpec]) -> Iterator[ArmSpec]:
    """A preset's name stands for all of its drafters, unless a folder is called so."""
    for spec in arms:
        name, at, budget = spec.partition("@") if isinstance(spec, str) else ("", "", "")
        kind, _, path = name.partition(":")
        if path in PRESETS and not Path(path).exists():
            yield from (f"{kind}:{path}/{domain}{at}{budget}" for domain in (*DOMAINS, OFA))
        else:
            yield spec


def _arm(spec: ArmSpec, drafters: dict[str, Drafter], given: dict[str, str]) -> Arm:
    if isinstance(spec, str):
        return _named(spec, drafters, given)
    drafter, budget = spec if isinstance(spec, tuple) else (spec, 0)
    if not isinstance(drafter, Drafter):
        raise BadOption("drafters", type(drafter).__name__, "arm names, drafters, or pairs (drafter, budget)")
    if drafters.setdefault(drafter.name, drafter) is not drafter:
        raise BadOption("drafters", drafter.name, "drafters of different names")
    budget = _checked(drafter.name, budget or _BUDGETS.get(drafter.name, 8))
    return Arm(f"{drafter.name}@{budget}", drafter.name, budget)


def _named(spec: str, drafters: dict[str, Drafter], given: dict[str, str]) -> Arm:
    name, at, tail = spec.rpartition("@")
    if not at or "/" in tail:  # a folder may have an "@" in its name
        name, at, tail = spec, "", ""
    if name == PLAIN and not tail:
        return Arm(PLAIN, PLAIN, 0)
    kind, _, path = name.partition(":")
    if path and kind in known_names(_DRAFTERS, None):
        if name not in given:
            given[name] = _short_name(kind, path, drafters)
            drafters[given[name]] = resolve("drafter", kind, _DRAFTERS, None, {"path": path, "name": given[name]})
        name = given[name]
    elif name not in drafters:
        try:
            drafters[name] = resolve("drafter", name, _DRAFTERS, _DRAFTERS, None)
        except UnknownName as error:
            raise UnknownName("drafter", name, (*known_names(_DRAFTERS, None), PLAIN)) from error
    budget = int(tail) if tail.isdigit() else 0
    if at and not budget:
        raise BadOption("drafters", spec, "a name, or name@budget with a budget of at least 1")
    budget = _checked(spec, budget or _BUDGETS.get(name, _BUDGETS.get(kind, 8)))
    return Arm(f"{name}@{budget}", name, budget)


def _short_name(kind: str, path: str, drafters: Mapping[str, Drafter]) -> str:
    """What a drafter with a path is called in arms, statistics and spans: its kind and the path's last part."""
    stem = PurePath(path.replace("@", "-")).stem or kind
    name = f"{kind}-{stem}"
    number = 2
    while name in drafters:
        name, number = f"{kind}-{stem}-{number}", number + 1
    return name


def _checked(spec: str, budget: int) -> int:
    if not 1 <= budget <= _MAX_BUDGET:
        raise BadOption("drafters", spec, f"a budget from 1 to {_MAX_BUDGET}")
    return budget


# -- engines -----------------------------------------------------------------------------------------------------------

_engines: weakref.WeakValueDictionary[tuple[Any, ...], Engine] = weakref.WeakValueDictionary()
_latest: list[Engine] = []  # the one used last stays, so that a re-built model object finds its weights loaded
_lock = threading.Lock()


def shared_engine(
    model: Any,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    compile: bool = False,
    num_threads: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Engine:
    """The engine of a model in this process: loaded once for the same arguments, then shared.

    Errors as in ``load_target``.
    """
    from metasd_langchain.models.load import load_target, uncollected

    with uncollected:
        from metasd_langchain.engine.loop import Engine  # torch is loaded with the first engine, not before

    kwargs = dict(model_kwargs or {})
    named = tuple(map(id, model)) if isinstance(model, tuple) else str(model)
    key = (named, revision, dtype, device, compile, num_threads, repr(sorted(kwargs.items(), key=lambda item: item[0])))
    with _lock:
        engine = _engines.get(key)
        if engine is None or engine.closed:
            load = partial(
                load_target,
                model,
                revision=revision,
                dtype=dtype,
                device=device,
                compile=compile,
                model_kwargs=kwargs,
                progress=progress,
            )
            # On a thread that ends: the OpenMP team it leaves behind ends with it (see models/threads.py).
            with ThreadPoolExecutor(1, "metasd-load") as thread:
                target = thread.submit(load).result()
            engine = _engines[key] = Engine(target, num_threads=num_threads)
        _latest[:] = [engine]
        return engine


def close_engine(engine: Engine) -> None:
    """Close an engine and forget it, so that its weights can be freed."""
    with _lock:
        _latest[:] = [other for other in _latest if other is not engine]
    engine.close()
