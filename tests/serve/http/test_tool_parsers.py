"""Tool calls out of text: every format, cut in every way, and what is no call."""

import json
import random

import pytest

from jaxserve.serve.http.formats import (
    TOOL_FORMATS,
    AnswerParser,
    ListParser,
    NamedParser,
    NoCalls,
    NumberedCalls,
    ParserMaker,
    choose_tool_format,
)

NAMES = {"f": {}, "get_weather": {}}


def hermes() -> AnswerParser:
    return TOOL_FORMATS.get("hermes").make(NAMES)


def llama3() -> AnswerParser:
    return TOOL_FORMATS.get("llama3").make(NAMES)


def listed() -> AnswerParser:
    return NumberedCalls(ListParser(NAMES))


CASES: list[tuple[ParserMaker, str, str, list[tuple[str, str]]]] = [
    # parser, text of the model, content, calls
    (hermes, "plain", "plain", []),
    (hermes, "  \n", "", []),
    (hermes, "a < b <tool", "a < b <tool", []),
    (hermes, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    (hermes, '\n<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>\n', "", [("f", '{"x":1}')]),
    (hermes, 'Hm.\n<tool_call> {"name": "f"} </tool_call>', "Hm.", [("f", "{}")]),
    (
        hermes,
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\""}}</tool_call>'
        '<tool_call>{"arguments": {"b": [1, {"c": 2}]} , "name": "get_weather"}</tool_call> ok',
        " ok",
        [("f", '{"a": "}</tool_call>\\""}'), ("get_weather", '{"b": [1, {"c": 2}]}')],
    ),
    (hermes, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
    (
        hermes,
        'x <tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        'x <tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        [],
    ),
    (hermes, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (hermes, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (llama3, "plain {x}", "plain {x}", []),
    (llama3, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (llama3, '\n<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        llama3,
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"d": "é;"}}',
        "",
        [("f", "{}"), ("get_weather", '{"d": "é;"}')],
    ),
    (llama3, '{"city": "Riga"} is JSON', '{"city": "Riga"} is JSON', []),
    (llama3, '{"name": 5}', '{"name": 5}', []),
    (llama3, "<|python", "<|python", []),
    (listed, "[ ]", "", []),
    (
        listed,
        '[{"name": "f", "parameters": {"x": 1}\n} ,\n{"name": "f", "parameters": {"x": 2}}]',
        "",
        [("f", '{"x": 1}'), ("f", '{"x": 2}')],
    ),
    (lambda: NumberedCalls(NamedParser("f")), '{"x": 1}', "", [("f", '{"x": 1}')]),
    (NoCalls, '<tool_call>{"name": "f"}', '<tool_call>{"name": "f"}', []),
]


CALL_F = '{"name": "f", "arguments": {"x": 1}}'
CALL_W = '{"name": "get_weather", "arguments": {}}'
BOTH = [("f", '{"x": 1}'), ("get_weather", "{}")]
UNKNOWN = '{"name": "rm", "arguments": {}}'
# Marks with several lists and objects in them, and a name for each way to write arguments that are none.
SEVERAL: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    *(
        ("hermes", f"a <tool_call>{body}</tool_call> b", "a b", BOTH)
        for body in (
            f"{CALL_F}{CALL_W}",
            f"\n{CALL_F}\n{CALL_W}\n",
            f"{CALL_F}, {CALL_W}",
            f"\n[{CALL_F},\n {CALL_W}]\n",
            f"{CALL_F}</tool_call>\n<tool_call>{CALL_W}",
            f"{CALL_F}<tool_call>{CALL_W}",
        )
    ),
    ("hermes", f"<tool_call>{CALL_F}{UNKNOWN}</tool_call> b", f"{UNKNOWN} b", BOTH[:1]),
    ("hermes", f"<tool_call>{UNKNOWN}{CALL_F}</tool_call>", f"<tool_call>{UNKNOWN}{CALL_F}</tool_call>", []),
    ("hermes", f"<tool_call>{CALL_F}}}\n</tool_call> b", "} b", BOTH[:1]),
    ("hermes", f"<tool_call>{CALL_F}\nSo be it.", "\nSo be it.", BOTH[:1]),
    ("llama3", f"{CALL_F}, {CALL_W}", "", BOTH),
    ("mistral", f"[TOOL_CALLS] [{CALL_F}]\n\n[TOOL_CALLS] [{CALL_W}]", "", BOTH),
    ("mistral", f"[TOOL_CALLS][{CALL_F}][TOOL_CALLS][{CALL_W}, {CALL_F}]", "", [*BOTH, BOTH[0]]),
    ("mistral", f'[TOOL_CALLS][{CALL_F}][TOOL_CALLS]get_weather{{}}[TOOL_CALLS]f{{"x": 1}}', "", [*BOTH, BOTH[0]]),
    ("mistral", f'[TOOL_CALLS]f{{"x": 1}}, [TOOL_CALLS][{CALL_W}]', ",", BOTH),
    ("gemma", "<|tool_call>call:f{x:1}call:get_weather{}<tool_call|>", "", [BOTH[0], BOTH[1]]),
    ("gemma", "<|tool_call>call:f{x:1}, call:get_weather{}\n<tool_call|>", "", BOTH),
    ("gemma", "<|tool_call>call:f{x:1}call:rm{}<tool_call|>", "<|tool_call>call:f{x:1}call:rm{}<tool_call|>", []),
    ("qwen3_coder", "<function=f>\n<parameter=x>\n1</parameter></function><function=get_weather></function>", "", BOTH),
]
for written in ("null", " null ", '""', '"null"', '"{}"', "{}"):
    call = f'{{"name": "f", "arguments": {written}}}'
    none = [("f", "{}")]
    SEVERAL += [
        ("hermes", f"<tool_call>\n{call}\n</tool_call> ok", " ok", none),
        ("hermes", f'<tool_call>{{"arguments": {written}, "name": "f"}}', "", none),
        ("llama3", call.replace("arguments", "parameters"), "", none),
        ("mistral", f"[TOOL_CALLS][{call}, {CALL_W}]", "", [*none, BOTH[1]]),
    ]
