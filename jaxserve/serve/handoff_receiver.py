"""The receiving side of a handoff: fetches the pages of a prompt into slots before its request is submitted.

To the scheduler these are pages in host memory like any others. Whatever goes wrong costs time and no token: what has
not arrived by the deadline, or cannot be trusted, is computed, and counted with its reason.

    offered --> fetching --> ready --> running (`release`)
                   \\--> short: what has come is used, the rest computed
"""

import collections
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import grpc

from jaxserve.api import Request
from jaxserve.config.addresses import is_loopback
from jaxserve.config.schema import HandoffConfig
from jaxserve.config.secret_files import read_mutual_tls, read_secret
from jaxserve.engine.exchanging import Exchanger
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.kv.handoff import (
    BadFrame,
    BadTicket,
    HandoffPeer,
    Pull,
    Ticket,
    digest_of,
    frame_from_proto,
    open_ticket,
    prompt_digest,
)
from jaxserve.kv.leases import ID_BYTES, Offers
from jaxserve.sched.page_exchange import Place, Wanted
from jaxserve.serve.handoff import HandoffCounts, HandoffSetup
from jaxserve.serve.handoff_sender import prompt_of

logger = logging.getLogger(__name__)

_CALL_S = 5.0  # for a renewal or a release
_RENEWALS = 6.0  # in the time of a lease
_MAX_FAULTS = 3  # frames of a process that were wrong, before its tickets are ignored
_MAX_PEERS = 256  # connections that are kept
# Reasons after which a lease is left to its end: the server is gone, or must not be called, or the ticket may be used
# again.
_NOT_RELEASED = frozenset({"died", "expired", "restarted", "no_tls", "cancelled"})
_REASONS = {
    grpc.StatusCode.NOT_FOUND: "expired",
    grpc.StatusCode.FAILED_PRECONDITION: "restarted",
    grpc.StatusCode.ABORTED: "flushed",
    grpc.StatusCode.INVALID_ARGUMENT: "unfit",
    grpc.StatusCode.UNAVAILABLE: "died",
    grpc.StatusCode.CANCELLED: "cancelled",
    grpc.StatusCode.DEADLINE_EXCEEDED: "stalled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
}


class _Fetched(NamedTuple):
    """What became of a pull. `reason`: why something is missing; empty if nothing is."""

    places: set[Place]
    reason: str


