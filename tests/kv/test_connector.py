"""`StoreConnector` between a fake scheduler and a fake worker, with the metadata as JSON between them."""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Sequence

import pytest
from fake_store import WAIT_S, FakeStore

from jaxserve.kv import connector
from jaxserve.kv.conformance import LAYOUT, key_of, page_of
from jaxserve.kv.connector import (
    ConnectorMeta,
    KVConnector,
    Load,
    Loaded,
    Match,
    PackedPages,
    PageRef,
    Saved,
    StoreConnector,
)
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.store import KVStore, Outcome

PAGE = 16
LAYERS = [400, 500, 124]  # bytes of each layer of a page of 1024


@dataclasses.dataclass(frozen=True)
class Seq:
    request_id: str
    page_keys: Sequence[bytes]
    page_size: int = PAGE


@dataclasses.dataclass(frozen=True)
class Plan:
    saved_pages: Sequence[PageRef] = ()


class Gathered:
    """One layer of the pages of keys, as a step gathers it."""

    def __init__(self, keys: Sequence[bytes], layer: int) -> None:
        start = sum(LAYERS[:layer])
        self._layers = [page_of(key)[start : start + LAYERS[layer]] for key in keys]

    def layer_of_page(self, index: int) -> memoryview:
        return memoryview(self._layers[index])


class World:
    """Slots, and a connector over them whose two sides see each other's words as JSON alone."""

    def __init__(self, store: KVStore, count: int = 12, load_s: float = 60.0) -> None:
        self.memory = [[bytearray(300), bytearray(700), bytearray(24)] for _ in range(count)]
        self.store = store
        self.connector: KVConnector = StoreConnector(store, self.views, layer_bytes=LAYERS, load_s=load_s)

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(part) for part in self.memory[slot]]

    def page(self, slot: int) -> bytes:
        return b"".join(self.memory[slot])

    def match(self, seq: Seq, num_computed: int) -> Match:
        """Asked at each step until it is known."""
        end = time.monotonic() + WAIT_S
        while (found := self.connector.get_num_new_matched_tokens(seq, num_computed)).num_tokens is None:
            assert found.is_async and time.monotonic() < end
            time.sleep(0.001)
        return found

    def step(self, plan: Plan | None = None) -> ConnectorMeta:
        """One step of the worker; loads are not waited for."""
        meta = self.connector.build_connector_meta(Plan() if plan is None else plan)
        told = ConnectorMeta.from_json(json.loads(json.dumps(meta.as_json())))
        assert told == meta
        self.connector.bind_connector_metadata(told)
        self.connector.start_load_kv()
        for layer in range(len(LAYERS)):
            pages: PackedPages = Gathered([page.key for page in told.saves], layer)
            self.connector.save_kv_layer(layer, pages)
        return meta

    def events(self, ready: Callable[[list[Loaded | Saved]], bool]) -> list[Loaded | Saved]:
        found: list[Loaded | Saved] = []
        end = time.monotonic() + WAIT_S
        while not ready(found):
            found.extend(self.connector.poll())
            assert time.monotonic() < end
        return found


def keys(count: int) -> list[bytes]:
    return [key_of(number) for number in range(count)]


def test_pages_are_saved_by_one_and_found_by_another() -> None:
    store = MemoryStore(LAYOUT.page_bytes, 1 << 20)
    writer = World(store)
    plan = Plan([PageRef(key, slot) for slot, key in enumerate(keys(3))])
    writer.step(plan)
    writer.connector.wait_for_save()
    assert set(writer.events(lambda found: len(found) == 3)) == {Saved(page, True) for page in plan.saved_pages}

    reader = World(store)
    seq = Seq("r", keys(5))
    assert reader.match(seq, PAGE) == Match(2 * PAGE, True), "page 0 is computed; 1 and 2 are there, 3 is not"
    assert reader.match(seq, PAGE) == Match(2 * PAGE, True), "asking changes nothing"
    reader.connector.update_state_after_alloc(seq, [7, 8], 2 * PAGE)
    meta = reader.step()
    assert [load.pages for load in meta.loads] == [(PageRef(key_of(1), 7), PageRef(key_of(2), 8))]
    for layer in range(len(LAYERS)):
        reader.connector.wait_for_layer_load(layer)
    assert [reader.page(slot) for slot in (7, 8)] == [bytes(page_of(key)) for key in keys(3)[1:]]
    assert reader.connector.poll() == [Loaded("r", 2, (7, 8))]
    assert reader.connector.failed_keys() == frozenset()
    reader.connector.wait_for_save()
    assert reader.step() == ConnectorMeta(), "once"
    reader.connector.request_finished(seq)
    reader.connector.close()


def test_a_sequence_without_pages_waits_for_nothing() -> None:
    world = World(FakeStore())
    assert world.connector.get_num_new_matched_tokens(Seq("a", []), 0) == Match(0, False)
    assert world.connector.get_num_new_matched_tokens(Seq("b", keys(2)), 2 * PAGE) == Match(0, False)
    world.connector.update_state_after_alloc(Seq("a", []), [], 0)
    assert world.step() == ConnectorMeta()
    world.connector.close()


