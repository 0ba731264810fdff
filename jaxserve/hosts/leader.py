"""`Leader`: process 0's end of the connections. It admits processes, sends them plans, and watches and compares them.

The stages of the start, the broadcast and the comparison of digests are here. A connection is a stranger until it has
proved that it knows the secret (`handshake`): a stranger is told nothing, costs little, and is soon closed.

The first failure is the only one: it is logged for the operator, sent to every member, and passed to the callbacks of
`on_failure`. Nothing is retried, since a process that has missed one plan can never take part again.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc

from jaxserve.errors import ConfigError, EngineStopped, HostLost, HostMismatch, HostsDiverged, PlanCorrupt
from jaxserve.hosts.digest import DigestBook, Divergence
from jaxserve.hosts.fingerprint import differences
from jaxserve.hosts.frames import MAX_REPORT_BYTES, Frame, Kind, make_frame
from jaxserve.hosts.handshake import Answering, Greeting, Session, Strangers, refusal
from jaxserve.hosts.link import (
    BEATS,
    GREETING_S,
    MAX_AHEAD,
    MAX_STRANGERS,
    NAME,
    SERVICE,
    Hearing,
    Peer,
    Trust,
    server_options,
)

logger = logging.getLogger(__name__)

SERVING = "ready"  # the last stage; after it silence of a process's Python is a failure, too: loading keeps it busy
_QUIET_S = 1.0  # between lines about strangers, of which there may be many


class _Member:
    """One of the other processes. Guarded by the leader's lock, but for the outbox."""

    def __init__(self, peer: Peer, session: Session) -> None:
        self.peer = peer
        self.session = session  # seals on the thread that sends, opens on the one that reads
        self.outbox: SimpleQueue[Frame | None] = SimpleQueue()
        self.met: dict[str, tuple[dict[str, str], dict[str, int]]] = {}
        self.gone = False


