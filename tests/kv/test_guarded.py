"""The circuit breaker around a store, on a clock that is turned by hand."""

import logging
import threading

import pytest
from fake_store import WAIT_S, FakeStore

from jaxserve.kv.conformance import LAYOUT, conformance, get, key_of
from jaxserve.kv.guarded import Guarded
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.store import Outcome, StoreUnavailable

KEYS = [key_of(0), key_of(1)]

TestGuarded = conformance(lambda layout, path: Guarded(MemoryStore(layout.page_bytes, 1 << 20)))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_dead_store_is_left_alone_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = FakeStore(), Clock()
    guard = Guarded(store, place="the bucket", clock=clock)
    store.error = ConnectionError("refused")
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert get(guard, KEYS) == [Outcome.FAILED] * 2
    assert len(store.calls) == 3, "a dead store costs three calls, and then nothing"
    assert guard.counts["skipped"] == 14 and guard.counts["opened"] == 1
    assert caplog.text.count("left alone") == 1
    assert guard.contains(KEYS) == [False] * 2 and len(store.calls) == 3
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        clock.now_s += pause_s - 0.01
        get(guard, KEYS)
        calls = len(store.calls)
        clock.now_s += 0.02
        get(guard, KEYS)
        get(guard, KEYS)
        assert len(store.calls) == calls + 1, f"one try after {pause_s} s"
    store.error = None
    clock.now_s += 61
    with caplog.at_level(logging.WARNING):
        assert guard.contains(KEYS) == [True] * 2, "asking what there is tries the store, too"
        assert get(guard, KEYS) == get(guard, KEYS) == [Outcome.OK] * 2
    assert caplog.text.count("works again") == 1
    assert caplog.text.count("left alone") == 1


def test_lateness_counts_and_misses_do_not() -> None:
    store, clock = FakeStore(), Clock()
    guard = Guarded(store, clock=clock)
    for outcome in (Outcome.MISS, Outcome.BAD, Outcome.REFUSED):
        store.outcome = outcome
        for _ in range(5):
            assert get(guard, KEYS) == [outcome] * 2
    store.answer = lambda key: Outcome.OK if key == KEYS[0] else Outcome.LATE
    for _ in range(5):
        get(guard, KEYS)
    assert not guard.counts["opened"], "half of the pages came"
    store.answer = lambda key: Outcome.LATE
    for _ in range(2):
        get(guard, KEYS)
    store.answer = lambda key: Outcome.OK
    get(guard, KEYS)
    store.answer = lambda key: Outcome.LATE
    for _ in range(2):
        get(guard, KEYS)
    assert not guard.counts["opened"], "not in a row"
    get(guard, KEYS)
    assert guard.counts["opened"] == 1 and guard.counts["get late"] == 15


def test_lateness_at_a_short_deadline_says_nothing_about_a_store() -> None:
    store, clock = FakeStore(), Clock()
    guard = Guarded(store, clock=clock)
    store.outcome = Outcome.LATE
    for _ in range(10):
        assert get(guard, KEYS, 0.99) == [Outcome.LATE] * 2
    assert len(store.calls) == 10, "it may be far away"
    get(guard, KEYS, 1.0)
    get(guard, KEYS, 1.0)
    get(guard, KEYS, 0.5)
    get(guard, KEYS, 1.0)
    assert guard.counts["opened"] == 1, "a short call between them is no sign of life"
    clock.now_s += 1.01
    assert get(guard, KEYS, 0.5) == [Outcome.LATE] * 2, "this one tries"
    assert get(guard, KEYS, 0.5) == [Outcome.FAILED] * 2, "the store is still left alone"
    clock.now_s += 1.01
    store.outcome = Outcome.MISS
    assert get(guard, KEYS, 0.5) == get(guard, KEYS, 0.5) == [Outcome.MISS] * 2