class Receipt:
    """The pages of one request. `cancel` is called by another thread than the one that fetches."""

    def __init__(self) -> None:
        self.name = secrets.token_bytes(ID_BYTES)
        self._lock = threading.Lock()
        self._cancelled = False
        self._pull: Pull | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Nobody waits for the pages any more."""
        with self._lock:
            self._cancelled = True
            if self._pull is not None:
                self._pull.cancel()

    def begin(self, pull: Pull) -> None:
        """The pull that a cancel ends."""
        with self._lock:
            self._pull = pull
            if self._cancelled:
                pull.cancel()


class HandoffReceiver:
    """Any thread. `fetch` waits, and is for threads that may."""

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
        self.offers = Offers(config.lease_s, config.max_offers, clock)
        self._config = config
        self._secret = read_secret(config.secret_file, "handoff.secret_file")
        self._credentials = _credentials(config)
        self._form = setup.form
        self._exchanger = exchanger
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._room = threading.Semaphore(config.max_pulls)
        self._peers: collections.OrderedDict[str, HandoffPeer] = collections.OrderedDict()
        self._faults: collections.Counter[bytes] = collections.Counter()  # by epoch of the sender

    def open(self, request: Request, sealed: bytes) -> Ticket:
        """The ticket that came with a request. Raises InvalidRequest for one that is not of this fleet, or of another
        prompt: no router sends it."""
        try:
            ticket = open_ticket(self._secret, sealed)
        except BadTicket as error:
            raise InvalidRequest(f"the ticket of the request cannot be used: {error}; leave it out") from error
        if ticket.prompt != prompt_digest(*prompt_of(request), request.seed):
            raise InvalidRequest("the ticket is of another prompt, salt or seed than the request; leave it out")
        return ticket

    def fetch(self, request: Request, ticket: Ticket, receipt: Receipt) -> None:
        """Fetches what the prompt lacks; `release` must follow. Never raises but for a defect."""
        begun_s, prompt = self._clock(), prompt_of(request)
        num_wanted = min(ticket.num_tokens, len(prompt.token_ids) - 1)
        try:
            wanted = self._exchanger.expect(receipt.name, prompt, num_wanted, request.tenant)
        except JaxserveError as error:  # the engine ends, and so will the request
            logger.warning("no pages are fetched: %s", error)
            return
        is_all_here = wanted.num_found == wanted.num_blocks
        fetched = _Fetched(set(), "failed" if wanted.slots else "" if is_all_here else "no_slot")
        try:
            if wanted.slots:
                fetched = self._pull(ticket, wanted, receipt, begun_s)
        except Exception:  # a defect must neither lose slots nor the request, which computes its prompt
            logger.exception("pages could not be fetched")
        finally:
            try:
                self._exchanger.arrive(receipt.name, fetched.places)
            except JaxserveError as error:
                logger.warning("pages that were fetched are not used: %s", error)
        self._note(wanted, fetched, num_wanted, len(prompt.token_ids), begun_s)
        if fetched.reason not in _NOT_RELEASED:
            self._release_lease(ticket)

    def release(self, receipt: Receipt) -> None:
        """The request has its pages, or has ended."""
        self._exchanger.tell_release(receipt.name)

    def close(self) -> None:
        """Ends connections."""
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()

    def _pull(self, ticket: Ticket, wanted: Wanted, receipt: Receipt, begun_s: float) -> _Fetched:
        if self._credentials is None and not is_loopback(ticket.address.rpartition(":")[0]):
            return _Fetched(set(), "no_tls")
        # Asked now and not at the start, since this engine may have other weights by now.
        if ticket.pages != digest_of(self._form.describe):
            return _Fetched(set(), "mismatch")
        with self._lock:
            if self._faults[ticket.name.epoch] >= _MAX_FAULTS:
                return _Fetched(set(), "quarantined")
        wait_s = self._config.wait_s
        if wanted.compute_s:
            wait_s = min(wait_s, max(self._config.least_wait_s, wanted.compute_s))
        peer, until_s = self._peer(ticket.address), begun_s + wait_s
        if not self._enter(peer, ticket, receipt, until_s):
            return _Fetched(set(), "cancelled" if receipt.cancelled else "busy")
        try:
            return self._frames(peer, ticket, wanted, receipt, until_s)
        finally:
            self._room.release()

    def _enter(self, peer: HandoffPeer, ticket: Ticket, receipt: Receipt, until_s: float) -> bool:
        """Waits until one more prompt may be fetched; the lease lasts meanwhile."""
        interval_s = self._config.lease_s / _RENEWALS
        while not receipt.cancelled and (left_s := until_s - self._clock()) > 0:
            if self._room.acquire(timeout=min(left_s, interval_s)):
                return True
            try:
                peer.renew(ticket.name, min(left_s, _CALL_S))
            except grpc.RpcError as error:  # the pull will say so as well
                logger.debug("a lease was not renewed: %s", error)
        return False

    def _frames(self, peer: HandoffPeer, ticket: Ticket, wanted: Wanted, receipt: Receipt, until_s: float) -> _Fetched:
        places: set[Place] = set()
        size = self._form.page_tokens
        pull = peer.pull(ticket.name, wanted.num_found * size, size, max(0.001, until_s - self._clock()))
        receipt.begin(pull)
        try:
            for message in pull:
                frame = frame_from_proto(self._secret, ticket.name, message)
                places |= self._form.write(frame, wanted.slots)
                with self._lock:
                    self._counts.bytes_pulled += len(frame.data)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            reason = _REASONS.get(code, "failed") if code is not None else "failed"
            if code is grpc.StatusCode.CANCELLED and not receipt.cancelled:
                reason = "died"  # a server that ends cancels its calls
            logger.info("pages from %s end early: %s", ticket.address, error)
            return _Fetched(places, reason)
        except BadFrame as error:
            pull.cancel()
            with self._lock:
                self._faults[ticket.name.epoch] += 1
            logger.warning("a frame from %s is not used: %s", ticket.address, error)
            return _Fetched(places, "damaged")
        if len(places) < len(wanted.slots):
            return _Fetched(places, "short")
        lacking = wanted.num_blocks - wanted.num_found - len({place.block for place in wanted.slots})
        return _Fetched(places, "no_slot" if lacking > 0 else "")

    def _peer(self, address: str) -> HandoffPeer:
        with self._lock:
            peer = self._peers.pop(address, None)
            if peer is None:
                config = self._config
                peer = HandoffPeer(address, self._credentials, config.tls_name, config.frame_bytes)
            self._peers[address] = peer
            # Peers come and go; a connection that is closed while it is used would end a pull.
            while len(self._peers) > _MAX_PEERS:
                self._peers.popitem(last=False)
            return peer

    def _release_lease(self, ticket: Ticket) -> None:
        try:
            self._peer(ticket.address).release(ticket.name, _CALL_S)
        except ValueError as error:  # the channel was closed
            logger.debug("a lease was not released: %s", error)

    def _note(self, wanted: Wanted, fetched: _Fetched, num_wanted: int, prompt_len: int, begun_s: float) -> None:
        size = self._form.page_tokens
        come = {place.block for place in wanted.slots} - {p.block for p in wanted.slots if p not in fetched.places}
        end = wanted.num_found
        while end in come:
            end += 1
        num_cached, num_pulled = wanted.num_found * size, (end - wanted.num_found) * size
        num_missed = max(0, num_wanted // size * size - num_cached - num_pulled)
        with self._lock:
            counts = self._counts
            counts.tokens.update(cached=num_cached, pulled=num_pulled, computed=prompt_len - num_cached - num_pulled)
            if num_missed:
                counts.missed[fetched.reason or "no_slot"] += num_missed
            counts.num_pulls += 1
            counts.pull_s += self._clock() - begun_s


def _credentials(config: HandoffConfig) -> grpc.ChannelCredentials | None:
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    tls = read_mutual_tls(config.tls_cert, config.tls_key, config.tls_ca, "handoff.")
    return grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)
