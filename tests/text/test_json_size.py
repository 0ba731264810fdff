"""The parts of JSON are counted as a parser would find them."""

import json
import random
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.text import ChatTemplate
from jaxserve.text.json_size import has_more_parts
from jaxserve.text.messages import _MOST_ARGUMENT_PARTS


def parts_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts_of, value.values()))
    return 1 + sum(map(parts_of, value)) if isinstance(value, list) else 0


def drawn(rng: random.Random, depth: int = 0) -> Any:
    texts = ["", "[{:", '"', "\\", '\\"[', "a:b", "\u00e9{", "\n"]
    kind = rng.randrange(5 if depth < 4 else 3)
    if kind < 3:
        return [rng.choice(texts), 1.5, None][kind]
    if kind == 3:
        return [drawn(rng, depth + 1) for _ in range(rng.randrange(5))]
    return {rng.choice(texts) + str(k): drawn(rng, depth + 1) for k in range(rng.randrange(5))}


def test_parts_are_those_of_a_parser() -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = [drawn(rng) for _ in range(5)]
        count = parts_of(value)
        for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
            for given in (text, text.encode()):
                assert has_more_parts(count - 1, given)
                assert not has_more_parts(count, given)


def test_texts_are_counted_together_and_hide_none_of_the_others() -> None:
    assert has_more_parts(3, "[[]]", "[[]]")
    assert not has_more_parts(4, "[[]]", "[[]]")
    assert has_more_parts(9, '"', "[" * 10)


def test_very_many_texts_are_taken_out_in_runs() -> None:
    value = [{"[{:" * 3: "]}"}] * 5000
    for given in (json.dumps(value), json.dumps(value).encode()):
        assert has_more_parts(10_000, given)
        assert not has_more_parts(10_001, given)


TEMPLATE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.items() }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("calls", [1, 4])
def test_arguments_of_very_many_parts_are_refused_before_they_are_read(calls: int) -> None:
    many = '{"a": [' + ",".join(["[]"] * (_MOST_ARGUMENT_PARTS // calls)) + "]}"

    def chat(arguments: str) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call] * calls}]

    template = ChatTemplate(TEMPLATE)
    with pytest.raises(InvalidRequest, match="the arguments of all calls have more than 131072"):
        template.prompt(chat(many))
    quoted = json.dumps({"a": "[{:" * _MOST_ARGUMENT_PARTS})
    assert "[{:" in template.prompt(chat(quoted)).text
