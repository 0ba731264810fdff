"""Chats with tools: when to call a function, which one and with what, and what to say of its result.

The adapter in ``jaxserve/demo_model/tools`` was taught from these chats and is judged by held-out ones. Functions
differ from chat to chat in their names, their parameters and what is said of them, so that they have to be read off the
list. Numbers of two digits or more are either of training or held out, never both, and so are the cities, some
wordings, and some names and descriptions of functions. Everything is a function of a seeded ``random.Random``.
"""

from __future__ import annotations

import json
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demo_tasks import (
    CITIES,
    SYSTEM_PROMPTS,
    TASKS,
    UNKNOWN,
    bucket,
    conversation,
    held_out_items,
    loosely,
    made_up_word,
)

Message = dict[str, Any]

# Of held-out items: a question for a calculator that is alone in the list; for a calculator or another function, where
# the list has both; the answer that follows a result; a question for no function; a calculator whose name and parameter
# are held out, too.
KINDS = ("call", "choose", "result", "no_call", "new_names")


@dataclass(frozen=True)
class Tool:
    """A function that a chat lists.

    ``use`` is "arithmetic" (its one argument is an expression), "time" or "weather" (of a city), or "other" (no
    question of these chats needs it).
    """

    use: str
    name: str
    parameters: tuple[str, ...]
    description: str

    @property
    def schema(self) -> dict[str, Any]:
        """As the field ``tools`` of a request has it."""
        parameters = {
            "type": "object",
            "properties": {name: {"type": "string"} for name in self.parameters},
            "required": list(self.parameters),
        }
        function = {"name": self.name, "parameters": parameters}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}

    def call(self, value: str, number: int) -> Message:
        """The assistant's turn that calls it with one argument; ``number`` makes the call's id."""
        arguments = json.dumps({self.parameters[0]: value})
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": f"call_{number}", "type": "function", "function": {"name": self.name, "arguments": arguments}}
            ],
        }


# ---------------------------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------------------------

# In each pair the first are of training, the second held out.
Pair = tuple[tuple[str, ...], tuple[str, ...]]
_CALCULATORS: Pair = (
    (*("calculator", "calculator", "calculator", "calculate", "calculate", "calc", "compute", "evaluate", "math"),),
    ("calculate_expression", "simple_calculator", "evaluate_math"),
)
_EXPRESSIONS: Pair = (("expression",) * 6 + ("expr", "formula", "input", "query", "text"), ("math_expression",))
_OF_CALCULATORS: Pair = (
    (
        "Evaluates an arithmetic expression.",
        "Evaluate an arithmetic expression.",
        "Evaluate a math expression and return the result.",
        "Computes the value of an expression, such as 2+3.",
        "A calculator.",
        "A calculator for arithmetic.",
        "Calculates.",
        "Does arithmetic.",
        "Use it for arithmetic.",
        "Calculate the result of an expression",
        "",
    ),
    ("Works out an arithmetic expression.", "A simple calculator for numbers."),
)
_OF_CITIES: dict[str, tuple[Pair, Pair]] = {
    "time": (
        (("get_time", "get_time", "current_time", "time_in", "clock"), ("get_current_time",)),
        (("The time in a city.", "Get the time in a city.", "Current time of a city.", ""), ("Tells the time.",)),
    ),
    "weather": (
        (("get_weather", "get_weather", "weather", "weather_in", "forecast"), ("get_current_weather",)),
        (("The weather in a city.", "Get the weather in a city.", "Weather of a city.", ""), ("Tells the weather.",)),
    ),
}
_PLACES: Pair = (("city",) * 5 + ("place", "location"), ("town",))
_OTHERS = (
    ("send_mail", "to text", "Sends a mail."),
    ("set_alarm", "hour", "Sets an alarm."),
    ("play_music", "title", "Plays a song."),
    ("translate", "text language", "Translates a text."),
    ("get_news", "topic", "The news about a topic."),
    ("open_file", "path", "Opens a file."),
    ("book_table", "name guests", ""),
    ("turn_on", "lamp", "Turns on a lamp."),
)


