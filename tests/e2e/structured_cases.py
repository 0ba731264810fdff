"""Schemas of growing nastiness, the same on every run, and what counts as a good answer to one."""

import json
import random
from typing import Any

import jsonschema

_WORDS = [
    "a",
    "b c",
    "naïve",
    "日本",
    'x"y',
    "back\\slash",
    "tab\there",
    "😀",
    "",
    "null",
    "line\nfeed",
    "/~1",
    "é" * 5,
]
_PATTERNS = [
    "^[a-z]{2,6}$",
    "^[A-Z][a-z]*( [A-Z][a-z]*)?$",
    "^(ab|cd){1,3}$",
    r"^\d{4}-\d{2}$",
    "^[\u03b1-\u03c9]{1,4}$",
    "^[^x]{0,5}$",
]


def schema(number: int) -> dict[str, Any]:
    """The schema with this number; from 25 to 25 they may nest deeper and know more keywords."""
    rng = random.Random(number)
    level = number // 25
    made = _object(rng, min(1 + level // 2, 4), level) if level else _leaf(rng, 0)
    if level >= 5:
        made["$defs"] = {
            "pair": {"type": "array", "prefixItems": [_leaf(rng, 2), _leaf(rng, 2)], "items": False, "minItems": 2},
            "tree": {
                "type": "object",
                "properties": {
                    "v": _leaf(rng, 3),
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["v"],
                "additionalProperties": False,
            },
        }
        made["properties"]["pair"] = {"$ref": "#/$defs/pair"}
        if level >= 6:
            made["properties"]["tree"] = {"$ref": "#/$defs/tree"}
        made["required"] = sorted({*made["required"], "pair"})
    jsonschema.Draft202012Validator.check_schema(made)
    return made


def _leaf(rng: random.Random, level: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        {"type": "string", "maxLength": rng.randint(1, 12)},
        {"enum": rng.sample(_WORDS, 3)},
        {"const": rng.choice([None, 7, "é", [1, 2], {"k": "v"}, -0.5])},
    ]
    if level >= 1:
        kinds += [
            {"type": "number", "exclusiveMinimum": low / 8, "maximum": low / 8 + 3},
            {"type": "string", "minLength": 2, "maxLength": 2 + rng.randint(0, 5)},
            {"enum": [1, "1", None, True, 2.5, *rng.sample(_WORDS, 2)]},
        ]
    if level >= 2:
        kinds += [{"type": "string", "pattern": rng.choice(_PATTERNS)}, {"type": ["integer", "null"], "minimum": low}]
    if level >= 3:
        kinds += [
            {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])},
            {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "multipleOf": rng.choice([3, 7, 10])}]},
        ]
    return rng.choice(kinds)


def _node(rng: random.Random, depth: int, level: int) -> dict[str, Any]:
    if depth <= 0 or rng.random() < 0.45:
        return _leaf(rng, level)
    kind = rng.random()
    if kind < 0.4:
        return _object(rng, depth, level)
    if kind < 0.8 or level < 3:
        least = rng.randint(0, 2)
        bounds = {"minItems": least, "maxItems": least + rng.randint(0, 2)}
        return {"type": "array", "items": _node(rng, depth - 1, level), **bounds}
    return {"anyOf": [_node(rng, depth - 1, level), _object(rng, depth - 1, level), {"type": "null"}]}


def _object(rng: random.Random, depth: int, level: int) -> dict[str, Any]:
    names = rng.sample(_WORDS if level >= 2 else ["id", "name", "age", "tags"], rng.randint(1, 3))
    required = [name for name in names if level < 1 or rng.random() < 0.6]
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _node(rng, depth - 1, level) for name in names},
        "required": required,
        "additionalProperties": False,
    }
    if level >= 4 and rng.random() < 0.3:
        made["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return made


def check_text(asked: dict[str, Any], text: str) -> None:
    """Raises when `text` is no JSON, or not what was asked."""
    jsonschema.Draft202012Validator(asked).validate(json.loads(text))
