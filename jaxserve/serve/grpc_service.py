"""The methods of `jaxserve.v1.Inference`: from a message to a call of the engine and back.

Errors become statuses in `grpc_errors`, updates become messages in `replies`; ports and shutdown are in `grpc_server`.
"""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from jaxserve import __version__
from jaxserve.api import FinishReason, Request, RequestOptions
from jaxserve.engine import (
    AnyEngine,
    AsyncEngine,
    PictureSource,
    Prompt,
    Update,
    chat_prompt,
    check_takes_pictures,
    check_token_ids,
    split_chat,
    with_pictures,
)
from jaxserve.errors import DeadlineExceeded, InvalidRequest, JaxserveError, PromptTooLong, UnsupportedOption
from jaxserve.serve.convert import abort_from_proto, refuse_unknown_fields, resume_from_proto, sampling_from_proto
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.owners import PROCESS, Owner, Owners
from jaxserve.serve.replies import Chunks, Replies
from jaxserve.serve.turns import Turns
from jaxserve.text import Tokenizer, check_special_text, encode_chat

MAX_REQUEST_ID_CHARS = 256
_MOST_MESSAGES = 2**14  # of a chat, as over HTTP: each is many objects of Python on its way to the prompt
_IDS_AT_ONCE = 2**16  # of a long prompt, which are copied without a break


# From a request and the ticket that came with it, which may be empty: the block in which it is answered, entered once
# its pages are here.
Receive = Callable[[Request, bytes], contextlib.AbstractAsyncContextManager[None]]


class _Early:
    """A request that is being encoded. Mutated on the event loop."""

    def __init__(self) -> None:
        self.aborted = False


