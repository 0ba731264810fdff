"""Transfers between slots and a store that hangs, fails and comes back: nothing is lost, nothing is written late."""

import random
import threading
import time
from collections.abc import Callable

import pytest
from fake_store import WAIT_S, FakeStore

from jaxserve.kv import transfer
from jaxserve.kv.conformance import LAYOUT, SCOPES, key_of, page_of
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.store import Outcome, StoreUnavailable
from jaxserve.kv.transfer import Filled, TransferOptions, Transfers, Written

HALF = LAYOUT.page_bytes // 2
LATER_S = 60.0


class Slots:
    """Host memory of a few pages, in two parts each, as for two devices; or in one."""

    def __init__(self, count: int, parts: int = 2) -> None:
        self.memory = [[bytearray(LAYOUT.page_bytes // parts) for _ in range(parts)] for _ in range(count)]

    def __call__(self, slot: int) -> list[memoryview]:
        return [memoryview(part) for part in self.memory[slot]]

    def page(self, slot: int) -> bytes:
        return b"".join(self.memory[slot])

    def write(self, slot: int, page: bytes) -> None:
        start = 0
        for part in self.memory[slot]:
            part[:] = page[start : start + len(part)]
            start += len(part)


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.001)


def events(transfers: Transfers, count: int) -> list[Filled | Written]:
    found: list[Filled | Written] = []
    until(lambda: found.extend(transfers.poll()) or len(found) >= count)
    assert len(found) == count
    return found


@pytest.mark.parametrize("parts", [1, 2])
def test_pages_go_out_and_come_back(parts: int) -> None:
    slots, woken = Slots(6, parts), threading.Event()
    transfers = Transfers(MemoryStore(LAYOUT.page_bytes, 1 << 20), slots, wake=woken.set)
    for slot in range(3):
        slots.write(slot, page_of(key_of(slot)))
        assert transfers.write_behind(key_of(slot), slot)
    assert sorted(events(transfers, 3), key=lambda event: event.slot) == [
        Written(key=key_of(slot), slot=slot, outcome=Outcome.OK) for slot in range(3)
    ]
    assert woken.is_set()
    ticket = transfers.fill([key_of(number) for number in (0, 1, 99)], [3, 4, 5], LATER_S)
    assert ticket is not None
    assert events(transfers, 1) == [
        Filled(ticket=ticket, slots=(3, 4, 5), outcomes=(Outcome.OK, Outcome.OK, Outcome.MISS))
    ]
    assert [slots.page(slot) for slot in (3, 4, 5)] == [page_of(key_of(0)), page_of(key_of(1)), bytes(1024)]
    assert transfers.counts["fill_ok"] == 2 and transfers.counts["fill_miss"] == 1
    assert transfers.close() and transfers.num_pending == 0
    assert transfers.fill([key_of(0)], [0], LATER_S) is None, "closed"
    assert not transfers.write_behind(key_of(0), 0)


def test_calls_return_at_once_and_queues_are_bounded() -> None:
    store, slots = FakeStore(), Slots(1)
    options = TransferOptions(fill_threads=1, max_fills=2, max_writes=2)
    transfers = Transfers(store, slots, options=options)
    store.go.clear()
    tickets = [transfers.fill([key_of(0)], [0], LATER_S)]
    assert store.entered.acquire(timeout=WAIT_S)
    tickets += [transfers.fill([key_of(number)], [0], LATER_S) for number in range(1, 5)]
    assert [ticket is not None for ticket in tickets] == [True, True, True, False, False]
    assert transfers.write_behind(key_of(0), 0)
    assert store.entered.acquire(timeout=WAIT_S)
    assert [transfers.write_behind(key_of(number), 0) for number in (0, 1, 2, 3)] == [False, True, True, False]
    assert transfers.counts["fills_refused"] == 2 and transfers.counts["writes_skipped"] == 2
    assert transfers.num_pending == 6 and transfers.poll() == []
    store.go.set()
    assert {type(event) for event in events(transfers, 6)} == {Filled, Written}
    assert transfers.close()


def test_a_fill_that_waited_too_long_is_not_begun() -> None:
    store = FakeStore()
    transfers = Transfers(store, Slots(2), options=TransferOptions(fill_threads=1))
    store.go.clear()
    first = transfers.fill([key_of(0)], [0], LATER_S)
    assert store.entered.acquire(timeout=WAIT_S)
    second = transfers.fill([key_of(1)], [1], 0.0)
    store.go.set()
    done = {event.ticket: event for event in events(transfers, 2) if isinstance(event, Filled)}
    assert done[first].outcomes == (Outcome.OK,) and done[second].outcomes == (Outcome.LATE,)
    assert [keys for _, keys in store.calls] == [(key_of(0),)]
    assert transfers.close()


def test_what_is_cancelled_before_it_began_is_not_asked_for_and_still_ends() -> None:
    store = FakeStore()
    transfers = Transfers(store, Slots(3), options=TransferOptions(fill_threads=1))
    store.go.clear()
    tickets = [transfers.fill([key_of(slot)], [slot], LATER_S) for slot in range(3)]
    assert store.entered.acquire(timeout=WAIT_S)
    for ticket in tickets[:2]:
        assert ticket is not None
        transfers.cancel(ticket)
    transfers.cancel(12345)  # it has ended long ago
    assert transfers.poll() == [], "the slot of a running fill is not free yet"
    store.go.set()
    done = {event.ticket: event for event in events(transfers, 3) if isinstance(event, Filled)}
    assert [done[ticket].cancelled for ticket in tickets] == [False, True, False]
    assert done[tickets[1]].slots == (1,)
    assert (("get", (key_of(1),))) not in store.calls and transfers.counts["cancelled"] == 1
    assert transfers.close()


def test_prefetches_are_bounded_and_counted() -> None:
    store = FakeStore()
    store.answer = lambda key: {key_of(1): Outcome.LATE}.get(key, Outcome.OK)
    transfers = Transfers(store, Slots(8), options=TransferOptions(max_prefetch_slots=5))
    first = transfers.prefetch([key_of(number) for number in range(3)], [0, 1, 2], LATER_S)
    second = transfers.prefetch([key_of(8), key_of(9)], [3, 4], LATER_S)
    assert first is not None and second is not None
    assert transfers.prefetch([key_of(7)], [5], LATER_S) is None, "six slots"
    assert transfers.fill([key_of(7)], [5], LATER_S) is not None, "a request that waits is not a guess"
    events(transfers, 3)
    assert transfers.prefetch([key_of(7)], [5], LATER_S) is None, "loaded, not settled"
    transfers.settle(first, 1)
    transfers.settle(second, 0)
    assert {name: transfers.counts[f"prefetch_{name}"] for name in ("used", "late", "wasted")} == {
        "used": 1,
        "late": 1,
        "wasted": 3,
    }
    third = transfers.prefetch([key_of(7)], [5], LATER_S)
    assert third is not None
    events(transfers, 1)
    transfers.settle(third, 1)
    assert transfers.close()


def test_a_store_that_raises_or_dies_costs_pages_and_nothing_else() -> None:
    store, slots = FakeStore(), Slots(2)
    transfers = Transfers(store, slots)
    store.error = OSError("gone")
    for _ in range(8):
        assert transfers.fill([key_of(0)], [0], LATER_S) is not None
        (event,) = events(transfers, 1)
        assert isinstance(event, Filled) and event.outcomes == (Outcome.FAILED,)
    assert len(store.calls) == 3 and transfers.guard.counts["opened"] == 1
    assert not any(slots.page(0))
    assert transfers.write_behind(key_of(1), 1)
    assert events(transfers, 1) == [Written(key=key_of(1), slot=1, outcome=Outcome.FAILED)]
    assert transfers.close()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit()])
