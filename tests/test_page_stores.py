"""The stores of an engine: what is refused before the model is loaded, what replicas share, and what is closed."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxserve.assemble import Device, assemble
from jaxserve.assemble.page_store import PageKeys, PageStore, PageStores
from jaxserve.config import load_config
from jaxserve.config.schema import EventsConfig, StoreConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.names import scope_of
from jaxserve.kv.page_events import PageEvents
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import Outcome, StoreOptions
from jaxserve.sched.loading import Filled, StoreKey, Written
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import FakeRunner, make_limits
from jaxserve.values.content import private_salt

WAIT_S = 60.0
WORDS = 256  # of a slot
SECRET = b"0123456789abcdef0123456789abcdef"


class Slots:
    """Host memory of four slots."""

    words = WORDS

    def __init__(self) -> None:
        self.memory = [bytearray(4 * WORDS) for _ in range(4)]

    def wait_for(self, slots: Sequence[int]) -> None: ...

    def views(self, slot: int) -> list[memoryview]:
        return [memoryview(self.memory[slot])]


class Mine(MemoryStore):
    """A store of somebody else, which keeps a list of all there are."""

    made: ClassVar[list["Mine"]] = []

    def __init__(self, layout: PageLayout, options: StoreOptions) -> None:
        super().__init__(layout.page_bytes, options.max_bytes or 1 << 20)
        self.secret = options.secret
        self.keys: set[bytes] = set()
        self.num_closes = 0
        self.made.append(self)

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        self.keys |= {*keys}
        return super().put(keys, pages, deadline_s)

    def close(self) -> None:
        self.num_closes += 1
        super().close()


def needs_more(layout: PageLayout) -> Mine:
    """No factory of a store: it takes no options."""
    return Mine(layout, StoreOptions())


FINISHED = MemoryStore(4 * WORDS, 1 << 20)


@pytest.fixture(autouse=True)
def _forget() -> None:
    Mine.made.clear()


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    path = tmp_path / "fleet"
    path.write_bytes(SECRET + b"\n")
    return str(path)


def stores(kind: str, **settings: Any) -> PageStores:
    return PageStores(StoreConfig(kind=kind, **settings))


def poll(store: PageStore) -> Filled | Written:
    """The next event."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        if events := store.poll():
            [event] = events
            return event
        time.sleep(0.001)
    raise AssertionError("no event")


def content(number: int) -> StoreKey:
    return StoreKey("salt", number.to_bytes(32, "little"))


