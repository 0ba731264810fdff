"""Streams for asyncio: one async iterator per call on top of the engine's loop thread.

This is the bridge between threads and an event loop. A request is made by `Engine.prepare`, which front doors call
through `run`, since a long prompt must not hold up the other streams.

A turn of the engine's loop wakes the event loop once, when all its updates are there: a wake-up for each token would
let both threads take the interpreter from each other hundreds of times a step.
"""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Generic, TypeVar

from jaxserve.api import NO_OPTIONS, FinishReason, Request, RequestOptions
from jaxserve.engine.base import Answering
from jaxserve.engine.daemon_threads import DaemonThreads
from jaxserve.engine.embedding import embedding_of, pooling_params
from jaxserve.engine.inputs import Prompt
from jaxserve.engine.outputs import Update
from jaxserve.engine.prices import check_answer
from jaxserve.engine.refusals import refusal_of
from jaxserve.engine.scoring import Judgement
from jaxserve.engine.shared_room import SharedRoom
from jaxserve.engine.tenants import Tenants
from jaxserve.engine.waiting import queue_full
from jaxserve.errors import EngineStopped, InvalidRequest, JaxserveError

T = TypeVar("T")
E_co = TypeVar("E_co", bound=Answering, covariant=True)

_SPARE_THREADS = 1  # beside those that one owner may have all: for one of whose prompts none is being encoded
_SUBMITTED_AT_ONCE = 32  # requests of one call; then other coroutines have their turn
_READ_AT_ONCE = 32  # updates of one call, likewise


class _Reader:
    """What one coroutine reads: the updates of its requests. Its event loop owns it.

    Attributes:
      updates: the engine's threads append, the coroutine pops; each is one uninterrupted operation of the interpreter.
      live: requests that have been submitted and have not ended, by id.
      waiter: what the coroutine waits for when there is nothing to read.
    """

    __slots__ = ("live", "updates", "waiter")

    def __init__(self) -> None:
        self.updates: collections.deque[Update] = collections.deque()
        self.live: dict[str, Request] = {}
        self.waiter: asyncio.Future[None] | None = None


class _Readers:
    """The readers of one event loop. `flush` is for the engine's threads, the rest for the loop's own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, abort: Callable[[Request], None]) -> None:
        self.active: set[_Reader] = set()
        self._loop = loop
        self._abort = abort
        self._waking = False  # `wake` has been asked for and has not begun: it will see all updates there are

    def flush(self) -> None:
        """Has the event loop wake whoever waits for updates that are there."""
        if self._loop.is_closed():  # nobody will ever read
            for request in [request for reader in self.active for request in reader.live.values()]:
                self._abort(request)
            self.active.clear()
        elif self.active and not self._waking:
            self._waking = True
            with contextlib.suppress(RuntimeError):  # it has closed since, as the next turn will see
                self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """Wakes the readers that wait and have something to read."""
        self._waking = False
        for reader in self.active:
            waiter = reader.waiter
            if waiter is not None and reader.updates and not waiter.done():
                waiter.set_result(None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What one call may ask for; None: any amount, of prompts and sequences as many as may wait.

    Attributes:
      max_prompts: of a call.
      max_n: sequences of each.
      max_stops: strings that end a text of a request.
      max_text_chars: see `AsyncEngine.check_text`.
      max_answer_bytes: that the answer can come to, see `engine.prices`.
    """

    max_prompts: int | None = None
    max_n: int | None = None
    max_stops: int | None = None
    max_text_chars: int | None = None
    max_answer_bytes: int | None = None


NO_LIMITS = CallLimits()


