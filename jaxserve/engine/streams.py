"""Streams for asyncio: one async iterator per request on top of the engine's loop thread.

Owns the bridge between threads and an event loop. Refuses to know a protocol, or how a request is made: that is
`Engine.prepare`, which front doors call through `run`, since a long prompt must not hold up the other streams.

A turn of the engine's loop wakes the event loop once, when all its updates are there: a wake-up for each token would
let both threads take the interpreter from each other hundreds of times a step.
"""

import asyncio
import collections
import contextlib
import functools
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


class _Stream:
    """Updates of one request, for the one coroutine that reads them. `asyncio.Queue` does more, in twice the time."""

    __slots__ = ("_loop", "_updates", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._updates: collections.deque[Update] = collections.deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        """Adds one; on the event loop."""
        self._updates.append(update)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def get(self) -> Update:
        """The next one."""
        while not self._updates:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self._updates.popleft()


class _Mail:
    """Updates on their way to one event loop. `put` and `flush` are for the engine's threads, the rest for the loop's.

    Attributes:
      streams: those that are running: where their updates go, and their requests.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[Request], None]) -> None:
        self.loop = loop
        self.streams: dict[_Stream, Request] = {}
        self._abort = abort
        # Appending, popping and testing are each one uninterrupted operation of the interpreter.
        self._sent: collections.deque[tuple[_Stream, Update]] = collections.deque()

    def put(self, stream: _Stream, update: Update) -> None:
        """Sends an update; it leaves with the next `flush`."""
        self._sent.append((stream, update))

    def flush(self) -> None:
        """Wakes the event loop if anything was sent."""
        if not self._sent:
            return
        try:
            self.loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:  # it is closed, so that nobody will ever read
            self._sent.clear()
            for request in tuple(self.streams.values()):
                self._abort(request)
            self.streams.clear()

    def _hand_out(self) -> None:
        sent = self._sent
        while sent:
            stream, update = sent.popleft()
            stream.put(update)


class AsyncEngine:
    """The engine as coroutines. One per event loop; closing it does not stop the engine."""

    def __init__(self, engine: AnyEngine, encode_threads: int = 2) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(encode_threads, thread_name_prefix="jaxserve-encode")
        self._closed = False
        self._num_pending = 0
        self._mail: dict[asyncio.AbstractEventLoop, _Mail] = {}  # of the loops that have running streams
        engine.watch_deliveries(self._flush)

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
        mail = self._mail.setdefault(loop, _Mail(loop, self.engine.abort))
        updates = _Stream(loop)
        mail.streams[updates] = request
        ended = True  # what is refused need not be aborted
        try:
            self.engine.submit(request, functools.partial(mail.put, updates), echo=echo)
            ended = False
            while not ended:
                update = await updates.get()
                ended = update.last
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            mail.streams.pop(updates, None)
            if not mail.streams:
                self._mail.pop(loop, None)
            if not ended:
                self.engine.abort(request)

    def end_streams(self, error: JaxserveError) -> None:
        """Every running stream raises `error`, and its request is aborted: for a loop that answers nobody any more."""
        for updates in [updates for mail in self._mail.values() for updates in mail.streams]:
            updates.put(Update("", 0, error=error))

    def _flush(self) -> None:
        for mail in self._mail.copy().values():
            mail.flush()

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
        if not self._closed:
            self._closed = True
            self.engine.unwatch_deliveries(self._flush)
        self._pool.shutdown(wait=False)
