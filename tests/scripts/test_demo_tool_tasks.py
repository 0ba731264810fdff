"""The chats with tools of the demo model's adapter: what is held out is, and the right turns are right."""

import json
import random
import re

import pytest
from demo_tool_tasks import KINDS, held_out_tool_items, is_held_out_number, tool_conversation


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def test_training_has_no_operand_that_is_held_out() -> None:
    rng, count = random.Random(3), 0
    for _ in range(500):
        chat = tool_conversation(rng)
        arithmetic = {tool.name for tool in chat.tools if tool.use == "arithmetic"}
        for message in chat.messages:
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] in arithmetic:
                    operands = numbers(str([*json.loads(call["function"]["arguments"]).values()]))
                    assert len(operands) == 2 and not any(map(is_held_out_number, operands))
                    count += 1
    assert count > 200


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_items(kind: str) -> None:
    items = held_out_tool_items(kind, 60, 5)
    assert items == held_out_tool_items(kind, 60, 5) != held_out_tool_items(kind, 60, 6)
    for item in items:
        question = item.messages[-1]["content"]
        names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item.tools or ()}
        assert len(names) == len(item.tools or ())
        if item.call is None:
            assert kind in ("result", "no_call") and item.answer["content"]
            continue
        name, arguments = item.call
        assert [*arguments] == names[name]["required"]
        operands = numbers(str([*arguments.values()]))  # none of a city
        assert sorted(operands) == sorted(numbers(question)), (question, arguments)
        assert all(is_held_out_number(operand) for operand in operands)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 'cal'; known are call, choose"):
        held_out_tool_items("cal", 1, 0)
