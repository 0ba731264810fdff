"""Server-sent events, and the counting of tokens that every answer ends with.

Owns the framing of a stream and `Usage`. Refuses to know what an event says.
"""

import contextlib
from collections.abc import AsyncGenerator, Sequence

import pydantic
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.api import Request
from jaxserve.serve.http.door import News, Peeked
from jaxserve.serve.http.errors import error_event
from jaxserve.serve.http.responses import CachedTokens, Usage

DONE = "data: [DONE]\n\n"


def event(body: pydantic.BaseModel) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


class EventStream(Response):
    """Sends `events` as they come, then [DONE]. An exception becomes an event, since the status has left already.

    Closes `news` and `events` in any case; when the client has left, the guard cancels the call, which ends up here.
    """

    media_type = "text/event-stream"

    def __init__(self, news: Peeked, events: AsyncGenerator[str, None], answer_id: str) -> None:
        # Proxies must pass each event on at once; the two headers tell the common ones.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": answer_id}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._news = news
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._news), contextlib.aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for text in self._events:
                    await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            except Exception as error:
                await send({"type": "http.response.body", "body": error_event(error).encode(), "more_body": True})
            await send({"type": "http.response.body", "body": DONE.encode(), "more_body": False})


class UsageCounter:
    """Adds up what requests have used. Mutated by one answer's stream."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._num_cached_tokens = [0] * len(requests)
        self._num_generated_tokens = 0

    def take(self, news: News) -> None:
        update = news.update
        self._num_generated_tokens += len(update.token_ids)
        # Each sequence reports its prompt; it was read from the cache, or run, once.
        if update.prompt is not None and update.index == 0:
            self._num_cached_tokens[news.prompt] = update.prompt.num_cached_tokens

    @property
    def usage(self) -> Usage:
        prompt, generated = self._num_prompt_tokens, self._num_generated_tokens
        details = CachedTokens(cached_tokens=sum(self._num_cached_tokens))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=details,
        )
