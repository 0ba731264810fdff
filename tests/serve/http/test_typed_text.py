"""Arguments without quotes, typed by schemas as clients write them: one level deep, and behind anything."""

import json
from typing import Any

import pytest

from jaxserve.serve.http.formats import TOOL_FORMATS
from jaxserve.serve.http.formats.typed_text import TypedText

DEFINITIONS: dict[str, Any] = {
    "Text": {"type": "string"},
    "Number": {"type": "integer"},
    "Maybe": {"anyOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
    "Size": {"enum": ["1", "2"]},
    "Again": {"$ref": "#/$defs/Maybe"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "Lost": {"$ref": "#/$defs/Lost"},
    "Named": {"$anchor": "named", "type": "string"},
    "Own": {"$id": "own", "type": "string"},
    "a/b~c": {"type": "string"},
}
TEXT, NULL = {"type": "string"}, {"type": "null"}
AS_TEXT: list[Any] = [
    TEXT,
    {"type": ["string", "null"]},
    {"anyOf": [TEXT, NULL]},
    {"oneOf": [NULL, TEXT]},
    {"anyOf": [{"anyOf": [NULL]}, {"oneOf": [TEXT]}]},
    {"allOf": [TEXT, {"minLength": 1}]},
    {"allOf": [{"$ref": "#/$defs/Text"}], "description": "d"},
    {"anyOf": [{"type": "integer"}, TEXT]},
    {"type": ["string", "integer"]},
    {"enum": ["7", "8"]},
    {"enum": ["1", "2"]},
    {"const": "7"},
    {"const": "8"},
    {"anyOf": [{"const": "7"}, {"const": None}]},
    {"type": "string", "nullable": True},
    *({"$ref": f"#/$defs/{name}"} for name in ("Text", "Maybe", "Size", "Again", "Loop", "a~1b~0c", "a%2Fb~0c")),
    {"$ref": "#/properties/x0"},
    {"$ref": "#named"},
    {"$ref": "own"},
    {"anyOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Number"}], "default": None},
]
AS_JSON: list[Any] = [
    {},
    True,
    5,
    None,
    {"type": 5},
    {"type": {"string": 1}},
    {"type": "integer"},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "integer"}, NULL]},
    {"anyOf": [{}, NULL]},
    {"$ref": "#/$defs/Number"},
    {"$ref": "#/nowhere"},
    {"$ref": "#/$defs/Lost"},
    {"$ref": 5},
    {"enum": [7, "a"]},
    {"const": 7},
    {"anyOf": [{"enum": ["auto"]}, {"type": "integer"}]},
    {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
    {"type": "number", "minimum": 1},
    {"enum": "7"},
    {"anyOf": 7, "allOf": [5]},
]


@pytest.mark.parametrize(("schemas", "wanted"), [(AS_TEXT, "7"), (AS_JSON, 7)], ids=["text", "JSON"])
@pytest.mark.parametrize("name", ["qwen3_coder", "gemma"])
def test_digits(name: str, schemas: list[Any], wanted: object) -> None:
    keys = [f"x{number}" for number in range(len(schemas))]
    root = {"$defs": DEFINITIONS, "properties": dict(zip(keys, [TEXT, *schemas[1:]], strict=True)), "type": "object"}
    if schemas is AS_JSON:
        keys = keys[1:]
    if name == "gemma":
        text = "<|tool_call>call:f{" + ",".join(f"{key}:7" for key in keys) + "}<tool_call|>"
    else:
        text = "<function=f>" + "".join(f"<parameter={key}>\n7\n</parameter>" for key in keys) + "</function>"
    pieces = TOOL_FORMATS.get(name).make({"f": root}).push(text)
    found = json.loads("".join(piece.arguments for piece in pieces))
    assert found == dict.fromkeys(keys, wanted), [root["properties"][key] for key in keys if found[key] != wanted]


PERSON = {"properties": {"zip": TEXT, "age": {"type": "integer"}}}


@pytest.mark.parametrize(
    "root",
    [
        PERSON,
        {"$ref": "#/$defs/P", "$defs": {"P": PERSON}},
        {"allOf": [{"properties": {"age": {"type": "integer"}}}, {"$ref": "#/$defs/Z"}],
         "$defs": {"Z": {"properties": {"zip": TEXT}}}},
        {"oneOf": [PERSON, {"properties": {"other": {}}}]},
        {"anyOf": [{"properties": {"zip": TEXT}}, {"properties": {"zip": NULL, "age": {"type": "integer"}}}]},
        {"properties": {"age": {"type": "integer"}}, "additionalProperties": TEXT},
        {"properties": {"age": {"type": "integer"}}, "patternProperties": {"^z": TEXT}, "additionalProperties": False},
    ],
)  # fmt: skip
def test_members_are_found_behind_anything(root: Any) -> None:
    schema = TypedText(root)
    assert [schema.value("0", schema.member(root, key)) for key in ("zip", "age")] == ["0", 0]


def test_members_and_items_within() -> None:
    """Gemma writes lists and objects without quotes, too."""
    root = {
        "properties": {
            "tags": {"type": "array", "items": {"$ref": "#/$defs/T"}},
            "pair": {"prefixItems": [TEXT, {"type": "integer"}], "items": TEXT},
            "old": {"items": [TEXT], "additionalItems": {"type": "boolean"}},
            "deep": {"anyOf": [{"properties": {"zip": {"$ref": "#/$defs/T"}}}, NULL]},
        },
        "$defs": {"T": TEXT},
    }
    text = "<|tool_call>call:f{tags:[1,true],pair:[1,2,3],old:[1,true],deep:{zip:01067,n:1}}<tool_call|>"
    pieces = TOOL_FORMATS.get("gemma").make({"f": root}).push(text)
    assert json.loads("".join(piece.arguments for piece in pieces)) == {
        "tags": ["1", "true"],
        "pair": ["1", 2, "3"],
        "old": ["1", True],
        "deep": {"zip": "01067", "n": 1},
    }


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        (TEXT, "null", "null"),
        ({"anyOf": [TEXT, NULL]}, "null", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"enum": ["null"]}, "null", "null"),
        ({"anyOf": [TEXT, NULL]}, "None", "None"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "true", True),
        ({"anyOf": [TEXT, NULL]}, "true", "true"),
        ({"anyOf": [TEXT, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [TEXT, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        (TEXT, '{"a": 1}', '{"a": 1}'),
        (TEXT, '"quoted"', '"quoted"'),
        ({"enum": ["a", "b"]}, '"a"', "a"),
        ({"enum": ["a", 2]}, "2", 2),
        ({"enum": [1, True]}, "true", True),
        ({"const": 1.0}, "1", 1),
        ({"type": "integer"}, "three", "three"),
        ({"type": "integer"}, "1.5", 1.5),
        ({"type": "object"}, "7", 7),
        (False, "7", 7),
    ],
)
def test_other_texts(schema: Any, text: str, wanted: object) -> None:
    found = TypedText(schema).value(text, schema)
    assert (type(found), found) == (type(wanted), wanted)


def test_a_schema_that_refers_to_itself_a_thousand_times_is_read_at_once() -> None:
    definitions = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{(n + 2) % 40}"}, NULL]}
        for n in range(40)
    } | {"d40": TEXT}
    deep: Any = TEXT
    for _ in range(300):
        deep = {"allOf": [deep]}
    schema = TypedText({"$defs": definitions, "properties": {"x": {"$ref": "#/$defs/d0"}, "y": deep}})
    assert schema.value("7", schema.member(schema.root, "x")) == "7"
    assert schema.value("7", schema.member(schema.root, "y")) in ("7", 7)
