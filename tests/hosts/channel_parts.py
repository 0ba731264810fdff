"""Both ends of the plan channel in one process, with fake devices and real stores, and another process by hand."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from jaxserve.assemble.many_hosts import join_stores
from jaxserve.assemble.page_store import PageStore, PageStores
from jaxserve.config.schema import StoreConfig
from jaxserve.errors import EngineStopped
from jaxserve.hosts import Follower, Leader, LeaderRunner, LocalStore, StepDigest, StorePart, Trust, follow
from jaxserve.hosts.frames import Frame
from jaxserve.hosts.handshake import Asking
from jaxserve.hosts.link import METHOD, server_options, transport_options
from jaxserve.sched import InFlight, StepPlan, StepResult, create_scheduler
from jaxserve.testing import FakeRunner, drive, make_limits, make_request

WAIT_S = 120.0
TRUST = Trust(b"a secret of all processes")
LIMITS = make_limits()


@contextlib.contextmanager
def leading(
    num_processes: int = 2, heartbeat_s: float = WAIT_S, *, trust: Trust = TRUST, **changes: Any
) -> Iterator[Leader]:
    settings = {"address": "127.0.0.1:0", "check_every": 4, "max_plan_bytes": 2**20, **changes}
    leader = Leader(num_processes=num_processes, heartbeat_s=heartbeat_s, trust=trust, **settings)
    try:
        yield leader
    finally:
        leader.close()


@contextlib.contextmanager
def joined(leader: Leader, process_id: int = 1, heartbeat_s: float = WAIT_S, **changes: Any) -> Iterator[Follower]:
    settings = {"num_processes": leader._num_processes, "host": f"host-{process_id}", **changes}
    link = follower(f"127.0.0.1:{leader.port}", process_id, heartbeat_s, **settings)
    try:
        yield link
    finally:
        link.close()


def follower(address: str, process_id: int = 1, heartbeat_s: float = WAIT_S, **changes: Any) -> Follower:
    settings = {"num_processes": 2, "host": "a", "join_s": WAIT_S, "max_plan_bytes": 2**20, "trust": TRUST, **changes}
    return Follower(address=address, process_id=process_id, heartbeat_s=heartbeat_s, **settings)


def ping_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the heartbeat is, connections break for want of a ping's answer after WAIT_S.

    Both follow from one setting. A test of Python's silence wants it short, and a busy machine answers no ping so soon.
    """
    monkeypatch.setattr("jaxserve.hosts.follower.transport_options", lambda _, size: transport_options(WAIT_S, size))
    monkeypatch.setattr(
        "jaxserve.hosts.leader.server_options", lambda _, number, size: server_options(WAIT_S, number, size)
    )


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    """What `work` returns or raises, from a thread that keeps nobody from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"in vain: {what}"
        time.sleep(0.002)


class Stream:
    """Another process, by hand: says just this on a real connection, and hears what comes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self.replies = channel.stream_stream(METHOD)(iter(self._outbox.get, None), timeout=WAIT_S)

    def join(self, secret: bytes = TRUST.secret, process_id: int = 1) -> None:
        asking = Asking(secret, process_id=process_id, num_processes=2, host="b")
        self.say_raw(asking.hello)
        self.say_raw(asking.prove(next(self.replies)))
        self.session = asking.check(next(self.replies))

    def say(self, frame: Frame) -> None:
        self.say_raw(self.session.seal(frame))

    def say_raw(self, raw: bytes) -> None:
        self._outbox.put(raw)

    def close(self) -> None:
        self._outbox.put(None)
        self.replies.cancel()


class Observed:
    """A fake device that tells what it was fed, and that can be held."""

    def __init__(self, digest: StepDigest, *, wrong_token_at: int = -1) -> None:
        self.inner = FakeRunner(LIMITS, vocab_size=100)
        self.limits = LIMITS
        self.takes = threading.Event()  # cleared: `dispatch` hangs
        self.takes.set()
        self.open = threading.Event()  # cleared: steps do not end
        self.open.set()
        self._digest = digest
        self._wrong_token_at = wrong_token_at

    def dispatch(self, plan: StepPlan) -> InFlight:
        assert self.takes.wait(WAIT_S)
        self._digest.observe(plan.to_json().encode())
        return _Held(self.inner.dispatch(plan), self.open, plan.step_id == self._wrong_token_at)


class _Held:
    def __init__(self, inner: InFlight, opened: threading.Event, wrong: bool) -> None:
        self._inner = inner
        self._open = opened
        self._wrong = wrong

    def result(self) -> StepResult:
        assert self._open.wait(WAIT_S)
        result = self._inner.result()
        return StepResult(token_ids=[t + 1 for t in result.token_ids]) if self._wrong else result


class Pair:
    """Process 0's runner, and another process that follows on a thread.

    `patience_s` is how long either waits for the channel to say why a device fails. `stores`: of the two; `joint` is
    then both as one.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        *,
        patience_s: float = WAIT_S,
        stall_s: float = WAIT_S,
        wrong_token_at: int = -1,
        stores: Sequence[LocalStore] = (),
    ) -> None:
        self.leader = stack.enter_context(leading())
        self.link = stack.enter_context(joined(self.leader))
        digests = [StepDigest() for _ in range(2)]
        self.here = Observed(digests[0])
        self.there = Observed(digests[1], wrong_token_at=wrong_token_at)
        for event in (self.here.open, self.here.takes, self.there.open, self.there.takes):
            stack.callback(event.set)
        met = in_thread(lambda: self.link.meet("ready", {}, {}))
        self.leader.meet("ready", {}, {}, WAIT_S)
        met.result(WAIT_S)
        part = StorePart(stores[1], self.link.answer) if stores else None
        options = {"heartbeat_s": patience_s, "check_every": 4, "finish_s": WAIT_S, "store": part}
        self.followed = in_thread(lambda: follow(self.there, self.link, digests[1], **options))
        stack.callback(lambda: self.link.give_up(EngineStopped("the test has ended")))
        self.runner = LeaderRunner(self.here, self.leader, digests[0], heartbeat_s=patience_s, stall_s=stall_s)
        if stores:
            self.joint = join_stores(self.leader, self.runner, 2, stores[0])

    def run(self, *, max_tokens: int = 30) -> dict[Any, Any]:
        requests = [make_request("a", [1, 2, 3], max_tokens), make_request("b", [50], max_tokens)]
        return drive(create_scheduler("fcfs", LIMITS), self.runner, requests)

    def run_to_the_end(self) -> None:
        self.run(max_tokens=40)
        self.runner.close(WAIT_S)
        self.leader.finish(WAIT_S)


class Slots:
    """Host memory of a process. While `go` is cleared, no page is taken from it or brought to it."""

    words = 16

    def __init__(self, num_slots: int = 4) -> None:
        self.memory = [bytearray(4 * self.words) for _ in range(num_slots)]
        self.go = threading.Event()
        self.go.set()

    def wait_for(self, slots: Sequence[int]) -> None:
        assert self.go.wait(WAIT_S)

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(self.memory[slot])]


def page_store(slots: Slots, part: int) -> PageStore:
    """A real store, in the memory of this process, of one process of a service."""
    stores = PageStores(StoreConfig(kind="memory", max_bytes=1 << 20))
    return stores.open(slots, f"part {part} of 2", "model")  # pyright: ignore[reportArgumentType]
