"""Values that a model wrote as bare text, typed by the schema of their place.

Some formats write arguments without quotes, so that only the schema says whether `10115` is a number or a text. Schemas
of clients have that behind references and alternatives as often as in `type`: pydantic writes an optional text as an
`anyOf`, and an enumeration as a `$ref`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from jaxserve.serve.http.formats.base import read_json

_OPTIONS = ("anyOf", "oneOf", "then", "else")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_ONE_OF_EACH = (None, True, 0.5, "", [], {})
_MAX_DEPTH = 100  # of schemas within schemas
_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


class TypedText:
    """The schema of a function's arguments, as far as it says how a text is to be read. It remembers what it found.

    A schema is the client's, and may be wrong: a part that is no schema says nothing, and a reference that leads
    nowhere neither. A place is a part of the schema, or made of several.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._targets: dict[str, Any] = {}

    def value(self, text: str, place: Any) -> Any:
        """What a text says at a place of the schema.

        Null, an object or a list where the schema allows it; else a text where it allows one; else the JSON that the
        text is. Where the schema says nothing, or nothing fits it, the JSON that the text is, if any.
        """
        read = _read(text)
        candidates = [read] if text.strip() == "null" or isinstance(read, dict | list) else []
        candidates += [text, read]
        if all(self._fits(example, place, _same_type) for example in _ONE_OF_EACH):
            return read
        for same in (_equal, _same_type):
            for candidate in candidates:
                if self._fits(candidate, place, same):
                    return candidate
        return read

    def member(self, place: Any, key: str) -> Any:
        """The place of an object's member."""
        return self._within(place, lambda schema: _member(schema, key))

    def item(self, place: Any, number: int) -> Any:
        """The place of a list's item."""
        return self._within(place, lambda schema: _item(schema, number))

    def _fits(self, value: Any, place: Any, same: Callable[[Any, Any], bool]) -> bool:
        """Whether types, constants and enumerations let the value stand there."""
        reached: dict[str, bool] = {}  # what a reference said; in the meantime, that it is not fulfilled

        def fits(schema: Any, depth: int) -> bool:
            if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
                return schema is not False
            kinds = schema.get("type")
            kinds = kinds if isinstance(kinds, list) else [kinds]
            checks = [_TYPES[kind] for kind in kinds if isinstance(kind, str) and kind in _TYPES]
            if checks and not any(check(value) for check in checks):
                return value is None and schema.get("nullable") is True
            members = schema.get("enum")
            if isinstance(members, list) and not any(same(value, member) for member in members):
                return False
            if "const" in schema and not same(value, schema["const"]):
                return False
            for reference in _references(schema):
                if reference not in reached:
                    reached[reference] = False
                    reached[reference] = fits(self._target(reference), depth + 1)
                if not reached[reference]:
                    return False
            if not all(fits(part, depth + 1) for part in _parts(schema, "allOf")):
                return False
            options = [_parts(schema, word) for word in ("anyOf", "oneOf")]
            return all(any(fits(part, depth + 1) for part in parts) for parts in options if parts)

        return fits(place, 0)

    def _within(self, place: Any, find: Callable[[Mapping[str, Any]], Any]) -> Any:
        """The place that `find` sees in a schema and in all that apply beside it; None: nothing is said of it."""
        reached: set[str] = set()

        def within(schema: Any, depth: int) -> Any:
            if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
                return None
            found = [find(schema)]
            for reference in set(_references(schema)) - reached:
                reached.add(reference)
                found.append(within(self._target(reference), depth + 1))
            found += [within(part, depth + 1) for part in _parts(schema, "allOf")]
            options = [within(part, depth + 1) for word in _OPTIONS for part in _parts(schema, word)]
            options = [option for option in options if option is not None]
            found = [each for each in [*found, {"anyOf": options} if options else None] if each is not None]
            return {"allOf": found} if len(found) > 1 else next(iter(found), None)

        return within(place, 0)

    def _target(self, reference: str) -> Any:
        """The part that a reference within the schema names; None: there is none."""
        if reference not in self._targets:
            self._targets[reference] = self._find(reference)
        return self._targets[reference]

    def _find(self, reference: str) -> Any:
        base, _, fragment = reference.partition("#")
        part = self.root
        if base:
            part = next((each for each in _all_parts(self.root) if each.get("$id") == base), None)
        if not fragment:
            return part
        if not fragment.startswith("/"):
            names = ("$anchor", "$dynamicAnchor")
            found = (e for e in _all_parts(part) if fragment in map(e.get, names) or e.get("$id") == f"#{fragment}")
            return next(found, None)
        for step in fragment[1:].split("/"):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(part, Mapping):
                part = part.get(key)
            elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
                part = part[int(key)]
            else:
                return None
        return part


def _member(schema: Mapping[str, Any], key: str) -> Any:
    known = schema.get("properties")
    if isinstance(known, Mapping) and key in known:
        return known[key]
    patterns = schema.get("patternProperties")  # expressions of a client are not run: each of them may be meant
    others = [*patterns.values()] if isinstance(patterns, Mapping) else []
    others += [schema["additionalProperties"]] if isinstance(schema.get("additionalProperties"), Mapping) else []
    return {"anyOf": others} if others else None


def _item(schema: Mapping[str, Any], number: int) -> Any:
    rest = schema.get("items")
    for first in (schema.get("prefixItems"), rest):  # `items` was a list up to draft 2019-09
        if isinstance(first, list) and number < len(first):
            return first[number]
    return rest if isinstance(rest, Mapping) else schema.get("additionalItems")


def _references(schema: Mapping[str, Any]) -> Iterator[str]:
    for word in _REFERENCES:
        if isinstance(reference := schema.get(word), str):
            yield reference


def _parts(schema: Mapping[str, Any], word: str) -> Sequence[Any]:
    found = schema.get(word)
    return found if isinstance(found, list) else [found] if isinstance(found, Mapping) else []


def _all_parts(root: Any) -> Iterator[Mapping[str, Any]]:
    left = [root]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left += part.values()
        elif isinstance(part, list):
            left += part


def _read(text: str) -> Any:
    """The JSON that a text is, or the word of Python; else the text itself."""
    try:
        return read_json(text)
    except (ValueError, RecursionError):
        return _PYTHON_WORDS.get(text.strip(), text)


def _equal(value: Any, member: Any) -> bool:
    return _same_type(value, member) and value == member


def _same_type(value: Any, member: Any) -> bool:
    return any(is_it(value) and is_it(member) for is_it in _TYPES.values())