def test_slots_come_back_whatever_goes_wrong(error: BaseException) -> None:
    """Even where a thread is ended by code of somebody; and there is one for the transfers after it."""

    class Ends(FakeStore):
        def get(self, keys, into, deadline_s):
            raise error

        put = get

    def no_bytes(slot: int) -> list[memoryview]:
        raise error

    options = TransferOptions(fill_threads=1, write_threads=1)
    for transfers in (Transfers(Ends(), Slots(1), options=options), Transfers(FakeStore(), no_bytes, options=options)):
        for _ in range(2):
            ticket = transfers.fill([key_of(0)], [0], LATER_S)
            assert events(transfers, 1) == [Filled(ticket=ticket, slots=(0,), outcomes=(Outcome.FAILED,))]
            assert transfers.write_behind(key_of(0), 0)
            assert events(transfers, 1) == [Written(key=key_of(0), slot=0, outcome=Outcome.FAILED)]
        assert transfers.close()


def test_a_flush_reaches_writes_that_wait_and_that_run() -> None:
    store, slots = FakeStore(), Slots(4)
    transfers = Transfers(store, slots)
    mine = [key_of(number, SCOPES[0]) for number in range(3)]
    other = key_of(0, SCOPES[1])
    store.go.clear()
    for slot, key in enumerate([*mine, other]):
        slots.write(slot, page_of(key))
        assert transfers.write_behind(key, slot)
    assert store.entered.acquire(timeout=WAIT_S)  # the first runs, the others wait
    flushing = threading.Thread(target=transfers.flush, args=(SCOPES[0],))
    flushing.start()
    until(lambda: len(transfers._dropped) == 2)
    assert ("flush", (SCOPES[0],)) not in store.calls, "a write that runs would bring its page back"
    store.go.set()
    flushing.join(WAIT_S)
    outcomes = {event.key: event.outcome for event in events(transfers, 4) if isinstance(event, Written)}
    assert outcomes == {mine[0]: Outcome.OK, mine[1]: Outcome.REFUSED, mine[2]: Outcome.REFUSED, other: Outcome.OK}
    assert store.stored == {other: bytes(page_of(other))}
    assert transfers.write_behind(mine[1], 1), "a new page of that tenant is welcome"
    assert events(transfers, 1) == [Written(key=mine[1], slot=1, outcome=Outcome.OK)]
    assert transfers.close()


