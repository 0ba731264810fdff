"""Connectors by config: settings, matches, loads and saves over slots, and what a defect of theirs costs."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from shelf_connector import SHELVES, Shelf

from jaxserve.assemble import Device, assemble
from jaxserve.assemble.page_connector import ConnectorStore, prepare_page_connectors
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kv.connector import ConnectorOptions, StoreConnector, create_connector
from jaxserve.kv.store import StoreUnavailable
from jaxserve.sched.loading import Filled, StoreKey, Written

WAIT_S = 60.0
WORDS = 64
SHELF, FORGETS = "shelf_connector:Shelf", "shelf_connector:ShelfThatForgets"


class Slots:
    """Host memory of four slots, each in two parts."""

    words = WORDS

    def __init__(self) -> None:
        self.memory = [(bytearray(WORDS), bytearray(3 * WORDS)) for _ in range(4)]

    def wait_for(self, slots: Sequence[int]) -> None: ...

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(part) for part in self.memory[slot]]

    def fill(self, slot: int, start: int) -> bytes:
        page = bytes((start + i) % 256 for i in range(4 * WORDS))
        self.memory[slot][0][:], self.memory[slot][1][:] = page[:WORDS], page[WORDS:]
        return page

    def page(self, slot: int) -> bytes:
        return b"".join(self.memory[slot])


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., tuple[ConnectorStore, Slots]]:
    """Makes a connector of a name and its slots."""
    secret = tmp_path / "fleet"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    SHELVES.clear()

    def make(name: str = SHELF, layout: str = "layout", **options: Any) -> tuple[ConnectorStore, Slots]:
        settings = {
            "model.path": "demo",
            "cache.host_bytes": 1 << 20,
            "store.connector": name,
            "store.connector_options": options or {"shelf": "a"},
            "store.secret_file": str(secret),
        }
        slots = Slots()
        connectors = prepare_page_connectors(load_config(None, settings, environ={}).config)
        return connectors.open(slots, layout, "model", 16), slots  # pyright: ignore[reportArgumentType]

    return make


def content(number: int, salt: str = "salt") -> StoreKey:
    return StoreKey(salt, number.to_bytes(32, "little"))


def until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def until_event(store: ConnectorStore) -> Filled | Written:
    events: list[Filled | Written] = []
    until(lambda: bool(events.extend(store.poll()) or events))
    [event] = events
    return event


@pytest.mark.parametrize(
    ("name", "options"),
    [(SHELF, {"shelf": "a"}), (FORGETS, {"shelf": "a", "slow": 3}), ("memory", {"max_bytes": 1 << 20})],
)
def test_pages_go_out_and_come_back_through_any_connector(opened: Any, name: str, options: Any) -> None:
    store, slots = opened(name, **options)
    page = slots.fill(2, 5)
    assert store.write(content(1), 2) and until_event(store) == Written(2)
    slots.fill(2, 9)
    woken: list[None] = []
    store.wake = lambda: woken.append(None)
    ticket = store.fill([content(1), content(2)], [0, 1], WAIT_S)
    assert until_event(store) == Filled(ticket, (True, False))
    until(lambda: bool(woken))
    assert slots.page(0) == page
    ticket = store.prefetch([content(1)], [3], WAIT_S)
    assert ticket is not None and until_event(store) == Filled(ticket, (True,))
    store.settle(ticket, 1)
    other = store.fill([content(1, salt="another")], [3], WAIT_S)
    assert until_event(store) == Filled(other, (False,))
    counts = store.counts.pages
    assert (counts["written"], counts["filled"], counts["missed"], counts["prefetch_used"]) == (1, 2, 2, 1)
    assert counts["failed"] == store.counts.breaks == 0
    store.close()
    store.close()
    assert store.fill([content(1)], [0], WAIT_S) is None and not store.write(content(3), 0)


def test_an_answer_that_is_known_at_once_wakes_the_loop(opened: Any) -> None:
    store, _ = opened()
    woken: list[None] = []
    store.wake = lambda: woken.append(None)
    assert store.fill([content(1)], [0], WAIT_S) is not None and woken
    store.close()


def test_all_methods_are_called_in_their_order(opened: Any) -> None:
    store, _ = opened()
    store.write(content(1), 2)
    until_event(store)
    store.fill([content(1)], [0], WAIT_S)
    until_event(store)
    store.close()
    assert store._connector.calls == [
        "start_load_kv",
        "save_kv_layer",
        "get_num_new_matched_tokens",
        "wait_for_layer_load",
        "close",
    ]


def test_a_match_that_is_never_known_ends_at_its_deadline_and_when_it_is_cancelled(opened: Any) -> None:
    store, _ = opened(shelf="a", slow=10**9)
    ticket = store.fill([content(1)], [0], 0.01)
    assert until_event(store) == Filled(ticket, (False,))
    ticket = store.fill([content(1)], [0], WAIT_S)
    assert ticket is not None
    store.cancel(ticket)
    assert until_event(store) == Filled(ticket, (False,))
    store.close()


def test_a_load_that_is_called_off_ends_and_its_connector_is_told_once(opened: Any) -> None:
    store, _ = opened()
    store.write(content(1), 2)
    until_event(store)
    ticket = store.fill([content(1)], [0], WAIT_S)
    store.cancel(ticket)
    assert until_event(store) == Filled(ticket, (True,)), "it was on its way"
    assert not store._counts["raised"] and not store._connector._asked
    store.close()


def test_pages_of_another_layout_are_not_found_and_a_flush_takes_its_salt_alone(opened: Any) -> None:
    store, _ = opened(FORGETS)
    other, _ = opened(FORGETS, layout="another layout")
    for salt in ("x", "y"):
        store.write(content(1, salt), 0)
        until_event(store)
    other.fill([content(1, "x")], [0], WAIT_S)
    assert until_event(other).ok == (False,)  # pyright: ignore[reportAttributeAccessIssue]
    store.flush("x")
    assert len(SHELVES["a"]) == 1
    store.flush(None)
    assert not SHELVES["a"]
    plain, _ = opened()
    with pytest.raises(StoreUnavailable, match="Shelf has no `flush`"):
        plain.flush("x")
    for each in (store, other, plain):
        each.close()


def test_a_defect_on_the_loop_costs_the_pages_and_one_on_the_thread_the_slots(
    opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = opened(shelf="a", breaks="get_num_new_matched_tokens")
    ticket = store.fill([content(1)], [0], WAIT_S)
    assert until_event(store) == Filled(ticket, (False,)) and "a defect of somebody else" in caplog.text
    assert store.write(content(1), 2) and until_event(store) == Written(2)
    store.close()
    store, _ = opened(shelf="a", breaks="wait_for_layer_load")
    assert store.fill([content(1)], [0], WAIT_S) is not None
    until(lambda: bool(store.poll() or store._given_up))
    assert store.counts.breaks == 1 and "not used any more" in caplog.text
    assert store.fill([content(1)], [1], WAIT_S) is None and not store.write(content(1), 2) and not store.poll()
    store.close()


class Half:
    """No connector: it lacks most methods."""

    def __init__(self, options: ConnectorOptions) -> None: ...

    def close(self) -> None: ...


NOTHING = 7


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"store.connector": "nobody"}, "no connector of pages is called 'nobody'"),
        ({"store.connector": SHELF, "store.kind": "memory"}, r"no use for store\.kind"),
        ({"store.connector": SHELF, "store.max_bytes": 5}, r"no use for store\.max_bytes"),
        ({"store.connector": SHELF, "store.secret_file": None}, r"needs store\.secret_file"),
        ({"store.connector": SHELF, "cache.host_bytes": 0}, r"cache\.host_bytes is 0"),
        ({"store.connector_options": {"a": 1}}, r"store\.connector_options is set"),
        (
            {"store.connector_options": {"a": 1}, "store.kind": "memory", "store.max_bytes": 5},
            r"store\.connector_options is set, but store\.kind is 'memory'",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_loaded(
    settings: dict[str, Any], match: str, tmp_path: Path
) -> None:
    (tmp_path / "fleet").write_text("0123456789abcdef")
    if "store.connector" in settings:
        settings = {"store.secret_file": str(tmp_path / "fleet"), **settings}
    config = load_config(None, {"model.path": "demo", "cache.host_bytes": 1 << 20, **settings}, environ={})

    def load(config: Any, progress: Any) -> list[Device]:
        raise AssertionError("the model is loaded")

    with pytest.raises(ConfigError, match=match):
        assemble(config, make_devices=load)


def test_what_is_no_connector_is_refused_with_what_it_lacks() -> None:
    options = ConnectorOptions(slot_bytes=lambda slot: [], page_bytes=8, page_size=4, wait_s=1.0, settings={})
    with pytest.raises(ConfigError, match="gives a Half without get_num_new_matched_tokens, update"):
        create_connector(Half, options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="is a int; give a class"):
        create_connector(f"{__name__}:NOTHING", options)
    with pytest.raises(ConfigError, match="takes the option max_bytes"):
        create_connector("memory", options)
    made = create_connector("memory", ConnectorOptions(**{**_fields(options), "settings": {"max_bytes": 64}}))
    assert isinstance(made, StoreConnector)
    shelf = ConnectorOptions(**{**_fields(options), "settings": {"shelf": "b"}})
    assert isinstance(create_connector(Shelf, shelf), Shelf)


def _fields(options: ConnectorOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("slot_bytes", "page_bytes", "page_size", "wait_s")}
