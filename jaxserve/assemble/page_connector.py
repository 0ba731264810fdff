"""A connector that a config names, as the scheduler sees it: `sched.loading.SlotStore` over a `KVConnector`.

Each fill is a sequence to the connector, with the keys of the pages that are lacking. Its scheduler's side is called on
the loop, its worker's side on a thread of its own, with a `ConnectorMeta` between them whenever there is something to
do. The pages that a plan has saved are in slots by then; `save_kv_layer` is given them as one layer.

A connector is code of somebody else. What it raises on the loop costs the pages that were asked for. What it raises on
its thread ends its use: nobody knows whether it still writes to the slots that it was given, so they are never used
again. Loads have no event before they end, so their slots stay the connector's for as long as it likes.
"""

import collections
import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.assemble.page_store import PageKeys, bytes_of, check_surroundings, page_layout
from jaxserve.config.schema import Config, StoreConfig
from jaxserve.config.secret_files import read_secret
from jaxserve.errors import ConfigError
from jaxserve.kv.connector import (
    CONNECTORS,
    ConnectorMeta,
    ConnectorOptions,
    Flushes,
    KVConnector,
    Loaded,
    PageRef,
    Saved,
    create_connector,
)
from jaxserve.kv.store import StoreUnavailable
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.sched.loading import Filled, StoreCounts, StoreKey, Written

logger = logging.getLogger(__name__)

_LOOK_S = 0.002  # between two looks for events; the interface has no call for them
_LOGGED = 5
_EVENTS = (
    "filled",
    "missed",
    "failed",
    "prefetch_used",
    "prefetch_wasted",
    "written",
    "write_refused",
    "write_skipped",
)
_CLOSE_S = _SETTLE_S = 10.0
_TAKEN = {"connector", "connector_options", "secret_file", "wait_s"}


def prepare_page_connectors(config: Config) -> "PageConnectors":
    """What opens the connector of `store.connector` for each replica. Raises ConfigError."""
    store = config.store
    useless = [name for name, value in store if name not in _TAKEN and value != StoreConfig.model_fields[name].default]
    if useless:
        raise ConfigError(
            f"store.connector is {store.connector!r}, which has no use for store.{useless[0]}; leave that out, or give "
            "it to the connector in store.connector_options"
        )
    if store.secret_file is None:
        raise ConfigError(
            "store.connector needs store.secret_file, by which the salts of requests are hidden in the names of pages"
        )
    assert store.connector is not None
    check_surroundings(config, f"store.connector is {store.connector!r}")
    CONNECTORS.get(store.connector)
    return PageConnectors(store.connector, store, read_secret(store.secret_file, "store.secret_file"))


class PageConnectors:
    """The connectors of one engine, one for each replica. Used by the thread that starts the engine."""

    def __init__(self, name: str, store: StoreConfig, secret: bytes) -> None:
        self._name = name
        self._store = store
        self._secret = secret
        self._opened: list[ConnectorStore] = []

    def open(self, slots: SlotBytes | None, layout: str, namespace: str, page_size: int) -> "ConnectorStore":
        """The connector for one replica; see `PageStores.open`. `page_size`: tokens. Raises ConfigError."""
        assert slots is not None, "`check_surroundings` has seen cache.host_bytes"
        pages = page_layout(slots, layout, namespace)

        slot_bytes = bytes_of(slots)
        options = ConnectorOptions(
            slot_bytes=slot_bytes,
            page_bytes=pages.page_bytes,
            page_size=page_size,
            wait_s=self._store.wait_s,
            settings=self._store.connector_options,
        )
        connector = create_connector(self._name, options)
        opened = ConnectorStore(connector, slot_bytes, PageKeys(self._secret, pages), page_size)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        """Closes all that was opened: for a start that does not succeed."""
        for opened in self._opened:
            opened.close()


class _View(NamedTuple):
    """A fill, as a connector sees a sequence."""

    request_id: str
    page_keys: tuple[bytes, ...]
    page_size: int


class _Plan(NamedTuple):
    """The pages that are in slots since the last time."""

    saved_pages: tuple[PageRef, ...]