class Leader:
    """The processes 1 to num_processes - 1, as process 0 sees them. Methods may be called from any thread."""

    def __init__(
        self,
        *,
        address: str,
        num_processes: int,
        heartbeat_s: float,
        check_every: int,
        max_plan_bytes: int,
        trust: Trust,
        greeting_s: float = GREETING_S,
    ) -> None:
        """Listens at once. `address` is HOST:PORT, port 0 takes a free one. Raises ConfigError when it cannot."""
        assert num_processes > 1, num_processes
        self.failure: EngineStopped | HostMismatch | None = None
        self._num_processes = num_processes
        self._heartbeat_s = heartbeat_s
        self._max_ahead = MAX_AHEAD + check_every
        self._max_plan_bytes = max_plan_bytes
        self._secret = trust.secret
        self._strangers = Strangers(limit=MAX_STRANGERS, patience_s=greeting_s)
        self._quiet_until_s = 0.0
        self._unsaid = 0  # lines about strangers since the last one
        self._changed = threading.Condition()  # guards all below
        self._members: dict[int, _Member] = {}
        self._is_serving = False
        self._book = DigestBook(range(1, num_processes))
        self._next_seq = 0
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._take_outcome: Callable[[int, Frame], None] | None = None
        self._saying_bye = False
        self._hearing = Hearing(heartbeat_s)
        self._stopped = threading.Event()
        # Each member's stream and each stranger holds one thread; a few more, for connections that are being refused.
        most = num_processes + MAX_STRANGERS + 4
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="jaxserve-plans")
        options = server_options(heartbeat_s, num_processes, MAX_REPORT_BYTES)
        self._server = grpc.server(self._pool, options=options, maximum_concurrent_rpcs=2 * most)
        handler = grpc.stream_stream_rpc_method_handler(self._attend)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {NAME: handler}),))
        try:
            self.port: int = self._server.add_secure_port(address, trust.server_credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address} for the other processes: {error}; set hosts.plan_port"
            ) from error
        self._server.start()
        self._watcher = threading.Thread(target=self._watch, name="jaxserve-hosts", daemon=True)
        self._watcher.start()

    # ---- the start -------------------------------------------------------------------------------------------------

    def meet(
        self, stage: str, facts: Mapping[str, str], numbers: Mapping[str, int], timeout_s: float | None
    ) -> dict[str, int]:
        """Waits until all have come to `stage`; returns the least of each number over all processes.

        Raises HostMismatch when facts differ, HostLost when a process does not come within `timeout_s` or is lost.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while len(waiting := [m for m in self._members.values() if stage in m.met]) < self._num_processes - 1:
                self._raise_failure()
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._changed.wait(left_s)
            self._raise_failure()
            missing = sorted({*range(1, self._num_processes)} - {m.peer.process_id for m in waiting})
        if missing:
            names = ", ".join(map(str, missing))
            self._fail(
                HostLost(
                    f"process {names} of {self._num_processes} did not come within {timeout_s:g} s (stage {stage!r}); "
                    "start the same command on every host, each with its own JAXSERVE_PROCESS_ID, and see its log there"
                )
            )
            self._raise_failure()
        wrong = [line for m in waiting for line in differences(facts, m.met[stage][0], str(m.peer))]
        if wrong:
            self._fail(HostMismatch(f"the processes do not fit together: {'; '.join(wrong)}"), Kind.REFUSED)
            self._raise_failure()
        least = {name: min(own, *(m.met[stage][1][name] for m in waiting)) for name, own in numbers.items()}
        with self._changed:
            self._is_serving = stage == SERVING
            for member in waiting if self._is_serving else ():
                self._hearing.heard(member.peer.process_id)
        self._tell_all(make_frame(Kind.WELCOME, {"stage": stage, "numbers": least}))
        return least

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def broadcast(self, plan: bytes) -> int:
        """Sends a plan to all and returns its number. Waits while a process is too far behind. Raises the failure."""
        if len(plan) > self._max_plan_bytes:
            self._fail(
                EngineStopped(
                    f"the plan of a step has {len(plan)} bytes, more than hosts.max_plan_bytes = "
                    f"{self._max_plan_bytes}; raise that on all hosts, or lower sched.max_rows or model.max_len"
                )
            )
        with self._changed:
            while self.failure is None and self._next_seq - self._book.confirmed > self._max_ahead:
                self._changed.wait()
            self._raise_failure()
            seq, self._next_seq = self._next_seq, self._next_seq + 1
        self._tell_all(Frame(Kind.PLAN, seq, plan))
        return seq

    def order(self, number: int, order: bytes) -> bool:
        """Sends an order for their stores to all, behind the plans so far. False: it is too long, and was not sent."""
        if len(order) > self._max_plan_bytes:
            return False
        self._tell_all(Frame(Kind.ORDER, number, order))
        return True

    def on_outcome(self, take: Callable[[int, Frame], None]) -> None:
        """`take` gets the number of the process and each outcome of an order, on any thread, and raises PlanCorrupt
        where it makes no sense. To be called before the first order."""
        self._take_outcome = take

    def record(self, seq: int, digest: bytes) -> None:
        """The digest of process 0 itself after step `seq`."""
        with self._changed:
            found = self._book.add_own(seq, digest)
        self._judge(found)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """`callback` gets the failure, once, on any thread; at once when it has happened already."""
        with self._changed:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            callback(failure)

    def finish(self, timeout_s: float) -> None:
        """Tells all that there are no more plans, and waits until their last digests have been found equal.

        Raises the failure, if there is one now.
        """
        with self._changed:
            self._raise_failure()
            self._saying_bye = True
            last = self._next_seq - 1
        self._tell_all(Frame(Kind.BYE, last))
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self.failure is None and self._book.agreed != last:
                if (left_s := deadline_s - time.monotonic()) <= 0:
                    break
                self._changed.wait(left_s)
            agreed = self._book.agreed
        if agreed != last and self.failure is None:
            self._fail(HostLost(f"the others have not confirmed step {last} within {timeout_s:g} s, only {agreed}"))
        self._raise_failure()

    def give_up(self, error: BaseException) -> None:
        """Tells all that process 0 ends because of `error`."""
        self._fail(error if isinstance(error, EngineStopped) else EngineStopped(f"process 0 has failed: {error!r}"))

    def close(self, timeout_s: float = 1.0) -> None:
        """Gives the members a moment to leave, then closes the port."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            for member in self._members.values():
                member.outbox.put(None)
            while not all(m.gone for m in self._members.values()) and (left_s := deadline_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
        self._stopped.set()
        self._server.stop(0).wait(timeout_s)
        self._watcher.join(timeout_s)
        self._pool.shutdown(wait=False)

    # ---- one member's stream, on threads of gRPC -------------------------------------------------------------------

    def _attend(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        number = self._strangers.begin(context.cancel)
        if not context.add_callback(lambda: self._strangers.finish(number)):
            self._strangers.finish(number)
            return
        address = context.peer()
        try:
            answering = Answering(self._secret, next(incoming))
            yield answering.challenge
            if not answering.check(next(incoming)):
                raise HostMismatch(
                    f"{_peer(answering.greeting, address)} does not know the secret of process 0: give all processes "
                    "the same hosts.secret_file"
                )
            member = self._admit(answering.greeting, answering.session, address)
        except (StopIteration, grpc.RpcError):
            self._tell_of_stranger(
                f"{address} has not proved that it is a process of this service, and left or was sent away"
            )
            return
        except (ConfigError, EngineStopped) as error:
            self._tell_of_stranger(f"{address} is refused: {error}")
            yield refusal(str(error))
            return
        self._strangers.finish(number)
        if not context.add_callback(lambda: self._leave(member)):
            self._leave(member)
            return
        yield answering.admitted
        threading.Thread(
            target=self._read, args=(member, incoming), name=f"jaxserve-{member.peer.process_id}", daemon=True
        ).start()
        while (frame := member.outbox.get()) is not None:
            yield member.session.seal(frame)

    def _tell_of_stranger(self, text: str) -> None:
        """Logs at most a line a second: strangers must not fill the log."""
        now_s = time.monotonic()
        with self._changed:
            if now_s < self._quiet_until_s:
                self._unsaid += 1
                return
            unsaid, self._unsaid = self._unsaid, 0
            self._quiet_until_s = now_s + _QUIET_S
        logger.warning("%s%s", text, f" (and {unsaid} more since the last such line)" if unsaid else "")

    def _admit(self, greeting: Greeting, session: Session, address: str) -> _Member:
        peer = _peer(greeting, address)
        with self._changed:
            if self.failure is not None or self._stopped.is_set():
                raise EngineStopped(f"{peer} came too late: {self.failure or 'the service has ended'}")
            if greeting.num_processes != self._num_processes or not 0 < peer.process_id < self._num_processes:
                raise HostMismatch(
                    f"{peer} of {greeting.num_processes} wants to join, but hosts.num_processes is "
                    f"{self._num_processes} on process 0: numbers go from 1 to {self._num_processes - 1} beside 0"
                )
            if (other := self._members.get(peer.process_id)) is not None:
                raise HostMismatch(
                    f"{peer} wants to join, but {other.peer} has that number; give each process its own "
                    "hosts.process_id, and after a failure start all of them again"
                )
            member = self._members[peer.process_id] = _Member(peer, session)
        logger.info("%s has joined", peer)
        return member

    def _read(self, member: _Member, incoming: Iterator[bytes]) -> None:
        process_id = member.peer.process_id
        try:
            for raw in incoming:
                frame = member.session.open(raw)
                with self._changed:
                    if self._is_serving:
                        self._hearing.heard(process_id)
                self._take(member, frame)
        except grpc.RpcError:
            pass  # `_leave` hears of it, too
        except PlanCorrupt as error:
            self._fail(PlanCorrupt(f"{member.peer}: {error}"))
        except Exception as error:  # the boundary of the thread: nobody reads this member's frames any more
            self._fail(EngineStopped(f"what {member.peer} has sent cannot be handled: {error!r}"))
        member.outbox.put(None)  # the member has sent its last frame, so the stream may end

    def _take(self, member: _Member, frame: Frame) -> None:
        if frame.kind is Kind.MEET:
            stage, facts, numbers = frame.take(stage=str, facts=dict, numbers=dict)
            with self._changed:
                member.met[stage] = (facts, numbers)
                self._changed.notify_all()
        elif frame.kind is Kind.REPORT:
            with self._changed:
                if not 0 <= frame.seq < self._next_seq:  # it would be kept, and end the wait for those that are behind
                    raise PlanCorrupt(f"a digest of step {frame.seq} arrived, and {self._next_seq} plans were sent")
                found = self._book.add_report(member.peer.process_id, frame.seq, frame.payload)
                self._changed.notify_all()
            self._judge(found)
        elif frame.kind is Kind.OUTCOME:
            if self._take_outcome is None:
                raise PlanCorrupt(f"an outcome of order {frame.seq} arrived, and none was given")
            self._take_outcome(member.peer.process_id, frame)
        elif frame.kind is Kind.FAILED:
            self._fail(HostLost(f"{member.peer} has given up: {frame.text}"))
        elif frame.kind is not Kind.BEAT:
            raise PlanCorrupt(f"a frame of kind {frame.kind.name} arrived, which only process 0 sends")

    def _leave(self, member: _Member) -> None:
        with self._changed:
            member.gone = True
            self._changed.notify_all()
            expected = self._saying_bye or self.failure is not None or self._stopped.is_set()
            silence_s = self._hearing.silence_s(member.peer.process_id)
        member.outbox.put(None)
        if not expected:
            self._fail(
                HostLost(
                    f"{member.peer} is lost: its connection broke, {silence_s:.1f} s after its last sign of life; see "
                    f"its log on {member.peer.host}"
                )
            )

    # ---- failures --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        beat = Frame(Kind.BEAT)
        while not self._stopped.wait(self._heartbeat_s / BEATS):
            with self._changed:
                members = [m for m in self._members.values() if not m.gone]
                silent = self._hearing.silent()
            for member in members:
                member.outbox.put(beat)
            for member in members:
                for process_id, silence_s in silent:
                    if process_id == member.peer.process_id:
                        self._fail(
                            HostLost(
                                f"{member.peer} is lost: no sign of life for {silence_s:.1f} s, more than "
                                f"hosts.heartbeat_s = {self._heartbeat_s:g}; look at that host and its network"
                            )
                        )

    def _judge(self, found: Divergence | None) -> None:
        if found is None:
            return
        with self._changed:
            peer = self._members[found.process_id].peer
        since = f"step {found.agreed}" if found.agreed >= 0 else "the start"
        self._fail(
            HostsDiverged(
                f"{peer} has computed something else than process 0: their checksums differ after step {found.seq} and "
                f"were equal after {since}; what was generated in between is in doubt. A memory, a link or a device of "
                "one of the two is faulty, or their software differs"
            )
        )

    def _fail(self, error: EngineStopped | HostMismatch, kind: Kind = Kind.FAILED) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = error
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        logger.error("%s", error)
        self._tell_all(make_frame(kind, str(error)))
        for callback in callbacks:
            callback(error)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _tell_all(self, frame: Frame) -> None:
        with self._changed:
            members = list(self._members.values())
        for member in members:
            member.outbox.put(frame)


def _peer(greeting: Greeting, address: str) -> Peer:
    return Peer(greeting.process_id, greeting.host, address)
