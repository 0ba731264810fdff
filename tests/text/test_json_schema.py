"""Schemas as they are held to: what is left out, which bounds hold, and the place that an error names."""

import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.errors import InvalidRequest, UnsupportedOption
from jaxserve.testing import ByteTokenizer
from jaxserve.text import grammar as grammar_module
from jaxserve.text.grammar import GrammarCompiler, TextMatcher
from jaxserve.text.json_schema import FORMATS, check_formats, enforceable, named, schemas_in
from jaxserve.values.structured_output import StructuredOutput

COMPILER = GrammarCompiler(ByteTokenizer(), 258, (257,))
OF_JSON_SCHEMA = ["uri-reference", "uri-template", "iri", "iri-reference", "idn-email", "idn-hostname", "regex"]
OF_OTHERS = ["path", "file-path", "directory-path", "password", "binary", "byte", "url", "decimal", "int32", "Date", ""]
UNKNOWN_FORMATS = [*OF_JSON_SCHEMA, "json-pointer", "relative-json-pointer", *OF_OTHERS]


def start(schema: Any) -> TextMatcher:
    return COMPILER.compile(StructuredOutput(json_schema=json.dumps(schema))).start()


def bytes_of(matcher: TextMatcher) -> list[int]:
    bits = int.from_bytes(matcher.mask, "little")
    return [i for i in range(258) if bits >> i & 1]


def accepts(schema: Any, text: str) -> bool:
    matcher = start(schema)
    for byte in text.encode():
        if byte not in bytes_of(matcher):
            return False
        matcher.accept(byte)
    return 257 in bytes_of(matcher)


@pytest.mark.parametrize("name", [*UNKNOWN_FORMATS, *sorted(FORMATS)])
def test_the_formats_that_grammars_know(name: str) -> None:
    schema = json.dumps({"type": "string", "format": name})
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema), log_level=0)
    assert matcher.is_error() == (name not in FORMATS), "the list is that of llguidance"
    assert accepts({"type": "string", "format": name}, '"a b"') == (name not in FORMATS - {"unknown"})


PATH = {"type": "string", "format": "path"}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"format": "path"}, "5"),
        ({"type": ["string", "null"], "format": "path"}, "null"),
        ({"anyOf": [{"type": "null"}, PATH]}, '"a"'),
        ({"allOf": [PATH, {"maxLength": 1}]}, '"a"'),
        ({"type": "array", "items": PATH}, '["a"]'),
        ({"prefixItems": [PATH], "items": False, "minItems": 1, "type": "array"}, '["a"]'),
        ({"$ref": "#/$defs/P", "$defs": {"P": PATH}}, '"a"'),
        ({"$ref": "#/definitions/format", "definitions": {"format": PATH}}, '"a"'),
        ({"type": "object", "properties": {"format": PATH}, "additionalProperties": False}, '{"format":"a"}'),
        ({"type": "object", "additionalProperties": PATH}, '{"b":"a"}'),
        ({"type": "object", "patternProperties": {"format": PATH}}, '{"format":"a"}'),
        ({"const": {"format": "path"}}, '{"format":"path"}'),
        ({"enum": [{"format": "path", "uniqueItems": True}]}, '{"format":"path","uniqueItems":true}'),
        ({"type": "object", "propertyNames": {"type": "string"}}, '{"a":1}'),
        ({"type": "object", "propertyNames": True}, '{"a":1}'),
        ({"type": "object", "propertyNames": {}}, '{"a":1}'),
        ({"type": "object", "propertyNames": {"type": ["string"], "title": "Key", "minLength": 0}}, '{"a":1}'),
        ({"type": "object", "propertyNames": PATH, "additionalProperties": {"type": "integer"}}, '{"a":1}'),
        ({"properties": {"propertyNames": {"type": "string"}}, "type": "object"}, '{"propertyNames":"a"}'),
    ],
)
def test_what_changes_nothing_stops_nothing(schema: Any, text: str) -> None:
    assert accepts(schema, text)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"pattern": "^a"}, 'Unimplemented keys: ."propertyNames"'),
        ({"enum": ["a"]}, "propertyNames"),
        ({"type": "string", "maxLength": 3}, "propertyNames"),
        ({"type": "string", "minLength": 1}, "propertyNames"),
        ({"type": "string", "format": "uuid"}, "propertyNames"),
        ({"type": "integer"}, "propertyNames"),
        ({"$ref": "#/$defs/A"}, "propertyNames"),
        (False, "propertyNames"),
    ],
)
def test_names_of_properties_that_are_bound_are_refused(names: Any, words: str) -> None:
    schema = {"properties": {"m": {"type": "object", "propertyNames": names}}, "$defs": {"A": {"type": "string"}}}
    with pytest.raises(InvalidRequest, match=f"at #/properties/m: .*{words}"):
        start(schema)


