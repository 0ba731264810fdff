"""Streams for asyncio: one async iterator per request on top of the engine's loop thread.

Owns the bridge between threads and an event loop. Refuses to know a protocol, or how a request is made: that is
`Engine.prepare`, which front doors call through `run`, since a long prompt must not hold up the other streams.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxserve.api import Request
from jaxserve.engine.base import AnyEngine
from jaxserve.engine.outputs import Update
from jaxserve.errors import EngineStopped

T = TypeVar("T")


class AsyncEngine:
    """The engine as coroutines. One per event loop; closing it does not stop the engine."""

    def __init__(self, engine: AnyEngine, encode_threads: int = 2) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(encode_threads, thread_name_prefix="jaxserve-encode")
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done on a thread of its own; such as `lambda: engine.prepare(prompt, sampling)`.

        Raises what `work` raises, and EngineStopped after `close`.
        """
        if self._closed:
            raise EngineStopped(f"no more requests are taken: {self.engine.failure or 'the engine is shutting down'}")
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def stream(self, request: Request, *, echo: bool = False) -> AsyncGenerator[Update, None]:
        """Submits a prepared request; yields updates until it has ended. Leaving early, or a cancel, aborts it.

        Raises what `Engine.submit` raises, and the typed error that ended the request, if one did.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self.engine.submit(request, lambda u: loop.call_soon_threadsafe(updates.put_nowait, u) and None, echo=echo)
        ended = False
        try:
            while not ended:
                update = await updates.get()
                ended = update.last
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            if not ended:
                self.engine.abort(request)

    def close(self) -> None:
        """Lets the threads go once they have done what they were given. The engine is left alone."""
        self._closed = True
        self._pool.shutdown(wait=False)
