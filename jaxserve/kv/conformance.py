"""The tests that every `KVStore` must pass, for pytest, in one line of a test file:

    TestMyStore = conformance(lambda layout, path: MyStore(layout, path))

`make` gets a layout and an empty directory, and is called anew for each test. Tests that need more than the interface
are there for what is given besides: `survives` when a new store on the same directory has the pages of the old one,
`damage` and `exchange` for stores whose bytes a test can reach, `process` for the test that kills a writer.
"""

import dataclasses
import hashlib
import importlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxserve.kv.names import CONTENT_KEY_BYTES, page_key
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import KVStore, Outcome, StoreUnavailable

MakeStore = Callable[[PageLayout, Path], KVStore]
"""Makes the store under test: for pages of this layout, with a directory of its own."""

LAYOUT = PageLayout(namespace="conformance", dtype="float32", shape=(2, 16, 8), element_bytes=4, page_bytes=1024)
"""Of the pages of the tests."""
AMPLE_S = 30.0
"""A deadline that no working store misses, on a busy machine either."""
SCOPES = (b"a" * 16, b"b" * 16)
"""The scopes of two tenants."""
_NUM_KILLS = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The store under test.

    Attributes:
      make: a store on a directory.
      survives: a second store on the same directory finds the pages.
      damage: changes bytes of every page under the directory, without the store.
      exchange: gives the only two pages under the directory each other's bytes.
      process: "module:function" of `make`, for a process of its own that is killed while it writes.
    """

    make: MakeStore
    survives: bool
    damage: Callable[[Path], None] | None
    exchange: Callable[[Path], None] | None
    process: str | None


def conformance(
    make: MakeStore,
    *,
    survives: bool = False,
    damage: Callable[[Path], None] | None = None,
    exchange: Callable[[Path], None] | None = None,
    process: str | None = None,
) -> type:
    """A class of tests, to be bound to a name that begins with "Test"."""
    subject = Subject(make=make, survives=survives, damage=damage, exchange=exchange, process=process)
    parts: list[type] = [_Basics]
    if survives:
        parts.append(_Survival)
    if damage is not None:
        parts.append(_Damage)
    if exchange is not None:
        parts.append(_Exchange)
    if process is not None:
        parts.append(_Kill)
    return type("TestConformance", tuple(parts), {"subject": subject})


def key_of(number: int, scope: bytes = SCOPES[0]) -> bytes:
    """The key of a page of the tests."""
    return page_key(scope, hashlib.blake2b(number.to_bytes(8, "big"), digest_size=CONTENT_KEY_BYTES).digest())


def page_of(key: bytes) -> bytearray:
    """The one content that a key stands for: half of it noise, half as smooth as numbers are."""
    noise = random.Random(key).randbytes(LAYOUT.page_bytes // 2)
    return bytearray(noise + key[-4:] * (LAYOUT.page_bytes // 8))


def put(store: KVStore, keys: Sequence[bytes]) -> None:
    """Stores the pages of `keys`, which must be taken."""
    outcomes = store.put(keys, [memoryview(page_of(key)) for key in keys], AMPLE_S)
    assert outcomes == [Outcome.OK] * len(keys), f"pages were not taken: {outcomes}"


def get(store: KVStore, keys: Sequence[bytes], deadline_s: float = AMPLE_S) -> list[Outcome]:
    """Reads pages and checks the content of those that are there."""
    buffers = [bytearray(LAYOUT.page_bytes) for _ in keys]
    outcomes = store.get(keys, [memoryview(buffer) for buffer in buffers], deadline_s)
    assert len(outcomes) == len(keys), "there must be an outcome for each key"
    for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome is not Outcome.OK or buffer == page_of(key), f"wrong bytes under key {key.hex()}"
    return outcomes


class _Part:
    subject: Subject

    def open(self, path: Path) -> KVStore:
        path.mkdir(mode=0o700, exist_ok=True)
        return self.subject.make(LAYOUT, path)


class _Basics(_Part):
    def test_pages_come_back_as_they_were(self, tmp_path: Path) -> None:
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(5)]
        assert store.contains(keys) == [False] * 5
        assert get(store, keys) == [Outcome.MISS] * 5
        put(store, keys)
        assert store.contains(keys) == [True] * 5
        assert get(store, keys) == [Outcome.OK] * 5
        put(store, keys)  # again: equal keys are equal pages
        assert get(store, keys[::-1]) == [Outcome.OK] * 5
        store.close()

    def test_each_key_has_its_own_outcome(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        put(store, [key_of(1), key_of(3)])
        asked = [key_of(number) for number in (0, 1, 2, 3, 1)]
        there = [False, True, False, True, True]
        assert store.contains(asked) == there
        assert get(store, asked) == [Outcome.OK if found else Outcome.MISS for found in there]
        assert get(store, []) == [] and store.put([], [], AMPLE_S) == [] and store.contains([]) == []
        store.close()

    def test_many_keys_in_one_call(self, tmp_path: Path) -> None:
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(60)]
        put(store, keys)
        assert get(store, keys) == [Outcome.OK] * 60
        store.close()

    def test_a_buffer_of_another_size_is_refused(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        put(store, [key_of(1)])
        for size in (LAYOUT.page_bytes - 1, LAYOUT.page_bytes + 1):
            buffer = bytearray(size)
            assert store.get([key_of(1)], [memoryview(buffer)], AMPLE_S)[0] is not Outcome.OK
            assert not any(buffer), "a buffer of the wrong size was written to"
            assert store.put([key_of(2)], [memoryview(buffer)], AMPLE_S)[0] is not Outcome.OK
        assert get(store, [key_of(1), key_of(2)]) == [Outcome.OK, Outcome.MISS]
        store.close()

    def test_the_store_keeps_no_buffer(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        page = page_of(key_of(1))
        assert store.put([key_of(1)], [memoryview(page)], AMPLE_S) == [Outcome.OK]
        page[:] = bytes(len(page))
        assert get(store, [key_of(1)]) == [Outcome.OK]
        store.close()

    def test_no_deadline_is_too_short(self, tmp_path: Path) -> None:
        """With no time at all every outcome but an error is right, and nothing is written after the return."""
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(8)]
        put(store, keys)
        calls: list[tuple[list[bytes], list[bytearray]]] = []
        for deadline_s in (0.0, -1.0, 1e-6, 1e-4):
            buffers = [bytearray(LAYOUT.page_bytes) for _ in keys]
            outcomes = store.get(keys, [memoryview(buffer) for buffer in buffers], deadline_s)
            calls.append(([bytes(buffer) for buffer in buffers], buffers))
            assert set(outcomes) <= {Outcome.OK, Outcome.LATE}, outcomes
            time.sleep(0.02)  # a moment for a store that goes on; one that needs longer ends by `close`
            assert set(store.put(keys, [memoryview(page_of(key)) for key in keys], deadline_s)) <= {
                Outcome.OK,
                Outcome.LATE,
            }
        assert get(store, keys) == [Outcome.OK] * 8
        store.close()
        for seen, buffers in calls:
            assert seen == [bytes(buffer) for buffer in buffers], "a buffer was written to after the call"

    def test_what_is_deleted_is_gone(self, tmp_path: Path) -> None:
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(4)]
        put(store, keys)
        store.delete([keys[1], key_of(99)])
        assert get(store, keys) == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
        assert store.contains(keys) == [True, False, True, True]
        put(store, [keys[1]])
        assert get(store, keys) == [Outcome.OK] * 4
        store.close()

    def test_a_late_put_does_not_outlive_a_delete(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        for number in range(20):
            store.put([key_of(number)], [memoryview(page_of(key_of(number)))], 1e-4)
        store.delete([key_of(number) for number in range(10)])
        store.flush(SCOPES[0])
        time.sleep(0.05)
        assert store.contains([key_of(number) for number in range(20)]) == [False] * 20
        store.close()

    def test_a_scope_is_flushed_alone(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        mine, others = ([key_of(number, scope) for number in range(4)] for scope in SCOPES)
        put(store, [*mine, *others])
        store.flush(SCOPES[0])
        assert get(store, mine) == [Outcome.MISS] * 4
        assert get(store, others) == [Outcome.OK] * 4
        store.flush(b"c" * 16)
        assert get(store, others) == [Outcome.OK] * 4
        put(store, mine)
        store.flush(None)
        assert get(store, [*mine, *others]) == [Outcome.MISS] * 8
        store.close()

    def test_threads_never_see_wrong_or_half_pages(self, tmp_path: Path) -> None:
        store, errors = self.open(tmp_path / "s"), []

        def work(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(40):
                    keys = [key_of(rng.randrange(6), rng.choice(SCOPES)) for _ in range(3)]
                    choice = rng.random()
                    if choice < 0.4:
                        store.put(keys, [memoryview(page_of(key)) for key in keys], AMPLE_S)
                    elif choice < 0.9:
                        assert set(get(store, keys)) <= {Outcome.OK, Outcome.MISS}
                    elif choice < 0.97:
                        store.delete(keys)
                    else:
                        store.flush(SCOPES[0])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors[0]
        store.close()

    def test_closed_means_closed(self, tmp_path: Path) -> None:
        store = self.open(tmp_path / "s")
        put(store, [key_of(1)])
        store.close()
        store.close()
        assert store.contains([key_of(1)]) == [False]
        assert get(store, [key_of(1)]) != [Outcome.OK]
        assert store.put([key_of(2)], [memoryview(page_of(key_of(2)))], AMPLE_S) != [Outcome.OK]

    def test_closing_under_load(self, tmp_path: Path) -> None:
        store, errors = self.open(tmp_path / "s"), []

        def work(seed: int) -> None:
            try:
                for number in range(50):
                    key = key_of(number % 5)
                    store.put([key], [memoryview(page_of(key))], AMPLE_S)
                    get(store, [key])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        store.close()
        for thread in threads:
            thread.join(2 * AMPLE_S)
            assert not thread.is_alive(), "a call hangs in a closed store"
        assert not errors, errors[0]


class _Survival(_Part):
    def test_a_new_store_finds_the_pages_of_the_old_one(self, tmp_path: Path) -> None:
        keys = [key_of(number) for number in range(10)]
        old = self.open(tmp_path / "s")
        put(old, keys)
        old.close()
        new = self.open(tmp_path / "s")
        assert new.contains(keys) == [True] * 10
        assert get(new, keys) == [Outcome.OK] * 10
        new.flush(None)
        new.close()
        newest = self.open(tmp_path / "s")
        assert newest.contains(keys) == [False] * 10
        newest.close()

    def test_two_stores_share_a_directory(self, tmp_path: Path) -> None:
        first, second = self.open(tmp_path / "s"), self.open(tmp_path / "s")
        put(first, [key_of(1), key_of(2)])
        put(second, [key_of(2), key_of(3)])
        keys = [key_of(number) for number in range(1, 4)]
        assert get(first, keys) == get(second, keys) == [Outcome.OK] * 3
        first.delete([key_of(3)])
        assert get(second, keys) == [Outcome.OK, Outcome.OK, Outcome.MISS]
        first.close()
        assert get(second, keys[:2]) == [Outcome.OK] * 2
        second.close()


class _Damage(_Part):
    def test_damaged_pages_are_not_used(self, tmp_path: Path) -> None:
        assert self.subject.damage is not None
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(4)]
        put(store, keys)
        self.subject.damage(tmp_path / "s")
        assert set(get(store, keys)) <= {Outcome.BAD, Outcome.MISS}
        assert set(get(store, keys)) <= {Outcome.BAD, Outcome.MISS}
        put(store, keys)  # it is not spoilt for good
        assert get(store, keys) == [Outcome.OK] * 4
        store.close()


class _Exchange(_Part):
    def test_bytes_of_another_key_are_not_used(self, tmp_path: Path) -> None:
        assert self.subject.exchange is not None
        store, keys = self.open(tmp_path / "s"), [key_of(1, SCOPES[0]), key_of(1, SCOPES[1])]
        put(store, keys)
        self.subject.exchange(tmp_path / "s")
        assert set(get(store, keys)) <= {Outcome.BAD, Outcome.MISS}
        store.close()


class _Kill(_Part):
    def test_a_killed_writer_leaves_no_bad_page(self, tmp_path: Path) -> None:
        assert self.subject.process is not None
        (tmp_path / "s").mkdir(mode=0o700)
        code = (
            f"import sys; from pathlib import Path; sys.path[:] = {sys.path!r}\n"
            "from jaxserve.kv.conformance import write_until_killed\n"
            f"write_until_killed({self.subject.process!r}, Path({str(tmp_path / 's')!r}))"
        )
        rng = random.Random(0)
        for _ in range(_NUM_KILLS):
            writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            assert writer.stdout is not None
            assert writer.stdout.read(1) == b"."  # the first page is stored
            time.sleep(rng.uniform(0.0, 0.02))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        store, keys = self.open(tmp_path / "s"), [key_of(number) for number in range(50)]
        outcomes = get(store, keys)
        assert Outcome.OK in outcomes and set(outcomes) <= {Outcome.OK, Outcome.MISS}, outcomes
        put(store, keys)
        assert get(store, keys) == [Outcome.OK] * 50
        store.close()


def write_until_killed(process: str, path: Path) -> None:
    """Puts pages again and again, and says so after the first; for the test of a killed writer."""
    module, _, name = process.partition(":")
    store: KVStore = getattr(importlib.import_module(module), name)(LAYOUT, path)
    number = 0
    while True:
        key = key_of(number % 50)
        try:
            store.put([key], [memoryview(page_of(key))], AMPLE_S)
            if number % 7 == 6:
                store.delete([key])
        except StoreUnavailable:
            pass
        if number == 0:
            print(".", end="", flush=True)
        number += 1
