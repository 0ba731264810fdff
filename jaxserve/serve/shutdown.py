"""How a server is asked to end: two flags, and the signals that set them.

Owns nothing else. What a drain means is for each server to say (`service`, `route`).
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable


class Shutdown:
    """Two flags that signals set: the first asks for a drain, the second for an end at once. One event loop."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()


def run_with_signals(work: Callable[[Shutdown], Awaitable[int]]) -> int:
    """Runs `work` on an event loop of its own, SIGTERM and SIGINT set its flags. Must be called on the main thread."""

    async def main() -> int:
        shutdown = Shutdown()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request)
        return await work(shutdown)

    return asyncio.run(main())
