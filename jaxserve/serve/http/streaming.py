"""Server-sent events, and `Usage`, the counting of tokens that every answer ends with."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import pydantic
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.api import Request
from jaxserve.engine import Update
from jaxserve.serve.http.door import Door, check_answered, follow
from jaxserve.serve.http.errors import REASON, http_reason
from jaxserve.serve.http.pieces import json_pieces, send_parts, write_parts
from jaxserve.serve.http.requests import StreamOptions
from jaxserve.serve.http.responses import CachedTokens, CompletionTokensDetails, Usage
from jaxserve.serve.turns import Turns

DONE = "data: [DONE]\n\n"


# A text, or the parts of one that is large.
Event = str | Sequence[bytes]


def event(body: pydantic.BaseModel) -> str:
    return f"data: {body.model_dump_json(exclude_unset=True)}\n\n"


async def large_event(turns: Turns, fields: Mapping[str, Any]) -> Event:
    """`event` of what has long lists, see `json_pieces`."""
    return await write_parts(turns, itertools.chain([b"data: "], json_pieces(fields), [b"\n\n"]))


def named_event(kind: str, **fields: object) -> str:
    """An event that names its kind twice, as the streams of typed events do."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def usage_in_all(options: StreamOptions | None) -> bool:
    """Whether each event of a stream tells the usage so far."""
    return options is not None and options.continuous_usage_stats is True


def usage_at_end(options: StreamOptions | None) -> bool:
    """Whether a stream ends with an event of the usage."""
    return options is not None and options.include_usage is True


def is_known(update: Update) -> bool:
    """Whether it tells the text of the known tokens of a resumed request, which the client has."""
    return not update.token_ids and update.finish_reason is None


class Answer(Protocol):
    """Turns the updates of one call into its events. Used by its call alone."""

    async def events(self, update: Update) -> list[Event]:
        """What an update tells the client: one event or several, or none when there is nothing to tell yet."""
        ...

    async def last_events(self, error: Exception | None) -> str:
        """What follows the last update, or the error after which none comes."""
        ...


class EventStream(Response):
    """Runs requests and sends what their updates tell as it comes, then the last events of their answer.

    With `resumable` the last event of an update has an id, CHOICE:TOKENS: how many tokens of that choice the client
    has by then.

    The status leaves with the first update, so a refusal still has a status of its own; a later exception becomes an
    event. When the client has left, the guard cancels the call, which ends the requests.
    """

    media_type = "text/event-stream"

    def __init__(
        self, door: Door, requests: Sequence[Request], answer: Answer, answer_id: str, *, resumable: bool = False
    ) -> None:
        # Proxies must pass each event on at once; the two headers tell the common ones.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": answer_id}
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._door = door
        self._requests = requests
        self._answer = answer
        self._resumable = resumable
        self._firsts = {one.request_id: one.sampling.n * number for number, one in enumerate(requests)}
        self._counts = [len(one.known(index).token_ids) for one in requests for index in range(one.sampling.n)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async with follow(self._door, self._requests) as updates:
                async for update in updates:
                    check_answered(update)
                    if not begun:
                        begun = True
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await _send(scope, send, await self._events(update))
            rest = await self._answer.last_events(None)
        except Exception as error:
            if not begun:
                raise
            scope[REASON] = http_reason(error)
            rest = await self._answer.last_events(error)
        await send({"type": "http.response.body", "body": rest.encode(), "more_body": False})

    async def _events(self, update: Update) -> list[Event]:
        events = await self._answer.events(update)
        if not self._resumable:
            return events
        choice = self._firsts[update.request_id] + update.index
        self._counts[choice] += len(update.token_ids)
        # The last event of an update has the id, so that a receiver with the id has them all.
        return [*events[:-1], f"id: {choice}:{self._counts[choice]}\n", *events[-1:]] if events else []


async def _send(scope: Scope, send: Send, events: Sequence[Event]) -> None:
    """In one message what is small; what is large in parts, each when there is room for it."""
    held: list[str] = []
    for one in events:
        if isinstance(one, str):
            held.append(one)
            continue
        await send_parts(scope, ["".join(held).encode() + one[0], *one[1:]], send, more=True)
        held.clear()
    if held:
        await send({"type": "http.response.body", "body": "".join(held).encode(), "more_body": True})


class UsageCounter:
    """Adds up what requests have used. Mutated by one answer's stream.

    Attributes:
      num_thought_tokens: counted by the answer, which knows what is a thought.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._num_cached_tokens = 0
        self._num_generated_tokens = sum(
            len(known.token_ids) for request in requests if request.resume for known in request.resume.sequences
        )
        self.num_thought_tokens = 0
        self._drafts: list[tuple[int, int]] = []  # of each sequence that had any: all, and accepted ones

    def take(self, update: Update) -> None:
        self._num_generated_tokens += len(update.token_ids)
        if update.drafts is not None:
            self._drafts.append(update.drafts)
        # Each sequence reports its prompt; it was read from the cache, or run, once.
        if update.prompt is not None and update.index == 0:
            self._num_cached_tokens += update.prompt.num_cached_tokens

    @property
    def usage(self) -> Usage:
        prompt, generated = self._num_prompt_tokens, self._num_generated_tokens
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=CachedTokens(cached_tokens=self._num_cached_tokens),
        )
        details = CompletionTokensDetails()
        if self.num_thought_tokens:
            details.reasoning_tokens = self.num_thought_tokens
        if self._drafts:
            drafted, accepted = map(sum, zip(*self._drafts, strict=True))
            details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, drafted - accepted
        if details.model_fields_set:
            usage.completion_tokens_details = details
        return usage
