"""The deployment that holds an engine: one process of Ray, one model.

The engine is built when Ray makes the replica, reported as unhealthy once it has died, and ended when Ray lets the
replica go. Requests are distributed in `ray_router` and repeated in `ray_ingress`.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator

import ray
from google.protobuf.message_factory import GetMessageClass
from ray import serve

from jaxserve.assemble import assemble
from jaxserve.config import ResolvedConfig
from jaxserve.config.addresses import is_everywhere
from jaxserve.config.schema import HandoffConfig
from jaxserve.engine import AsyncEngine
from jaxserve.errors import Draining, EngineStopped, Status
from jaxserve.fleet.messages import Accepted, Refusal
from jaxserve.offline.console import set_up_logging
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.grpc_service import InferenceService, generate_replies
from jaxserve.serve.handoff import HandoffSetup
from jaxserve.serve.handoff_service import HandoffService
from jaxserve.serve.limits import call_limits, make_tenants
from jaxserve.serve.status import public_message, status_of
from jaxserve.serve.turns import Turns
from jaxserve.telemetry import observe_requests

logger = logging.getLogger(__name__)

_FETCH_S = 0.02  # between two looks whether all leases have ended


class EngineReplica:
    """Ray makes one per replica and calls its methods on one event loop."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        """Loads and compiles, which takes as long as it takes: Ray sends nothing here before it is done."""
        self._ending = contextlib.ExitStack()  # first of all, since Ray calls `__del__` even when building failed
        set_up_logging(resolved.config.runtime)
        self._replica = serve.get_replica_context().replica_id.unique_id
        assembly = assemble(resolved)
        self._engine = assembly.engine
        self._ending.enter_context(observe_requests(self._engine, resolved.config.runtime))
        doors = resolved.config.serve
        self._async_engine = AsyncEngine(
            self._engine,
            doors.encode_threads,
            limits=call_limits(doors),
            tenants=make_tenants(doors.tenants),
        )
        self._ending.callback(self._async_engine.close)
        self._turns = Turns()
        self._refuse_special_text = resolved.config.serve.grpc.refuse_special_text
        self._service = InferenceService(self._async_engine, refuse_special_text=self._refuse_special_text)
        self._handoff: HandoffService | None = None
        if assembly.pages is not None:
            setup = HandoffSetup(_at_this_node(resolved.config.handoff), assembly.pages)
            self._handoff = HandoffService(self._async_engine, setup, refuse_special_text=self._refuse_special_text)
            self._handoff.start()
            self._ending.callback(self._handoff.stop)
        self._engine.start()
        self._ending.callback(self._engine.stop, hand_over=True)
        self._ending.callback(self._engine.export, doors.export_s)
        self._ending.callback(self._wait_until_fetched, doors.drain_s)
        logger.info("replica %s serves %s", self._replica, self._engine.model.name)

    async def generate(
        self, message: bytes, *, prompt_key: object, avoid: object, wanted: object = None
    ) -> AsyncGenerator[Accepted | bytes | Refusal, None]:
        """Streams the serialised messages of one request, between an Accepted and, at times, a Refusal.

        Args:
          message: a serialised GenerateRequest.
          prompt_key, avoid, wanted: for the router, which alone reads them.
        """
        yield Accepted(replica=self._replica)
        try:
            replies = generate_replies(
                self._async_engine,
                pb.GenerateRequest.FromString(message),
                refuse_special_text=self._refuse_special_text,
                receive=None if self._handoff is None else self._handoff.receive,
                turns=self._turns,
            )
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply
        except Exception as error:
            yield _refusal(error)

    async def offer(
        self, request_id: str, *, prompt_key: object, avoid: object
    ) -> AsyncGenerator[Accepted | Refusal, None]:
        """Sets room aside for a request whose prompt another replica computes first: Accepted, and a Refusal without
        room."""
        assert self._handoff is not None, "the ingress asks where `prefill` is set"
        yield Accepted(replica=self._replica)
        try:
            self._handoff.offer(request_id)
        except Exception as error:
            yield _refusal(error)

    async def prefill(
        self, message: bytes, *, prompt_key: object, avoid: object
    ) -> AsyncGenerator[Accepted | bytes | Refusal, None]:
        """Computes the prompt of a serialised GenerateRequest for another replica: Accepted, then a serialised
        PrefillResponse or a Refusal."""
        assert self._handoff is not None, "the ingress asks where `prefill` is set"
        yield Accepted(replica=self._replica)
        try:
            answer = await self._handoff.prefill(pb.GenerateRequest.FromString(message), None)
            yield answer.SerializeToString()
        except Exception as error:
            yield _refusal(error)

    async def answer(self, method: str, message: bytes) -> bytes | Refusal:
        """The serialised answer of a method that streams nothing. `message` is its serialised request."""
        kind = pb.DESCRIPTOR.services_by_name["Inference"].methods_by_name[method].input_type
        try:
            request = GetMessageClass(kind).FromString(message)
            return (await getattr(self._service, method)(request, None)).SerializeToString()
        except Exception as error:
            return _refusal(error)

    async def is_alive(self) -> bool:
        """True while new requests are taken."""
        return self._engine.accepting

    async def check_health(self) -> None:
        """Called by Ray. Raises EngineStopped when the engine has died, so that Ray replaces this replica."""
        if self._engine.failure is not None:
            raise EngineStopped(f"the engine has died: {self._engine.failure!r}")

    def _wait_until_fetched(self, timeout_s: float) -> None:
        """Waits for other replicas to fetch what they were promised. Its calls are over, and Ray gives the time."""
        end_s = time.monotonic() + timeout_s
        handoff = self._handoff
        while handoff is not None and (num_owed := handoff.num_owed) and self._engine.failure is None:
            if time.monotonic() >= end_s:
                logger.warning("the pages of %d prompts are not fetched, and will be computed again", num_owed)
                return
            time.sleep(_FETCH_S)

    def __del__(self) -> None:
        """Ends the engine. Ray calls it once no request is left, or when the time to drain is over."""
        self._ending.close()


def _at_this_node(config: HandoffConfig) -> HandoffConfig:
    """With the address of this node for "all addresses": one config is for all nodes, and tickets name an address."""
    if not is_everywhere(config.host):
        return config
    return config.model_copy(update={"host": ray.util.get_node_ip_address()})


def _refusal(error: Exception) -> Refusal:
    reference = f"error {uuid.uuid4().hex[:12]}"
    status = status_of(error)
    if status is Status.INTERNAL:
        logger.exception("a request failed, %s", reference)
    return Refusal(status=status, text=public_message(error, reference), drained=isinstance(error, Draining))
