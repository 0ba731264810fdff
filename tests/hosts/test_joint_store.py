"""The stores of two processes as one: over the real plan channel, with real stores and fake devices."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest
from channel_parts import WAIT_S, Pair, Slots, Stream, in_thread, leading, page_store, wait_until

from jaxserve.errors import PlanCorrupt
from jaxserve.hosts import JointStore
from jaxserve.hosts.frames import Frame, Kind, make_frame
from jaxserve.kv.store import StoreUnavailable
from jaxserve.sched.loading import Filled, StoreKey, Written

SALT = "a tenant"


class Both:
    """Two processes with four slots and a store each."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.slots = [Slots(), Slots()]
        self.stores = [page_store(slots, number) for number, slots in enumerate(self.slots)]
        for store, slots in zip(self.stores, self.slots, strict=True):
            stack.callback(store.close)
            stack.callback(slots.go.set)
        self.pair = Pair(stack, stores=self.stores)
        self.joint = self.pair.joint

    def event(self) -> Filled | Written:
        """The next event."""
        found: list[Filled | Written] = []
        wait_until(lambda: bool(found.extend(self.joint.poll()) or found), "an event")
        [event] = found
        return event

    def write(self, number: int, slot: int) -> None:
        """Each process writes a part of its own."""
        for process_id, slots in enumerate(self.slots):
            slots.memory[slot][:] = part(process_id, number)
        assert self.joint.write(page(number), slot)
        assert self.event() == Written(slot)

    def fill(self, numbers: Sequence[int], slots: Sequence[int]) -> tuple[bool, ...]:
        """Whether the pages came."""
        ticket = self.joint.fill([page(number) for number in numbers], slots, WAIT_S)
        event = self.event()
        assert isinstance(event, Filled) and event.ticket == ticket
        return event.ok

    def has_answered(self, process_id: int) -> bool:
        """Of the one order that has not ended."""
        [pending] = self.joint._pending.values()
        return process_id not in pending.waiting


@pytest.fixture
def both() -> Iterator[Both]:
    with contextlib.ExitStack() as stack:
        yield Both(stack)


def page(number: int, salt: str = SALT) -> StoreKey:
    return StoreKey(salt, number.to_bytes(32, "little"))


def part(process_id: int, number: int) -> bytes:
    return bytes([16 * process_id + number]) * (4 * Slots.words)


def test_a_page_is_found_if_every_process_has_its_part(both: Both) -> None:
    both.write(1, 0)
    both.write(2, 1)
    assert both.fill([1, 2, 3], [2, 3, 0]) == (True, True, False)
    for process_id, slots in enumerate(both.slots):
        assert slots.memory[2] == part(process_id, 1) and slots.memory[3] == part(process_id, 2)
    both.stores[1].flush(SALT)
    assert both.fill([1], [3]) == (False,), "process 0 has its part still"
    pages = both.joint.counts.pages
    assert (pages["filled"], pages["missed"], pages["written"]) == (2, 2, 2)


def test_a_flush_reaches_all(both: Both) -> None:
    both.write(1, 0)
    both.joint.flush("another tenant")
    assert both.fill([1], [1]) == (True,)
    both.joint.flush(SALT)
    assert [one.fill([page(1)], [1], WAIT_S) is not None for one in both.stores] == [True, True]
    wait_until(lambda: all(one.counts.pages["missed"] == 1 for one in both.stores), "neither has it")


