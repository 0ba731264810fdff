"""Messages in the form that a template reads, against transformers (see scripts/make_template_fixtures.py)."""

import datetime
import functools
import hashlib
import json
from pathlib import Path

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.text import ChatTemplate

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tokenizers"
CONVERSATIONS = json.loads((FIXTURES / "conversations.json").read_text())["conversations"]
ANSWERS = json.loads((FIXTURES / "templates.json").read_text())
SMALL = json.loads((Path(__file__).parent / "small_templates.json").read_text())


@functools.cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime.datetime(2026, 3, 1))


def written(source: str, conversation: dict) -> str:
    return compiled(source).render(conversation["messages"], tools=conversation.get("tools"))


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SKIPS_OTHERS = (
    "{% for m in messages %}{% if m.role == 'system' %}S[{{ m.content }}]{% elif m.role == 'user' %}U[{{ m.content }}]"
    "{% elif m.role == 'assistant' %}A[{{ m.content }}]{% endif %}{% endfor %}"
)
NAMES_IT = "{% for m in messages %}{% if m['role'] in ('developer', 'user') %}{{ m.role }} {% endif %}{% endfor %}"


def turn(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (SKIPS_OTHERS, [turn("developer", "a"), turn("user", "b")], "S[a]U[b]"),
        (SKIPS_OTHERS, [turn("system", "a"), turn("developer", "b"), turn("user", "c")], "S[a\n\nb]U[c]"),
        (SKIPS_OTHERS, [turn("developer", "a"), turn("system", "b"), turn("developer", "c")], "S[a\n\nb\n\nc]"),
        (SKIPS_OTHERS, [turn("user", "a"), turn("developer", "b"), turn("user", "c")], "U[a]S[b]U[c]"),
        (SKIPS_OTHERS, [turn("system", "a"), turn("system", "b")], "S[a]S[b]"),
        (SKIPS_OTHERS, [turn("developer", [{"type": "text", "text": "a"}]), turn("system", "b")], "S[a\n\nb]"),
        (NAMES_IT, [turn("system", "a"), turn("developer", "b"), turn("user", "c")], "developer user "),
        (SKIPS_OTHERS, [turn("user", "a"), {"role": "assistant"}, turn("assistant", None, refusal="x")], "U[a]A[]A[]"),
        (SKIPS_OTHERS, [turn("assistant", None, tool_calls=[]), turn("user", [])], "A[]U[]"),
        ("{{ messages[0].tool_calls[0].arguments }}", [turn("assistant", "", tool_calls=[{"arguments": '{"a":1}'}])],
         '{"a":1}'),
        ("{{ messages[0].tool_calls[0].arguments }}", [turn("assistant", "", tool_calls=[{"arguments": {"é": 1}}])],
         '{"é": 1}'),
        ("{{ messages[0].tool_calls[0].arguments | tojson }}",
         [turn("assistant", "", tool_calls=[{"arguments": None}])], "{}"),
        ("{% for c in messages[0].tool_calls %}{{ '' + c['function']['arguments'] }}{% endfor %}",
         [turn("assistant", None, tool_calls=[CALL])], '{"a": 1}'),
        ("{% set field = 'arguments' %}{{ '' + messages[0].tool_calls[0].function[field] }}",  # no tree says this
         [turn("assistant", None, tool_calls=[CALL])], '{"a": 1}'),
        ("{% if messages[0].content is none %}{{ messages[0].tool_calls[0].function.name }}{% endif %}",
         [turn("assistant", "", tool_calls=[CALL])], "f"),
        ("{{ messages[0].content[0].text }}", [turn("user", [{"type": "text", "text": t} for t in "ab"])], "a\nb"),
        ("{{ messages[0].content | map(attribute='text') | join }}", [turn("user", "ab")], "ab"),
        ("{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}",
         [turn("developer", [{"type": "text", "text": "a"}])], "a"),
        ("{% for m in messages if m.role != 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
         "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
         [turn("system", "a"), turn("user", [{"type": "text", "text": "b"}])], "ab"),
        ("{% set ns = namespace(it=messages[0].content) %}{% for p in ns.it %}{{ p.text }}{% endfor %}",
         [turn("user", "ab")], "ab"),
        ("{% macro f(x) %}{{ f(x) if x == 1 }}{% for p in x %}{{ p.text }}{% endfor %}{% endmacro %}"
         "{{ f(messages[0]['content']) }}", [turn("user", "ab")], "ab"),
        ("{{ messages[0].thinking }}{{ messages[1].reasoning }}",
         [turn("assistant", "", reasoning_content="a"), turn("assistant", "", thinking="b")], "ab"),
    ],
)  # fmt: skip
def test_messages_come_in_the_form_that_a_template_reads(source, messages, text):
    assert ChatTemplate(source).render(messages) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for t in tools %}{{ '' + t.function.description }}{{ t.function.parameters | tojson }}{% endfor %}", "{}"),
        ("{% for t in tools %}{{ t | tojson }}{% endfor %}", '{"type": "function", "function": {"name": "f"}}'),
    ],
)
def test_fields_that_a_tool_lacks_are_there_where_a_template_needs_them(source, text):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate(source).render([turn("user", "a")], tools=tools) == text
    assert tools == [{"type": "function", "function": {"name": "f"}}]


def test_conditions_that_grow_of_themselves_end():
    """A variable in its own condition, and choices of hundreds of roles."""
    source = "{% set x = messages[0].role == 'user' %}{% for m in messages %}{% set x = x or m.role == 'a' %}"
    source += "{% if x %}{{ m.content }}{% endif %}{% endfor %}" + "".join(
        f"{{% if messages[0].role == 'r{i}' or messages[0].role == 'user' %}}{{% endif %}}" for i in range(300)
    )
    assert ChatTemplate(source).render([turn("user", "a")]) == "a"


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)), ids=[one["name"] for one in CONVERSATIONS])
@pytest.mark.parametrize("name", list(SMALL))
def test_a_way_of_reading_gets_what_transformers_gives_it(name, number):
    answer = ANSWERS["small"][name][number]
    if answer is None:
        pytest.skip("transformers shows the words in no form")
    assert written(SMALL[name], CONVERSATIONS[number]) == answer


def test_published_templates_get_what_transformers_gives_them(request):
    """Writes a line for each conversation that differs; the templates are those of a folder that the user has."""
    folder = request.config.getoption("--templates")
    if folder is None:
        pytest.skip("needs --templates FOLDER, with published templates")
    equal, without, differ, unknown = 0, 0, [], []
    for path in sorted(Path(folder).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        known = ANSWERS["published"].get(path.stem)
        if known is None or hashlib.sha256(source.encode()).hexdigest()[:16] != known["sha256"]:
            unknown.append(path.stem)
            continue
        for conversation, answer in zip(CONVERSATIONS, known["texts"], strict=True):
            if answer is None:
                without += 1
                continue
            try:
                text = written(source, conversation)
            except InvalidRequest as error:
                text = str(error)
            if hashlib.sha256(text.encode()).hexdigest()[:16] == answer:
                equal += 1
            else:
                differ.append(f"{path.stem}: {conversation['name']}")
    print(f"{equal} equal, {len(differ)} differ, {without} without an answer; not in the file: {unknown}")
    assert not differ, "\n".join(differ)
