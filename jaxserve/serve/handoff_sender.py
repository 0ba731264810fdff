"""The sending side of a handoff: pages of prompts wait in slots under leases, and others fetch them from a port.

The port shows pages to whoever has a certificate of the fleet, or is on this machine, and knows a lease: 128 random
bits that a ticket alone tells.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc

from jaxserve.api import Request
from jaxserve.config.addresses import address_of
from jaxserve.config.secret_files import read_secret
from jaxserve.engine.exchanging import Exchanger
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.kv.gen import handoff_pb2 as pb
from jaxserve.kv.gen import handoff_pb2_grpc as pb_grpc
from jaxserve.kv.handoff import (
    FRAME_OVERHEAD,
    Ticket,
    digest_of,
    frame_to_proto,
    lease_from_proto,
    prompt_digest,
    seal_ticket,
)
from jaxserve.kv.leases import LeaseGone, LeaseName, Leases, OtherEpoch
from jaxserve.sched.page_exchange import Lent, Prompt
from jaxserve.serve.handoff import HandoffCounts, HandoffSetup
from jaxserve.serve.page_port import PORT_OPTIONS, DecodedMessages, call_threads, mutual_credentials
from jaxserve.serve.ports import HeldPort

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # between two looks for leases that have run out
_SAVE_S = 30.0  # for pages to reach their slots
_MAX_REQUEST_BYTES = 4096
_MAX_PAGE_TOKENS = 1 << 20
_FRAME_BYTES = 8 << 20  # of a frame, where whole pages are not larger: pages are read while others are on their way


class _TlsFiles(NamedTuple):
    """Settings of `handoff:` by the names that doors have for them."""

    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None


class Lending(NamedTuple):
    """What a lease is for."""

    name: bytes
    lent: Lent


class HandoffSender:
    """Leases and the port. `start` and `stop` are called once, by one thread; the rest by any."""

    def __init__(
        self,
        setup: HandoffSetup,
        exchanger: Exchanger,
        counts: HandoffCounts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError."""
        config = setup.config
        assert config.secret_file is not None, "`check_handoff` has seen it"
        self.leases: Leases[Lending] = Leases(config.lease_s, config.max_leases, clock)
        self._config = config
        self._secret = read_secret(config.secret_file, "handoff.secret_file")
        self._form = setup.form
        self._exchanger = exchanger
        self._counts = counts
        self._lock = threading.Lock()
        self._pulls: collections.Counter[str] = collections.Counter()  # by peer
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="jaxserve-leases", daemon=True)
        files = _TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
        self._credentials = mutual_credentials(files, "handoff", config.host, "the other servers", "tls_ca")
        self._server: grpc.Server | None = None
        self._address = ""

    def start(self) -> str:
        """Listens; returns the address that tickets have. Raises ConfigError."""
        config = self._config
        held = HeldPort(config.host, config.port, "handoff.port", "handoff.host")
        held.close()
        server = self._server = grpc.server(
            call_threads("handoff", config.max_pulls + 2, 8 * config.max_pulls),
            interceptors=[DecodedMessages()],
            maximum_concurrent_rpcs=8 * config.max_pulls,
            options=[("grpc.max_receive_message_length", _MAX_REQUEST_BYTES), *PORT_OPTIONS],
        )
        pb_grpc.add_HandoffsServicer_to_server(self, server)
        address = address_of(config.host, held.number)
        try:
            if self._credentials is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: {error}; another process was faster") from error
        server.start()
        self._looking.start()
        self._address = config.address or address
        return self._address

    def stop(self) -> None:
        """Ends all calls; slots go with the engine."""
        self._ended.set()
        if self._server is not None:
            self._server.stop(0)

    # ---- leases ----------------------------------------------------------------------------------------------------

    def num_full(self, request: Request) -> int:
        """Tokens of the full pages that the prompt of a request can lend."""
        size = self._form.page_tokens
        return (len(request.prompt_token_ids) - 1) // size * size

    def is_here(self, request: Request) -> bool:
        """Whether nothing of the prompt must be computed."""
        return self._exchanger.num_found(prompt_of(request)) * self._form.page_tokens >= self.num_full(request)

    def lend(self, name: LeaseName, request: Request) -> tuple[bytes, int]:
        """A lease of the pages of the prompt, under a name that is reserved: the ticket, and the tokens that it has.

        Waits until the pages are in their slots. Raises EngineStopped and DeadlineExceeded; then nothing is lent, nor
        reserved.
        """
        prompt = prompt_of(request)
        try:
            lent = self._exchanger.lend(name.transfer_id, prompt, _SAVE_S)
        except BaseException:
            self.leases.give_up()
            raise
        num_tokens = lent.num_blocks * self._form.page_tokens
        self.leases.lend(name, Lending(name.transfer_id, lent))
        ticket = Ticket(
            name=name,
            address=self._address,
            pages=digest_of(self._form.describe),
            prompt=prompt_digest(*prompt, request.seed),
            num_tokens=num_tokens,
        )
        return seal_ticket(self._secret, ticket), num_tokens

    def release(self, name: LeaseName) -> None:
        """Ends a lease, if it is there."""
        lending = self.leases.release(name)
        if lending is not None:
            self._exchanger.tell_release(lending.name)

    def expire(self) -> None:
        """Gives back the slots of leases that have run out."""
        for lending in self.leases.take_expired():
            logger.info("the lease of %d pages has run out", sum(map(len, lending.lent.slots)))
            self._exchanger.tell_release(lending.name)

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.expire()

    # ---- calls of other servers ------------------------------------------------------------------------------------

    def Pull(self, request: pb.PullRequest, context: grpc.ServicerContext) -> Iterator[pb.PageFrame]:
        """Frames until the end of what is lent, while the lease is."""
        name = self._checked(request.lease, context)
        if not (0 < request.page_tokens <= _MAX_PAGE_TOKENS):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"pages of {request.page_tokens} tokens")
        peer = context.peer().rpartition(":")[0]
        with self._lock:
            mine, all_ = self._pulls[peer], self._pulls.total()
            busy = all_ >= self._config.max_pulls or mine >= max(1, self._config.max_pulls // 2)
            if not busy:
                self._pulls[peer] += 1
        if busy:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many pulls at once (handoff.max_pulls)")
        try:
            yield from self._frames(name, request, context)
        finally:
            with self._lock:
                self._pulls[peer] -= 1
                self._pulls += collections.Counter()  # leaves out peers without pulls

    def _frames(
        self, name: LeaseName, request: pb.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PageFrame]:
        size = self._form.page_tokens
        most_bytes = min(self._config.frame_bytes, request.max_frame_bytes)
        step = self._form.step(request.page_tokens, min(most_bytes, _FRAME_BYTES))
        begin = request.first_token // (step * size) * step  # so that frames begin at whole pages of both
        lent = self._renew(name, context).lent
        try:
            is_whole = self._exchanger.is_whole(name.transfer_id)
        except JaxserveError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        if not is_whole:
            context.abort(grpc.StatusCode.ABORTED, "the pages were flushed")
        while begin < lent.num_blocks and context.is_active():
            end = min(begin + step, lent.num_blocks)
            frame = self._form.read(lent, begin, end)
            if len(frame.data) > most_bytes + FRAME_OVERHEAD // 2:
                context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"whole pages of both servers have {len(frame.data)} bytes, and a frame {most_bytes} at most",
                )
            self._renew(name, context)
            with self._lock:  # several are sent at once
                self._counts.bytes_sent += len(frame.data)
            yield frame_to_proto(self._secret, name, frame)
            begin = end

    def Renew(self, request: pb.LeaseName, context: grpc.ServicerContext) -> pb.Renewed:
        """The lease goes on."""
        self._renew(self._checked(request, context), context)
        return pb.Renewed(seconds=self._config.lease_s)

    def Release(self, request: pb.LeaseName, context: grpc.ServicerContext) -> pb.Released:
        """The lease ends."""
        self.release(self._checked(request, context))
        return pb.Released()

    def _renew(self, name: LeaseName, context: grpc.ServicerContext) -> Lending:
        try:
            return self.leases.renew(name)
        except LeaseGone as error:
            context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        except OtherEpoch as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("abort raises")

    @staticmethod
    def _checked(message: pb.LeaseName, context: grpc.ServicerContext) -> LeaseName:
        name = lease_from_proto(message)
        if name is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the name of a lease has 16 bytes, and so has an epoch")
            raise AssertionError("abort raises")
        return name


def prompt_of(request: Request) -> Prompt:
    """What the pages of a request's prompt follow from."""
    return Prompt(request.cache_salt, request.prompt_token_ids, request.content)
