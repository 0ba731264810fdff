"""Both ends of the plan channel in one process, and another process by hand."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from jaxserve.hosts import Follower, Leader, Trust
from jaxserve.hosts.frames import Frame
from jaxserve.hosts.handshake import Asking
from jaxserve.hosts.link import METHOD, server_options, transport_options

WAIT_S = 120.0
TRUST = Trust(b"a secret of all processes")


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
