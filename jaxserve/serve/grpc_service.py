"""`jaxserve.v1.Inference`: what each method does.

Owns the way from a message to a request of the engine and from updates back to messages. Refuses statuses (see
`grpc_errors`), ports and shutdown (see `grpc_server`).
"""

import contextlib
import uuid

import grpc

from jaxserve.api import Request
from jaxserve.engine import AsyncEngine, Prompt, Update
from jaxserve.errors import InvalidRequest
from jaxserve.serve.convert import (
    FINISH_REASONS,
    logprobs_to_proto,
    prompt_info_to_proto,
    refuse_unknown_fields,
    sampling_from_proto,
)
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc

_MAX_REQUEST_ID_CHARS = 256


class InferenceService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._live: set[str] = set()

    @property
    def num_live(self) -> int:
        """Calls that have not ended."""
        return len(self._live)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams one request. Raises typed errors; a cancel from whatever cause arrives as CancelledError."""
        request_id = self._claim_id(request.request_id)
        try:
            prepared = await self._prepare(request, request_id)
            replies = _Replies(prepared, request.echo)
            # Closed here and not by the garbage collector: closing is what aborts, and pages must not wait for it.
            async with contextlib.aclosing(self._engine.stream(prepared, echo=request.echo)) as updates:
                async for update in updates:
                    await context.write(replies.build(update))
        finally:
            self._live.discard(request_id)

    def _claim_id(self, wanted: str) -> str:
        """Refuses an id that is live: the engine aborts by id, so a twin's cancel would end the first."""
        if len(wanted) > _MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(f"request_id has {len(wanted)} characters, at most {_MAX_REQUEST_ID_CHARS} are taken")
        if wanted in self._live:
            raise InvalidRequest(f"a request with id {wanted!r} is live already; choose another, or send none")
        request_id = wanted or uuid.uuid4().hex
        self._live.add(request_id)
        return request_id

    async def _prepare(self, request: pb.GenerateRequest, request_id: str) -> Request:
        refuse_unknown_fields(request)
        sampling = sampling_from_proto(request.sampling)
        return await self._engine.prepare(
            await self._prompt(request),
            sampling,
            request_id=request_id,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
        )

    async def _prompt(self, request: pb.GenerateRequest) -> Prompt:
        kind = request.WhichOneof("prompt")
        if kind == "text":
            return request.text
        if kind == "token_ids":
            return tuple(request.token_ids.ids)
        if kind == "chat":
            for message in (request.chat, *request.chat.messages):
                refuse_unknown_fields(message)
            messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
            return await self._engine.encode_chat(messages)
        raise InvalidRequest("the request has no prompt; set text, token_ids or chat")


class _Replies:
    """Builds the messages of one call, in order. Used by its handler alone."""

    def __init__(self, request: Request, echo: bool) -> None:
        self._request = request
        self._echo = echo
        self._first = True
        self._num_cached_tokens = 0
        self._num_generated_tokens = 0

    def build(self, update: Update) -> pb.GenerateResponse:
        reply = pb.GenerateResponse(
            request_id=update.request_id, index=update.index, text=update.text, token_ids=update.token_ids
        )
        self._num_generated_tokens += len(update.token_ids)
        if update.logprobs is not None:
            reply.logprobs.extend(logprobs_to_proto(update.logprobs))
        if self._first:
            self._first = False
            self._num_cached_tokens = update.prompt.num_cached_tokens if update.prompt is not None else 0
            reply.prompt.CopyFrom(prompt_info_to_proto(self._request.prompt_token_ids, update.prompt, self._echo))
        if update.finish_reason is not None:
            reply.finish_reason = FINISH_REASONS[update.finish_reason]
        if isinstance(update.stop_reason, str):
            reply.stop_text = update.stop_reason
        elif update.stop_reason is not None:
            reply.stop_token_id = update.stop_reason
        if update.last:
            reply.usage.num_prompt_tokens = len(self._request.prompt_token_ids)
            reply.usage.num_cached_tokens = self._num_cached_tokens
            reply.usage.num_generated_tokens = self._num_generated_tokens
        return reply
