"""JSON schemas as llguidance can hold a text to them, and the places in them that messages name.

llguidance refuses some keywords that change nothing, and holds some texts to less than the schema says. So a schema is
written anew before it is compiled:

- `uniqueItems` is left out: no grammar can hold a list to it, and pydantic writes it for every set.
- A `format` that no grammar knows is left out: to JSON Schema it is an annotation (2020-12 Validation, 7.2.1). Callers
  who asked for strictness are told instead (`check_formats`).
- `propertyNames` is left out if every name fits it.
- An exclusive bound that is whole is moved inwards by less than a billionth: llguidance lets `-0` pass below an
  exclusive maximum of 0, and 10 between an exclusive 10 and 10.5. Numbers closer to the bound cannot come.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxserve.errors import InvalidRequest, UnsupportedOption

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
_DATA = frozenset({"enum", "const", "default", "examples", "x-guidance"})  # keywords whose values are no schemas
# Models write a blank behind a comma and a colon, or none. Left free, one can fill an answer with white space.
_COMPACT: dict[str, Any] = {"whitespace_pattern": "", "item_separator": ", ?", "key_separator": ": ?"}
_ABOUT_SPACE = frozenset({*_COMPACT, "whitespace_flexible"})
_CHANGED = ('"uniqueItems"', '"format"', '"propertyNames"', '"exclusive')
_ANNOTATIONS = frozenset({"title", "description", "$comment", "examples", "default", "deprecated", "format"})
_MOST_MOVED = 2**40  # above, twelve digits more are not exact in 64 bits, and the step is large
_NAME = "jaxserve: "  # begins the `$comment` of a schema that messages name


def enforceable(schema: str) -> str:
    """The schema as it can be held to. Raises InvalidRequest for no JSON."""
    if not any(word in schema for word in _CHANGED):
        return schema
    try:
        root = json.loads(schema)
        for _, part in schemas_in(root):
            _change(part)
        return json.dumps(root)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the json_schema cannot be read: {error}") from error


def white_space(schema: Any) -> dict[str, Any]:
    """llguidance's options for the white space of texts that fit the schema; empty if its own `x-guidance` has some."""
    options = schema.get("x-guidance") if isinstance(schema, Mapping) else None
    has_own = isinstance(options, Mapping) and not _ABOUT_SPACE.isdisjoint(options)
    return {} if has_own else dict(_COMPACT)


def compact(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with these options in it, as one within a grammar has to have them."""
    options = schema.get("x-guidance", {})
    if not isinstance(options, Mapping):  # llguidance judges it
        return dict(schema)
    return {**schema, "x-guidance": {**white_space(schema), **options}}


def _change(part: dict[str, Any]) -> None:
    part.pop("uniqueItems", None)
    if isinstance(part.get("format"), str) and part["format"] not in FORMATS:
        del part["format"]
    if "propertyNames" in part and _fits_every_name(part["propertyNames"]):
        del part["propertyNames"]
    _move_bound(part, "exclusiveMinimum", "minimum", 1)
    _move_bound(part, "exclusiveMaximum", "maximum", -1)


def _fits_every_name(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return schema is True
    kinds = schema.get("type", "string")
    if not (kinds == "string" or (isinstance(kinds, list) and "string" in kinds)) or schema.get("minLength", 0) != 0:
        return False
    return not set(schema) - _ANNOTATIONS - {"type", "minLength"} and schema.get("format", "") not in FORMATS


def _move_bound(part: dict[str, Any], exclusive: str, inclusive: str, sign: int) -> None:
    bound = part.get(exclusive)
    if isinstance(bound, bool):  # draft 4: it says how the other bound is meant
        del part[exclusive]
        if not bound or inclusive not in part:
            return
        bound = part[exclusive] = part.pop(inclusive)
    if part.get("type") == "integer" or not isinstance(bound, int | float) or not abs(bound) <= _MOST_MOVED:
        return
    if bound != math.floor(bound):
        return
    step = 10.0 ** (math.floor(math.log10(abs(bound))) - 12) if bound else 1e-30
    part[exclusive] = bound + sign * step


def check_formats(schema: Any, name: str) -> None:
    """Raises UnsupportedOption for a `format` of texts that no grammar knows, with its place in the schema `name`."""
    for place, part in schemas_in(schema):
        wanted, kinds = part.get("format"), part.get("type", "string")
        is_text = kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
        if is_text and isinstance(wanted, str) and wanted not in FORMATS:
            raise UnsupportedOption(
                f"the {name} is strict, but its format {wanted!r:.80} at #{place} cannot be enforced; known: "
                f"{', '.join(sorted(FORMATS - {'unknown'}))}. Leave the format out, or set strict to false: then it is "
                "an annotation"
            )


def named(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema with a name for messages: it travels in the text of a constraint, and changes nothing."""
    return {**schema, "$comment": _NAME + name}


def name_of(schema: Any) -> str | None:
    """The name that `named` gave."""
    comment = schema.get("$comment") if isinstance(schema, Mapping) else None
    return comment.removeprefix(_NAME) if isinstance(comment, str) and comment.startswith(_NAME) else None


def schemas_in(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas of a schema, each behind those that it is part of, with its place as a JSON pointer.

    A schema may be changed before the next one is asked for.
    """
    left = [("", root)] if isinstance(root, dict) else []
    while left:
        place, schema = left.pop()
        yield place, schema
        left += reversed([(place + below, part) for below, part in parts_of(schema)])


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas that a schema has in its keywords, with the pointers from it to them."""
    for keyword, value in schema.items():
        below = f"/{_escaped(keyword)}"
        parts: Iterable[tuple[str, Any]] = ((below, value),)
        if keyword in _DATA:
            continue
        if isinstance(value, list):
            parts = ((f"{below}/{number}", part) for number, part in enumerate(value))
        elif isinstance(value, dict) and keyword in _NAMED_SCHEMAS:
            parts = ((f"{below}/{_escaped(name)}", part) for name, part in value.items())
        yield from ((place, part) for place, part in parts if isinstance(part, dict))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