def test_a_flush_that_cannot_be_sure_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SETTLE_S", 0.05)
    store = FakeStore()
    transfers = Transfers(store, Slots(1))
    store.go.clear()
    assert transfers.write_behind(key_of(0), 0)
    assert store.entered.acquire(timeout=WAIT_S)
    with pytest.raises(StoreUnavailable, match="being written"):
        transfers.flush(None)
    store.go.set()
    events(transfers, 1)
    assert transfers.close()


def test_close_drains_writes() -> None:
    store, slots = FakeStore(), Slots(20)
    transfers = Transfers(store, slots)
    for slot in range(20):
        slots.write(slot, page_of(key_of(slot)))
        assert transfers.write_behind(key_of(slot), slot)
    assert transfers.close()
    assert store.stored == {key_of(slot): bytes(page_of(key_of(slot))) for slot in range(20)}
    assert len(transfers.poll()) == 20
    assert ("close", ()) not in store.calls, "replicas share a store"


def test_close_does_not_wait_for_ever_and_says_what_hangs() -> None:
    store = FakeStore()
    transfers = Transfers(store, Slots(1))
    store.go.clear()
    transfers.fill([key_of(0)], [0], LATER_S)
    assert store.entered.acquire(timeout=WAIT_S)
    assert not transfers.close(0.05)
    store.go.set()
    until(lambda: transfers.num_pending == 0)


def test_random_operations_lose_no_slot() -> None:
    """Failures and cancels at random moments: each accepted transfer ends once, with the right bytes."""
    rng = random.Random(0)
    store, slots = FakeStore(), Slots(32)
    store.answer = lambda key: rng.choice([Outcome.OK, Outcome.OK, Outcome.MISS, Outcome.BAD])
    transfers = Transfers(store, slots, options=TransferOptions(max_fills=8, max_writes=8, max_prefetch_slots=6))
    free, fills, writes, prefetches = set(range(32)), {}, {}, set()
    for _ in range(3000):
        for event in transfers.poll():
            if isinstance(event, Written):
                assert writes.pop(event.slot) == event.key
                free.add(event.slot)
                continue
            keys = fills.pop(event.ticket)
            for key, slot, outcome in zip(keys, event.slots, event.outcomes, strict=True):
                assert outcome is not Outcome.OK or slots.page(slot) == page_of(key)
                free.add(slot)
            if event.ticket in prefetches:
                prefetches.discard(event.ticket)
                transfers.settle(event.ticket, event.outcomes.count(Outcome.OK))
        count = rng.randrange(1, 4)
        if len(free) < count:
            time.sleep(0.001)
            continue
        taken = rng.sample(sorted(free), count)
        choice = rng.random()
        if choice < 0.6:
            keys = [key_of(rng.randrange(100)) for _ in taken]
            start = transfers.prefetch if choice < 0.2 else transfers.fill
            ticket = start(keys, taken, LATER_S)
            if ticket is not None:
                fills[ticket] = keys
                free -= set(taken)
                if choice < 0.2:
                    prefetches.add(ticket)
        elif choice < 0.9:
            key = key_of(rng.randrange(100))
            slots.write(taken[0], page_of(key))
            if transfers.write_behind(key, taken[0]):
                writes[taken[0]] = key  # by slot: a page may be written again before the first event is read
                free.discard(taken[0])
        elif fills:
            transfers.cancel(rng.choice(list(fills)))
    assert transfers.close()
    for event in transfers.poll():
        free |= {event.slot} if isinstance(event, Written) else set(event.slots)
    assert free == set(range(32))
    assert all(stored == page_of(key) for key, stored in store.stored.items())
