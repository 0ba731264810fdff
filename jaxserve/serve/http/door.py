"""The common part of all routes: the engine, the settings, and the way from prompts to one stream of updates."""

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from starlette.requests import Request as HttpRequest

from jaxserve.api import FinishReason, Request
from jaxserve.config.schema import HttpConfig
from jaxserve.engine import Answering, AsyncEngine, Update
from jaxserve.errors import EngineStopped, UnknownModel
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.http.counted import caller_id
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.formats import ThinkingFormat, ToolFormat
from jaxserve.serve.http.guard import time_is_up
from jaxserve.serve.owners import Owner
from jaxserve.serve.turns import Turns
from jaxserve.text import Tokenizer

_CALLER_CHARS = 200  # of an id that becomes part of another


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Handed to every router.

    Attributes:
      tool_format, thinking_format: those in which this model writes tool calls and thoughts.
      turns: of what is made in pieces for the answers of this door.
      any_model: the names of models that requests give, which may be those of adapters, are for the engine to check.
    """

    engine: AsyncEngine[Answering]
    config: HttpConfig
    counts: DoorCounts
    tool_format: ToolFormat
    thinking_format: ThinkingFormat | None
    any_model: bool = False
    turns: Turns = dataclasses.field(default_factory=Turns)
    started_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.engine.engine.model.name

    def check_model(self, name: str | None, *, adapters: bool = True) -> str:
        """The name of the model for the answer: that of an adapter, too, where `adapters`. None is the model itself.

        Raises UnknownModel for one that is not served.
        """
        if name is None or name == self.model_name:
            return self.model_name
        if self.any_model and adapters:
            return name
        loaded = self.engine.engine.model.adapters
        if loaded is None or not adapters:
            raise UnknownModel(f"the model {name!r:.200} is not served here; there is {self.model_name!r}")
        return loaded.check(name, self.model_name).name

    def need_tokenizer(self) -> Tokenizer:
        """Raises HttpRefusal when the engine has none."""
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise HttpRefusal(400, "this needs a tokenizer, and the engine was started without; send token ids")
        return tokenizer


def new_id(given: str | None, call: HttpRequest) -> str:
    """What the answer and its requests are called: the client's own name, or one that nobody else has.

    The latter begins with the `X-Request-Id` of the call, which proxies give to several calls at once.
    """
    caller, unique = caller_id(call.headers), uuid.uuid4().hex
    return given or (unique if caller is None else f"{caller[:_CALLER_CHARS]}-{unique[:8]}")


def trace_of(call: HttpRequest) -> str:
    """The W3C trace that the caller belongs to, or ""."""
    return call.headers.get("traceparent", "")


@contextlib.asynccontextmanager
async def in_time(door: Door) -> AsyncIterator[None]:
    """DeadlineExceeded is raised in the block when it takes longer than `request_timeout_s`."""
    limit_s = door.config.request_timeout_s
    timer = asyncio.timeout(limit_s)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise
        raise time_is_up(limit_s) from error


@contextlib.asynccontextmanager
async def follow(door: Door, requests: Sequence[Request]) -> AsyncIterator[AsyncGenerator[Update, None]]:
    """Their stream of updates, see `AsyncEngine.stream`; the end of the block aborts what is still running.

    Updates with log-probabilities come in turns: to write one takes a millisecond, and a step of the engine has one
    for each of its sequences. Raises as `in_time`.
    """
    async with in_time(door), contextlib.aclosing(door.engine.stream(*requests)) as updates:
        if not any(one.sampling.logprobs for one in requests):
            yield updates
            return
        async with contextlib.aclosing(_in_turns(door.turns, updates)) as paced:
            yield paced


async def _in_turns(turns: Turns, updates: AsyncGenerator[Update, None]) -> AsyncGenerator[Update, None]:
    async for update in updates:
        if update.logprobs:
            await turns.next()
        yield update


def check_answered(update: Update) -> None:
    """Raises EngineStopped for a request that was ended from elsewhere: what its client has got is no answer."""
    if update.finish_reason is FinishReason.ABORT:
        raise EngineStopped("the request was aborted from elsewhere before its answer was complete; send it again")


async def prepare(
    door: Door, makers: Sequence[Callable[[], Request]], n: int = 1, *, tenant: str | None, owner: Owner
) -> list[Request]:
    """Encodes and checks all prompts, off the event loop; each has `n` sequences. Raises as `AsyncEngine.run` does."""
    work = functools.partial(_make_all, makers)
    return await door.engine.run(work, prompts=len(makers), n=n, tenant=tenant, owner=owner.id)


def _make_all(makers: Sequence[Callable[[], Request]]) -> list[Request]:
    return [make() for make in makers]
