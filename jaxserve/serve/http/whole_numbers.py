"""Bodies in which 8.0 is a whole number and 8.5 is none, as JSON knows one kind of numbers (RFC 8259, 6).

Many languages and some libraries write whole numbers so. The rule is put into the schema of pydantic wherever a body
has an integer: in strict mode it takes no float, and otherwise it would take "8" and true, too.
"""

from typing import Any

import pydantic
from pydantic_core import core_schema

_LIMITS = ("ge", "gt", "le", "lt", "multiple_of")
_NOT_SCHEMAS = ("cls", "config", "default", "metadata", "serialization")
_DONE = "whole number"


def _changed(schema: Any) -> Any:
    """The schema, with every integer in it as `_whole_number`."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_changed, schema))
    if not isinstance(schema, dict) or _DONE in schema.get("metadata", ()):
        return schema
    if schema.get("type") == "int":
        return _whole_number(schema)
    return {key: value if key in _NOT_SCHEMAS else _changed(value) for key, value in schema.items()}


def _whole_number(integer: dict[str, Any]) -> core_schema.CoreSchema:
    """An integer, or a float of the same value. The document, and JSON that this server wrote, know the first alone."""
    either: core_schema.CoreSchema = core_schema.union_schema(
        [
            core_schema.int_schema(strict=True),
            core_schema.chain_schema([core_schema.float_schema(strict=True), core_schema.int_schema(strict=False)]),
        ],
        mode="left_to_right",
        custom_error_type="int_type",
    )
    if limits := {name: integer[name] for name in _LIMITS if name in integer}:
        either = core_schema.chain_schema([either, core_schema.int_schema(strict=True, **limits)])
    return core_schema.json_or_python_schema(
        json_schema=integer,  # pyright: ignore[reportArgumentType]
        python_schema=either,
        metadata={_DONE: True},
    )


class WholeNumbers(pydantic.BaseModel):
    """A body with that rule, for itself and what derives from it. Their document is as without it."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        schema = handler(source)
        own = handler.resolve_ref_schema(schema)
        changed = _changed(dict(own))
        own.clear()  # pyright: ignore[reportAttributeAccessIssue]  # other schemas refer to it
        own.update(changed)
        return schema
