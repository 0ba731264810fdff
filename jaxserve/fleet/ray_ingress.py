"""The deployment behind Ray's gRPC proxy: the services of jaxserve, in front of many replicas.

It moves requests and translates statuses; replicas are chosen in `ray_router`. An ingress keeps nothing of a call when
it has ended, so that there may be many of them. A request whose replica died goes on at another behind what the client
has. Where some replicas compute prompts for others (`ray_prompts`), it pairs them as a router does: a replica that has
room is found first, and gets the request with the ticket of its prompt.
"""

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from jaxserve.api import ResumeReason
from jaxserve.client import Retries
from jaxserve.errors import DeadlineExceeded, EngineStopped, Status
from jaxserve.fleet.messages import Accepted, CallFailed, Refusal
from jaxserve.fleet.ray_prompts import FleetPrompts
from jaxserve.routing import PromptKey
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.grpc_server import SERVICE_NAME
from jaxserve.serve.received import Received
from jaxserve.serve.route_apart import Apart, Missed
from jaxserve.serve.route_service import key_of_request
from jaxserve.serve.status import GRPC_CODES
from jaxserve.serve.suspects import Deaths

logger = logging.getLogger(__name__)

# Trailing metadata of an answer, to inspect routing: which replica gave it, and on which attempt.
REPLICA_TRAILER = "jaxserve-replica"
ATTEMPT_TRAILER = "jaxserve-attempt"

_ASK_S = 2.0  # for some replica to answer that it is alive
_WATCH_S = 1.0  # between two checks, for `Watch`
_SERVICES = ("", SERVICE_NAME)
_WAITS = Retries()