class InferenceService(pb_grpc.InferenceServicer):
    """The methods. Used on one event loop, which alone mutates it. They raise typed errors."""

    def __init__(
        self,
        engine: AsyncEngine[AnyEngine],
        *,
        refuse_special_text: bool = False,
        receive: Receive | None = None,
        owners: Owners | None = None,
    ) -> None:
        """`refuse_special_text`: as in `GrpcConfig`. `receive`: see `generate_replies`. `owners`: of the calls; None:
        all are the process's own."""
        self._engine = engine
        self._owners = owners
        self._receive = receive
        self._refuse_special_text = refuse_special_text
        self._turns = Turns()
        self._num_live = 0
        self._early: dict[str, _Early] = {}  # by `Owner.own`: those with an id that the engine does not know yet

    @property
    def num_live(self) -> int:
        """Generate calls that have not ended."""
        return self._num_live

    def _owner_of(self, context: grpc.aio.ServicerContext) -> Owner:
        return PROCESS if self._owners is None else self._owners.of_call(context)

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams one request. A cancel, whatever its cause, arrives as CancelledError."""
        owner, early = self._owner_of(context), _Early()
        request_id = owner.own(request.request_id) if request.request_id else ""
        if request_id in self._early:
            if not request.HasField("resume"):
                raise InvalidRequest(f"a request with id {request.request_id!r} is live already; choose another")
            self._early[request_id].aborted = True  # itself, on a connection that has been lost
        if request_id:
            self._early[request_id] = early
        self._num_live += 1
        try:
            replies = generate_replies(
                self._engine,
                request,
                # None where the client set no deadline, despite the signature.
                remaining_s=context.time_remaining(),
                traceparent=_traceparent(context),
                is_aborted=lambda: self._hand_over(request_id, early),
                refuse_special_text=self._refuse_special_text,
                receive=self._receive,
                owner=owner,
                turns=self._turns,
            )
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    await context.write(reply)
        finally:
            self._num_live -= 1
            self._hand_over(request_id, early)

    def _hand_over(self, request_id: str, early: _Early) -> bool:
        """Whether it has been aborted. From now on aborts go to the engine. Its id may be another request's by now."""
        if self._early.get(request_id) is early:
            del self._early[request_id]
        return early.aborted

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        """Ids of a text or a chat, as `Generate` would encode it."""
        refuse_special_text = self._refuse_special_text
        return await self._engine.run(
            lambda: _tokenized(self._engine, request, refuse_special_text), owner=self._owner_of(context).id
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        """Text of ids."""
        owner = self._owner_of(context)
        text = await self._engine.run(lambda: _detokenize(self._engine.engine, request), owner=owner.id)
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        """The model that is served, and its limits."""
        refuse_unknown_fields(request)
        model, tokenizer = self._engine.engine.model, self._engine.engine.tokenizer
        return pb.GetModelResponse(
            name=model.name,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            has_tokenizer=tokenizer is not None,
            has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
            version=__version__,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        """The load of the engine."""
        refuse_unknown_fields(request)
        engine = self._engine.engine
        counts = [counts for stats in engine.stats if (counts := stats.counts) is not None]
        return pb.GetLoadResponse(
            **engine.load._asdict(),
            num_pages=sum(c.grantable_pages for c in counts),
            num_used_pages=sum(c.held_pages for c in counts),
            accepting=engine.accepting,
        )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Ends requests of the caller by id; within one step their memory is free."""
        owner = self._owner_of(context)
        request_ids = [owner.own(request_id) for request_id in abort_from_proto(request)]
        for request_id in request_ids:
            if request_id in self._early:
                self._early[request_id].aborted = True
        self._engine.engine.abort(*request_ids)
        return pb.AbortResponse()


async def generate_replies(
    async_engine: AsyncEngine[AnyEngine],
    message: pb.GenerateRequest,
    *,
    remaining_s: float | None = None,
    traceparent: str = "",
    is_aborted: Callable[[], bool] = lambda: False,
    refuse_special_text: bool = False,
    receive: Receive | None = None,
    owner: Owner = PROCESS,
    turns: Turns,
) -> AsyncGenerator[bytes, None]:
    """The messages that answer one request, each a `GenerateResponse` as it is sent, for every door that speaks them.

    `remaining_s` until the deadline of the call, None without one. `is_aborted` is called once, just before the
    request is submitted: from then on aborts go to the engine. Close it, rather than drop it, to end the request at
    once. `refuse_special_text`: as in `GrpcConfig`. `receive` hears of every request, and gets the pages of one
    with a ticket; None refuses such requests. `owner`: whose request it is. `turns`: of what is made in pieces on
    this event loop. Raises the typed errors of `AsyncEngine.stream`, and InvalidRequest or a similar error for a
    message that cannot be taken.
    """
    if message.ticket and receive is None:
        raise UnsupportedOption("the request has a ticket, and this server takes no pages of others; leave it out")
    prepared = await prepare_message(async_engine, message, remaining_s, traceparent, refuse_special_text, owner=owner)
    replies, chunks = Replies(prepared, message.echo, turns), Chunks(message.chunk_tokens)
    async with contextlib.AsyncExitStack() as stack:
        holds = bool(message.ticket)
        if receive is not None:
            await stack.enter_async_context(receive(prepared, message.ticket))
        if is_aborted():
            count = prepared.sampling.n
            for k in range(count):
                reason = FinishReason.ABORT
                yield await replies.build(Update(prepared.request_id, k, finish_reason=reason, last=k == count - 1))
            return
        # Closed here and not by the garbage collector: closing aborts the request, and its pages must not wait.
        async with contextlib.aclosing(async_engine.stream(prepared)) as updates:
            try:
                async for update in updates:
                    if holds:  # its pages have been loaded
                        holds = False
                        await stack.aclose()
                    if (ready := chunks.take(update)) is not None:
                        yield await replies.build(ready)
            except JaxserveError:
                for ready in chunks.take_rest():  # the client may keep the text generated so far
                    yield await replies.build(ready)
                raise


async def prepare_message(
    async_engine: AsyncEngine[AnyEngine],
    message: pb.GenerateRequest,
    remaining_s: float | None,
    traceparent: str = "",
    refuse_special_text: bool = False,
    *,
    owner: Owner = PROCESS,
) -> Request:
    """The request of a message, encoded on a thread of its own. Arguments and errors as of `generate_replies`."""
    arrived_s = time.monotonic()
    _check_sizes(message, async_engine.engine.model.max_model_len)
    if message.sampling.HasField("truncate_prompt_tokens"):
        async_engine.check_text(message.text, *(each.content for each in message.chat.messages))
    return await async_engine.run(
        lambda: _prepare(async_engine.engine, message, arrived_s, remaining_s, traceparent, refuse_special_text, owner),
        prompts=1,
        n=message.sampling.n or 1,
        tenant=None if message.resume.sequences else message.tenant,
        owner=owner.id,
    )


def _check_sizes(message: pb.GenerateRequest, max_model_len: int) -> None:
    """Of what need not be read to be refused. Raises InvalidRequest, PromptTooLong."""
    _check_chat_size(message.chat)
    count = len(message.token_ids.ids)
    if count > max_model_len and not message.sampling.HasField("truncate_prompt_tokens"):
        raise PromptTooLong(
            f"the prompt has {count} tokens; a sequence holds {max_model_len}, prompt and output together; shorten it, "
            "or set truncate_prompt_tokens"
        )


def _check_chat_size(chat: pb.ChatMessages) -> None:
    if len(chat.messages) > _MOST_MESSAGES:
        raise InvalidRequest(
            f"the chat has {len(chat.messages)} messages and at most {_MOST_MESSAGES} are taken; leave older ones out"
        )


def _copied(ids: Sequence[int]) -> list[int]:
    """A copy, between whose pieces other threads have their turn."""
    found: list[int] = []
    for start in range(0, len(ids), _IDS_AT_ONCE):
        found += ids[start : start + _IDS_AT_ONCE]
    return found


def _prepare(
    engine: AnyEngine,
    message: pb.GenerateRequest,
    arrived_s: float,
    remaining_s: float | None,
    traceparent: str,
    refuse_special_text: bool,
    owner: Owner,
) -> Request:
    """Takes as long as encoding takes. Raises InvalidRequest and its kin."""
    refuse_unknown_fields(message)
    if len(message.request_id) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"request_id has {len(message.request_id)} characters, at most {MAX_REQUEST_ID_CHARS} are taken"
        )
    return engine.prepare(
        _prompt(engine, message, refuse_special_text),
        sampling_from_proto(message.sampling),
        owner.sign(
            RequestOptions(
                request_id=message.request_id or uuid.uuid4().hex,
                priority=message.priority,
                cache_salt=message.cache_salt,
                tenant=message.tenant,
                adapter=message.model or None,
                ttft_target_s=message.ttft_target_s if message.HasField("ttft_target_s") else None,
                tpot_target_s=message.tpot_target_s if message.HasField("tpot_target_s") else None,
                timeout_s=_time_left_s(message, arrived_s, remaining_s),
                traceparent=traceparent,
                echo=message.echo,
                resume=resume_from_proto(message.resume) if message.HasField("resume") else None,
            )
        ),
    )


def _time_left_s(message: pb.GenerateRequest, arrived_s: float, remaining_s: float | None) -> float | None:
    """The nearer of both limits, None without either. The wait for an encoding thread counts, too."""
    own_s = message.timeout_s if message.HasField("timeout_s") else None
    if own_s is not None and not own_s > 0:
        return own_s  # for which `prepare` raises
    limits_s = [limit_s for limit_s in (own_s, remaining_s) if limit_s is not None]
    if not limits_s:
        return None
    left_s = min(limits_s) - (time.monotonic() - arrived_s)
    if left_s <= 0:
        raise DeadlineExceeded(
            f"the {min(limits_s):g} s of the request were over before its prompt was read; allow more"
        )
    return left_s


def _prompt(engine: AnyEngine, message: pb.GenerateRequest, refuse_special_text: bool) -> Prompt:
    kind = message.WhichOneof("prompt")
    sources = [PictureSource(f"pictures[{number}]", data) for number, data in enumerate(message.pictures)]
    if kind == "text":
        return chat_prompt(message.text, sources)
    if kind == "token_ids":
        refuse_unknown_fields(message.token_ids)
        return {"prompt_token_ids": _copied(message.token_ids.ids), "multi_modal_data": {"image": sources}}
    if kind == "chat":
        if sources:
            raise InvalidRequest("pictures of a chat belong to its messages; set ChatMessage.pictures")
        most = engine.model.max_model_len if not message.sampling.HasField("truncate_prompt_tokens") else None
        token_ids, sources = _chat_ids(engine, message.chat, refuse_special_text, most)
        return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": sources}}
    raise InvalidRequest("the request has no prompt; set text, token_ids or chat")


def _chat_ids(
    engine: AnyEngine, chat: pb.ChatMessages, refuse_special_text: bool, max_tokens: int | None
) -> tuple[list[int], list[PictureSource]]:
    """The prompt with a placeholder for each picture, and the pictures. `max_tokens` as of `encode_chat`."""
    for part in (chat, *chat.messages):
        refuse_unknown_fields(part)
    template, tokenizer = engine.chat_template(), engine.tokenizer
    assert tokenizer is not None, "a chat template without a tokenizer"
    messages, sources = split_chat([_message(message) for message in chat.messages])
    check_takes_pictures(engine.model.pictures, sources)
    if refuse_special_text:
        check_special_text(tokenizer, messages)
    return encode_chat(tokenizer, template, messages, max_tokens=max_tokens), sources


def _message(message: pb.ChatMessage) -> dict[str, object]:
    if not message.pictures:
        return {"role": message.role, "content": message.content}
    text = [{"type": "text", "text": message.content}] if message.content else []
    return {"role": message.role, "content": [*({"type": "image", "image": data} for data in message.pictures), *text]}


def _tokenized(
    async_engine: AsyncEngine[AnyEngine], message: pb.TokenizeRequest, refuse_special_text: bool
) -> pb.TokenizeResponse:
    token_ids = _tokenize(async_engine, message, refuse_special_text)
    answer = pb.TokenizeResponse(max_model_len=async_engine.engine.model.max_model_len)
    for start in range(0, len(token_ids), _IDS_AT_ONCE):  # as in `_copied`
        answer.token_ids.extend(token_ids[start : start + _IDS_AT_ONCE])
    return answer


def _tokenize(
    async_engine: AsyncEngine[AnyEngine], message: pb.TokenizeRequest, refuse_special_text: bool
) -> list[int]:
    refuse_unknown_fields(message)
    engine = async_engine.engine
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("there is nothing to tokenize; set text or chat")
    if kind == "text":
        add = message.add_special_tokens if message.HasField("add_special_tokens") else True
        async_engine.check_text(message.text)
        return _tokenizer(engine).encode(message.text, add_special_tokens=add)
    if message.HasField("add_special_tokens"):
        raise InvalidRequest("add_special_tokens is for text; the chat template writes all special tokens of a chat")
    _check_chat_size(message.chat)
    async_engine.check_text(*(each.content for each in message.chat.messages))
    return list(with_pictures(engine.model.pictures, *_chat_ids(engine, message.chat, refuse_special_text, None))[0])


def _detokenize(engine: AnyEngine, message: pb.DetokenizeRequest) -> str:
    refuse_unknown_fields(message)
    tokenizer = _tokenizer(engine)
    check_token_ids(message.token_ids, engine.model.vocab_size)
    return tokenizer.decode(_copied(message.token_ids), skip_special_tokens=message.skip_special_tokens)


def _tokenizer(engine: AnyEngine) -> Tokenizer:
    if engine.tokenizer is None:
        raise InvalidRequest("there is no text here: this server was started without a tokenizer")
    return engine.tokenizer


def _traceparent(context: grpc.aio.ServicerContext) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == "traceparent"), "")
