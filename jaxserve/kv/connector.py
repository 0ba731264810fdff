"""`KVConnector`: the methods by which engines ask an outside system for pages, under the names that vLLM gave them.

The scheduler's side decides and never waits; the worker's side moves bytes. Between them goes a `ConnectorMeta`, which
is JSON, so that the worker may be another process, or several. Whoever knows the interface elsewhere finds these
differences, each of which is a class of defects there:

- Pages go through slots of host memory, so nothing outside the device ever writes to a page of it, and a page that is
  freed is under no transfer. `update_state_after_alloc` names slots; plans move them to pages.
- Layers are one page here: a step is one compiled program, in which no hook can run between two layers. So
  `wait_for_layer_load` waits for whole pages, and `save_kv_layer` is given views of one gather.
- A load that fails is computed: `poll` and `failed_keys` say which pages came. No request fails by a store.
- `request_finished` never holds pages back: what is to be saved is in a slot by then.

`StoreConnector` is the reference, over any `KVStore`. A store of pages needs no connector: this seam is for systems
that bring a transport or a placement of their own. docs/kv-stores.md says how LMCache and Mooncake would fit.

To bring a connector, write a class with these methods that takes `ConnectorOptions`, and name it in `store.connector`:
an entry point in the group `jaxserve.kv_connectors`, or `package.module:Class`. An engine makes one for each replica,
and calls the scheduler's side on its loop and the worker's side on a thread of its own (`assemble.page_connector`).
"""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxserve.errors import ConfigError
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.store import KVStore, Outcome
from jaxserve.kv.transfer import SlotBytes, Transfers, Written
from jaxserve.kv.workers import Workers
from jaxserve.values.registry import Registry, check_takes

_MAX_LOOKUPS = 256  # that wait
_CLOSE_S = 5.0
_GRACE_S = 1.0  # beyond the deadline, which a store may miss by the time of a copy


class SequenceView(Protocol):
    """What a connector may know of a sequence.

    Attributes:
      request_id: of one sequence, for as long as it lives.
      page_keys: of the full pages of its beginning that may come from elsewhere, see `names.page_key`.
      page_size: tokens of a page.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def page_keys(self) -> Sequence[bytes]: ...

    @property
    def page_size(self) -> int: ...


class PageRef(NamedTuple):
    """A page in a slot of host memory."""

    key: bytes
    slot: int


class PlanView(Protocol):
    """What a connector may know of a step: the pages that it gathers into slots."""

    @property
    def saved_pages(self) -> Sequence[PageRef]:
        """In the order in which the step gathers them."""
        ...


class PackedPages(Protocol):
    """One layer of the pages that a step saved, in the order of `ConnectorMeta.saves`."""

    def layer_of_page(self, index: int) -> memoryview:
        """The bytes of the layer of one page. Valid until `wait_for_save` returns."""
        ...


class Match(NamedTuple):
    """Pages that a connector has beyond those that are computed.

    Attributes:
      num_tokens: a multiple of the page size; None: not known yet, ask again at a later step.
      is_async: they are loaded while the sequence waits, and not within a step.
    """

    num_tokens: int | None
    is_async: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Pages to bring for one sequence, in order. `deadline_s`: seconds after which computing them is better."""

    request_id: str
    pages: tuple[PageRef, ...]
    deadline_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorMeta:
    """What the worker's side is to do with one step."""

    loads: tuple[Load, ...] = ()
    saves: tuple[PageRef, ...] = ()
    cancels: tuple[str, ...] = ()  # requests whose loads nobody needs any more

    def as_json(self) -> dict[str, Any]:
        """All of it as values of JSON, for a worker in another process."""
        return {
            "loads": [[load.request_id, _refs_as_json(load.pages), load.deadline_s] for load in self.loads],
            "saves": _refs_as_json(self.saves),
            "cancels": list(self.cancels),
        }

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> "ConnectorMeta":
        """The inverse of `as_json`."""
        return cls(
            loads=tuple(
                Load(request_id=request_id, pages=_refs_from_json(pages), deadline_s=deadline_s)
                for request_id, pages, deadline_s in tree["loads"]
            ),
            saves=_refs_from_json(tree["saves"]),
            cancels=tuple(tree["cancels"]),
        )


