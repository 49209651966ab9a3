"""C11: a model that loves blanks goes on with them between JSON tokens until the cap.

JSON is written as ``json.dumps`` writes it, so there is nothing to go on with; an answer is over with its last bracket.
"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.bugs.kit import PROMPT, TOKENIZER, Heard, make

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9999},
        "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
        "c": {"type": "object", "properties": {"d": {"enum": ["x", "y"]}}, "required": ["d"]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
SCHEMA["properties"]["c"]["additionalProperties"] = False  # else a key may be all blanks, which is its own affair
BLANKS = [i for i in range(len(TOKENIZER)) if TOKENIZER.decode([i]) != "" and not TOKENIZER.decode([i]).strip()]
FORMATS: tuple[dict[str, Any], ...] = (
    SCHEMA,
    {**SCHEMA, "x-guidance": {"whitespace_flexible": True}},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
)


@pytest.mark.parametrize("response_format", FORMATS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_ends_and_holds_no_run_of_blanks(response_format: dict[str, Any], temperature: float) -> None:
    assert len(BLANKS) >= 3  # space, line break, tab
    heard = Heard()
    llm = make(max_tokens=120, temperature=temperature, seed=1, logit_bias=dict.fromkeys(BLANKS, 100.0))
    assert not llm.invoke(PROMPT).strip()  # it does love them
    text = llm.invoke(PROMPT, {"callbacks": [heard]}, response_format=response_format)
    assert heard.responses[0].generations[0][0].generation_info["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)
    assert not re.search(r"\s{2}", text)
    assert text == json.dumps(json.loads(text))