def test_one_thread_tries_while_others_are_answered() -> None:
    store, clock = FakeStore(), Clock()
    guard = Guarded(store, clock=clock)
    store.outcome = Outcome.FAILED
    for _ in range(3):
        get(guard, KEYS)
    clock.now_s += 2
    store.outcome = Outcome.OK
    store.go.clear()
    for _ in range(3):
        assert store.entered.acquire(timeout=WAIT_S)
    results: list[list[Outcome]] = []
    trying = threading.Thread(target=lambda: results.append(get(guard, KEYS)))
    trying.start()
    assert store.entered.acquire(timeout=WAIT_S)
    assert get(guard, KEYS) == [Outcome.FAILED] * 2
    store.go.set()
    trying.join()
    assert results == [[Outcome.OK] * 2] and get(guard, KEYS) == [Outcome.OK] * 2


def test_a_clock_that_jumps_forward_only_tries_earlier() -> None:
    store, clock = FakeStore(), Clock()
    guard = Guarded(store, clock=clock)
    store.outcome = Outcome.FAILED
    for _ in range(3):
        get(guard, KEYS)
    clock.now_s += 1e9
    get(guard, KEYS)
    clock.now_s += 1.9
    assert len(store.calls) == 4 and get(guard, KEYS) == [Outcome.FAILED] * 2 and len(store.calls) == 4


def test_stores_of_others_may_do_anything(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.error = RuntimeError("nobody knows")
    guard = Guarded(store)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            assert guard.contains(KEYS) == [False] * 2
    assert caplog.text.count("nobody knows") == 3 == len(store.calls)
    guard.close()


@pytest.mark.parametrize(
    "answer", [[Outcome.OK], [Outcome.OK] * 3, [True, True], ["ok", "ok"], None, 7, {Outcome.OK: 1, Outcome.MISS: 2}]
)
def test_an_answer_of_the_wrong_length_or_type_is_a_fault_without_pages(answer: object) -> None:
    class Broken(FakeStore):
        def get(self, keys, into, deadline_s):
            self.calls.append(("get", tuple(keys)))
            return answer

        put = get

        def contains(self, keys):
            self.calls.append(("contains", tuple(keys)))
            return [0, 1] if isinstance(answer, list) else answer

    store = Broken()
    guard = Guarded(store)
    assert get(guard, KEYS) == [Outcome.FAILED] * 2
    assert guard.put(KEYS, [memoryview(b"x")] * 2, 1.0) == [Outcome.FAILED] * 2
    assert guard.contains(KEYS) == guard.contains(KEYS) == [False] * 2
    assert len(store.calls) == 3 and guard.counts["opened"] == 1


def test_a_store_that_ends_its_thread_is_tried_again() -> None:
    class Ends(FakeStore):
        def get(self, keys, into, deadline_s):
            raise SystemExit

    clock = Clock()
    guard = Guarded(Ends(), clock=clock)
    for _ in range(6):
        clock.now_s += 100
        with pytest.raises(SystemExit):
            get(guard, KEYS)
    assert guard.counts["get failed"] == 12 and guard.counts["opened"] == 1


def test_deletions_are_tried_always_and_fail_loudly() -> None:
    store = FakeStore()
    guard = Guarded(store, clock=Clock())
    store.error = ConnectionError("refused")
    for _ in range(4):
        get(guard, KEYS)
    assert guard.counts["opened"] == 1
    with pytest.raises(StoreUnavailable, match="may remain.*delete again"):
        guard.delete(KEYS)
    with pytest.raises(StoreUnavailable, match="flush again"):
        guard.flush(None)
    store.error = None
    guard.delete(KEYS)
    guard.flush(b"s" * 16)
    assert [call for call, _ in store.calls if call in ("delete", "flush")] == ["delete", "flush"] * 2


def test_a_page_of_the_wrong_size_is_not_a_fault() -> None:
    guard = Guarded(MemoryStore(LAYOUT.page_bytes, 1 << 20))
    for _ in range(5):
        assert guard.put([KEYS[0]], [memoryview(b"short")], 1.0) == [Outcome.REFUSED]
    assert not guard.counts["opened"]