class Loaded(NamedTuple):
    """A load has ended, and its slots are the caller's.

    Attributes:
      num_pages: from the first on that are whole; the caller computes the others.
      slots: of all pages of the load.
    """

    request_id: str
    num_pages: int
    slots: tuple[int, ...]


class Saved(NamedTuple):
    """A save has ended, and its slot is the caller's. `stored`: the page is there."""

    page: PageRef
    stored: bool


class SchedulerConnector(Protocol):
    """The scheduler's side. Called by the loop; returns at once."""

    def get_num_new_matched_tokens(self, seq: SequenceView, num_computed: int) -> Match:
        """Tokens that can be loaded behind the first `num_computed`. Changes nothing; may be asked again."""
        ...

    def update_state_after_alloc(self, seq: SequenceView, slots: Sequence[int], num_external: int) -> None:
        """`num_external` tokens of the last match will be loaded, one page into each of `slots`."""
        ...

    def build_connector_meta(self, plan: PlanView) -> ConnectorMeta:
        """What the worker has to do beside this step. Takes what was decided since the last time."""
        ...

    def request_finished(self, seq: SequenceView) -> None:
        """It has ended, or was aborted: forget it, and cancel its loads. Events of its slots still come."""
        ...


class WorkerConnector(Protocol):
    """The worker's side. Called by one thread."""

    def bind_connector_metadata(self, meta: ConnectorMeta) -> None:
        """Of the step that begins. The one before must have been waited for."""
        ...

    def start_load_kv(self) -> None:
        """Begins the loads of the bound step."""
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Returns when all pages of the bound step have come, failed, or are late: layers do not come one by one."""
        ...

    def save_kv_layer(self, layer: int, pages: PackedPages) -> None:
        """Takes a layer of the pages that the bound step saves. Layers come in order."""
        ...

    def wait_for_save(self) -> None:
        """Returns when the views of the bound step are read. The pages are in slots then, and not yet durable."""
        ...

    def poll(self) -> list[Loaded | Saved]:
        """What has ended since the last time."""
        ...

    def failed_keys(self) -> frozenset[bytes]:
        """Pages that were to be loaded and did not come, since the last time."""
        ...

    def close(self) -> None:
        """Ends transfers. A store that was given stays open."""
        ...


class KVConnector(SchedulerConnector, WorkerConnector, Protocol):
    """Both sides in one object, for a process that has both."""


@runtime_checkable
class Flushes(Protocol):
    """A connector that can forget pages, which operators ask for by salt. Without this method they are told so."""

    def flush(self, scope: bytes | None) -> None:
        """Removes all pages whose key begins with `scope`, or all, in every place. Any thread; may wait.

        Raises `StoreUnavailable` when one may remain.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """What a connector is made of.

    Attributes:
      slot_bytes: the buffers of a slot. Those of a load are the connector's to write until its event.
      page_bytes: the sum of these buffers; a page is one piece, and `layer` is always 0.
      page_size: tokens of a page.
      wait_s: seconds after which no request waits for a load any more.
      settings: `store.connector_options`, for the connector to check.
    """

    slot_bytes: SlotBytes
    page_bytes: int
    page_size: int
    wait_s: float
    settings: Mapping[str, Any]


ConnectorFactory = Callable[[ConnectorOptions], KVConnector]
"""What a name of `store.connector` leads to: it makes the connector of an engine."""

CONNECTORS: Registry[ConnectorFactory] = Registry(
    "connector of pages", "jaxserve.kv_connectors", {"memory": "jaxserve.kv.connector:memory_connector"}
)
"""The connectors that are built in, and the entry points of the group `jaxserve.kv_connectors`."""
_METHODS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "poll",
    "failed_keys",
    "close",
)


