"""The methods of `jaxserve.v1.Handoff`: routers have prompts computed on one server, and answered on another."""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc

from jaxserve.api import FinishReason, Pooling, Request
from jaxserve.engine import AnyEngine, AsyncEngine, Engine, pooling_params
from jaxserve.engine.daemon_threads import DaemonThreads
from jaxserve.engine.exchanging import Exchanger
from jaxserve.engine.refusals import refusal_of
from jaxserve.errors import Draining, EngineStopped, InvalidRequest, QueueFull, UnsupportedOption
from jaxserve.kv.leases import LeaseName
from jaxserve.serve.convert import refuse_unknown_fields
from jaxserve.serve.gen import handoff_pb2 as pb
from jaxserve.serve.gen import handoff_pb2_grpc as pb_grpc
from jaxserve.serve.gen import inference_pb2 as inference_pb
from jaxserve.serve.grpc_service import prepare_message
from jaxserve.serve.handoff import HandoffCounts, HandoffSetup
from jaxserve.serve.handoff_receiver import HandoffReceiver, Receipt
from jaxserve.serve.handoff_sender import HandoffSender
from jaxserve.serve.owners import PROCESS, Owner, Owners

T = TypeVar("T")

HANDOFF_NAME: str = pb.DESCRIPTOR.services_by_name["Handoff"].full_name
ROLES = {"both": pb.ROLE_BOTH, "prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
_EXTRA_THREADS = 4  # beside those that fetch: for waits of a turn of the loop


class HandoffService(pb_grpc.HandoffServicer):
    """Both sides of a server, as far as its role has them. Used on one event loop; raises typed errors.

    Attributes:
      counts: for metrics.
    """

    def __init__(
        self,
        engine: AsyncEngine[AnyEngine],
        setup: HandoffSetup,
        *,
        refuse_special_text: bool = False,
        owners: Owners | None = None,
    ) -> None:
        """Raises ConfigError. `refuse_special_text`, `owners`: as of `InferenceService`."""
        assert isinstance(engine.engine, Engine), "`check_handoff` refuses replicas"
        config = setup.config
        exchanger = Exchanger(engine.engine)
        self.counts = HandoffCounts()
        self._engine = engine
        self._config = config
        self._refuse_special_text = refuse_special_text
        self._owners = owners
        self._sender = HandoffSender(setup, exchanger, self.counts) if config.role != "decode" else None
        self._receiver = HandoffReceiver(setup, exchanger, self.counts) if config.role != "prefill" else None
        self._num_prefills = 0  # that are computed, or wait for their ticket
        self._threads = DaemonThreads("jaxserve-handoff", config.max_pulls + _EXTRA_THREADS)

    def start(self) -> str | None:
        """Opens the port on which pages are fetched; returns its address. Raises ConfigError."""
        return None if self._sender is None else self._sender.start()

    def stop(self) -> None:
        """Closes the port and all connections."""
        if self._sender is not None:
            self._sender.stop()
        if self._receiver is not None:
            self._receiver.close()
        self._threads.close(cancel=True)

    @property
    def num_owed(self) -> int:
        """Prompts that another server was promised, or is about to be, and has not fetched: a server that is shut down
        keeps its engine and its port for them. Each ends with its fetch, or with its lease."""
        return 0 if self._sender is None else self._num_prefills + len(self._sender.leases.live())

    def read_counts(self) -> HandoffCounts:
        """`counts`, with what is lent now. Any thread."""
        if self._sender is not None:
            self.counts.leases = self._sender.leases.counts
            live = self._sender.leases.live()
            self.counts.live_leases = len(live)
            self.counts.lent_slots = sum(len(slots) for lending in live for slots in lending.lent.slots)
        return self.counts

    # ---- for routers -----------------------------------------------------------------------------------------------

    async def GetRole(self, request: pb.GetRoleRequest, context: grpc.aio.ServicerContext) -> pb.GetRoleResponse:
        """The part that this server takes."""
        refuse_unknown_fields(request)
        return pb.GetRoleResponse(role=ROLES[self._config.role])

    async def Offer(self, request: pb.OfferRequest, context: grpc.aio.ServicerContext) -> pb.OfferResponse:
        """Refused while there is no room for one more request."""
        refuse_unknown_fields(request)
        return pb.OfferResponse(seconds=self.offer(request.request_id, self._owner_of(context)))

    def _owner_of(self, context: grpc.aio.ServicerContext) -> Owner:
        return PROCESS if self._owners is None else self._owners.of_call(context)

    def offer(self, request_id: str, owner: Owner = PROCESS) -> float:
        """Sets room aside for a request: for so many seconds. Raises QueueFull and its kin without room."""
        if self._receiver is None:
            raise UnsupportedOption("this server computes prompts and takes none of others (handoff.role is prefill)")
        if not request_id:
            raise InvalidRequest("an offer names its request; set request_id")
        engine, offers = self._engine.engine, self._receiver.offers
        if not engine.accepting:
            raise refusal_of(engine.failure)
        engine.check_room(1, owner.id, {owner.id: offers.count()})
        offers.take(owner.own(request_id))
        return offers.lease_s

    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> pb.PrefillResponse:
        """Computes a prompt, and lends its pages."""
        refuse_unknown_fields(request)
        return await self.prefill(request.request, context.time_remaining(), self._owner_of(context))

    async def prefill(
        self, message: inference_pb.GenerateRequest, remaining_s: float | None, owner: Owner = PROCESS
    ) -> pb.PrefillResponse:
        """`Prefill` of a request that came by another way. `remaining_s`: as for `generate_replies`."""
        sender = self._sender
        if sender is None:
            raise UnsupportedOption("this server computes no prompts for others (handoff.role is decode)")
        if message.HasField("resume") or message.ticket or not message.sampling.HasField("seed"):
            raise InvalidRequest("a prompt that is to be computed has a seed, and neither resume nor a ticket")
        self._num_prefills += 1
        try:
            prepared = await prepare_message(
                self._engine, message, remaining_s, refuse_special_text=self._refuse_special_text, owner=owner
            )
            return await self._prefill(sender, prepared)
        finally:
            self._num_prefills -= 1

    async def _prefill(self, sender: HandoffSender, request: Request) -> pb.PrefillResponse:
        prompt_len, num_full = len(request.prompt_token_ids), sender.num_full(request)
        longest = self._engine.engine.model.private_prompts_above
        # Keys of such prompts follow from their whole length, so that a beginning by itself has others.
        is_private = longest is not None and prompt_len > longest
        # A beginning may end inside of a picture.
        is_whole = is_private or bool(request.content) or request.sampling.prompt_logprobs is not None
        if not num_full or is_whole:
            self.counts.prefills["short"] += 1
            return pb.PrefillResponse(num_prompt_tokens=prompt_len)
        engine, outcome = self._engine.engine, "failed"
        try:
            if not engine.accepting:  # also where all pages are here: a server that is shut down promises nothing more
                raise refusal_of(engine.failure)
            name = sender.leases.reserve()
            try:
                if not await self._in_thread(sender.is_here, request):
                    await self._compute(request, num_full)
            except BaseException:
                sender.leases.give_up()
                raise
            ticket, num_tokens = await self._lend(sender, name, request)
            outcome = "lent"
        except (QueueFull, Draining):
            outcome = "refused"
            raise
        finally:
            self.counts.prefills[outcome] += 1
        return pb.PrefillResponse(ticket=ticket, num_prompt_tokens=prompt_len, num_lent_tokens=num_tokens)

    async def _lend(self, sender: HandoffSender, name: LeaseName, request: Request) -> tuple[bytes, int]:
        """See `HandoffSender.lend`, which runs to its end even if nobody waits for it any more."""
        lending = asyncio.ensure_future(self._in_thread(sender.lend, name, request))
        try:
            return await asyncio.shield(lending)
        except asyncio.CancelledError:
            lending.add_done_callback(lambda done: None if done.exception() else sender.release(name))
            raise

    async def _compute(self, request: Request, num_tokens: int) -> None:
        """Runs the full pages of a prompt as a request that generates nothing. Left early, it is aborted."""
        alone = dataclasses.replace(
            request,
            prompt_token_ids=request.prompt_token_ids[:num_tokens],
            sampling=pooling_params(),
            max_tokens=0,
            stop_token_ids=frozenset(),
            bad_word_ids=(),
            grammar=None,
            echo_text="",
            pooling=Pooling.LAST,
        )
        async with contextlib.aclosing(self._engine.stream(alone)) as updates:
            async for update in updates:
                if update.finish_reason is FinishReason.ABORT:
                    raise EngineStopped("the server shuts down, and the prompt was not computed")

    # ---- for requests with tickets ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def receive(self, request: Request, ticket: bytes) -> AsyncIterator[None]:
        """Has the pages of a prompt in slots for as long as the block lasts. Raises InvalidRequest.

        The room that was set aside for the request is its own from now on. `ticket` empty: its prompt was computed
        nowhere.
        """
        receiver = self._receiver
        if receiver is not None:
            receiver.offers.end(request.request_id)
        if not ticket:
            yield
            return
        if receiver is None:
            raise UnsupportedOption("this server takes no pages of others (handoff.role is prefill); send no ticket")
        opened = receiver.open(request, ticket)
        receipt = Receipt()
        fetching = asyncio.ensure_future(self._in_thread(receiver.fetch, request, opened, receipt))
        # The thread fills slots: they are given back when it is done, whoever waits for it.
        fetching.add_done_callback(lambda done: receiver.release(receipt) if receipt.cancelled else None)
        try:
            await asyncio.shield(fetching)
        except BaseException:  # the call has ended, or a defect
            receipt.cancel()
            if fetching.done():
                receiver.release(receipt)
            raise
        try:
            yield
        finally:
            receiver.release(receipt)

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._threads.submit("", functools.partial(work, *args)))
