"""What a door adds to a token, in Python, above the stream of the engine: no device, no text, no JSON.

    python scripts/bench_stream.py --tokens 20000 --rounds 9

A fake engine has all updates ready. `stream` reads them from `AsyncEngine.stream`; `door` is the response of a streamed
call over HTTP, whose answer has nothing to say. Prints medians of the rounds in microseconds a token, and what the
door adds. `one`: a call of one prompt. `many`: a call of 16, which share the tokens. `turns`: one prompt, whose tokens
come one in each turn of the engine's loop, so that every one of them wakes the reader.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Message

from jaxserve.api import Request
from jaxserve.config.schema import HttpConfig
from jaxserve.engine import AsyncEngine, Sink, Update
from jaxserve.serve.http.door import Door
from jaxserve.serve.http.formats import choose_tool_format
from jaxserve.serve.http.streaming import EventStream
from jaxserve.testing import make_request

NUM_PROMPTS = 16


class ReadyEngine:
    """The part of an `AnyEngine` that streams use. Each request has `num_tokens` updates at once, or one a turn."""

    failure = None

    def __init__(self, num_tokens: int, *, in_turns: bool) -> None:
        self._num_tokens = num_tokens
        self._in_turns = in_turns
        self._tell: Callable[[], None] = lambda: None

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def abort(self, request: Request) -> None:
        raise AssertionError(f"{request.request_id} has not ended")

    def submit(self, request: Request, sink: Sink) -> None:
        updates = [Update(request.request_id, 0, (7,), "a") for _ in range(self._num_tokens - 1)]
        updates.append(Update(request.request_id, 0, (7,), "a", last=True))
        if not self._in_turns:
            for update in updates:
                sink(update)
            self._tell()
            return
        loop, left = asyncio.get_running_loop(), iter(updates)

        def turn() -> None:
            if (update := next(left, None)) is not None:
                sink(update)
                self._tell()
                loop.call_soon(turn)

        loop.call_soon(turn)


class Silent:
    """An answer that tells its client nothing."""

    def events(self, update: Update) -> str:
        return ""

    def last_events(self, error: Exception | None) -> str:
        return ""


async def read_stream(engine: AsyncEngine, requests: list[Request]) -> None:
    async for _ in engine.stream(*requests):
        pass


async def read_door(engine: AsyncEngine, requests: list[Request]) -> None:
    config = HttpConfig(port=0)
    tools = choose_tool_format(config.tool_parser, None)
    door = Door(engine=engine, config=config, tool_format=tools, thinking_format=None)

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    await EventStream(door, requests, Silent(), "id")({"type": "http"}, receive, send)


def microseconds(
    read: Callable[[AsyncEngine, list[Request]], Awaitable[None]], num_prompts: int, num_tokens: int, *, in_turns: bool
) -> float:
    """Of one token, in one run on an event loop of its own."""
    fake: Any = ReadyEngine(num_tokens // num_prompts, in_turns=in_turns)
    requests = [make_request(f"r{k}", [1]) for k in range(num_prompts)]

    async def run() -> float:
        engine = AsyncEngine(fake)
        begun_s = time.perf_counter()
        await read(engine, requests)
        return time.perf_counter() - begun_s

    return asyncio.run(run()) / (num_tokens // num_prompts * num_prompts) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of one run")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"us a token{'stream':>10}{'door':>10}{'added':>10}")
    for name, num_prompts, in_turns in (("one", 1, False), ("many", NUM_PROMPTS, False), ("turns", 1, True)):
        figures = [
            [microseconds(read, num_prompts, options.tokens, in_turns=in_turns) for read in (read_stream, read_door)]
            for _ in range(options.rounds)
        ]
        stream, door = (statistics.median(column) for column in zip(*figures, strict=True))
        added = statistics.median(b - a for a, b in figures)
        print(f"{name:10}{stream:10.2f}{door:10.2f}{added:10.2f}")


if __name__ == "__main__":
    main()