def create_connector(connector: str | ConnectorFactory, options: ConnectorOptions) -> KVConnector:
    """Builds the connector that a config asks for: a name (see `CONNECTORS.names()`), `package.module:Name`, or a class
    or function of the options.

    Raises ConfigError when nothing has this name, or what was found gives no connector.
    """
    found = CONNECTORS.get(connector)
    if not callable(found):
        raise ConfigError(
            f"the connector {connector!r:.120} is a {type(found).__name__}; give a class that takes ConnectorOptions"
        )
    check_takes(CONNECTORS.kind, found, options)
    made = found(options)
    missing = [name for name in _METHODS if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"the connector {connector!r:.120} gives a {type(made).__name__} without {', '.join(missing)}; a "
            f"connector has the methods {', '.join(_METHODS)}"
        )
    return made


def memory_connector(options: ConnectorOptions) -> "StoreConnector":
    """The factory of the name "memory": the reference, over pages in this process, of `max_bytes` in all."""
    max_bytes = options.settings.get("max_bytes")
    if options.settings.keys() != {"max_bytes"} or not isinstance(max_bytes, int):
        raise ConfigError(
            f"the memory connector takes the option max_bytes, a number of bytes, and no other; given: "
            f"{dict(options.settings)!r:.200}"
        )
    store = MemoryStore(options.page_bytes, max_bytes)
    return StoreConnector(store, options.slot_bytes, layer_bytes=[options.page_bytes], load_s=options.wait_s)


