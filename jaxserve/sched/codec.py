"""The way from dataclasses and named tuples to JSON and back, by the fields that their classes declare.

A field that is added to a class is written and read without a line elsewhere. A dataclass becomes an object, without
the fields that hold their defaults; a named tuple becomes an array. Reading follows the annotations; values without
structure (numbers, texts, unions of several types) are passed on as they are, for the class to check.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

# Metadata of a dataclass field that has no JSON: it is read as its default.
UNWRITTEN = types.MappingProxyType({"unwritten": True})

_T = TypeVar("_T")
_Read = Callable[[Any], Any]


def dumps(value: object) -> str:
    """One line of JSON. `dataclasses.asdict` would copy each number first: milliseconds for a long prompt."""
    return json.dumps(value, default=_fields_of, separators=(",", ":"))


def load(kind: type[_T], raw: Any) -> _T:
    """The value that parsed JSON stands for. Raises ValueError, TypeError or what `kind` itself raises."""
    return _reader(kind)(raw)


def _fields_of(value: Any) -> dict[str, Any]:
    found = {}
    for name, default in _defaults(type(value)):
        held = getattr(value, name)
        if held is not default and held != default:
            found[name] = held
    return found


@functools.cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Name and default of each field that is written; MISSING, which equals no value, where there is none."""
    return tuple((field.name, field.default) for field in dataclasses.fields(kind) if field.metadata != UNWRITTEN)


@functools.cache
def _reader(kind: Any) -> _Read:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        some = [one for one in arguments if one is not type(None)]
        if len(some) > 1:
            return _pass
        inner = _reader(some[0])
        return lambda raw: None if raw is None else inner(raw)
    if origin is tuple:
        return _tuple_reader(arguments)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if isinstance(kind, type) and issubclass(kind, tuple):
        readers = [_reader(hint) for hint in typing.get_type_hints(kind).values()]
        if all(reader is _pass for reader in readers):
            return lambda raw: kind(*raw)
        return lambda raw: kind(*[reader(one) for reader, one in zip(readers, raw, strict=False)])
    return _pass


def _tuple_reader(arguments: tuple[Any, ...]) -> _Read:
    assert len(arguments) == 2 and arguments[1] is ..., f"tuple{list(arguments)}: only tuple[X, ...] has a JSON form"
    inner = _reader(arguments[0])
    return tuple if inner is _pass else lambda raw: tuple([inner(one) for one in raw])


def _dataclass_reader(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}

    def read(raw: dict[str, Any]) -> Any:
        unknown = raw.keys() - readers.keys()
        if unknown:
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: readers[name](value) for name, value in raw.items()})

    return read


def _pass(raw: Any) -> Any:
    return raw