class Ingress:
    """One method per method of the services; Ray's proxy calls them by name."""

    def __init__(
        self, engines: DeploymentHandle, max_attempts: int, apart: Apart, prompts: DeploymentHandle | None = None
    ) -> None:
        """`engines` answer; `prompts` compute prompts for them, those that are worth it by `apart`. None: there are no
        such replicas."""
        self._generate = engines.options(method_name="generate", stream=True)
        self._offer = engines.options(method_name="offer", stream=True)
        self._is_alive = engines.options(method_name="is_alive")
        self._answer = engines.options(method_name="answer")
        self._max_attempts = max_attempts
        self._apart = apart
        self._prompts = None if prompts is None else FleetPrompts(prompts)

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Streams one request, from as many replicas as it takes."""
        request.request_id = request.request_id or uuid.uuid4().hex  # one for all attempts, as the seed is
        if not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(63)
        call = _Call(request, key_of_request(request))
        while True:
            async with contextlib.aclosing(self._attempt(call)) as replies:
                async for reply in replies:
                    trailers = [(REPLICA_TRAILER, call.tried[-1]), (ATTEMPT_TRAILER, str(call.num_attempts))]
                    grpc_context.set_trailing_metadata(trailers)
                    yield reply
            if call.refusal is None or call.received.complete:
                return
            if call.refusal.status is Status.INVALID and request.ticket and not call.received.begun:
                logger.warning("replica %s does not take a ticket: %s", call.tried[-1], call.refusal.text)
                request.ClearField("ticket")
                call.takes_ticket = False
                continue  # if it is the request that is wrong, the replica says so again
            if not self._may_move(call, call.refusal):
                raise _failed(grpc_context, call, call.refusal)
            wait_s = self._wait_s(call, call.refusal)
            try:
                call.received.go_on(
                    call.request, ResumeReason.DRAINED if call.refusal.drained else ResumeReason.DIED, wait_s
                )
            except DeadlineExceeded as error:
                raise _failed(grpc_context, call, Refusal(status=error.status, text=str(error))) from error
            await asyncio.sleep(wait_s)

    def _may_move(self, call: "_Call", refusal: Refusal) -> bool:
        """Whether the request is sent to another replica."""
        status = refusal.status
        if status is Status.OVERLOADED and not call.received.begun:
            return call.num_attempts == 1  # once: where two are full the others are likely to be
        if status not in (Status.UNAVAILABLE, Status.OVERLOADED):
            return False
        call.note_loss(call.tried[-1] if call.tried else "a replica", refusal.text, drained=refusal.drained)
        return call.deaths.num_recent < self._max_attempts

    @staticmethod
    def _wait_s(call: "_Call", refusal: Refusal) -> float:
        """Seconds until the next attempt: none after the first failure, since another replica is likely well."""
        num_failed = call.deaths.num_recent
        if refusal.status is Status.OVERLOADED and call.received.begun:
            return _WAITS.wait_s(num_failed)
        return 0.0 if num_failed <= 1 else _WAITS.wait_s(num_failed - 2)

    async def _attempt(self, call: "_Call") -> AsyncGenerator[pb.GenerateResponse, None]:
        """One replica's stream. Afterwards `call.refusal` says why there was no answer; None: there was one."""
        call.num_attempts += 1
        call.refusal, wanted = None, None
        may_travel = call.takes_ticket and not call.deaths.suspected  # by replicas that computed its prompt, too
        if self._prompts is not None and may_travel and self._apart.is_worth(call.request):
            wanted = await self._prefill_elsewhere(call, self._prompts)
            if call.refusal is not None:
                return
        stream: Any = self._generate.remote(
            call.request.SerializeToString(), prompt_key=call.prompt_key, avoid=tuple(call.tried), wanted=wanted
        )
        async with contextlib.aclosing(self._items(call, stream)) as items:
            async for item in items:
                reply = pb.GenerateResponse.FromString(item)
                try:
                    call.received.take(reply)
                except EngineStopped as error:  # a part of the answer is missing
                    call.refusal = Refusal(status=error.status, text=f"replica {call.tried[-1]}: {error}")
                    return
                yield reply

    async def _prefill_elsewhere(self, call: "_Call", prompts: FleetPrompts) -> str | None:
        """Has the prompt computed, for a replica that has set room aside: its name. `call.refusal`: none has any."""
        stream: Any = self._offer.remote(call.request.request_id, prompt_key=call.prompt_key, avoid=tuple(call.tried))
        async with contextlib.aclosing(self._items(call, stream)) as items:
            async for _ in items:
                pass
        if call.refusal is not None:
            return None
        answering = call.tried.pop()  # it is not to be avoided

        def note_death(missed: Missed) -> bool:
            call.note_loss(missed.name, missed.reason, drained=missed.drained)
            return call.deaths.suspected

        await self._apart.prepare(prompts, call.request, call.prompt_key, answering, lambda: None, note_death)
        return answering

    async def _items(self, call: "_Call", stream: Any) -> AsyncGenerator[bytes, None]:
        """The messages of a replica. Its name goes to `call.tried`, and its refusal or death to `call.refusal`."""
        replica = "a replica"
        ended = False
        try:
            async for item in stream:
                if isinstance(item, Accepted):
                    call.tried.append(item.replica)
                    replica = f"replica {item.replica}"
                elif isinstance(item, Refusal):
                    call.refusal = item
                else:
                    yield item
            ended = True
        except (RayTaskError, TaskCancelledError):
            raise  # a defect, which another replica would have too; or the client is gone
        except RayError as error:
            ended = True
            logger.warning(
                "request %r: %s is lost on attempt %d, after %d tokens: %s, %s",
                call.request.request_id, replica, call.num_attempts, call.received.num_tokens,
                type(error).__name__, error,
            )  # fmt: skip
            call.refusal = Refusal(status=Status.UNAVAILABLE, text=f"{replica} died")
        finally:
            if not ended:  # the client left, and its answer must not be generated any more
                stream.cancel()

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        """Answered by any replica: they have the same tokenizer."""
        return pb.TokenizeResponse.FromString(await self._ask_one("Tokenize", request, grpc_context))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        """Answered by any replica."""
        return pb.DetokenizeResponse.FromString(await self._ask_one("Detokenize", request, grpc_context))

    async def GetModel(self, request: pb.GetModelRequest, grpc_context: RayServegRPCContext) -> pb.GetModelResponse:
        """Answered by any replica: they serve the same model."""
        return pb.GetModelResponse.FromString(await self._ask_one("GetModel", request, grpc_context))

    async def GetLoad(self, request: pb.GetLoadRequest, grpc_context: RayServegRPCContext) -> pb.GetLoadResponse:
        """Refused: no single replica knows it, and Ray's own status does."""
        raise _unimplemented(grpc_context, "GetLoad", "look at `serve status` or at Ray's metrics")

    async def Abort(self, request: pb.AbortRequest, grpc_context: RayServegRPCContext) -> pb.AbortResponse:
        """Refused: an ingress does not know which replica has a request that came through another."""
        raise _unimplemented(grpc_context, "Abort", "cancel the call that asked")

    async def _ask_one(self, method: str, request: Message, grpc_context: RayServegRPCContext) -> bytes:
        """The answer of a replica, or of another one when the first, or its engine, has died without an answer."""
        for attempt in range(1, self._max_attempts + 1):
            try:
                answer: Any = await self._answer.remote(method, request.SerializeToString())
            except (RayTaskError, TaskCancelledError):
                raise
            except RayError as error:
                logger.warning("a replica is lost on attempt %d of %s: %s", attempt, method, error)
                continue
            if isinstance(answer, Refusal):
                if answer.status is Status.UNAVAILABLE:
                    logger.warning("a replica refuses attempt %d of %s: %s", attempt, method, answer.text)
                    continue
                grpc_context.set_code(GRPC_CODES[answer.status])
                grpc_context.set_details(answer.text)
                raise CallFailed(answer.text)
            return answer
        text = f"{self._max_attempts} replicas died before one answered; try again"
        grpc_context.set_code(GRPC_CODES[Status.UNAVAILABLE])
        grpc_context.set_details(text)
        raise CallFailed(text)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> health_pb2.HealthCheckResponse:
        """The standard health service: SERVING when some replica says that it takes requests."""
        if request.service not in _SERVICES:
            grpc_context.set_code(grpc.StatusCode.NOT_FOUND)
            raise CallFailed(f"no service is called {request.service!r}; there are {_SERVICES}")
        return await self._health()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Streams the status of `Check` whenever it changes."""
        last = None
        while True:
            now = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if request.service in _SERVICES:
                now = await self._health()
            if now != last:
                yield now
            last = now
            await asyncio.sleep(_WATCH_S)

    async def _health(self) -> health_pb2.HealthCheckResponse:
        asked = self._is_alive.remote()
        try:
            alive = await asyncio.wait_for(asked, _ASK_S)
        except (TimeoutError, RayError):
            alive = False
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if alive else statuses.NOT_SERVING)


class _Call:
    """The state of one request. Mutated by the call's own coroutine."""

    def __init__(self, request: pb.GenerateRequest, prompt_key: PromptKey) -> None:
        self.request = request
        self.prompt_key = prompt_key
        self.tried: list[str] = []  # replicas that took it, the newest last
        self.num_attempts = 0
        self.takes_ticket = True  # False: a replica has refused one, and would refuse the next as well
        self.received = Received(request)
        self.deaths = Deaths(self.received.num_tokens)
        self.refusal: Refusal | None = None

    def note_loss(self, replica: str, reason: str, *, drained: bool) -> None:
        """A replica is gone, or full, that had the request. None ever runs it alone: Ray has no replica to spare."""
        self.deaths.note(replica, reason, self.received.num_tokens, alone=False, innocent=drained)


def _unimplemented(grpc_context: RayServegRPCContext, method: str, remedy: str) -> CallFailed:
    text = f"a fleet on Ray does not answer {method}; {remedy}"
    grpc_context.set_code(grpc.StatusCode.UNIMPLEMENTED)
    grpc_context.set_details(text)
    return CallFailed(text)


def _failed(grpc_context: RayServegRPCContext, call: _Call, refusal: Refusal) -> CallFailed:
    text = refusal.text
    if call.received.begun:
        text = f"the answer broke off after {call.received.num_tokens} tokens: {text}"
    elif refusal.status is Status.UNAVAILABLE:
        text = f"{call.num_attempts} attempts failed before anything was streamed, the last one: {text}"
    grpc_context.set_code(GRPC_CODES[refusal.status])
    grpc_context.set_details(text)
    return CallFailed(text)