class StoreConnector(KVConnector):
    """A `KVConnector` over a store: looks pages up in the background, loads by `Transfers`, saves what steps gather.

    Attributes:
      transfers: between the slots and the store, with the counts.
    """

    def __init__(
        self, store: KVStore, slot_bytes: SlotBytes, *, layer_bytes: Sequence[int], load_s: float = 2.0
    ) -> None:
        """
        Args:
          slot_bytes: the buffers of a slot; their sum is that of `layer_bytes`.
          layer_bytes: of each layer of a page, in order.
          load_s: seconds after which a load is given up.
        """
        self.transfers = Transfers(store, slot_bytes)
        self._slot_bytes = slot_bytes
        self._starts = [sum(layer_bytes[:layer]) for layer in range(len(layer_bytes))]
        self._sizes = list(layer_bytes)
        self._load_s = load_s
        # The scheduler's side.
        self._lookup = Workers("kv-lookup", 1, _MAX_LOOKUPS)
        self._lock = threading.Lock()
        self._found: dict[str, list[bool] | None] = {}  # request -> pages that the store has; None: it is being asked
        self._first: dict[str, int] = {}  # request -> page at which its last match began
        self._loads: list[Load] = []
        self._cancels: list[str] = []
        # The worker's side.
        self._meta = ConnectorMeta()
        self._next_layer = 0
        self._tickets: dict[int, Load] = {}
        self._events: list[Loaded | Saved] = []
        self._failed: set[bytes] = set()

    def get_num_new_matched_tokens(self, seq: SequenceView, num_computed: int) -> Match:
        first, keys = num_computed // seq.page_size, tuple(seq.page_keys)
        if first >= len(keys):
            return Match(0, False)
        with self._lock:
            if seq.request_id not in self._found:
                self._found[seq.request_id] = None
                if not self._lookup.submit(functools.partial(self._look_up, seq.request_id, keys)):
                    self._found[seq.request_id] = []  # too many wait: computing is quicker
            found = self._found[seq.request_id]
        if found is None:
            return Match(None, True)
        self._first[seq.request_id] = first
        behind = found[first:]
        count = behind.index(False) if False in behind else len(behind)
        return Match(count * seq.page_size, count > 0)

    def update_state_after_alloc(self, seq: SequenceView, slots: Sequence[int], num_external: int) -> None:
        count = num_external // seq.page_size
        assert count == len(slots), f"{len(slots)} slots for {num_external} tokens"
        if count:
            first = self._first[seq.request_id]
            pages = tuple(map(PageRef, seq.page_keys[first : first + count], slots))
            assert len(pages) == count, "more pages than were matched"
            self._loads.append(Load(request_id=seq.request_id, pages=pages, deadline_s=self._load_s))

    def build_connector_meta(self, plan: PlanView) -> ConnectorMeta:
        meta = ConnectorMeta(loads=tuple(self._loads), saves=tuple(plan.saved_pages), cancels=tuple(self._cancels))
        self._loads.clear()
        self._cancels.clear()
        return meta

    def request_finished(self, seq: SequenceView) -> None:
        with self._lock:
            self._found.pop(seq.request_id, None)
        self._first.pop(seq.request_id, None)
        self._cancels.append(seq.request_id)

    def bind_connector_metadata(self, meta: ConnectorMeta) -> None:
        assert not self._meta.saves, "wait_for_save was not called for the step before"
        self._meta, self._next_layer = meta, 0

    def start_load_kv(self) -> None:
        for load in self._meta.loads:
            keys, slots = [page.key for page in load.pages], [page.slot for page in load.pages]
            ticket = self.transfers.fill(keys, slots, load.deadline_s)
            if ticket is None:  # too many wait
                self._failed.update(keys)
                self._events.append(Loaded(load.request_id, 0, tuple(slots)))
            else:
                self._tickets[ticket] = load
        for ticket, load in self._tickets.items():
            if load.request_id in self._meta.cancels:
                self.transfers.cancel(ticket)

    def wait_for_layer_load(self, layer: int) -> None:
        wanted = set(self._meta.loads)
        end = time.monotonic() + max((load.deadline_s for load in wanted), default=0.0) + _GRACE_S
        while wanted & set(self._tickets.values()) and (left_s := end - time.monotonic()) > 0:
            self.transfers.wait(left_s)
            self._collect()

    def save_kv_layer(self, layer: int, pages: PackedPages) -> None:
        assert layer == self._next_layer, f"layer {layer} came instead of {self._next_layer}"
        self._next_layer += 1
        for index, (_, slot) in enumerate(self._meta.saves):
            source = pages.layer_of_page(index).cast("B")
            assert source.nbytes == self._sizes[layer], (source.nbytes, self._sizes[layer])
            _copy(source, self._slot_bytes(slot), self._starts[layer])

    def wait_for_save(self) -> None:
        assert not self._meta.saves or self._next_layer == len(self._sizes), "a layer is missing"
        for page in self._meta.saves:
            if not self.transfers.write_behind(page.key, page.slot):
                self._events.append(Saved(page, False))
        self._meta = ConnectorMeta()

    def poll(self) -> list[Loaded | Saved]:
        self._collect()
        events, self._events = self._events, []
        return events

    def failed_keys(self) -> frozenset[bytes]:
        failed, self._failed = frozenset(self._failed), set()
        return failed

    def flush(self, scope: bytes | None) -> None:
        """As `Flushes.flush`."""
        self.transfers.flush(scope)
        with self._lock:
            self._found.clear()  # whoever asks again hears that there is nothing

    def close(self) -> None:
        self._lookup.close(_CLOSE_S)
        self.transfers.close()

    def _look_up(self, request_id: str, keys: Sequence[bytes]) -> None:
        found = self.transfers.guard.contains(keys)
        with self._lock:
            if request_id in self._found:  # else it has ended meanwhile
                self._found[request_id] = found

    def _collect(self) -> None:
        for event in self.transfers.poll():
            if isinstance(event, Written):
                page = PageRef(event.key, event.slot)
                self._events.append(Saved(page, event.outcome is Outcome.OK))
                continue
            load = self._tickets.pop(event.ticket)
            whole = [outcome is Outcome.OK for outcome in event.outcomes]
            num_pages = whole.index(False) if False in whole else len(whole)
            if not event.cancelled:
                self._failed.update(page.key for page, good in zip(load.pages, whole, strict=True) if not good)
            self._events.append(Loaded(load.request_id, num_pages, event.slots))


def _copy(source: memoryview, buffers: Sequence[memoryview], start: int) -> None:
    """Writes to a place in buffers that are taken as one after the other."""
    for buffer in buffers:
        size = buffer.nbytes
        if start < size and source:
            count = min(size - start, source.nbytes)
            buffer.cast("B")[start : start + count] = source[:count]
            source, start = source[count:], start + count
        start -= size
    assert not source, "the layers are larger than the slot"


def _refs_as_json(pages: Sequence[PageRef]) -> list[list[Any]]:
    return [[page.key.hex(), page.slot] for page in pages]


def _refs_from_json(tree: Sequence[Sequence[Any]]) -> tuple[PageRef, ...]:
    return tuple(PageRef(bytes.fromhex(key), slot) for key, slot in tree)
