"""Answers as models write them, special tokens included, and what they say.

The shapes are those of the models' cards, chat templates and documentation; the words are ours.
"""

import dataclasses
from typing import Any

FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": ["string", "null"]},
        },
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "mode": {"type": "object"},
            "force": {"type": "boolean"},
        },
    },
    "get_time": {"type": "object", "properties": {}},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transcript:
    """`tools`, `thinking`: names of formats. `prompt`: how the prompt ends. `calls`: names and arguments."""

    name: str
    text: str
    tools: str = "hermes"
    thinking: str = "none"
    prompt: str = ""
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


PARIS = ("get_weather", {"city": "Paris", "days": 3})
TRANSCRIPTS = [
    # ---- thoughts
    Transcript(
        name="qwen3",
        thinking="qwen3",
        text="<think>\nThe user greets me.\n\nI greet back.\n</think>\n\nHello! How can I help?",
        reasoning="The user greets me.\n\nI greet back.",
        content="Hello! How can I help?",
    ),
    Transcript(
        name="qwen3, thinking off",
        thinking="qwen3",
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        text="Hello!",
        content="Hello!",
    ),
    Transcript(name="qwen3, /no_think", thinking="qwen3", text="<think>\n\n</think>\n\nHello!", content="Hello!"),
    Transcript(
        name="qwen3 2507, the prompt opens the thought",
        thinking="qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
        text="I need the weather.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        reasoning="I need the weather.",
        calls=(PARIS,),
    ),
    Transcript(name="qwen3, cut", thinking="qwen3", text="<think>\nLet me see</th", reasoning="Let me see</th"),
    Transcript(name="qwen3, no thought", thinking="qwen3", text="No <think> here.", content="No <think> here."),
    Transcript(
        name="deepseek_r1, the prompt opens the thought",
        thinking="deepseek_r1",
        prompt="<｜Assistant｜><think>\n",  # noqa: RUF001
        text="First, 1+2 is 3.\n</think>\n\n1+2 = **3**",
        reasoning="First, 1+2 is 3.",
        content="1+2 = **3**",
    ),
    Transcript(
        name="deepseek_r1, the model opens the thought",
        thinking="deepseek_r1",
        prompt="<｜Assistant｜>",  # noqa: RUF001
        text="<think>\nHm.\n</think>\n\n3",
        reasoning="Hm.",
        content="3",
    ),
    Transcript(
        name="deepseek_r1, nobody opens the thought",
        thinking="deepseek_r1",
        prompt="<｜Assistant｜>",  # noqa: RUF001
        text="Hm, < 4.\n</think>\n\n3",
        reasoning="Hm, < 4.",
        content="3",
    ),
    Transcript(
        name="magistral",
        tools="mistral",
        thinking="mistral",
        text='[THINK]I look it up.[/THINK]Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
        reasoning="I look it up.",
        content="Let me see.",
        calls=(PARIS,),
    ),
    # ---- gpt-oss
    Transcript(
        name="gpt_oss, a call",
        tools="gpt_oss",
        text="<|channel|>analysis<|message|>We need to use get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
        reasoning="We need to use get_weather.",
        calls=(PARIS,),
    ),
    Transcript(
        name="gpt_oss, the recipient first, the end skipped",
        tools="gpt_oss",
        text='<|channel|>analysis<|message|>Time.<|end|><|start|>assistant to=functions.get_weather<|channel|>'
        'commentary json<|message|>{"city":"Paris","days":3}',
        reasoning="Time.",
        calls=(PARIS,),
    ),
    Transcript(
        name="gpt_oss, an answer",
        tools="gpt_oss",
        text="<|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>2 < 3, yes."
        "<|return|>",
        reasoning="Simple.",
        content="2 < 3, yes.",
    ),
    Transcript(
        name="gpt_oss, a preamble and two calls",
        tools="gpt_oss",
        text="<|channel|>analysis<|message|>Plan.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Now.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        reasoning="Plan.\nNow.",
        content="I look.",
        calls=(("get_time", {}), PARIS),
    ),
    Transcript(name="gpt_oss, constrained", tools="gpt_oss", text='{"ok": true}', content='{"ok": true}'),
    Transcript(name="gpt_oss, a short text", tools="gpt_oss", text="to", content="to"),
    # ---- Qwen3-Coder
    Transcript(
        name="qwen3_coder",
        tools="qwen3_coder",
        text="I'll check.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        content="I'll check.",
        calls=(PARIS,),
    ),
    Transcript(
        name="qwen3_coder, code, lists, booleans",
        tools="qwen3_coder",
        text="<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\n"
        'def f(x):\n    return "\\d" if x < 3 else None\n\n</parameter>\n<parameter=tags>\n["a", "b"]\n</parameter>\n'
        '<parameter=mode>\n{"x": 1}\n</parameter>\n<parameter=force>\ntrue\n</parameter>\n</function>\n</tool_call>',
        calls=(
            (
                "write_file",
                {
                    "path": "a.py",
                    "content": 'def f(x):\n    return "\\d" if x < 3 else None\n',
                    "tags": ["a", "b"],
                    "mode": {"x": 1},
                    "force": True,
                },
            ),
        ),
    ),
    Transcript(
        name="qwen3_coder, two calls, a null, no parameters",
        tools="qwen3_coder",
        text="<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=get_weather>\n"
        "<parameter=city>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n</function>\n</tool_call>",
        calls=(("get_time", {}), ("get_weather", {"city": "3", "units": None})),
    ),
    Transcript(
        name="qwen3_coder, two calls in one",
        tools="qwen3_coder",
        text="<tool_call>\n<function=get_time>\n</function>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        calls=(("get_time", {}), ("get_weather", {"city": "Paris"}), ("get_time", {})),
    ),
    Transcript(
        name="qwen3_coder, the opening tag forgotten",
        tools="qwen3_coder",
        text="Ok.\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        content="Ok.",
        calls=(("get_weather", {"city": "Paris"}),),
    ),
    Transcript(
        name="qwen3_coder, the closing tag forgotten",
        tools="qwen3_coder",
        text="<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
        calls=(("get_weather", {"city": "Paris"}),),
    ),
    Transcript(
        name="qwen3_coder, an unknown function",
        tools="qwen3_coder",
        text="<tool_call>\n<function=rm>\n</function>\n</tool_call>",
        content="<tool_call>\n<function=rm>\n</function>\n</tool_call>",
    ),
    # ---- Mistral
    Transcript(
        name="mistral, version 3",
        tools="mistral",
        text='[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        calls=(PARIS,),
    ),
    Transcript(
        name="mistral, version 3, two calls with ids behind text",
        tools="mistral",
        text='Hello[TOOL_CALLS][{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather", "id": "a1B2c3D4e"}, '
        '{"name": "get_time", "arguments": {}}]\nmore',
        content="Hello\nmore",
        calls=(PARIS, ("get_time", {})),
    ),
    Transcript(
        name="mistral, version 11",
        tools="mistral",
        text='[TOOL_CALLS]get_weather{"city": "Paris", "days": 3}[TOOL_CALLS]get_time{}',
        calls=(PARIS, ("get_time", {})),
    ),
    Transcript(
        name="mistral, version 11, ids",
        tools="mistral",
        text='[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Paris", "days": 3}',
        calls=(PARIS,),
    ),
    Transcript(
        name="mistral, braces in texts",
        tools="mistral",
        text='[TOOL_CALLS]write_file[ARGS]{"content": "a \\"}\\" {["}',
        calls=(("write_file", {"content": 'a "}" {['}),),
    ),
    Transcript(
        name="mistral, an unknown function",
        tools="mistral",
        text='[TOOL_CALLS]rm{"a": 1}',
        content='[TOOL_CALLS]rm{"a": 1}',
    ),
    # ---- Gemma
    Transcript(
        name="functiongemma",
        tools="gemma",
        text="<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_response>",
        calls=(PARIS,),
    ),
    Transcript(
        name="gemma 4, nested values",
        tools="gemma",
        text='Ok. <|tool_call>call:write_file{path:<|"|>a, {b}: "c"<|"|>,tags:[<|"|>x<|"|>,<|"|>y<|"|>],mode:{n:-1.5,'
        "m:null},force:true}<tool_call|><|tool_call>call:get_time{}<tool_call|>",
        content="Ok.",
        calls=(
            (
                "write_file",
                {"path": 'a, {b}: "c"', "tags": ["x", "y"], "mode": {"n": -1.5, "m": None}, "force": True},
            ),
            ("get_time", {}),
        ),
    ),
    Transcript(
        name="gemma 4, no call",
        tools="gemma",
        text="<|tool_call>call:get_time{a}<tool_call|>",
        content="<|tool_call>call:get_time{a}<tool_call|>",
    ),
    # ---- Llama 4
    Transcript(
        name="pythonic",
        tools="pythonic",
        text='[get_weather(city="Paris", days=3), get_time()]',
        calls=(PARIS, ("get_time", {})),
    ),
    Transcript(
        name="pythonic, tags and nested values",
        tools="pythonic",
        text="<|python_start|>[write_file(path='a\\'s [x](y)', tags=['x', \"]\"], mode={'n': -1.5, 'm': None}, "
        "force=true)]<|python_end|>",
        calls=(
            (
                "write_file",
                {"path": "a's [x](y)", "tags": ["x", "]"], "mode": {"n": -1.5, "m": None}, "force": True},
            ),
        ),
    ),
    Transcript(name="pythonic, a list", tools="pythonic", text="[1, 2] is a list", content="[1, 2] is a list"),
    Transcript(name="pythonic, an escape", tools="pythonic", text='[get_weather(city="\\d")]',
               calls=(("get_weather", {"city": "\\d"}),)),
    Transcript(
        name="pythonic, an unknown function", tools="pythonic", text="[rm(path='a')]", content="[rm(path='a')]"
    ),
    Transcript(
        name="pythonic, cut", tools="pythonic", text='[get_weather(city="Par', content='[get_weather(city="Par'
    ),
]  # fmt: skip