class _Whole:
    """The pages of a step, each as one layer."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._pages = pages

    def layer_of_page(self, index: int) -> memoryview:
        return self._pages[index]


class _Order(NamedTuple):
    """What the thread has to do. `at_once`: to wait for the loads before anything else."""

    meta: ConnectorMeta
    at_once: bool


class _Fill:
    """A fill without its event. Mutated on the loop."""

    __slots__ = ("finished", "num_matched", "slots", "ticket", "until_s", "view")

    def __init__(self, ticket: int, view: _View, slots: tuple[int, ...], until_s: float) -> None:
        self.num_matched = 0  # pages that the connector has said it has
        self.finished = False  # the connector was told to forget it
        self.ticket = ticket
        self.view = view
        self.slots = slots
        self.until_s = until_s


class ConnectorStore:
    """A `SlotStore`. Called by the loop; `wake` is set before it."""

    def __init__(
        self,
        connector: KVConnector,
        slot_bytes: Callable[[int], list[memoryview]],
        keys: PageKeys,
        page_size: int,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._connector = connector
        self._slot_bytes = slot_bytes
        self._keys = keys
        self._page_size = page_size
        self._counts: collections.Counter[str] = collections.Counter()
        self._tickets = itertools.count(1)
        self._unmatched: dict[int, _Fill] = {}  # the connector does not know yet what it has
        self._loading: dict[str, _Fill] = {}
        self._prefetched: dict[int, int] = {}  # ticket -> pages that came, until settled
        self._saves: list[PageRef] = []  # for the next meta
        self._saving: dict[PageRef, None] = {}  # from `write` to the event
        self._news = False  # there is something for the next meta
        self._at_once = False  # it has loads that are to be waited for
        self._ended: list[Filled | Written] = []
        # Between the loop and the thread.
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._events: collections.deque[Loaded | Saved] = collections.deque()
        self._num_outside = 0  # loads and saves without an event; the loop adds, and takes away
        self._given_up = False
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- the loop --------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> StoreCounts:
        """See `SlotStore`."""
        return StoreCounts({name: self._counts[name] for name in _EVENTS}, int(self._given_up))

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        if self._given_up or self._closed:
            return None
        ticket = next(self._tickets)
        view = _View(f"fill-{ticket}", tuple(map(self._keys.key, keys)), self._page_size)
        self._unmatched[ticket] = _Fill(ticket, view, tuple(slots), time.monotonic() + deadline_s)
        self._match()
        if self._ended:  # the loop may sleep from now on
            self.wake()
        if self._news:
            self._tell()
        if self._unmatched:
            self._put(_Order(ConnectorMeta(), False))
        return ticket

    def prefetch(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`. A connector knows no ranks."""
        ticket = self.fill(keys, slots, deadline_s)
        if ticket is not None:
            self._prefetched[ticket] = 0
        return ticket

    def settle(self, ticket: int, num_used: int) -> None:
        """See `SlotStore`."""
        self._counts["prefetch_used"] += num_used
        self._counts["prefetch_wasted"] += self._prefetched.pop(ticket) - num_used

    def cancel(self, ticket: int) -> None:
        """See `SlotStore`."""
        fill = self._unmatched.pop(ticket, None)
        if fill is not None:
            self._end(fill, 0)
            self._finish(fill)
            self.wake()
            return
        for loading in self._loading.values():
            if loading.ticket == ticket:
                self._finish(loading)

    def write(self, key: StoreKey, slot: int) -> bool:
        """See `SlotStore`."""
        if self._given_up or self._closed:
            self._counts["write_skipped"] += 1
            return False
        page = PageRef(self._keys.key(key), slot)
        self._saves.append(page)
        self._saving[page] = None
        self._news = True
        return True

    def poll(self) -> list[Filled | Written]:
        """See `SlotStore`."""
        self._match()
        if self._news and not self._given_up:
            self._tell()
        while self._events:
            event = self._events.popleft()
            if not self._is_expected(event):
                self._note_fault(ValueError(f"an event of nothing that was asked: {event!r:.200}"))
                continue
            self._num_outside -= 1
            if isinstance(event, Saved):
                del self._saving[event.page]
                self._counts["written" if event.stored else "write_refused"] += 1
                self._ended.append(Written(event.page.slot))
            else:
                fill = self._loading.pop(event.request_id)
                self._counts["failed"] += fill.num_matched - event.num_pages
                self._end(fill, event.num_pages)
                self._finish(fill)
        ended, self._ended = self._ended, []
        return ended

    def _is_expected(self, event: object) -> bool:
        if isinstance(event, Saved):
            return event.page in self._saving
        fill = self._loading.get(event.request_id) if isinstance(event, Loaded) else None
        return fill is not None and isinstance(event, Loaded) and 0 <= event.num_pages <= fill.num_matched

    def _match(self) -> None:
        """Asks for what is not known yet, and lets the connector have the slots of what it has."""
        now_s = time.monotonic()
        for fill in [*self._unmatched.values()]:
            if self._given_up:
                del self._unmatched[fill.ticket]
                self._end(fill, 0)
                continue
            try:
                num_tokens, is_async = self._connector.get_num_new_matched_tokens(fill.view, 0)
                if num_tokens is None and now_s < fill.until_s:
                    continue
                count = min((num_tokens or 0) // self._page_size, len(fill.slots))
            except Exception as error:
                self._note_fault(error)
                count, is_async = 0, True
            del self._unmatched[fill.ticket]
            if not count:
                self._counts["missed"] += len(fill.slots)
                self._end(fill, 0)
                self._finish(fill)
                continue
            try:
                self._connector.update_state_after_alloc(fill.view, fill.slots[:count], count * self._page_size)
            except Exception as error:
                self._give_up(error)  # nobody knows whether it has the slots
                continue
            fill.num_matched = count
            self._counts["missed"] += len(fill.slots) - count
            self._loading[fill.view.request_id] = fill
            self._num_outside += 1
            self._news = True
            self._at_once |= not is_async

    def _tell(self) -> None:
        saves, self._saves = tuple(self._saves), []
        self._news = False
        try:
            meta = self._connector.build_connector_meta(_Plan(saves))
        except Exception as error:
            self._give_up(error)  # nobody knows which of the slots it has
            return
        self._num_outside += len(saves)
        self._put(_Order(meta, self._at_once))
        self._at_once = False

    def _end(self, fill: _Fill, num_pages: int) -> None:
        self._ended.append(Filled(fill.ticket, tuple(number < num_pages for number in range(len(fill.slots)))))
        self._counts["filled"] += num_pages
        if fill.ticket in self._prefetched:
            self._prefetched[fill.ticket] = num_pages

    def _finish(self, fill: _Fill) -> None:
        """It is forgotten, and what is not loaded yet is called off. A load that was called off has an event, too."""
        if fill.finished or self._given_up:
            return
        fill.finished = True
        try:
            self._connector.request_finished(fill.view)
            self._news = True
        except Exception as error:
            self._note_fault(error)

    def _put(self, order: _Order) -> None:
        self._orders.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kv-connector", daemon=True)
            self._thread.start()

    def _note_fault(self, error: Exception) -> None:
        self._counts["raised"] += 1
        if self._counts["raised"] <= _LOGGED:
            logger.warning("the connector %s raised %r", type(self._connector).__name__, error)

    def _give_up(self, error: BaseException) -> None:
        logger.error(
            "the connector %s raised %r, and is not used any more, nor are the slots that it has",
            type(self._connector).__name__,
            error,
        )
        self._given_up = True

    # ---- its thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # code of anybody
            self._give_up(error)
            self.wake()

    def _step(self) -> bool:
        """The next order, or a look for events. False at the end."""
        connector = self._connector
        busy = self._num_outside > len(self._events) or bool(self._unmatched)
        order: _Order | None = _Order(ConnectorMeta(), False)
        with contextlib.suppress(queue.Empty):
            order = self._orders.get(timeout=_LOOK_S if busy else None)
        if order is None:
            return False
        meta = order.meta
        if meta != ConnectorMeta():
            connector.bind_connector_metadata(meta)
            connector.start_load_kv()
            if order.at_once:
                connector.wait_for_layer_load(0)
            if meta.saves:
                pages = [self._slot_bytes(page.slot) for page in meta.saves]
                whole = [views[0] if len(views) == 1 else memoryview(b"".join(views)) for views in pages]
                connector.save_kv_layer(0, _Whole(whole))
            connector.wait_for_save()
        events = connector.poll()
        self._events.extend(events)
        connector.failed_keys()  # events say as much; it is asked so that the connector can forget them
        if events or self._unmatched:
            self.wake()
        return True

    # ---- any thread ------------------------------------------------------------------------------------------------

    def flush(self, salt: str | None) -> None:
        """See `SlotStore`."""
        connector = self._connector
        if not isinstance(connector, Flushes):
            raise StoreUnavailable(
                f"the connector {type(connector).__name__} has no `flush`, so its pages remain; delete them there"
            )
        scope = None if salt is None else self._keys.scope_of(salt)
        on_their_way = [page for page in self._saving.copy() if scope is None or page.key.startswith(scope)]
        end_s = time.monotonic() + _SETTLE_S
        while not self._given_up and any(page in self._saving for page in on_their_way):
            if time.monotonic() > end_s:
                raise StoreUnavailable(f"pages were being written for {_SETTLE_S:.0f} s; flush again")
            self.wake()
            time.sleep(_LOOK_S)
        connector.flush(scope)

    def close(self) -> None:
        """Lets saves end that were begun, and closes the connector. May be called twice."""
        if self._closed:
            return
        if self._news and not self._given_up:
            self._tell()
        self._closed = True
        end_s = time.monotonic() + _CLOSE_S
        while self._thread is not None and not self._given_up and time.monotonic() < end_s:
            if self._num_outside <= len(self._events) and self._orders.empty():
                break
            time.sleep(_LOOK_S)
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, end_s - time.monotonic()))
        try:
            self._connector.close()
        except Exception as error:
            self._note_fault(error)
