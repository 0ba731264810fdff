"""`SealedStore` over places that hang, are slow, fill up and lie, without files or networks."""

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kv import compression, sealed_store
from jaxserve.kv.blobs import BlobsError
from jaxserve.kv.conformance import AMPLE_S, LAYOUT, get, key_of, page_of, put
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.names import BlobName
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import Outcome, StoreUnavailable

SECRET = b"a secret of the fleet, of 32 bytes"
WAIT_S = 30.0


class SlowBlobs(MemoryStore):
    """`before` runs in the thread of each call that reads or writes."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__(None, 1 << 26)
        self.before = before
        self.entered = threading.Semaphore(0)

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        self.entered.release()
        self.before()
        return super().read(name, max_bytes, timeout_s)

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        self.entered.release()
        self.before()
        return super().write(name, data, timeout_s)

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        self.before()
        return super().exists(names, timeout_s)


def sealed(blobs: MemoryStore, layout: PageLayout = LAYOUT, **options: object) -> SealedStore:
    return SealedStore(blobs, layout, SECRET, place="test", **options)  # type: ignore[arg-type]


def test_a_place_that_hangs_costs_the_deadline_and_its_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "_CLOSE_S", 0.05)
    go = threading.Event()
    blobs = SlowBlobs(lambda: go.wait(WAIT_S))
    store = sealed(blobs, workers=2)
    buffers = [bytearray(LAYOUT.page_bytes) for _ in range(5)]
    views = [memoryview(buffer) for buffer in buffers]
    assert store.get([key_of(n) for n in range(5)], views, 0.02) == [Outcome.LATE] * 5
    assert store.put([key_of(1)], [memoryview(page_of(key_of(1)))], 0.02) == [Outcome.LATE]
    monkeypatch.setattr(sealed_store, "_MAX_WAITING", 3)
    full = sealed(blobs, workers=1)
    pages = [memoryview(page_of(key_of(n))) for n in range(6)]
    outcomes = full.put([key_of(n) for n in range(6)], pages, 0.02)
    assert Outcome.REFUSED in outcomes and set(outcomes) <= {Outcome.LATE, Outcome.REFUSED}, "the queue is bounded"
    full.close()
    go.set()
    time.sleep(0.05)
    assert not any(map(any, buffers)), "a read that ended late wrote into a buffer"


def test_a_call_may_have_more_keys_than_jobs_may_wait() -> None:
    store, keys = sealed(MemoryStore(None, 1 << 26)), [key_of(number) for number in range(1000)]
    for start in range(0, 1000, 100):
        put(store, keys[start : start + 100])
    assert get(store, [*keys, key_of(1000)]) == [Outcome.OK] * 1000 + [Outcome.MISS]
    store.close()


def test_a_call_that_gets_no_turn_does_not_wait_for_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "_MAX_WAITING", 1)
    go = threading.Event()
    blobs = SlowBlobs(lambda: go.wait(WAIT_S))
    store = sealed(blobs, workers=1)
    reading = [threading.Thread(target=get, args=(store, [key_of(number)])) for number in range(2)]
    reading[0].start()
    assert blobs.entered.acquire(timeout=WAIT_S)  # the first runs
    reading[1].start()
    while not store._readers._jobs:  # the second waits
        time.sleep(0.001)
    assert get(store, [key_of(2), key_of(3)], 1e6) == [Outcome.LATE] * 2
    go.set()
    for thread in reading:
        thread.join(WAIT_S)
    store.close()


def test_a_place_that_gives_up_at_the_deadline_is_late() -> None:
    class GivesUp(MemoryStore):
        def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
            time.sleep(timeout_s - 0.005)
            raise BlobsError("DEADLINE_EXCEEDED")

    store = sealed(GivesUp(None, 1 << 20))
    assert get(store, [key_of(1)], 0.1) == [Outcome.LATE], "that a deadline was short is no fault of the place"
    store.close()


def test_contains_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "_ASK_S", 0.02)
    go = threading.Event()
    store = sealed(SlowBlobs(lambda: go.wait(WAIT_S)))
    with pytest.raises(StoreUnavailable, match="does not say which pages it has .late."):
        store.contains([key_of(1)])
    go.set()
    store.close()


def test_a_deletion_waits_for_writes_that_run_and_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    blobs = SlowBlobs(lambda: go.wait(WAIT_S))
    store = sealed(blobs)
    assert store.put([key_of(1)], [memoryview(page_of(key_of(1)))], 0.05) == [Outcome.LATE]
    assert blobs.entered.acquire(timeout=WAIT_S)
    monkeypatch.setattr(sealed_store, "_DELETE_S", 0.02)
    with pytest.raises(StoreUnavailable, match="writes did not end"):
        store.delete([key_of(1)])
    monkeypatch.setattr(sealed_store, "_DELETE_S", WAIT_S)
    deleting = threading.Thread(target=store.delete, args=([key_of(1)],))
    deleting.start()
    go.set()
    deleting.join(WAIT_S)
    assert store.contains([key_of(1)]) == [False]
    store.close()


LARGE = PageLayout(namespace="n", dtype="bfloat16", shape=(1 << 15,), element_bytes=2, page_bytes=1 << 16)


def smooth(number: int) -> memoryview:
    return memoryview(random.Random(number).randbytes(1 << 14) + bytes(3 << 14))


def test_pages_are_compressed_for_a_slow_place() -> None:
    store = sealed(SlowBlobs(lambda: time.sleep(0.05)), LARGE, compression="auto")  # 1.3 MB/s
    for number in range(8):
        assert store.put([key_of(number)], [smooth(number)], AMPLE_S) == [Outcome.OK]
    assert store.counts["compressed"] >= 6 and store.counts["bytes_written"] < 4 << 16
    buffer = bytearray(1 << 16)
    for number in range(8):
        assert store.get([key_of(number)], [memoryview(buffer)], AMPLE_S) == [Outcome.OK]
        assert buffer == smooth(number)
    store.close()


def test_noise_is_stored_as_it_is_even_in_a_slow_place() -> None:
    store = sealed(SlowBlobs(lambda: time.sleep(0.02)), LARGE, compression="auto")
    for number in range(5):
        noise = memoryview(random.Random(number).randbytes(1 << 16))
        assert store.put([key_of(number)], [noise], AMPLE_S) == [Outcome.OK]
    assert store.counts["compressed"] == 0
    store.close()


def test_pages_of_a_server_with_the_library_are_kept_by_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ConfigError("compression of pages needs the library backports.zstd")

    blobs = MemoryStore(None, 1 << 20)
    rich = sealed(blobs, compression="zstd")
    put(rich, [key_of(1)])
    monkeypatch.setattr(compression, "_load_zstd", missing)
    poor = sealed(blobs)
    assert get(poor, [key_of(1)]) == [Outcome.MISS]
    assert get(rich, [key_of(1)]) == [Outcome.OK], "it is not damaged"
    assert poor.counts["unknown_codec"] == 1 and blobs.counts["bad"] == 0
    for kind in ("zstd", "auto"):
        with pytest.raises(ConfigError, match="backports.zstd"):
            sealed(blobs, compression=kind)
    rich.close()
    poor.close()


def test_a_place_keeps_within_its_bound() -> None:
    blobs = MemoryStore(None, 20_000)
    store = sealed(blobs)
    for number in range(50):
        put(store, [key_of(number)])
        put(store, [key_of(number)])  # the same name again takes no more room
    assert 10 < len(blobs._pages) < 20 and sum(map(len, blobs._pages.values())) <= 20_000
    assert store.put([key_of(99)], [memoryview(b"short")], AMPLE_S) == [Outcome.REFUSED]
    store.close()
