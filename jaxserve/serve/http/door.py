"""What all routes share: the engine, the settings, and how a body becomes running requests.

Owns the way from prompts to one stream of updates. Refuses the shape of answers, which differ from route to route.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request as HttpRequest

from jaxserve.api import FinishReason, Request
from jaxserve.config_schema import HttpConfig
from jaxserve.engine import AsyncEngine, Prompt, Update, embedding_of, pooling_params
from jaxserve.errors import EngineStopped
from jaxserve.serve.http.errors import HttpRefusal
from jaxserve.serve.http.guard import time_is_up
from jaxserve.serve.http.tool_parsers import ToolParser
from jaxserve.text import Tokenizer

_BITE = 32  # requests of one call that are submitted before others have their turn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """Handed to every router. `tool_parser` is how this model writes tool calls."""

    engine: AsyncEngine
    config: HttpConfig
    tool_parser: ToolParser
    started_s: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.engine.engine.model.name

    def check_model(self, name: str | None) -> None:
        """Raises HttpRefusal with 404 for a model that is not served. None is the one that is."""
        if name is not None and name != self.model_name:
            text = f"the model {name!r:.200} is not served here; there is {self.model_name!r}"
            raise HttpRefusal(404, text, param="model", kind="model_not_found")

    def need_tokenizer(self) -> Tokenizer:
        """Raises HttpRefusal when the engine has none."""
        tokenizer = self.engine.engine.tokenizer
        if tokenizer is None:
            raise HttpRefusal(400, "this needs a tokenizer, and the engine was started without; send token ids")
        return tokenizer


class News(NamedTuple):
    """An update of prompt number `prompt`."""

    prompt: int
    update: Update


class _Failure(NamedTuple):
    error: Exception


class _Ended(NamedTuple):
    """One prompt's stream is over."""


def new_id(given: str | None) -> str:
    """What the answer and its requests are called: the client's own name, or one that nobody else has."""
    return given or uuid.uuid4().hex


def trace_of(call: HttpRequest) -> str:
    """The W3C trace that the caller belongs to, or ""."""
    return call.headers.get("traceparent", "")


async def run_requests(door: Door, requests: Sequence[Request], *, echo: bool = False) -> AsyncGenerator[News, None]:
    """The updates of all requests, as they come. Leaving early aborts what is still running.

    Raises what `AsyncEngine.stream` raises, DeadlineExceeded after `request_timeout_s`, and EngineStopped for a request
    that was ended from elsewhere: what its client has got is no answer.
    """
    inbox: asyncio.Queue[News | _Failure | _Ended] = asyncio.Queue()

    async def pump(number: int, request: Request) -> None:
        try:
            async with contextlib.aclosing(door.engine.stream(request, echo=echo)) as updates:
                async for update in updates:
                    inbox.put_nowait(News(number, update))
        except Exception as error:  # whatever it is, it must not leave the others waiting
            inbox.put_nowait(_Failure(error))
        else:
            inbox.put_nowait(_Ended())

    limit_s = door.config.request_timeout_s
    alarm = asyncio.get_running_loop().call_later(limit_s, inbox.put_nowait, _Failure(time_is_up(limit_s)))
    pumps: list[asyncio.Future[None]] = []
    left = len(requests)
    try:
        for number, request in enumerate(requests):
            pumps.append(asyncio.ensure_future(pump(number, request)))
            if number % _BITE == _BITE - 1:
                await asyncio.sleep(0)
        while left:
            item = await inbox.get()
            if isinstance(item, _Failure):
                raise item.error
            if isinstance(item, _Ended):
                left -= 1
            elif item.update.finish_reason is FinishReason.ABORT:
                raise EngineStopped("the request was ended before its answer was complete: the server is shutting down")
            else:
                yield item
    finally:
        alarm.cancel()
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)  # so that all are aborted when this returns


class Peeked:
    """A stream whose first item is here already. Close it, even when nothing of it was read."""

    def __init__(self, first: News, rest: AsyncGenerator[News, None]) -> None:
        self._first = first
        self._rest = rest

    async def __aiter__(self) -> AsyncGenerator[News, None]:
        yield self._first
        async for item in self._rest:
            yield item

    async def aclose(self) -> None:
        await self._rest.aclose()


async def peek(news: AsyncGenerator[News, None]) -> Peeked:
    """Waits for the first item, so that a refusal still finds a status line to go into."""
    return Peeked(await anext(news), news)


async def prepare(door: Door, makers: Sequence[Callable[[], Request]]) -> list[Request]:
    """Encodes and checks all prompts, off the event loop."""
    return await door.engine.run(lambda: [make() for make in makers])


class Vector(NamedTuple):
    """An embedding: `values` [D], of length 1."""

    values: list[float]
    num_prompt_tokens: int


async def embed_prompts(
    door: Door, prompts: Sequence[Prompt], truncate_prompt_tokens: int | None, *, tenant: str, traceparent: str
) -> list[Vector]:
    """One vector for each prompt. Raises as `run_requests` and `AnyEngine.prepare` do."""
    sampling = pooling_params(truncate_prompt_tokens)
    make = functools.partial(
        door.engine.engine.prepare, sampling=sampling, tenant=tenant, traceparent=traceparent, pooling=True
    )
    requests = await prepare(door, [functools.partial(make, prompt) for prompt in prompts])
    found: dict[int, list[float]] = {}
    async with contextlib.aclosing(run_requests(door, requests)) as news:
        async for item in news:
            found[item.prompt] = embedding_of(item.update.prompt)
    return [Vector(found[k], len(request.prompt_token_ids)) for k, request in enumerate(requests)]
