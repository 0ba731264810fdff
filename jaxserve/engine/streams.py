"""Streams for asyncio: one async iterator per request on top of the engine's loop thread.

Owns the bridge between threads and an event loop. Refuses to know a protocol, or how a request is made: that is
`Engine.prepare`, which front doors call through `run`, since a long prompt must not hold up the other streams.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxserve.api import Request
from jaxserve.engine.base import AnyEngine, reason_of
from jaxserve.engine.embedding import embedding_of, pooling_params
from jaxserve.engine.inputs import Prompt
from jaxserve.engine.outputs import Update
from jaxserve.errors import EngineStopped, JaxserveError, QueueFull

T = TypeVar("T")


class AsyncEngine:
    """The engine as coroutines. One per event loop; closing it does not stop the engine."""

    def __init__(self, engine: AnyEngine, encode_threads: int = 2) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(encode_threads, thread_name_prefix="jaxserve-encode")
        self._closed = False
        self._num_pending = 0
        self._open: set[asyncio.Queue[Update]] = set()  # of running streams

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, done on a thread of its own; such as `lambda: engine.prepare(prompt, sampling)`.

        Raises what `work` raises, EngineStopped after `close` or once the engine has died, and QueueFull when as much
        waits as may wait at all.
        """
        failure = self.engine.failure
        if self._closed or failure is not None:
            raise EngineStopped(f"the engine takes no more requests: {reason_of(failure)}")
        if self._num_pending >= self.engine.load.max_waiting:
            raise QueueFull(
                f"{self._num_pending} prompts wait to be encoded; sched.max_waiting is {self.engine.load.max_waiting}; "
                "try again later",
                retry_after_s=1.0,
            )
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_pending -= 1

    async def stream(self, request: Request, *, echo: bool = False) -> AsyncGenerator[Update, None]:
        """Submits a prepared request; yields updates until it has ended. Leaving early, or a cancel, aborts it.

        Raises what `Engine.submit` raises, and the typed error that ended the request, if one did.
        """
        loop = asyncio.get_running_loop()
        updates: asyncio.Queue[Update] = asyncio.Queue()
        self.engine.submit(request, lambda u: loop.call_soon_threadsafe(updates.put_nowait, u) and None, echo=echo)
        ended = False
        self._open.add(updates)
        try:
            while not ended:
                update = await updates.get()
                ended = update.last
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            self._open.discard(updates)
            if not ended:
                self.engine.abort(request)

    def end_streams(self, error: JaxserveError) -> None:
        """Every running stream raises `error`, and its request is aborted: for a loop that answers nobody any more."""
        for updates in self._open:
            updates.put_nowait(Update("", 0, error=error))

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """The embedding of a prompt: the mean of its final hidden states, of Euclidean length 1. [D] numbers.

        A cancel aborts it. Raises InvalidRequest and its kin for a prompt that cannot be taken, and what `stream`
        raises.
        """
        sampling = pooling_params(truncate_prompt_tokens)
        request = await self.run(
            lambda: self.engine.prepare(prompt, sampling, request_id=request_id, priority=priority, pooling=True)
        )
        async with contextlib.aclosing(self.stream(request)) as updates:
            async for update in updates:
                if update.prompt is not None:
                    return embedding_of(update.prompt)
        raise EngineStopped("the request was aborted before its prompt had run")

    def close(self) -> None:
        """Lets the threads go once they have done what they were given. The engine is left alone."""
        self._closed = True
        self._pool.shutdown(wait=False)
