"""C9: drafted tokens that a grammar forbids move its parser on, or poison it: invalid JSON, or a crash.

Drafts are judged without being read; the answer is the one of plain constrained decoding, and valid, whatever they
hold.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from metasd_langchain.testing.drafters import HalfDrafter, HostileDrafter
from metasd_langchain.values import EMPTY_DRAFT, Draft
from tests.bugs import kit
from tests.bugs.kit import PROMPT, VOCAB, encode, ids, make, scripted

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "category", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {"response_format": SCHEMA, "max_tokens": 90}


@functools.cache
def truth(seed: int) -> tuple[int, ...]:
    return ids(make(speculative=False, temperature=0.9, seed=seed, **OPTIONS))


class Scribbler:
    """Drafts ids that are illegal nearly everywhere: control tokens, the EOS, bytes, ids that no vocabulary has."""

    candidates = 0
    prompt_rows = 0
    hidden_layers: tuple[int, ...] = ()
    name = "scribbler"

    def open(self, request: Any) -> Any:
        return self

    def forget(self, scope: str | None = None) -> None:
        """Nothing is shared."""

    def hint(self) -> float:
        return float("nan")

    def propose(self, tokens: Sequence[int], budget: int, draws: Any) -> Draft:
        n = len(tokens)
        if n % 5 == 0:
            return EMPTY_DRAFT
        some = (1, 0, 2, 3, VOCAB - 1, 4 + n % 250, VOCAB, 10**9, -1)
        chain = tuple(some[(n + i) % len(some)] for i in range(budget))
        return Draft.chain(chain) if n % 2 else Draft(chain, tuple((i - 1) // 2 for i in range(budget)))

    def observe(self, round: Any) -> None:
        """Learns nothing."""

    def close(self) -> None:
        """Nothing to let go."""


def drafter(kind: str, seed: int) -> Any:
    answers = {encode(PROMPT): truth(seed)}
    fakes = {
        "hostile": lambda: HostileDrafter(VOCAB, answers),
        "hostile-tree": lambda: HostileDrafter(VOCAB, answers, shape="tree"),
        "half": lambda: HalfDrafter(answers, VOCAB),
        "half-tree": lambda: HalfDrafter(answers, VOCAB, shape="tree"),
        "scribbler": Scribbler,
    }
    return fakes[kind]()


@pytest.mark.parametrize("kind", ["hostile", "hostile-tree", "half", "half-tree", "scribbler"])
def test_scripted_drafts_leave_ids_and_validity_alone(kind: str) -> None:
    for seed in range(10):
        llm = scripted(drafter(kind, seed), 8, temperature=0.9, seed=seed, **OPTIONS)
        assert ids(llm) == truth(seed)
        jsonschema.validate(json.loads(llm.invoke(PROMPT)), SCHEMA)


@pytest.mark.parametrize("arm", ["lookup@8", "suffix@8", "recycling@8", "recycling_tree@8"])
def test_model_free_drafts_leave_ids_and_validity_alone(arm: str) -> None:
    llm = make(drafters=[arm], policy="fixed", **OPTIONS)
    for seed in range(10):
        assert ids(llm, temperature=0.9, seed=seed) == truth(seed)
        jsonschema.validate(json.loads(llm.invoke(PROMPT, temperature=0.9, seed=seed)), SCHEMA)


def test_illegal_nodes_cost_no_scored_row() -> None:
    """Tokens that cannot come are not sent through the model."""
    answers = {encode(PROMPT): ids(make(speculative=False, regex="[abc]{12}"))}
    never = HostileDrafter(4, answers)  # control tokens only
    records = kit.rounds(scripted(never, 8, regex="[abc]{12}"))
    assert sum(record.drafted for record in records) == 0
    free = kit.rounds(scripted(HostileDrafter(4, answers), 8, max_tokens=8))
    assert sum(record.drafted for record in free) > 0