def threads_beside(before: set[threading.Thread]) -> list[str]:
    """Names of a store's threads; other tests of this process may have left some of their own."""
    return [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kv-")]


def test_replicas_share_a_store_and_the_last_of_them_closes_it(secret_file: str) -> None:
    opener = stores(f"{__name__}:Mine", secret_file=secret_file)
    assert not Mine.made, "a class of somebody else is made once"
    slots, other = Slots(), Slots()
    first, second = opener.open(slots, "layout", "model"), opener.open(other, "layout", "model")
    third = opener.open(Slots(), "another layout", "model")
    shared, apart = Mine.made
    slots.memory[2][:] = bytes(range(256)) * 4
    assert first.write(content(1), 2) and poll(first) == Written(2)
    ticket = second.fill([content(1), content(2)], [0, 1], WAIT_S)
    assert ticket is not None and poll(second) == Filled(ticket, (True, False))
    assert other.memory[0] == slots.memory[2]
    assert {key[:16] for key in shared.keys} == {scope_of(SECRET, "salt")}
    assert first.counts.pages["written"] == second.counts.pages["filled"] == second.counts.pages["missed"] == 1
    assert first.counts.pages["filled"] == second.counts.breaks == 0
    first.close()
    first.close()
    assert (shared.num_closes, apart.num_closes) == (0, 0)
    opener.close()
    assert (shared.num_closes, apart.num_closes) == (1, 1)
    third.close()
    assert apart.num_closes == 1


def test_pages_of_a_callers_salt_have_one_scope_whatever_is_added_to_it() -> None:
    """Who flushes them names that salt alone."""
    keys = PageKeys(SECRET, PageLayout(namespace="n", dtype="uint8", shape=(1,), element_bytes=1, page_bytes=1))
    plain, added, other = (
        keys.key(StoreKey(salt, bytes(32))) for salt in ("salt", private_salt("salt", "owner=ab"), "salt2")
    )
    assert plain[:16] == added[:16] == scope_of(SECRET, "salt") != other[:16]


def test_a_directory_is_closed_with_its_threads_and_its_own_secret_keys_the_names(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    opener = stores("file", location=str(tmp_path / "pages"), max_bytes=1 << 20)
    own = (tmp_path / "pages" / "secret").read_bytes()
    store = opener.open(Slots(), "layout", "model")  # pyright: ignore[reportArgumentType]
    assert store.write(content(1), 0) and poll(store) == Written(0)
    assert store._shared.secret == own
    assert store._keys.key(content(1)).startswith(scope_of(own, "salt"))
    assert threads_beside(before)
    store.close()
    assert not threads_beside(before)


def test_a_store_in_memory_is_emptied(tmp_path: Path) -> None:
    opener = stores("memory", max_bytes=1 << 20)
    store = opener.open(Slots(), "layout", "model")  # pyright: ignore[reportArgumentType]
    assert store.write(content(1), 0) and poll(store) == Written(0)
    memory = store._shared.store
    assert isinstance(memory, MemoryStore) and memory._pages
    store.close()
    assert not memory._pages


def test_a_finished_store_is_its_owners_to_close(secret_file: str) -> None:
    opener = stores(f"{__name__}:FINISHED", secret_file=secret_file)
    store = opener.open(Slots(), "layout", "model")  # pyright: ignore[reportArgumentType]
    assert store.write(content(1), 0) and poll(store) == Written(0)
    other = opener.open(Slots(), "another layout", "model")  # pyright: ignore[reportArgumentType]
    ticket = other.fill([content(1)], [0], WAIT_S)
    assert poll(other) == Filled(ticket, (False,)), "the store is told of no layouts, so keys are other ones"  # pyright: ignore[reportArgumentType]
    store.close()
    other.close()
    assert FINISHED._pages


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kind": "memory"}, r"needs store\.max_bytes"),
        ({"kind": "file", "max_bytes": 1 << 20}, r"needs store\.location"),
        ({"kind": "file", "location": "pages"}, r"needs store\.max_bytes"),
        ({"kind": "file", "location": "open", "max_bytes": 1 << 20}, "it must belong to user"),
        ({"kind": "file", "location": "pages", "max_bytes": 1 << 20, "tls_ca": "x"}, "store: .*no use for tls_ca"),
        ({"kind": "file", "location": "pages", "max_bytes": 1 << 20, "policy": "mru"}, "store: no tier policy"),
        ({"kind": "remote", "location": "localhost:1"}, r"needs store\.secret_file"),
        ({"kind": "remote", "location": "localhost:1", "secret_file": "none"}, r"store\.secret_file: cannot read"),
        ({"kind": "remote", "location": "localhost:1", "secret_file": "short"}, r"store\.secret_file \(.*has 5 bytes"),
        ({"kind": "remote", "location": "nowhere", "secret_file": "fleet"}, "store: .*must be HOST:PORT"),
        ({"kind": "remote", "location": "10.0.0.1:7", "secret_file": "fleet"}, "store: .*set tls_ca, tls_cert"),
        (
            {"kind": "remote", "location": "10.0.0.1:7", "secret_file": "fleet"}
            | dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), "short"),
            r"store: .*tls_cert .*no pair of PEM files",
        ),
        ({"kind": "object", "location": "tape://x", "secret_file": "fleet"}, "store: .*object store"),
        ({"kind": f"{__name__}:Mine"}, r"needs store\.secret_file"),
        ({"kind": f"{__name__}:FINISHED", "secret_file": "fleet", "max_bytes": 5}, "finished MemoryStore.*max_bytes"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(
    settings: dict[str, Any], match: str, tmp_path: Path, secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "open").mkdir(mode=0o755)
    monkeypatch.chdir(tmp_path)
    named = {f"store.{name}": value for name, value in settings.items()}
    config = load_config(None, {"model.path": "demo", "cache.host_bytes": 1 << 20, **named}, environ={})

    def load(config: Any, progress: Any) -> list[Device]:
        raise AssertionError("the model is loaded")

    with pytest.raises(ConfigError, match=match):
        assemble(config, make_devices=load)


def test_a_function_that_takes_no_options_is_named(secret_file: str) -> None:
    with pytest.raises(ConfigError, match=r"store: .*needs_more takes \(layout"):
        stores(f"{__name__}:needs_more", secret_file=secret_file).open(Slots(), "layout", "model")  # pyright: ignore[reportArgumentType]


def make_devices(config: Any, progress: Any) -> list[Device]:
    limits = make_limits(slots=HostSlots(num_slots=4, max_draining=4, max_loads=4))
    return [
        Device(
            runner=FakeRunner(limits),
            vocab_size=256,
            eos_token_ids=(),
            sampling_defaults={},
            slots=Slots(),  # pyright: ignore[reportArgumentType]
        )
        for _ in range(config.parallel.data)
    ]


def settings(secret_file: str) -> dict[str, Any]:
    return {
        "model.path": "demo",
        "model.skip_tokenizer": True,
        "cache.host_bytes": 1 << 20,
        "parallel.data": 2,
        "store.kind": f"{__name__}:Mine",
        "store.secret_file": secret_file,
    }


def test_an_engine_closes_the_one_store_of_its_replicas(secret_file: str) -> None:
    engine = assemble(load_config(None, settings(secret_file), environ={}), make_devices=make_devices).engine
    [store] = Mine.made
    assert not store.num_closes
    engine.stop()
    assert store.num_closes == 1


def test_a_start_that_fails_later_leaves_no_store_and_no_events_open(
    secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **options: Any) -> None:
        raise ConfigError("too late")

    events = [PageEvents(EventsConfig(), port=0, replica=replica) for replica in range(2)]
    monkeypatch.setattr("jaxserve.assemble.open_page_events", lambda config: events)
    monkeypatch.setattr("jaxserve.assemble.open_step_log", fails)
    with pytest.raises(ConfigError, match="too late"):
        assemble(load_config(None, settings(secret_file), environ={}), make_devices=make_devices)
    [store] = Mine.made
    assert store.num_closes == 1
    assert all(one._socket.closed for one in events)
