"""The end of every other process: joins, keeps in touch, takes plans in order, reports.

Owns the connection to process 0 and what its silence means. Refuses to execute anything (`follow` does) and to end the
process: it raises, whoever started it decides.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue

import grpc

from jaxserve.errors import EngineStopped, HostLost, HostMismatch, PlanCorrupt
from jaxserve.hosts.frames import Frame, Kind, decode, encode, make_frame
from jaxserve.hosts.link import BEATS, METHOD, Hearing, Peer, transport_options

logger = logging.getLogger(__name__)

_LEADER = 0


class Follower:
    """Process 0, as another process sees it. Methods may be called from any thread, `meet` and `frames` from one."""

    def __init__(self, *, address: str, process_id: int, host: str, heartbeat_s: float, join_s: float) -> None:
        """Connects; raises HostLost when nothing answers at `address` (HOST:PORT) within `join_s`."""
        self.failure: EngineStopped | HostMismatch | None = None
        self._leader = Peer(_LEADER, address.rpartition(":")[0], address)
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[BaseException], None]] = []
        self._inbox: SimpleQueue[Frame | None] = SimpleQueue()  # None: see `failure`
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._hearing = Hearing(heartbeat_s)
        self._is_serving = False
        self._said_bye = False  # process 0 has: the end of the stream is expected
        self._closing = False  # so is any end
        self._over = threading.Event()  # nothing more is to be expected: it has failed, or the stream has ended
        self._stopped = threading.Event()
        self._next_seq = 0
        self._channel = grpc.insecure_channel(address, options=transport_options(heartbeat_s))
        try:
            grpc.channel_ready_future(self._channel).result(join_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise HostLost(
                f"{self._leader} does not answer within {join_s:g} s; is it running, and do hosts.coordinator and "
                "hosts.plan_port name a port of its host that a firewall lets through?"
            ) from None
        self._outbox.put(encode(make_frame(Kind.HELLO, {"host": host}, process_id)))
        call = self._channel.stream_stream(METHOD)(iter(self._outbox.get, None))
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
        frame = self._next_frame()
        assert frame.kind is Kind.WELCOME, frame
        assert frame.fields["stage"] == stage, frame
        return frame.fields["numbers"]

    def start_serving(self) -> None:
        """From now on silence of process 0's Python is a failure, too, and not of its connection alone."""
        self._hearing.heard(_LEADER)
        self._is_serving = True

    def plans(self) -> Iterator[tuple[int, bytes]]:
        """(seq, plan) of each step, in order, until process 0 says that there are no more.

        Raises HostLost, PlanCorrupt or what `give_up` was called with.
        """
        while (frame := self._next_frame()).kind is Kind.PLAN:
            yield frame.seq, frame.payload
        assert frame.kind is Kind.BYE, frame

    def report(self, seq: int, digest: bytes) -> None:
        """The digest of all steps up to `seq`."""
        self._send(Frame(Kind.REPORT, seq, digest))

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
        """Sends what is left, then closes the connection. For process 0 a loss, unless it has said that it ends."""
        self._closing = True
        self._outbox.put(None)
        self._threads[0].join(timeout_s)
        self._stopped.set()
        self._channel.close()
        self._threads[1].join(timeout_s)

    # ---- threads ---------------------------------------------------------------------------------------------------

    def _read(self, call: Iterator[bytes]) -> None:
        try:
            for raw in call:
                self._take(decode(raw))
            reason = None if self._said_bye else "its connection was closed"
        except PlanCorrupt as error:
            self.give_up(error)
            return
        except grpc.RpcError as error:
            reason = "its connection broke"
            if isinstance(error, grpc.Call):
                reason += f" ({error.code().name}: {error.details()})"
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
        else:
            if frame.kind is Kind.BYE:
                self._said_bye = True
            elif frame.kind is Kind.PLAN:
                if frame.seq != self._next_seq:
                    raise PlanCorrupt(f"plan {frame.seq} arrived, but {self._next_seq} was due")
                self._next_seq += 1
            self._inbox.put(frame)

    def _watch(self) -> None:
        beat = encode(Frame(Kind.BEAT))
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
        self._outbox.put(encode(frame))

    def _next_frame(self) -> Frame:
        frame = self._inbox.get() if self.failure is None else None
        if frame is None:
            assert self.failure is not None
            raise self.failure
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
