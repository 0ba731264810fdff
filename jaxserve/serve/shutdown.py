"""`Shutdown`: two flags that end a server, the signals that set them, and a wait that the second flag cuts short.

What a server does in a drain is its own affair (`service`, `route`).
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable

_HURRY_S = 2.0  # for a step to end and for last messages to leave, after a second signal


class Shutdown:
    """Two flags that signals set: the first asks for a drain, the second for an end at once. One event loop."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()

    async def wait_for(self, work: Awaitable[object], timeout_s: float) -> bool:
        """Waits for `work`: at most `timeout_s`, and little longer once an end at once is asked for.

        True when it has ended; otherwise it is cancelled. Raises its errors.
        """
        task, hurried = asyncio.ensure_future(work), asyncio.ensure_future(self.now.wait())
        try:
            await asyncio.wait({task, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if hurried.done() and not task.done():
                await asyncio.wait({task}, timeout=min(timeout_s, _HURRY_S))
            if not task.done():
                return False
            task.result()
            return True
        finally:
            hurried.cancel()
            task.cancel()
            await asyncio.gather(task, hurried, return_exceptions=True)


def run_with_signals(work: Callable[[Shutdown], Awaitable[int]]) -> int:
    """Runs `work` on an event loop of its own, SIGTERM and SIGINT set its flags. Must be called on the main thread."""

    async def main() -> int:
        shutdown = Shutdown()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request)
        return await work(shutdown)

    return asyncio.run(main())