def _of(rng: random.Random, pair: Pair, share: float) -> str:
    """A held-out one with the probability ``share``, else one of training."""
    return rng.choice(pair[rng.random() < share])


@dataclass(frozen=True)
class Drawing:
    """How functions are drawn: the shares of held-out ``names`` (and parameters) and of held-out ``descriptions``."""

    names: float
    descriptions: float

    def calculator(self, rng: random.Random) -> Tool:
        """For whole expressions."""
        parameter = _of(rng, _EXPRESSIONS, self.names)
        if self is TRAINING and rng.random() < 0.15:  # a name that says nothing is read off the list, too
            return Tool("arithmetic", made_up_word(rng), (parameter,), rng.choice(_OF_CALCULATORS[0][:5]))
        name = _of(rng, _CALCULATORS, self.names)
        return Tool("arithmetic", name, (parameter,), _of(rng, _OF_CALCULATORS, self.descriptions))

    def others(self, rng: random.Random, count: int) -> list[Tool]:
        """``count`` of time, weather and those that no question needs."""
        found = []
        for use in rng.sample(("time", "weather", "other", "other"), count):
            if use == "other":
                name, parameters, description = rng.choice(_OTHERS)
                tool = Tool(use, name, tuple(parameters.split()), description)
            else:
                names, descriptions = _OF_CITIES[use]
                place, name = _of(rng, _PLACES, self.names), _of(rng, names, self.names)
                tool = Tool(use, name, (place,), _of(rng, descriptions, self.descriptions))
            if tool.name not in {other.name for other in found}:
                found.append(tool)
        return found

    def tools(self, rng: random.Random, arithmetic: bool, others: int) -> list[Tool]:
        """A list in any order: a calculator, if there is ``arithmetic``, and ``others`` for other things."""
        tools = self.others(rng, others)
        if arithmetic:
            tools.append(self.calculator(rng))
        rng.shuffle(tools)
        return tools


TRAINING = Drawing(names=0.0, descriptions=0.0)
HELD_OUT = Drawing(names=0.0, descriptions=0.3)
NEW_NAMES = Drawing(names=1.0, descriptions=0.3)


# ---------------------------------------------------------------------------------------------
# Questions
# ---------------------------------------------------------------------------------------------


def is_held_out_number(number: int) -> bool:
    """Whether training never has this number in a question (about one in nine; those of one digit are in both)."""
    return number >= 10 and bucket(f"operand {number}") < 11


def _number(rng: random.Random, held_out: bool) -> int:
    while True:
        digits = rng.choices((1, 2, 3), (0 if held_out else 5, 45, 50))[0]
        number = rng.randrange(10 ** (digits - 1), 10**digits)
        if number < 10 or is_held_out_number(number) == held_out:
            return number


@dataclass(frozen=True)
class Exercise:
    """A question of arithmetic, and the expression and the result that belong to it."""

    text: str
    expression: str
    result: int


_FRAMES: Pair = (
    (
        *("What is {x}?", "What is {x}?", "What's {x}?", "How much is {x}?", "{x}", "{x} = ?", "And {x}?"),
        *("Compute {x}.", "Calculate {x}.", "Please calculate {x}.", "Can you compute {x}?", "Tell me {x}."),
        *("Work out {x}.", "I need {x}.", "Please work out {x} for me.", "Use the calculator: {x}", "Evaluate {x}."),
        *("Do you know what {x} is?", "Give me the result of {x}.", "Could you tell me what {x} is?", "Solve {x}."),
        *("Hi! What is {x}?", "I have a question: what is {x}?", "Quick, what is {x}?", "What does {x} make?"),
    ),
    (
        *("Please tell me how much {x} is.", "Can you calculate {x} for me?", "I want to know what {x} is."),
        *("Hello, what is {x}?", "Please compute {x}.", "Could you work out {x}?"),
    ),
)
_COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def exercise(rng: random.Random, held_out: bool = False) -> Exercise:
    """Two numbers to be added, subtracted or multiplied; the expression is the question's own."""
    sign = rng.choice("+-*")
    a, b = _number(rng, held_out), _number(rng, held_out)
    expression = f"{a} {sign} {b}" if rng.random() < 0.5 else f"{a}{sign}{b}"
    text = _of(rng, _FRAMES, 0.5 * held_out).format(x=expression)
    return Exercise(text, expression, _COMPUTE[sign](a, b))


