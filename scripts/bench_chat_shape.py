"""Times what a chat costs beside its template: checking messages, bringing them into its form, finding special tokens.

    python scripts/bench_chat_shape.py [--turns 200] [--tokenizer DIRECTORY]

The template writes each message once and is as cheap as one can be; its own time is told beside. The conversation has
calls, results of tools, thoughts and lists of parts. Milliseconds, the least of many runs.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxserve.text import ChatTemplate, SpecialText, load_tokenizer
from jaxserve.text.messages import check_messages, shaped
from jaxserve.text.special_text import PromptText

_SOURCE = (
    "{% for m in messages %}{{ m.role }}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "{{ m.reasoning_content or m.thinking }}{% endfor %}"
)
_DEMO = Path(__file__).parent.parent / "jaxserve" / "demo_model"


def _conversation(num_turns: int) -> Iterator[dict[str, Any]]:
    words = "> The quick brown fox jumps over the lazy dog, if a < b. " * 6
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "f", "arguments": '{"city": "Oslo", "days": 3}'},
    }
    kinds: tuple[dict[str, Any], ...] = (
        {"role": "user", "content": [{"type": "text", "text": words}, {"type": "text", "text": words}]},
        {"role": "assistant", "content": None, "reasoning_content": words, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": words},
        {"role": "assistant", "content": words},
    )
    yield {"role": "developer", "content": words}
    for number in range(num_turns - 1):
        yield kinds[number % len(kinds)]


def _least_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        before_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - before_s)
    return min(times) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--tokenizer", type=Path, default=_DEMO)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    template, special = ChatTemplate.of(tokenizer, _SOURCE), SpecialText.of(tokenizer)
    messages = list(_conversation(options.turns))
    form, checked = template.form(), check_messages(messages)
    shape = shaped(checked, form)
    prompt: PromptText = template.prompt(messages)
    rows = {
        "check and copy": lambda: check_messages(messages),
        "shape": lambda: shaped(checked, form),
        "look for special tokens": lambda: special.marks_for(shape),
        "mark special tokens": lambda: (marks := special.marks_for(shape)) and special.marked(shape, marks),
        "all, with the template": lambda: template.prompt(messages),
    }
    print(f"{options.turns} turns, {len(prompt.text)} characters, {len(tokenizer.special_ids)} special tokens")
    for name, work in rows.items():
        print(f"{name:26} {_least_ms(work):7.3f} ms")


if __name__ == "__main__":
    main()
