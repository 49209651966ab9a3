"""Every module of the drafters folder keeps the contract, if it can be built without a model."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType

import pytest

from metasd_langchain import drafters
from metasd_langchain.drafters import Drafter
from metasd_langchain.errors import BadOption
from metasd_langchain.testing.drafter_contract import DrafterContract
from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter, PerfectDrafter, RaisingDrafter

FREE = {"lookup", "suffix", "recycling"}  # must be among those found


def modules() -> dict[str, ModuleType]:
    """Modules with a ``create`` that takes options only."""
    found = {}
    for info in pkgutil.iter_modules(drafters.__path__):
        module = importlib.import_module(f"{drafters.__name__}.{info.name}")
        create = getattr(module, "create", None)
        if create is not None and len(inspect.signature(create).parameters) == 1:
            found[info.name] = module
    return found


MODULES = modules()
VARIANTS: list[tuple[str, Mapping[str, object]]] = [
    ("lookup", {"min_ngram": 1, "max_ngram": 5}),
    ("suffix", {"shared": False}),
    ("suffix", {"max_bytes": 4096}),
    ("recycling", {"context": 1}),
    ("recycling", {"shape": "tree"}),
    ("recycling", {"shared": False, "k": 1}),
]
CASES = [(name, {}) for name in sorted(MODULES)] + VARIANTS


def build(name: str, options: Mapping[str, object]) -> Drafter:
    try:
        drafter: Drafter = MODULES[name].create(options)
    except BadOption:
        if name in FREE:
            raise
        pytest.skip(f"{name} needs options: it keeps the contract in its own test")
    if hasattr(drafter, "bind"):
        pytest.skip(f"{name} needs a target: it keeps the contract in its own test")
    return drafter


def test_found_what_is_known() -> None:
    assert set(MODULES) >= FREE


@pytest.mark.parametrize("name", sorted(MODULES))
def test_named_after_its_module(name: str) -> None:
    assert build(name, {}).name == name


@pytest.mark.parametrize("name", sorted(FREE))
@pytest.mark.parametrize("options", [{"nonsense": 1}, {"name": 7}, {"name": "a@b"}, {"name": ""}])
def test_bad_option_is_named(name: str, options: Mapping[str, object]) -> None:
    with pytest.raises(BadOption) as caught:
        MODULES[name].create(options)
    assert caught.value.option == next(iter(options))


class TestBuiltIn(DrafterContract):
    @pytest.fixture(autouse=True, params=CASES, ids=lambda case: f"{case[0]}-{dict(case[1])}")
    def _case(self, request: pytest.FixtureRequest) -> None:
        self.case: tuple[str, Mapping[str, object]] = request.param

    def make(self) -> Drafter:
        drafter = build(*self.case)
        if hasattr(drafter, "bind"):
            pytest.skip(f"{drafter.name} needs a target: it keeps the contract in its own test")
        return drafter


SCRIPTED = {
    "perfect": lambda: PerfectDrafter(lambda prompt: [1, 2, 3] * 20),
    "perfect tree": lambda: PerfectDrafter(lambda prompt: [1, 2, 3] * 20, shape="tree", vocab=40),
    "hostile": lambda: HostileDrafter(40, lambda prompt: [1, 2, 3] * 20),
    "hostile tree": lambda: HostileDrafter(40, lambda prompt: [1, 2, 3] * 20, shape="tree"),
    "half": lambda: HalfDrafter({}, 40),
    "half tree": lambda: HalfDrafter(lambda prompt: [1, 2, 3] * 20, 40, shape="tree"),
    "raising, not yet": lambda: RaisingDrafter(at=10**6),
}


class TestScripted(DrafterContract):
    from_text = False

    @pytest.fixture(autouse=True, params=sorted(SCRIPTED))
    def _case(self, request: pytest.FixtureRequest) -> None:
        self.case: str = request.param

    def make(self) -> Drafter:
        return SCRIPTED[self.case]()

    def test_tokens_a_grammar_forces_are_part_of_the_text(self) -> None:
        pytest.skip("a script counts from the prompt")
