"""`Shutdown`: what signals ask of a server: two flags that end it, and one that has it read its keys again.

What a server does in a drain is its own affair (`service`, `route`).
"""

import asyncio
import functools
import math
import os
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jaxserve.engine.daemon_threads import DaemonThreads

T = TypeVar("T")

_THREADS_S = 2.0  # for what threads of the event loop have begun, such as the writing of a file
_HURRY_S = 2.0  # for a step to end and for last messages to leave, after a second signal


class Shutdown:
    """Two flags that signals set: the first asks for a drain, the second for an end at once. One event loop.

    Attributes:
      reread: set by SIGHUP in a server that has files of keys; who reads them clears it.
      until_s: on the clock of the event loop: the end of the drain, unless it ends before.
    """

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        self.reread = asyncio.Event()
        self.until_s = math.inf
        self._signalled = False

    def request(self) -> None:
        """A signal: the first one drains. Even after an order to drain, it hurries nothing."""
        if self._signalled:
            self.now.set()
        self._signalled = True
        self.drain.set()

    def drain_within(self, seconds: float) -> None:
        """An order to drain, for so many seconds at most. A later one can only make the time shorter."""
        self.until_s = min(self.until_s, asyncio.get_running_loop().time() + seconds)
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


class _LoopThreads(ThreadPoolExecutor):
    """Those of `asyncio.to_thread`. An event loop takes only a ThreadPoolExecutor, and waits for its threads, as Python
    does at its end: work that nothing can stop would hold up the end of the server for as long as it lasts."""

    def __init__(self) -> None:
        count = min(32, (os.cpu_count() or 1) + 4)  # as many as an event loop has otherwise
        super().__init__(count)
        self._daemons = DaemonThreads("jaxserve-loop", count)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        return self._daemons.submit("", functools.partial(fn, *args, **kwargs))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._daemons.close(cancel=cancel_futures, timeout_s=_THREADS_S if wait else 0.0)


def run_with_signals(work: Callable[[Shutdown], Awaitable[int]], *, rereads: bool = False) -> int:
    """Runs `work` on an event loop of its own, whose flags are set by SIGTERM and SIGINT.

    SIGHUP, that of a closed terminal, does the same unless `nohup` has it ignored; with `rereads` it sets
    `Shutdown.reread` in any case, and ends nothing. Must be called on the main thread."""

    async def main() -> int:
        shutdown = Shutdown()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(_LoopThreads())
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, shutdown.request)
        if rereads:
            loop.add_signal_handler(signal.SIGHUP, shutdown.reread.set)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, shutdown.request)
        return await work(shutdown)

    return asyncio.run(main())