def test_a_store_that_hangs_holds_up_no_step() -> None:
    store = FakeStore()
    store.go.clear()
    world = World(store)
    seq = Seq("r", keys(2))
    for _ in range(5):
        assert world.connector.get_num_new_matched_tokens(seq, 0) == Match(None, True)
        world.step()
        world.connector.wait_for_save()
    assert store.entered.acquire(timeout=WAIT_S)
    store.go.set()
    assert world.match(seq, 0) == Match(2 * PAGE, True)
    world.connector.close()


def test_pages_that_do_not_come_are_named_and_the_rest_is_used() -> None:
    store = FakeStore()
    world = World(store)
    seq = Seq("r", keys(4))
    assert world.match(seq, 0) == Match(4 * PAGE, True)
    store.answer = lambda key: {key_of(2): Outcome.BAD}.get(key, Outcome.OK)
    world.connector.update_state_after_alloc(seq, [0, 1, 2, 3], 4 * PAGE)
    world.step()
    world.connector.wait_for_layer_load(0)
    assert world.connector.poll() == [Loaded("r", 2, (0, 1, 2, 3))]
    assert world.connector.failed_keys() == {key_of(2)}
    assert world.connector.failed_keys() == frozenset(), "once"
    world.connector.close()


def test_an_aborted_request_gives_its_slots_back_when_the_store_has_let_go() -> None:
    store = FakeStore()
    world = World(store)
    seqs = [Seq(f"r{number}", [key_of(number)]) for number in range(4)]
    for slot, seq in enumerate(seqs):
        assert world.match(seq, 0).num_tokens == PAGE
        world.connector.update_state_after_alloc(seq, [slot], PAGE)
    store.go.clear()
    world.step()
    world.connector.wait_for_save()
    world.connector.request_finished(seqs[3])  # its fill waits behind two that hang
    world.step()
    world.connector.wait_for_save()
    assert world.connector.poll() == []
    store.go.set()
    found = world.events(lambda found: len(found) == 4)
    assert sorted(found) == [Loaded(f"r{n}", int(n != 3), (n,)) for n in range(4)]
    assert world.connector.failed_keys() == frozenset(), "it was not wanted"
    assert ("get", (key_of(3),)) not in store.calls
    world.connector.close()


def test_a_late_load_is_computed() -> None:
    store = FakeStore()
    world = World(store, load_s=0.0)
    seq = Seq("r", keys(1))
    world.match(seq, 0)
    world.connector.update_state_after_alloc(seq, [0], PAGE)
    world.step()
    world.connector.wait_for_layer_load(0)
    assert world.connector.poll() == [Loaded("r", 0, (0,))]
    assert world.connector.failed_keys() == {key_of(0)}
    world.connector.close()


def test_a_store_that_keeps_its_deadline_for_itself_does_not_stop_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait ends, the slot stays the store's: its event comes when the store lets go."""
    monkeypatch.setattr(connector, "_GRACE_S", 0.05)
    store = FakeStore()
    world = World(store, load_s=0.05)
    seq = Seq("r", keys(1))
    world.match(seq, 0)
    world.connector.update_state_after_alloc(seq, [0], PAGE)
    store.go.clear()
    world.step()
    world.connector.wait_for_layer_load(0)
    assert world.connector.poll() == []
    store.go.set()
    assert world.events(lambda found: len(found) == 1) == [Loaded("r", 1, (0,))]
    world.connector.close()


def test_a_lookup_of_a_request_that_ended_leaves_nothing() -> None:
    store = FakeStore()
    store.go.clear()
    world = World(store)
    for number in range(300):  # more than may wait
        seq = Seq(f"r{number}", keys(1))
        world.connector.get_num_new_matched_tokens(seq, 0)
    assert world.connector.get_num_new_matched_tokens(Seq("r299", keys(1)), 0) == Match(0, False), "refused: compute"
    for number in range(300):
        world.connector.request_finished(Seq(f"r{number}", keys(1)))
    store.go.set()
    assert isinstance(world.connector, StoreConnector)
    assert world.connector._lookup.wait_idle(WAIT_S)
    assert world.connector._found == {}
    world.connector.close()


def test_misuse_is_found() -> None:
    world = World(FakeStore())
    world.connector.bind_connector_metadata(ConnectorMeta(saves=(PageRef(key_of(0), 0),)))
    with pytest.raises(AssertionError, match="layer 1 came instead of 0"):
        world.connector.save_kv_layer(1, Gathered([key_of(0)], 1))
    with pytest.raises(AssertionError, match="a layer is missing"):
        world.connector.wait_for_save()
    with pytest.raises(AssertionError, match="was not called"):
        world.connector.bind_connector_metadata(ConnectorMeta())
    world.connector.close()


def test_metadata_is_json() -> None:
    rng = random.Random(0)
    for _ in range(20):
        pages = tuple(PageRef(rng.randbytes(48), rng.randrange(99)) for _ in range(rng.randrange(4)))
        load = Load(request_id="ü", pages=pages, deadline_s=rng.random())
        meta = ConnectorMeta(loads=(load,) * rng.randrange(3), saves=pages, cancels=("a", "b"))
        assert ConnectorMeta.from_json(json.loads(json.dumps(meta.as_json()))) == meta
