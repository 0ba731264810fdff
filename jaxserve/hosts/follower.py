"""`Follower`: the connection of every other process to process 0. It proves itself, joins, takes plans and
orders, and reports.

It raises when process 0 is lost or silent. Plans are executed by `running.follow`; the caller ends the process.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

import grpc

from jaxserve.errors import EngineStopped, HostLost, HostMismatch, PlanCorrupt
from jaxserve.hosts.frames import Frame, Kind, make_frame
from jaxserve.hosts.handshake import Asking
from jaxserve.hosts.link import BEATS, GREETING_S, METHOD, Hearing, Peer, Trust, transport_options
from jaxserve.hosts.store_orders import Outcome, outcome_frame

logger = logging.getLogger(__name__)

_LEADER = 0
_AGAIN_S = 0.2  # until the next attempt to join
_FRAMING_BYTES = 64  # of a plan: kind, number, seal


class Follower:
    """Process 0, as another process sees it. Methods may be called from any thread, `meet` and `frames` from one."""

    def __init__(
        self,
        *,
        address: str,
        process_id: int,
        num_processes: int,
        host: str,
        heartbeat_s: float,
        join_s: float,
        max_plan_bytes: int,
        trust: Trust,
        greeting_s: float = GREETING_S,
    ) -> None:
        """Connects and joins. `address` is HOST:PORT.

        Raises HostLost when no process 0 answers within `join_s`, HostMismatch when it refuses or has another secret.
        """
        self.failure: EngineStopped | HostMismatch | None = None
        self._leader = Peer(_LEADER, address.rpartition(":")[0], address)
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._inbox: SimpleQueue[Frame | None] = SimpleQueue()  # None: see `failure`
        self._outbox: SimpleQueue[bytes | Frame | None] = SimpleQueue()  # bytes: not to be sealed
        self._hearing = Hearing(heartbeat_s)
        self._is_serving = False
        self._said_bye = False  # process 0 has said goodbye: the end of the stream is expected
        self._closing = False  # `close` was called: any end is expected
        self._over = threading.Event()  # nothing more will come: the connection has failed, or the stream has ended
        self._stopped = threading.Event()
        self._next_seq = 0
        self._channel = trust.connect(address, transport_options(heartbeat_s, max_plan_bytes + _FRAMING_BYTES))
        try:
            call = self._join(trust.secret, process_id, num_processes, host, join_s, greeting_s)
        except BaseException:
            self._channel.close()
            raise
        self._threads = [
            threading.Thread(target=self._read, args=(call,), name="jaxserve-plans", daemon=True),
            threading.Thread(target=self._watch, name="jaxserve-hosts", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def meet(self, stage: str, facts: Mapping[str, str], numbers: Mapping[str, int]) -> dict[str, int]:
        """Waits until all have come to `stage`; returns the least of each number over all processes.

        Raises HostMismatch when the facts differ somewhere, HostLost when process 0 is lost or gives up.
        """
        self._send(make_frame(Kind.MEET, {"stage": stage, "facts": dict(facts), "numbers": dict(numbers)}))
        met, least = self._expect(Kind.WELCOME).take(stage=str, numbers=dict)
        assert met == stage, met
        return least

    def start_serving(self) -> None:
        """From now on silence of process 0's Python is a failure, too, and not of its connection alone."""
        self._hearing.heard(_LEADER)
        self._is_serving = True

    def frames(self) -> Iterator[Frame]:
        """The plan of each step and the orders between them, in order, until process 0 says that there are no more.

        Raises HostLost, PlanCorrupt or what `give_up` was called with.
        """
        while (frame := self._expect(Kind.PLAN, Kind.ORDER, Kind.BYE)).kind is not Kind.BYE:
            yield frame

    def report(self, seq: int, digest: bytes) -> None:
        """The digest of all steps up to `seq`."""
        self._send(Frame(Kind.REPORT, seq, digest))

    def answer(self, number: int, outcome: Outcome) -> None:
        """What the store of this process has done of order `number`."""
        self._send(outcome_frame(number, outcome))

    def wait_for_end(self, timeout_s: float) -> None:
        """After the last report: waits until process 0 has compared it. Raises what it found, or HostLost."""
        if not self._over.wait(timeout_s):
            self._fail(HostLost(f"{self._leader} has not ended within {timeout_s:g} s after its last plan"))
        if self.failure is not None:
            raise self.failure

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """`callback` gets the failure, once, on any thread; at once when it has happened already."""
        with self._lock:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            callback(failure)

    def give_up(self, error: BaseException) -> None:
        """Tells process 0 that this process ends because of `error`."""
        self._send(make_frame(Kind.FAILED, f"{type(error).__name__}: {error}"))
        self._fail(error if isinstance(error, EngineStopped) else EngineStopped(f"this process has failed: {error!r}"))

    def close(self, timeout_s: float = 1.0) -> None:
        """Sends the queued frames, then closes the connection. A loss for process 0, unless it has ended first."""
        self._closing = True
        self._outbox.put(None)
        self._threads[0].join(timeout_s)
        self._stopped.set()
        self._channel.close()
        self._threads[1].join(timeout_s)

    # ---- the start -------------------------------------------------------------------------------------------------

    def _join(
        self, secret: bytes, process_id: int, num_processes: int, host: str, join_s: float, greeting_s: float
    ) -> "grpc.Call":
        """A stream on which both sides have proved themselves. Attempts it again where process 0 had no time for it."""
        deadline_s = time.monotonic() + join_s
        reason = ""
        while (left_s := deadline_s - time.monotonic()) > 0:
            asking = Asking(secret, process_id=process_id, num_processes=num_processes, host=host)
            try:
                return self._greet(asking, min(greeting_s, left_s))
            except HostMismatch as error:
                raise HostMismatch(f"{self._leader} refuses this process: {error}") from None
            except PlanCorrupt as error:
                raise HostMismatch(f"{self._leader} is no process 0 of this version: {error}") from error
            except StopIteration:
                newest = "it has ended the connection"
            except grpc.RpcError as error:
                newest = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else repr(error)
            if reason and time.monotonic() >= deadline_s:
                break  # this attempt was cut short by the timeout, so the error of the one before says more
            if newest != reason:
                logger.info("%s does not answer yet: %s", self._leader, newest)
                reason = newest
            time.sleep(min(_AGAIN_S, max(0.0, deadline_s - time.monotonic())))
        raise HostLost(
            f"{self._leader} does not answer within {join_s:g} s ({reason}); is it running, and do hosts.coordinator "
            "and hosts.plan_port name a port of its host that a firewall lets through?"
        )

    def _greet(self, asking: Asking, greeting_s: float) -> "grpc.Call":
        self._outbox = outbox = SimpleQueue()
        outbox.put(asking.hello)
        call = self._channel.stream_stream(METHOD)(self._outgoing(outbox))
        timer = threading.Timer(greeting_s, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            outbox.put(asking.prove(next(call)))
            self._session = asking.check(next(call))
        except BaseException:
            outbox.put(None)
            call.cancel()
            raise
        finally:
            timer.cancel()
        return call

    def _outgoing(self, outbox: "SimpleQueue[bytes | Frame | None]") -> Iterator[bytes]:
        while (item := outbox.get()) is not None:
            yield item if isinstance(item, bytes) else self._session.seal(item)

    # ---- threads ---------------------------------------------------------------------------------------------------

    def _read(self, call: Iterator[bytes]) -> None:
        try:
            for raw in call:
                self._take(self._session.open(raw))
            reason = None if self._said_bye else "its connection was closed"
        except PlanCorrupt as error:
            self.give_up(error)
            return
        except grpc.RpcError as error:
            reason = "its connection broke"
            if isinstance(error, grpc.Call):
                reason += f" ({error.code().name}: {error.details()})"
        except Exception as error:  # the boundary of the thread: otherwise a stop of the plans would go unnoticed
            self.give_up(EngineStopped(f"what {self._leader} has sent cannot be handled: {error!r}"))
            return
        if reason is not None and not self._closing:
            self._fail(HostLost(f"{self._leader} is lost: {reason}; see its log"))
        self._over.set()

    def _take(self, frame: Frame) -> None:
        if self._is_serving:
            self._hearing.heard(_LEADER)
        if frame.kind is Kind.BEAT:
            return
        if frame.kind is Kind.REFUSED:
            self._fail(HostMismatch(f"{self._leader} refuses this process: {frame.text}"))
        elif frame.kind is Kind.FAILED:
            self._fail(HostLost(f"{self._leader} has ended the service: {frame.text}"))
        elif frame.kind not in (Kind.WELCOME, Kind.PLAN, Kind.ORDER, Kind.BYE):
            raise PlanCorrupt(f"a frame of kind {frame.kind.name} arrived, which process 0 does not send")
        else:
            if frame.kind is Kind.BYE:
                self._said_bye = True
            elif frame.kind is Kind.PLAN:
                if frame.seq != self._next_seq:
                    raise PlanCorrupt(f"plan {frame.seq} arrived, but {self._next_seq} was due")
                self._next_seq += 1
            self._inbox.put(frame)

    def _watch(self) -> None:
        beat = Frame(Kind.BEAT)
        while not self._stopped.wait(self._heartbeat_s / BEATS):
            self._outbox.put(beat)
            for _, silence_s in self._hearing.silent():
                self._fail(
                    HostLost(
                        f"{self._leader} is lost: no sign of life for {silence_s:.1f} s, more than hosts.heartbeat_s = "
                        f"{self._heartbeat_s:g}; look at that host and its network"
                    )
                )

    def _send(self, frame: Frame) -> None:
        self._outbox.put(frame)

    def _next_frame(self) -> Frame:
        frame = self._inbox.get() if self.failure is None else None
        if frame is None:
            assert self.failure is not None
            raise self.failure
        return frame

    def _expect(self, *kinds: Kind) -> Frame:
        frame = self._next_frame()
        if frame.kind not in kinds:
            error = PlanCorrupt(f"a frame of kind {frame.kind.name} arrived where {kinds[0].name} was due")
            self.give_up(error)
            raise error
        return frame

    def _fail(self, error: EngineStopped | HostMismatch) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            callbacks = list(self._callbacks)
        logger.error("%s", error)
        self._inbox.put(None)
        self._over.set()
        for callback in callbacks:
            callback(error)