for written in ("null", " null\n", " ", ""):
    head = "<|channel|>commentary to=functions.f<|message|>"
    SEVERAL.append(("gpt_oss", f"{head}{written}<|call|><|start|>assistant{head}null", "", [("f", "{}"), ("f", "{}")]))
CASES += [
    (lambda name=name: TOOL_FORMATS.get(name).make(NAMES), text, content, calls)
    for name, text, content, calls in SEVERAL
]
CASES += [
    (listed, '[{"name": "f", "parameters": null}, {"name": "f"}]', "", [("f", "{}"), ("f", "{}")]),
    (hermes, '<tool_call>{"name": "f", "arguments": nul', "", [("f", "nul")]),
    (hermes, '<tool_call>{"name": "f", "arguments": {"x": 1}, "parameters": {"y": 2}}', "", [("f", '{"x": 1}')]),
]


def read(make: ParserMaker, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = make()
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.call is None:
            continue
        if piece.name is not None:
            assert piece.call == len(calls), "calls are numbered in their order, and named first"
            calls.append([piece.name, ""])
        calls[piece.call][1] += piece.arguments
    return "".join(piece.content for piece in pieces), [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
def test_whole_and_cut_in_every_way(make: ParserMaker, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = read(make, [text])
    assert found == (content, calls)
    assert read(make, list(text)) == found
    for cut in range(1, len(text)):
        assert read(make, [text[:cut], text[cut:]]) == found, cut
    rng = random.Random(7)
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        assert read(make, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == found, cuts


def test_arguments_are_told_as_they_come() -> None:
    parser = hermes()
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "')
    assert [piece.arguments for piece in parser.push("one ")] == ["one "]
    assert [piece.arguments for piece in parser.push("two")] == ["two"]


def test_no_name_is_told_before_it_is_known_to_be_one() -> None:
    parser = hermes()
    assert parser.push('<tool_call>{"arguments": {"x": 1}, "name": "f') == []
    assert [(p.name, p.arguments) for p in parser.push('"}')] == [("f", '{"x": 1}')]


def test_long_arguments_come_whole_out_of_small_pieces() -> None:
    arguments = json.dumps({"text": "word " * 100_000})
    parser = hermes()
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    told = "".join(piece.arguments for k in range(0, len(text), 50) for piece in parser.push(text[k : k + 50]))
    assert told == arguments


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=x>\nNaN\n</parameter>\n</function>", {"x": "NaN"}),
        ("qwen3_coder", "<function=f>\n<parameter=x>\n[1e999]\n</parameter>\n</function>", {"x": "[1e999]"}),
        ("qwen3_coder", '<function=f>\n<parameter=x>\n"\\ud800"\n</parameter>\n</function>', {"x": "\ufffd"}),
        ("gemma", "<|tool_call>call:f{x:-Infinity,y:1.5}<tool_call|>", {"x": "-Infinity", "y": 1.5}),
        ("gemma", '<|tool_call>call:f{x:"\\ud800"}<tool_call|>', {"x": "\ufffd"}),
        ("pythonic", "[f(x='\\ud83d\\ude00 \\ud800 ü')]", {"x": "😀 \ufffd ü"}),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>', {"x": "\ufffd"}),
    ],
)
def test_what_json_or_utf8_cannot_say_is_told_all_the_same(name: str, text: str, wanted: dict[str, object]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    content, [(_, arguments)] = read(lambda: TOOL_FORMATS.get(name).make(NAMES), [text])
    assert content == ""
    assert json.loads(arguments.encode(), parse_constant=refuse) == wanted


@pytest.mark.parametrize(
    ("wanted", "template", "name"),
    [
        ("auto", None, "hermes"),
        ("auto", "{{ '<tool_call>' }} {\"parameters\": 1}", "hermes"),
        ("auto", 'respond with {"name": function name, "parameters": ...}', "llama3"),
        ("auto", "<|python_tag|>", "llama3"),
        ("auto", "<tool_call>\n<function=example_function_name>", "qwen3_coder"),
        ("auto", "{{- '[TOOL_CALLS]' }}", "mistral"),
        ("auto", "{{- '<|start|>assistant<|channel|>final<|message|>' }}", "gpt_oss"),
        ("auto", "<start_function_call>call:", "gemma"),
        ("auto", "<|channel>thought <|tool_call>call:", "gemma"),
        ("auto", "[func_name1(params_name1=params_value1, ...)]", "pythonic"),
        ("llama3", "<tool_call>", "llama3"),
        ("hermes", "<|python_tag|>", "hermes"),
    ],
)
def test_the_format_is_read_off_the_template(wanted: str, template: str | None, name: str) -> None:
    assert choose_tool_format(wanted, template) is TOOL_FORMATS.get(name)
