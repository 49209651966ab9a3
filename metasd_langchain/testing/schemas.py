"""Random JSON schemas, the same for the same seed: what a grammar has to hold its promises on."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

__all__ = ["random_schema"]

Schema = dict[str, Any]
_KEYS = ("name", "age", "tags", "id", "city", "note", "size", "on", "items", "first name", 'a "quoted" key', "größe")
_PATTERNS = (r"^[A-Z]{2}-[0-9]{3}$", r"^[a-z]+@[a-z]+\.(com|org)$", r"^(ab)*c$", r"^\w{2,8}$", r"^#[0-9a-f]{6}$")
_VALUES = ("red", "green", "a b", "", "x\ny", "日本", 0, -3, 2.5, True, None)


def random_schema(seed: int, depth: int = 3) -> Schema:
    """A schema of objects, arrays, strings, numbers, enums, unions and references.

    Args:
        seed: any whole number.
        depth: how deeply objects and arrays may be nested, references apart.
    """
    rng = random.Random(f"schema {seed}")
    if rng.random() < 0.15:  # a tree: recursion through a reference
        node = {"type": "object", "properties": {"value": _scalar(rng), "next": {"$ref": "#/$defs/node"}}}
        return {"$ref": "#/$defs/node", "$defs": {"node": {**node, "required": ["value"]}}}
    return _object(rng, depth) if rng.random() < 0.8 else _any(rng, depth)


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0 or rng.random() < 0.55:
        return _scalar(rng)
    return rng.choice((_object, _array, _union))(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    keys = rng.sample(_KEYS, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {key: _any(rng, depth - 1) for key in keys}}
    schema["required"] = [key for key in keys if rng.random() < 0.7]
    if rng.random() < 0.6:
        schema["additionalProperties"] = False
    return schema


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": _any(rng, depth - 1)}
    if rng.random() < 0.4:
        schema["minItems"] = rng.randint(1, 3)
    if rng.random() < 0.4:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _scalar(rng: random.Random) -> Schema:
    kinds: tuple[Callable[[random.Random], Schema], ...] = (_string, _string, _number, _number, _fixed)
    return rng.choice(kinds)(rng)


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": rng.choice(("string", ["string", "null"]))}
    if kind == 1:
        least = rng.randint(0, 5)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}
    if kind == 2:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    return {"type": "string", "format": rng.choice(("date", "time", "date-time", "uuid", "email", "ipv4"))}


def _number(rng: random.Random) -> Schema:
    schema: Schema = {"type": rng.choice(("integer", "integer", "number"))}
    if rng.random() < 0.6:
        schema["minimum"] = rng.randint(-1200, 1200)
    if rng.random() < 0.5:
        schema["maximum"] = schema.get("minimum", 0) + rng.randint(0, 900)
    return schema


def _fixed(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "boolean"}
    if kind == 1:
        return {"type": "null"}
    if kind == 2:
        return {"const": rng.choice(_VALUES)}
    return {"enum": rng.sample(_VALUES, rng.randint(1, 4))}
