"""How often the demo model's adapter for tools calls the right function rightly, on held-out chats, over HTTP.

    python -m jaxserve.run --config configs/demo-tools.yaml &
    python scripts/eval_demo_tools.py [--items 1000] [--json benchmarks/demo_tools.json]

Chats come from `demo_tool_tasks.py`, `--items` of each kind. They are sent by OpenAI's client to a server, greedy and
without any constraint: tools are not strict, and `tool_choice` is `auto`. A call is right when it is the only one,
there is no text beside it, and name and arguments are those of the item. An answer is right when its text is, whole;
where there is none that is right alone (a story), it must call nothing.

Exit code 1: of calls of the calculator alone in the list, less than 95 % are right.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import openai
from demo_tool_tasks import KINDS, ToolItem, held_out_tool_items
from openai.types.chat import ChatCompletionMessage
from record import write_record
from rich.console import Console
from rich.table import Table

ENOUGH = 0.95  # of calls of the calculator
# Names and parameters that it was not taught are told, but not counted.
PROMISED = tuple(kind for kind in KINDS if kind != "new_names")
STREAMS = 16  # items at once


def is_right(item: ToolItem, message: ChatCompletionMessage) -> bool:
    """Whether a server's message is the item's right turn."""
    if item.call is None:
        return not message.tool_calls and (item.is_free or message.content == item.answer["content"])
    if message.content or len(message.tool_calls or ()) != 1:
        return False
    [call] = message.tool_calls or ()
    try:
        return call.type == "function" and (call.function.name, json.loads(call.function.arguments)) == item.call
    except ValueError:  # the arguments are no JSON
        return False


async def evaluate(
    client: openai.AsyncOpenAI, model: str, count: int, seed: int, kinds: tuple[str, ...] = KINDS
) -> tuple[dict[str, float], list[tuple[ToolItem, ChatCompletionMessage]]]:
    """The share of right turns of each kind, and what was wrong."""
    places, wrong = asyncio.Semaphore(STREAMS), []

    async def ask(item: ToolItem) -> bool:
        async with places:
            answer = await client.chat.completions.create(
                model=model,
                messages=item.messages,  # pyright: ignore[reportArgumentType]
                tools=item.tools or openai.omit,  # pyright: ignore[reportArgumentType]
                temperature=0,
            )
        message = answer.choices[0].message
        if not (right := is_right(item, message)):
            wrong.append((item, message))
        return right

    shares = {}
    for kind in kinds:
        shares[kind] = sum(await asyncio.gather(*map(ask, held_out_tool_items(kind, count, seed)))) / count
    return shares, wrong


async def run(args: argparse.Namespace) -> int:
    console = Console(soft_wrap=True, highlight=False)
    begin_s = time.perf_counter()
    async with openai.AsyncOpenAI(base_url=args.url, api_key="none", timeout=600) as client:
        shares, wrong = await evaluate(client, args.model, args.items, args.seed)
    mean = sum(shares[kind] for kind in PROMISED) / len(PROMISED)
    table = Table("kind", "right", title=f"{args.items} items of each kind in {time.perf_counter() - begin_s:.0f} s")
    for kind, share in {**shares, "all but new_names": mean}.items():
        table.add_row(kind, f"{100 * share:.1f} %")
    console.print(table)
    for item, message in wrong[: args.show]:
        told = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # pyright: ignore
        asked = item.messages[-1]["content"]
        console.print(f"{item.kind}: {asked!r} -> {told or message.content!r}", markup=False)
        console.print(f"    wanted {item.call or item.answer['content']!r}", markup=False)
    if args.json:
        write_record(args.json, {**shares, "all but new_names": mean}, items=args.items, seed=args.seed)
    return 0 if shares["call"] >= ENOUGH else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo-tools")
    parser.add_argument("--items", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=1, help="of the items; training is judged by those of 0")
    parser.add_argument("--show", type=int, default=10, help="wrong answers to print")
    parser.add_argument("--json", type=Path, help="record of the shares")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