def test_a_flush_that_fails_somewhere_says_where(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(salt: str | None) -> None:
        raise StoreUnavailable("the drive is read-only")

    monkeypatch.setattr(both.stores[1], "flush", fail)
    with pytest.raises(StoreUnavailable, match=r"process 1: .*the drive is read-only"):
        both.joint.flush(None)


def test_an_order_keeps_its_place_behind_the_plans_before_it(both: Both) -> None:
    """The plans before it may still load from the slot, or save to it."""
    both.write(1, 0)
    both.pair.there.takes.clear()
    ran = in_thread(both.pair.run)
    wait_until(lambda: len(both.pair.here.inner.plans) > 1, "the other process is behind")
    ticket = both.joint.fill([page(1)], [1], WAIT_S)
    wait_until(lambda: both.has_answered(0), "process 0 has its part")
    assert both.joint.poll() == [] and both.slots[1].memory[1] == bytes(4 * Slots.words)
    both.pair.there.takes.set()
    assert both.event() == Filled(ticket or -1, (True,))
    ran.result(WAIT_S)


def test_a_store_that_is_late_stalls_no_step(both: Both) -> None:
    both.write(1, 0)
    both.slots[1].go.clear()
    ticket = both.joint.fill([page(1)], [1], WAIT_S)
    both.pair.run()
    assert both.joint.poll() == [], "the slot is the order's until the last process has answered"
    both.joint.cancel(ticket or -1)
    both.slots[1].go.set()
    assert isinstance(both.event(), Filled)
    both.pair.runner.close(WAIT_S)
    both.pair.leader.finish(WAIT_S)
    assert both.pair.there.inner.plans == both.pair.here.inner.plans


def test_prefetches_are_settled_everywhere(both: Both) -> None:
    both.write(1, 0)
    both.write(2, 1)
    both.stores[1].flush(SALT)
    both.write(1, 0)
    ticket = both.joint.prefetch([page(1), page(2)], [2, 3], WAIT_S)
    assert ticket is not None and both.event() == Filled(ticket, (True, False))
    both.joint.settle(ticket, 1)
    for store, wasted in zip(both.stores, (1, 0), strict=True):
        wait_until(lambda store=store: store.counts.pages["prefetch_used"] == 1, "it has heard")
        assert store.counts.pages["prefetch_wasted"] == wasted


def test_orders_are_bounded_in_number_and_length(both: Both) -> None:
    joint, there = both.joint, both.slots[1]
    there.go.clear()
    assert joint.write(page(0), 0) and not joint.write(page(0), 1), "it is on its way"
    assert all(joint.fill([page(1)], [1], WAIT_S) is not None for _ in range(64))
    assert joint.fill([page(1)], [1], WAIT_S) is None
    assert joint.prefetch([page(2)] * 40, [2] * 40, WAIT_S) is not None
    assert joint.prefetch([page(3)] * 25, [3] * 25, WAIT_S) is None
    assert all(joint.write(page(number), 0) for number in range(1, 256)) and not joint.write(page(256), 0)
    assert joint.counts.pages["write_skipped"] == 2
    long = "x" * 2**20
    assert joint.prefetch([page(2, long)], [2], WAIT_S) is None
    with pytest.raises(StoreUnavailable, match=r"1,048,576 characters is too long .* hosts\.max_plan_bytes"):
        joint.flush(long)
    assert both.pair.leader.failure is None


@pytest.mark.parametrize("ends", ["lost", "closed"])
def test_the_end_of_the_service_ends_a_flush(both: Both, ends: str) -> None:
    both.pair.there.takes.clear()
    ran = in_thread(both.pair.run)
    wait_until(lambda: len(both.pair.here.inner.plans) > 1, "the other process is behind")
    flushed = in_thread(lambda: both.joint.flush(None))
    wait_until(lambda: bool(both.joint._pending) and both.has_answered(0), "process 0 has flushed")
    if ends == "lost":
        both.pair.link.close()
    else:
        both.joint.close()
    with pytest.raises(StoreUnavailable, match=r"store of process 1: .*(is lost|has ended).*; flush again"):
        flushed.result(WAIT_S)
    both.pair.there.takes.set()
    with contextlib.suppress(Exception):
        ran.result(WAIT_S)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda number: Frame(Kind.OUTCOME, number, b"\xff"), "outcome of order 0 cannot be read: Invalid JSON"),
        (lambda number: make_frame(Kind.OUTCOME, {"ok": [1]}, number), r"cannot be read: ok\.0: .*valid boolean"),
        (lambda number: make_frame(Kind.OUTCOME, {"ok": []}, number), "order 0 is of 0 slots, not 1"),
        (lambda number: make_frame(Kind.OUTCOME, {"ok": [True]}, number + 1), "outcome of order 1 arrived, which was"),
    ],
)
def test_an_outcome_that_makes_no_sense_ends_the_service_with_a_word(answer: Callable[[int], Frame], text: str) -> None:
    with leading() as leader, grpc.insecure_channel(f"127.0.0.1:{leader.port}") as channel:
        stream = Stream(channel)
        with contextlib.closing(stream):
            stream.join()
            joint = JointStore(page_store(Slots(), 0), num_processes=2, send=leader.order, in_order=lambda work: None)
            leader.on_outcome(joint.take)
            number = joint.fill([page(1)], [1], WAIT_S)
            assert number is not None
            stream.say(answer(number))
            wait_until(lambda: leader.failure is not None, "it was found")
            with pytest.raises(PlanCorrupt, match=rf"process 1 \(b, .*{text}"):
                leader.broadcast(b"")