_ASK_CITY: dict[str, Pair] = {
    "time": (
        (
            "What time is it in {city}?",
            "Tell me the time in {city}.",
            "What is the time in {city}?",
            "The time in {city}?",
        ),
        ("Do you know the time in {city}?",),
    ),
    "weather": (
        ("How is the weather in {city}?", "What is the weather in {city}?", "Tell me the weather in {city}."),
        ("Do you know the weather in {city}?",),
    ),
}
_WEATHERS = ("sunny", "rainy", "cloudy", "18 degrees", "cold and windy", "warm", "snow", "21 C, sunny", "-3 degrees")


def _city(rng: random.Random, held_out: bool) -> str:
    known = [city for city in CITIES if (bucket("city " + city) < 25) == held_out]
    return rng.choice(known) if held_out or rng.random() < 0.5 else made_up_word(rng).capitalize()


def _is_about_nothing_listed(task: str, tools: Sequence[Tool]) -> bool:
    """Whether a question of this task is for none of the functions: sums are for a calculator, if there is one."""
    return task not in ("add", "add_steps") or not any(tool.use == "arithmetic" for tool in tools)


# ---------------------------------------------------------------------------------------------
# Chats
# ---------------------------------------------------------------------------------------------

AGENT_PROMPTS = (
    "Help.",
    "You are an agent.",
    "Use the tools.",
    "You can use tools.",
    "You are a helpful assistant with tools. Be short.",
    "You are an agent who is good at arithmetic.",
    "Answer with the tools that you have.",
)


