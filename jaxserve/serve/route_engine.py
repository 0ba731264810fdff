"""The servers of a router as one engine, whose requests are calls of the router's own service.

So the routes of `serve.http` run over a router as they do over an engine, and their streams are placed, moved and
quarantined like those that come over gRPC. Prompts are rendered and encoded here: what goes to a server is token ids,
and it knows nothing of chats, tools and APIs.
"""

import asyncio
import dataclasses
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from jaxserve.api import NO_OPTIONS, FinishReason, PromptInfo, Request, RequestOptions, SamplingParams, shown_id
from jaxserve.engine import Load, ModelInfo, Prompt, Sink, Update, prepare_request
from jaxserve.engine.load import NOTHING_PENDING, Pending
from jaxserve.engine.shared_room import SharedRoom
from jaxserve.engine.waiting import queue_full
from jaxserve.errors import EngineStopped, InvalidRequest, JaxserveError, UnsupportedOption
from jaxserve.sched.plan import Drafted
from jaxserve.serve.convert import (
    CallOptions,
    finish_reason_from_proto,
    logprobs_from_proto,
    request_to_proto,
    resume_to_proto,
)
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.owners import Owner
from jaxserve.serve.route_service import RouteService
from jaxserve.serve.status import error_of_grpc
from jaxserve.text import ChatTemplate, Tokenizer
from jaxserve.values.content import Picture, PlacedPicture

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOOK_S = 0.2  # between questions what is served, until there is an answer
_RENEW_S = 10.0  # and after it
_PATIENCE_S = 5.0  # of a start, in which addresses are looked up and servers asked: no answer yet is no news
# Spaces, digits, letters of several scripts and an emoji: where two vocabularies differ, they do here.
_SAMPLE = "The answer is 1467.\n\tif x != 2: naïve façade, Größe, привет, 東京, 한국어 🙂"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Routed(Request):
    """A request with the message that servers get, and whose it is."""

    message: pb.GenerateRequest = dataclasses.field(repr=False, compare=False)
    signed_by: Owner