class AsyncEngine(Generic[E_co]):
    """An engine of the kind `E_co` as coroutines. One per event loop; closing it does not stop the engine."""

    def __init__(
        self,
        engine: E_co,
        encode_threads: int = 2,
        *,
        limits: CallLimits = NO_LIMITS,
        tenants: Tenants | None = None,
    ) -> None:
        """`tenants`: their limits; None: no limits."""
        self.engine = engine
        self._limits = limits
        self._tenants = tenants
        self._threads = DaemonThreads("jaxserve-encode", encode_threads, spare=_SPARE_THREADS)
        self._closed = False
        self._pending: SharedRoom[str] = SharedRoom(0)  # sequences of prompts to be encoded; other work counts as one
        self._readers: dict[asyncio.AbstractEventLoop, _Readers] = {}  # of the loops that have running streams
        engine.watch_deliveries(self._flush)

    async def run(
        self, work: Callable[[], T], *, prompts: int = 0, n: int = 1, tenant: str | None = None, owner: str = ""
    ) -> T:
        """The result of `work`, done on a thread of its own; such as `lambda: engine.prepare(prompt, sampling)`.

        `prompts`, `n`: of the call that this begins, which has a sequence for each of both; 0: it begins none. What
        there is no room for is refused here, before anything is encoded or made for a sequence. `tenant`: whose call it
        is; None: one that was accepted elsewhere, or of which nothing is counted. `owner`: as `Request.owner`; threads
        that are free work for the owner that has fewest.

        Raises what `work` raises, EngineStopped after `close` or once the engine has died, InvalidRequest for a call
        that could never be taken, QueueFull when as much waits as may wait at all, and TenantLimited. After a cancel
        nobody gets the result: work that waits is never begun, and pictures are decoded no further.
        """
        failure = self.engine.failure
        if self._closed or failure is not None:
            raise refusal_of(failure)
        pending = self._pending
        pending.most = self.engine.load.max_waiting
        if prompts:
            self._check_call(prompts, n)
            self.engine.check_room(prompts * n, owner, pending.by_owner)
            if self._tenants is not None and tenant is not None:
                self._tenants.enter(tenant, prompts)
        elif pending.lacking(owner, 1):
            raise queue_full(
                "prompts wait to be encoded", "1 more is given", "sched.max_waiting", pending, owner, retry_after_s=1.0
            )
        weight = prompts * n if prompts else 1
        left = threading.Event()
        work = self._until(left.is_set, work)
        pending.enter(owner, weight, at_any_rate=True)
        try:
            return await asyncio.wrap_future(self._threads.submit(owner, work))
        finally:
            left.set()
            pending.leave(owner, weight)

    def _until(self, has_left: Callable[[], bool], work: Callable[[], T]) -> Callable[[], T]:
        """`work` that ends when the caller has left. A cancel does not reach a thread, but pictures, which take
        longest, are decoded no further then."""
        try:
            pictures = self.engine.model.pictures
        except EngineStopped:  # a router that does not know its model yet; work that needs it says so
            return work
        return work if pictures is None else pictures.for_caller(has_left, work)

    def _check_call(self, prompts: int, n: int) -> None:
        if n < 1:  # a call of less than nothing would be room for others
            raise InvalidRequest(f"n is {n}, but must be at least 1")
        for what, count, most, setting in (
            ("prompts", prompts, self._limits.max_prompts, "serve.max_prompts"),
            ("sequences of a prompt (n)", n, self._limits.max_n, "serve.max_n"),
            ("sequences (prompts times n)", prompts * n, self.engine.load.max_waiting, "sched.max_waiting"),
        ):
            if most is not None and count > most:
                raise InvalidRequest(
                    f"the call asks for {count} {what} and at most {most} are taken ({setting}); ask for fewer"
                )

    def _check_stops(self, count: int) -> None:
        """Each string is looked for after each token, on the loop that all requests share."""
        most = self._limits.max_stops
        if most is not None and count > most:
            raise InvalidRequest(
                f"the request has {count} stop strings and at most {most} are taken (serve.max_stops); give fewer"
            )

    def check_text(self, *texts: str) -> None:
        """Of texts that are encoded as a whole however many tokens they have, since those are asked for, or the last
        of them. Others are refused when a beginning has more than fit. Any thread.

        Raises InvalidRequest for more than `max_text_chars` characters together; None: any number.
        """
        count = sum(map(len, texts))
        if self._limits.max_text_chars is not None and count > self._limits.max_text_chars:
            raise InvalidRequest(
                f"there are {count} characters to encode, and at most {self._limits.max_text_chars} are taken at once "
                "(serve.max_text_chars); send them in parts"
            )

    def check_answer(self, requests: Sequence[Request], *, repeats_prompt: bool = False) -> None:
        """Raises InvalidRequest when the answer to the requests of a call can be too large.

        `stream` asks this, too. A door asks before it, whose answers repeat the log-probabilities of a prompt with each
        sequence (`repeats_prompt`).
        """
        if self._limits.max_answer_bytes is not None:
            check_answer(requests, self._limits.max_answer_bytes, repeats_prompt=repeats_prompt)

    async def stream(self, *requests: Request) -> AsyncGenerator[Update, None]:
        """Submits prepared requests, each with an id of its own; yields updates as they come, until all have ended.

        Other coroutines have their turn after some updates, also when more are there. Leaving early, or a cancel,
        aborts what has not ended. Raises what `check_answer` and `Engine.submit` raise, and the typed error that ended
        one of them, TenantLimited and RequestRejected; the others are aborted.
        """
        self.check_answer(requests)
        loop = asyncio.get_running_loop()
        readers = self._readers.setdefault(loop, _Readers(loop, self.engine.abort))
        reader = _Reader()
        live, updates, tenants = reader.live, reader.updates, self._tenants
        readers.active.add(reader)
        try:
            for number, request in enumerate(requests, start=1):
                self._check_stops(len(request.sampling.stop or ()))
                if tenants is not None:
                    tenants.begin(request)
                live[request.request_id] = request  # before it is submitted: whatever follows ends it
                self.engine.submit(request, updates.append)
                if number % _SUBMITTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            num_read = 0  # since others had their turn
            while live:
                if num_read == _READ_AT_ONCE:
                    await asyncio.sleep(0)
                    num_read = 0
                while not updates:
                    num_read = 0
                    reader.waiter = loop.create_future()
                    await reader.waiter
                num_read += 1
                update = updates.popleft()
                if tenants is not None and update.token_ids and update.request_id in live:
                    tenants.charge(live[update.request_id].tenant, len(update.token_ids))
                if update.last and (ended := live.pop(update.request_id, None)) is not None and tenants is not None:
                    tenants.end(ended)
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            readers.active.discard(reader)
            if not readers.active:
                self._readers.pop(loop, None)
            for request in live.values():
                self.engine.abort(request)
                if tenants is not None:
                    tenants.end(request)

    def end_streams(self, error: JaxserveError) -> None:
        """Every running stream raises `error`, which aborts its requests: for a loop that answers nobody any more."""
        for readers in self._readers.values():
            for reader in readers.active:
                reader.updates.append(Update("", 0, error=error))
            readers.flush()

    def _flush(self) -> None:
        for readers in self._readers.copy().values():
            readers.flush()

    async def embed(
        self,
        prompt: Prompt,
        options: RequestOptions = NO_OPTIONS,
        *,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> list[float]:
        """The embedding of a prompt, as `EmbeddingRules.form` takes `dimensions` and `normalize`.

        A cancel aborts it. Raises InvalidRequest and its kin for a prompt or a form that cannot be taken, and what
        `stream` raises.
        """
        form = self.engine.model.embedding.form(dimensions, normalize)
        sampling = pooling_params(truncate_prompt_tokens)
        options = dataclasses.replace(options, pooling=True)
        request = await self.run(lambda: self.engine.prepare(prompt, sampling, options), owner=options.owner)
        async with contextlib.aclosing(self.stream(request)) as updates:
            async for update in updates:
                if update.prompt is not None:
                    return embedding_of(update.prompt, form)
        raise EngineStopped("the request was aborted before its prompt had run")

    async def judge(self, judgements: Sequence[Judgement], options: RequestOptions = NO_OPTIONS) -> None:
        """Asks the model about all documents at once, until each has its score.

        The requests are called after `options.request_id`, with a number each. A cancel aborts them. Raises what `run`
        and `stream` raise.
        """
        numbers = itertools.count()

        def ask(one: Judgement) -> Request:
            assert one.sampling is not None, one
            name = None if options.request_id is None else f"{options.request_id}-{next(numbers)}"
            own = dataclasses.replace(options, request_id=name)
            return self.engine.prepare({"prompt_token_ids": one.prompt_ids}, one.sampling, own)

        waiting = [one for one in judgements if one.sampling is not None]
        while waiting:
            encode = functools.partial(list, map(ask, waiting))
            requests = await self.run(encode, prompts=len(waiting), owner=options.owner)
            asked = {request.request_id: one for request, one in zip(requests, waiting, strict=True)}
            async with contextlib.aclosing(self.stream(*requests)) as updates:
                async for update in updates:
                    if update.finish_reason is FinishReason.ABORT:
                        raise EngineStopped("the request was aborted before the model had answered")
                    for entry in update.logprobs or ():
                        likely = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
                        asked[update.request_id].take({**likely, entry.token_id: entry.logprob})
            waiting = [one for one in waiting if one.sampling is not None]

    def close(self) -> None:
        """Lets the threads go once they have done what they were given. The engine is left alone."""
        if not self._closed:
            self._closed = True
            self.engine.unwatch_deliveries(self._flush)
        self._threads.close()