def test_a_schema_without_such_words_stays_as_it_is() -> None:
    written = '{"type": "number",  "minimum": 1E400}'
    assert enforceable(written) is written


# ---- bounds ----------------------------------------------------------------------------------------------------------


def fits(text: str, schema: dict[str, Any]) -> bool:
    value = Decimal(text)
    low, high, above, below, step = (
        Decimal(str(schema[name])) if name in schema else None
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    )
    return (
        (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
        and (below is None or value < below)
        and (step is None or value % step == 0)
        and (schema["type"] != "integer" or value == int(value))
    )


@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
@pytest.mark.parametrize("bound", [0, -0.0, 0.0, 1, 2.0, -3, 10, 99, 123456789, 0.5])
def test_an_exclusive_bound_never_comes(bound: float, sign: int) -> None:
    exclusive, other = ("exclusiveMinimum", "maximum") if sign > 0 else ("exclusiveMaximum", "minimum")
    texts = [f"{bound:g}", f"-{bound:g}", f"{bound:.1f}", f"-{abs(bound):.2f}", "-0", "0", "-0.0", "123456789", "-0.00"]
    texts = [text for text in texts if text.lstrip("-")[:1].isdigit()]
    for bounds in (
        {exclusive: bound, other: bound + sign * 0.5},
        {exclusive: bound, f"exclusive{other.title()}": bound + sign * 0.25},
        {exclusive: bound, other: bound + sign * 0.5, "multipleOf": 0.25},
        {exclusive: bound, other: bound + sign * 7},
        {exclusive: bound},
    ):
        apart = {"allOf": [{"type": "number"}, *({name: value} for name, value in bounds.items())]}
        for schema in ({"type": "number", **bounds}, apart):
            matcher = start(schema)
            assert matcher.mask
            for text in texts:
                assert not accepts(schema, text) or fits(text, {"type": "number", **bounds}), (schema, text)
        inside = bound + sign * 0.25
        if fits(f"{inside:.2f}", {"type": "number", **bounds}):
            assert accepts({"type": "number", **bounds}, repr(inside))


def test_numbers_walked_at_random_keep_their_bounds() -> None:
    rng, num_texts = random.Random(3), 0
    values = [0, 1, -1, 2, 10, -10, 99, 0.5, -0.5, 0.55, 1.5, -1.5, 10.5, -10.5, 99.5, 0.1, 1e-5, -1e-5, 7.25]
    for _ in range(150):
        low, high = sorted(rng.sample(values, 2))
        schema: dict[str, Any] = {"type": rng.choice(["number", "number", "integer"])}
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice([1, 0.5, 0.1, 0.25])
        try:
            grammar = COMPILER.compile(StructuredOutput(json_schema=json.dumps(schema)))
        except InvalidRequest:
            continue  # no number fits it
        for _ in range(4):
            matcher, text = grammar.start(), b""
            while len(text) < 60 and (allowed := bytes_of(matcher)):
                byte = 257 if 257 in allowed and rng.random() < 0.4 else rng.choice(allowed)
                if byte == 257:
                    num_texts += 1
                    assert fits(text.decode(), schema), (schema, text)
                    break
                text += bytes([byte])
                matcher.accept(byte)
    assert num_texts > 200


@pytest.mark.parametrize(
    ("schema", "in_it", "out"),
    [
        ({"minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, "0.25", "0"),
        ({"minimum": 0, "exclusiveMinimum": False, "maximum": 0.5}, "0", "-0.25"),
        ({"minimum": -1, "maximum": 0, "exclusiveMaximum": True}, "-0.5", "-0"),
        ({"exclusiveMinimum": True, "maximum": 0}, "-1", "1"),
    ],
)
def test_exclusive_bounds_of_draft_4(schema: dict[str, Any], in_it: str, out: str) -> None:
    assert accepts({"type": "number", **schema}, in_it) and not accepts({"type": "number", **schema}, out)


# ---- words for errors ------------------------------------------------------------------------------------------------

NO = {"not": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (NO, "at #: Unimplemented keys"),
        ({"properties": {"a": {"type": "array", "items": NO}}}, 'at #/properties/a/items: Unimplemented keys: ."not".'),
        ({"properties": {"a/b~c": NO}}, "at #/properties/a~1b~0c: Unimplemented"),
        ({"properties": {"50% é x": {"$ref": "#/$defs/a%20b"}}, "$defs": {"a b": NO}}, "at #/.defs/a b: Unimplemented"),
        ({"properties": {"50% é x": NO}}, "at #/properties/50% é x: Unimplemented"),
        ({"anyOf": [{"type": "string"}, NO]}, "at #/anyOf/1: "),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"x": NO}}}}, "at #/.defs/A/properties/x: "),
        ({"items": {"$ref": "#"}, "properties": {"x": NO}}, "at #/properties/x: "),
        ({"properties": {"a": {"$ref": "#/$defs/lost"}}}, "at #/properties/a: Pointer '/.defs/lost' does not exist"),
        ({"properties": {"a": {"type": "objec"}}}, "at #/properties/a: Invalid type: objec"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "at #/properties/a: regex parse error"),
        (
            {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]},
            "at #/properties/a: Unsatisfiable schema: minimum",
        ),
        ({"properties": {"ok": {"type": "string"}, "a": {"contains": {}}}}, "at #/properties/a: "),
        ({"$id": "http://a/b", "properties": {"a": NO}}, "at #/properties/a: "),
        ({"additionalProperties": NO}, "at #/additionalProperties: "),
    ],
)
def test_an_error_names_the_place(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^the json_schema cannot be compiled {words}") as caught:
        start({"type": "object", **schema})
    assert "while processing" not in str(caught.value) and "whole" not in str(caught.value)


def test_a_schema_of_many_parts_is_searched_for_a_limited_time() -> None:
    for size, place in ((60, "/properties/no"), (300, "")):
        schema: Any = {"properties": {f"p{n}": {"type": "null"} for n in range(size)} | {"no": NO}}
        with pytest.raises(InvalidRequest, match=f"at #{place}: Unimplemented keys"):
            start(schema)


def test_the_schema_that_takes_too_much_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_TRIAL_S", 0.1)
    compiler = GrammarCompiler(ByteTokenizer(), 258, (257,))
    slow = {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b"} for i in range(1, 30)]}
    both = {"anyOf": [named({"type": "string"}, "first one"), named(slow, "second one")]}
    for _ in range(2):
        with pytest.raises(UnsupportedOption, match="^the second one cannot be compiled: the schema takes more"):
            compiler.compile(StructuredOutput(json_schema=json.dumps(both)))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (PATH, ""),
        ({"properties": {"a": {"anyOf": [PATH, {"type": "null"}]}}}, "/properties/a/anyOf/0"),
        ({"$defs": {"x/y": {"type": ["string", "null"], "format": "byte"}}}, "/$defs/x~1y"),
        ({"items": {"format": ""}}, "/items"),
    ],
)
def test_strict_schemas_with_unknown_formats(schema: Any, place: str) -> None:
    with pytest.raises(UnsupportedOption) as caught:
        check_formats(schema, "schema of tool f")
    assert str(caught.value).startswith("the schema of tool f is strict, but its format '")
    assert f"' at #{place} cannot be enforced; known: date, date-time, " in str(caught.value)


def test_strict_schemas_with_known_formats_or_none_of_texts() -> None:
    check_formats({"properties": {"format": {"format": "date"}, "n": {"type": "integer", "format": "int32"}}}, "x")
    check_formats({"const": {"format": "path"}, "enum": [{"format": "path"}]}, "x")
    check_formats({"properties": {"a": True, "format": {"type": "string"}}, "required": ["format"]}, "x")


def test_all_schemas_of_a_schema_are_found_and_no_data() -> None:
    schema = {
        "properties": {"enum": {"items": [{}, True]}, "a": False},
        "enum": [{"b": {}}],
        "anyOf": [{"not": {}}],
        "dependencies": {"x": ["y"], "z": {"default": {}}},
        "x-guidance": {},
    }
    found = [place for place, _ in schemas_in(schema)]
    assert found == ["", "/properties/enum", "/properties/enum/items/0", "/anyOf/0", "/anyOf/0/not", "/dependencies/z"]
    assert [*schemas_in(True)] == []
