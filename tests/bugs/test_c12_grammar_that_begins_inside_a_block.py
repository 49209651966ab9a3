"""C12: where a grammar begins in the middle of a drafted block (free text, then a tool call), what was drafted behind
the beginning goes unchecked.

Every node is judged along its own path, so a block may cross the opener: what stands behind it obeys the schema, and
the ids are those of plain decoding under the same grammar.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from metasd_langchain.constraints import json_rule, lark
from metasd_langchain.testing.drafters import HalfDrafter, PerfectDrafter
from tests.bugs.kit import PROMPT, VOCAB, decode, encode, ids, make, scripted

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["look", "listen"]},
        "arguments": {"type": "object", "additionalProperties": False},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
OPENER, CLOSER = "<call>", "</call>"
AUTO = lark(f'start: /[^<]{{0,12}}/ ("{OPENER}" call "{CLOSER}")?\ncall: {json_rule(SCHEMA)}', label="tools")
LOVES_CALLS = {encode("<")[1]: 6.0}  # so that a random model calls at all
OPTIONS: dict[str, Any] = {"grammar": AUTO, "max_tokens": 80, "temperature": 1.0, "logit_bias": LOVES_CALLS}


def called(text: str) -> bool:
    """Whether the answer holds a call; if so, it is a valid one."""
    before, opener, rest = text.partition(OPENER)
    assert "<" not in before
    if not opener:
        return False
    call, closer, after = rest.partition(CLOSER)
    assert (closer, after) == (CLOSER, "")
    jsonschema.validate(json.loads(call), SCHEMA)
    return True


@pytest.mark.parametrize("budget", [3, 8, 16])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_block_may_cross_the_opener(budget: int, shape: Any) -> None:
    calls = 0
    for seed in range(5):
        truth = ids(make(speculative=False, seed=seed, **OPTIONS))
        answers = {encode(PROMPT): truth}
        for fake in (PerfectDrafter(answers, shape=shape, vocab=VOCAB), HalfDrafter(answers, VOCAB, shape=shape)):
            llm = scripted(fake, budget, seed=seed, **OPTIONS)
            assert ids(llm) == truth
            calls += called(llm.invoke(PROMPT))
    assert calls >= 2


def test_what_is_drafted_behind_the_opener_is_checked() -> None:
    """A draft that opens a call and goes on as free text would."""
    checked = 0
    for seed in range(12):
        truth = ids(make(speculative=False, seed=seed, **OPTIONS))
        ends = [decode(truth[:i]).endswith(OPENER) for i in range(len(truth) + 1)]
        if not any(ends):
            continue
        at = ends.index(True)
        lie = (*truth[:at], *encode("the cat sat")[1:], *truth[at:])
        llm = scripted(PerfectDrafter({encode(PROMPT): lie}, vocab=VOCAB), 16, seed=seed, **OPTIONS)
        assert ids(llm) == truth
        checked += called(llm.invoke(PROMPT))
    assert checked >= 2