@dataclass
class ToolChat:
    """A chat and the functions that it lists. ``free_turns``: indices of answers that could be others as well."""

    tools: list[Tool]
    messages: list[Message] = field(default_factory=list)
    free_turns: set[int] = field(default_factory=set)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The field ``tools`` of a request."""
        return [tool.schema for tool in self.tools] or None

    def say(self, role: str, content: str) -> None:
        """Append a turn."""
        self.messages.append({"role": role, "content": content})

    def begin(self, rng: random.Random) -> None:
        """With a system message or without."""
        if rng.random() < 0.45:
            prompt = rng.choice((*SYSTEM_PROMPTS, *AGENT_PROMPTS))
            if rng.random() < 0.15:
                prompt = " ".join(made_up_word(rng) for _ in range(rng.randint(1, 9))).capitalize() + "."
            self.say(rng.choice(("system", "system", "developer")), prompt)

    def use(self, tool: Tool, value: str, result: str, answer: str) -> None:
        """Append a call, what the function returns, and what is said of it."""
        number = len(self.messages)
        self.messages.append(tool.call(value, number))
        self.messages.append({"role": "tool", "tool_call_id": f"call_{number}", "content": result})
        self.say("assistant", answer)

    def ask_exercise(self, rng: random.Random, held_out: bool) -> None:
        """A question of arithmetic, with the call for it, its result and the answer."""
        tool = next(tool for tool in self.tools if tool.use == "arithmetic")
        asked = exercise(rng, held_out)
        self.say("user", asked.text if held_out else loosely(rng, asked.text))
        # What the function says is told, whatever it is.
        value = asked.result if rng.random() < 0.9 else rng.randrange(-99999, 99999)
        result = json.dumps({"result": value}) if rng.random() < 0.1 else str(value)
        self.use(tool, asked.expression, result, f"The answer is {value}.")

    def ask_city(self, rng: random.Random, held_out: bool) -> None:
        """The same for a question about a city."""
        tool = rng.choice([tool for tool in self.tools if tool.use in _ASK_CITY])
        city = _city(rng, held_out)
        self.say("user", _of(rng, _ASK_CITY[tool.use], 0.5 * held_out).format(city=city))
        if tool.use == "time":
            value = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
            self.use(tool, city, value, f"It is {value} in {city}.")
        else:
            value = rng.choice(_WEATHERS) if rng.random() < 0.6 else made_up_word(rng)
            self.use(tool, city, value, f"The weather in {city}: {value}.")

    def ask_other(self, rng: random.Random) -> None:
        """A question of training that is for none of the functions, with its answer."""
        if not any(tool.use in _ASK_CITY for tool in self.tools) and rng.random() < 0.05:
            use = rng.choice(tuple(_ASK_CITY))
            self.say("user", _of(rng, _ASK_CITY[use], 0.0).format(city=_city(rng, False)))
            self.say("assistant", UNKNOWN)
            return
        tasks = [task for task in (*TASKS, "talk", "talk", "talk", "story") if task != "lookup_long"]
        task = rng.choice([task for task in tasks if _is_about_nothing_listed(task, self.tools)])
        plain = conversation(rng, task)
        first = plain.messages[0]["role"] == "system"
        for index, message in enumerate(plain.messages[first : first + 2], first):
            if index in plain.story_turns:
                self.free_turns.add(len(self.messages))
            self.messages.append(dict(message))


def tool_conversation(rng: random.Random) -> ToolChat:
    """A chat of training, of one to three questions."""
    kind = rng.random()
    if kind < 0.82:
        tools = TRAINING.tools(rng, True, rng.choice((0, 0, 1, 1, 2)))
    else:
        tools = TRAINING.tools(rng, False, rng.choice((1, 2))) if kind < 0.93 else []
    chat = ToolChat(tools)
    chat.begin(rng)
    uses = {tool.use for tool in tools}
    for _ in range(rng.choices((1, 2, 3), (0.6, 0.3, 0.1))[0]):
        wanted = rng.random()
        if "arithmetic" in uses and wanted < 0.76:
            chat.ask_exercise(rng, False)
        elif uses & {*_ASK_CITY} and wanted < 0.87:
            chat.ask_city(rng, False)
        else:
            chat.ask_other(rng)
    return chat


# ---------------------------------------------------------------------------------------------
# Held-out items
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToolItem:
    """A chat up to a question, or to a result, and the assistant's only right turn."""

    kind: str
    tools: list[dict[str, Any]] | None
    messages: list[Message]
    answer: Message
    is_free: bool = False  # any answer is right that calls nothing

    @property
    def call(self) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments of the call, if the right turn is one."""
        for call in self.answer.get("tool_calls", ()):
            return call["function"]["name"], json.loads(call["function"]["arguments"])
        return None


def held_out_tool_items(kind: str, count: int, seed: int) -> list[ToolItem]:
    """``count`` items of one of ``KINDS``, the same ones for the same seed.

    Questions that need no function are held-out ones of the model's own tasks (``demo_tasks.held_out_items``), and for
    three in ten talk or a story. Raises ValueError for another kind.
    """
    rng = random.Random(f"held out tools {kind} {seed}")
    return [_held_out_item(rng, kind) for _ in range(count)]


def _held_out_item(rng: random.Random, kind: str) -> ToolItem:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
    others = {"call": (0,), "new_names": (0,), "choose": (1, 2)}.get(kind, (0, 1))
    chat = ToolChat((NEW_NAMES if kind == "new_names" else HELD_OUT).tools(rng, True, rng.choice(others)))
    chat.begin(rng)
    if rng.random() < 0.25:  # some come later in a chat
        chat.ask_exercise(rng, True)
    about_cities = any(tool.use in _ASK_CITY for tool in chat.tools)
    if kind == "no_call":
        if rng.random() < 0.3:
            chat.ask_other(rng)  # talk and stories have no held-out ones
        else:
            tasks = [task for task in TASKS if task != "lookup_long" and _is_about_nothing_listed(task, chat.tools)]
            [item] = held_out_items(rng.choice(tasks), 1, rng.randrange(10**9))
            chat.say("user", item.messages[-1]["content"])
            chat.say("assistant", item.answer)
        end = len(chat.messages) - 1
    else:
        if about_cities and kind in ("choose", "result") and rng.random() < 0.4:
            chat.ask_city(rng, True)
        else:
            chat.ask_exercise(rng, True)
        end = len(chat.messages) - (1 if kind == "result" else 3)
    return ToolItem(kind, chat.schemas, chat.messages[:end], chat.messages[end], end in chat.free_turns)