class RouteEngine:
    """An `Answering`. Used on the event loop of the service, but for `prepare`, which any thread may call."""

    def __init__(
        self,
        service: RouteService,
        tokenizer: Tokenizer,
        max_waiting: int,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokenizer`: that of the servers. `max_waiting`: most sequences of one call. `now_s`: a clock, in seconds."""
        self.tokenizer = tokenizer
        self.failure: BaseException | None = None  # never: servers may come back
        self.fault: str | None = "no server has said yet what it serves"
        self._service = service
        self._max_waiting = max_waiting
        self._now_s = now_s
        self._model: ModelInfo | None = None
        self._template: ChatTemplate | None = None
        self._tell: tuple[Callable[[], None], ...] = ()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the identity of the request, which the task holds
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to ask servers what they serve."""
        self._following = asyncio.create_task(self._follow_model())

    async def stop(self) -> None:
        """Ends every request."""
        tasks = [*self._tasks.values(), *([] if self._following is None else [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- the model ---------------------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo:
        """What the servers serve. Raises EngineStopped while that is not known."""
        if self._model is None:
            raise EngineStopped(f"the router cannot answer yet: {self.fault}")
        return self._model

    async def _follow_model(self) -> None:
        told, begun_s = None, self._now_s()
        while True:
            wrong = False  # a server has answered, and cannot be used: that is told at once
            try:
                self._model, self.fault = await self._ask_model(), None
            except JaxserveError as error:
                wrong = isinstance(error, InvalidRequest)
                if self._model is None or wrong:  # else they are gone for a moment
                    self._model, self.fault = None, str(error)
            if self.fault is None:
                told = None
            elif self.fault != told and (wrong or self._now_s() - begun_s >= _PATIENCE_S):
                logger.warning("no requests over HTTP: %s", self.fault)
                told = self.fault
            await asyncio.sleep(_LOOK_S if self._model is None else _RENEW_S)

    async def _ask_model(self) -> ModelInfo:
        """Raises InvalidRequest for servers with another tokenizer, and what the service raises."""
        asked = _Question()
        reply: pb.GetModelResponse = await self._service.GetModel(pb.GetModelRequest(), asked)
        sample = pb.TokenizeRequest(text=_SAMPLE, add_special_tokens=False)
        token_ids = (await self._service.Tokenize(sample, asked)).token_ids
        if list(token_ids) != self.tokenizer.encode(_SAMPLE, add_special_tokens=False):
            raise InvalidRequest(
                f"the servers, of the model {reply.name!r}, have another tokenizer than the one in route.tokenizer; "
                "give the directory of their checkpoint"
            )
        return ModelInfo(
            name=reply.name,
            vocab_size=reply.vocab_size,
            max_model_len=reply.max_model_len,
            eos_token_ids=tuple(reply.eos_token_ids),
            pictures=_NoPictures(),
        )

    def chat_template(self) -> ChatTemplate:
        """That of the tokenizer. Raises InvalidRequest when it has none, or one that does not compile."""
        if self._template is None:
            self._template = ChatTemplate.of(self.tokenizer)
        return self._template

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def load(self) -> Load:
        """Requests of all doors of the router; its servers have the queues."""
        return Load(
            num_running=self._service.num_live,
            num_waiting=0,
            num_waiting_tokens=0,
            max_waiting=self._max_waiting,
            max_waiting_tokens=0,
        )

    def check_room(self, num_sequences: int, owner: str, pending: Pending = NOTHING_PENDING) -> None:
        """Raises QueueFull for more sequences than may be encoded at a time; whether a server has room it says
        itself."""
        room: SharedRoom[str] = SharedRoom(self._max_waiting)
        if room.lacking(owner, num_sequences, pending):
            raise queue_full(
                "sequences wait to be encoded",
                f"{num_sequences} more are asked for",
                "sched.max_waiting",
                room,
                owner,
                pending,
                retry_after_s=1.0,
            )

    def prepare(self, prompt: Prompt, sampling: SamplingParams, options: RequestOptions = NO_OPTIONS) -> Request:
        """As `Engine.prepare`. Grammars, priorities and names of adapters are for a server to check, which knows them.

        A request without a seed gets one, which holds wherever it runs.
        """
        assert not options.pooling, "a call of a router generates"
        prepared = prepare_request(
            prompt,
            dataclasses.replace(sampling, structured=None),
            dataclasses.replace(options, adapter=None),
            request_id=uuid.uuid4().hex,
            model=self.model,
            tokenizer=self.tokenizer,
            seed=secrets.randbits(63),
            arrival_s=time.monotonic(),
        )
        message = request_to_proto(
            prepared.prompt_token_ids,
            dataclasses.replace(sampling, seed=prepared.seed, truncate_prompt_tokens=None),  # they are cut already
            CallOptions(
                request_id=shown_id(prepared.request_id),
                priority=options.priority,
                cache_salt=options.cache_salt,
                tenant=options.tenant,
                ttft_target_s=options.ttft_target_s,
                tpot_target_s=options.tpot_target_s,
                echo=options.echo,
                model=options.adapter or "",
            ),
        )
        if options.resume is not None:
            message.resume.CopyFrom(resume_to_proto(options.resume))
        fields: dict[str, Any] = {field.name: getattr(prepared, field.name) for field in dataclasses.fields(prepared)}
        return _Routed(**{**fields, "sampling": sampling}, message=message, signed_by=Owner.of(options))

    def submit(self, request: Request, sink: Sink) -> None:
        """Sends it to a server. What keeps it from an answer arrives at the sink."""
        assert isinstance(request, _Routed), "requests are made by `prepare`"
        task = asyncio.get_running_loop().create_task(self._run(request, sink))
        self._tasks[id(request)] = task
        task.add_done_callback(lambda _: self._tasks.pop(id(request), None))

    def abort(self, *requests: Request) -> None:
        """Ends them, on their servers as well."""
        for request in requests:
            if (task := self._tasks.get(id(request))) is not None:
                task.cancel()

    def watch_deliveries(self, tell: Callable[[], None]) -> None:
        """`tell` is called after each update."""
        self._tell += (tell,)

    def unwatch_deliveries(self, tell: Callable[[], None]) -> None:
        """Ends what `watch_deliveries` began."""
        self._tell = tuple(one for one in self._tell if one != tell)

    async def _run(self, request: _Routed, sink: Sink) -> None:
        def deliver(update: Update) -> None:
            sink(update)
            for tell in self._tell:
                tell()

        client = _HttpClient(request, deliver)
        error: JaxserveError | None = None
        try:
            await self._service.forward(request.message, client, request.signed_by)
            if not client.has_all:
                error = EngineStopped("the stream of a server ended before its last message; send the request again")
        except JaxserveError as raised:
            error = raised
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            error = EngineStopped("the call to a server was cancelled; send the request again")
        except Exception as raised:
            error = JaxserveError(f"a defect of the router: {raised!r}")
            error.__cause__ = raised
        if error is not None:
            deliver(Update(request.request_id, 0, finish_reason=FinishReason.ERROR, error=error, last=True))


class _Question:
    """The caller of a method that has no stream. See `route_service.Caller`."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def peer(self) -> str:
        return ""

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: pb.GenerateResponse) -> None:
        raise AssertionError("a question has one answer, which is returned")

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise error_of_grpc(code, details)


class _HttpClient(_Question):
    """The caller of one `Generate`: turns its messages into updates. Used by its request alone.

    Attributes:
      has_all: the last message has come.
    """

    def __init__(self, request: Request, deliver: Callable[[Update], None]) -> None:
        self._deliver = deliver
        self._request_id = request.request_id
        self._trace = (("traceparent", request.traceparent),) if request.traceparent else ()
        self._prompt: PromptInfo | None = None  # for sequences that have not begun
        self._begun: set[int] = set()
        self.has_all = False

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._trace

    async def write(self, message: pb.GenerateResponse) -> None:
        self.has_all = message.HasField("usage")
        prompt = None
        if message.HasField("prompt"):
            entries = logprobs_from_proto(message.prompt.prompt_logprobs)
            self._prompt = PromptInfo(message.prompt.num_cached_tokens, entries or None)
        if message.index not in self._begun:
            self._begun.add(message.index)
            prompt = self._prompt
            if prompt is not None:  # its log-probabilities are told once
                self._prompt = prompt._replace(logprobs=None)
        which, usage = message.WhichOneof("stop_reason"), message.usage
        self._deliver(
            Update(
                request_id=self._request_id,
                index=message.index,
                token_ids=tuple(message.token_ids),
                text=message.text,
                finish_reason=finish_reason_from_proto(message.finish_reason) if message.finish_reason else None,
                stop_reason=None if which is None else getattr(message, which),
                logprobs=logprobs_from_proto(message.logprobs) or None,
                prompt=prompt,
                last=self.has_all,
                drafts=Drafted(usage.num_drafted_tokens, usage.num_accepted_tokens)
                if usage.num_drafted_tokens
                else None,
            )
        )


class _NoPictures:
    """A `PictureReader` that takes none: what a picture becomes in a prompt is known to servers alone."""

    def check_count(self, num_pictures: int) -> None:
        raise UnsupportedOption(
            "the HTTP port of a router takes no pictures; send them to it over gRPC, or to the HTTP port of a server"
        )

    def for_caller(self, has_left: Callable[[], bool], work: Callable[[], T]) -> Callable[[], T]:
        del has_left
        return work

    def begin(self) -> Callable[[Any], Picture]:
        def read(source: Any) -> Picture:
            raise AssertionError(f"`check_count` lets none through, got {source!r:.80}")

        return read

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        return list(token_ids), ()
