"""`jaxserve.v1.Inference`: what each method does.

Owns the way from a message to a request of the engine and from updates back to messages. Refuses statuses (see
`grpc_errors`), ports and shutdown (see `grpc_server`).
"""

import contextlib
import uuid
from collections.abc import AsyncGenerator

import grpc

from jaxserve.api import Request
from jaxserve.engine import AnyEngine, AsyncEngine, Prompt, Update
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
from jaxserve.text import encode_chat

_MAX_REQUEST_ID_CHARS = 256


class InferenceService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._num_live = 0

    @property
    def num_live(self) -> int:
        """Calls that have not ended."""
        return self._num_live

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams one request. Raises typed errors; a cancel from whatever cause arrives as CancelledError."""
        self._num_live += 1
        try:
            async with contextlib.aclosing(generate_replies(self._engine, request)) as replies:
                async for reply in replies:
                    await context.write(reply)
        finally:
            self._num_live -= 1


async def generate_replies(
    async_engine: AsyncEngine, message: pb.GenerateRequest
) -> AsyncGenerator[pb.GenerateResponse, None]:
    """The messages that answer one request, for every door that speaks them.

    Close it, rather than drop it, to end the request at once. Raises the typed errors of `AsyncEngine.stream`, and
    InvalidRequest or its kin for a message that cannot be taken.
    """
    prepared = await async_engine.run(lambda: _prepare(async_engine.engine, message))
    replies = _Replies(prepared, message.echo)
    # Closed here and not by the garbage collector: closing is what aborts, and pages must not wait for it.
    async with contextlib.aclosing(async_engine.stream(prepared, echo=message.echo)) as updates:
        async for update in updates:
            yield replies.build(update)


def _prepare(engine: AnyEngine, message: pb.GenerateRequest) -> Request:
    """Takes as long as encoding takes. Raises InvalidRequest and its kin."""
    refuse_unknown_fields(message)
    if len(message.request_id) > _MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(message.request_id)} characters, at most {_MAX_REQUEST_ID_CHARS} are taken"
        )
    sampling = sampling_from_proto(message.sampling)
    return engine.prepare(
        _prompt(engine, message),
        sampling,
        request_id=message.request_id or uuid.uuid4().hex,
        priority=message.priority,
        cache_salt=message.cache_salt,
        tenant=message.tenant,
    )


def _prompt(engine: AnyEngine, message: pb.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        return tuple(message.token_ids.ids)
    if kind == "chat":
        for part in (message.chat, *message.chat.messages):
            refuse_unknown_fields(part)
        template, tokenizer = engine.chat_template(), engine.tokenizer
        assert tokenizer is not None, "a chat template without a tokenizer"
        return encode_chat(tokenizer, template, [{"role": m.role, "content": m.content} for m in message.chat.messages])
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
