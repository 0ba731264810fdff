"""`Transfers`: threads that fill slots of host memory from a store, and write slots to it behind the engine's back.

A slot belongs to a transfer from the call that names it until the event that says it ended, whatever the outcome: the
loop pins it for that long, and nothing else. The loop never waits here: calls return at once, a full queue refuses,
events are collected with `poll`.

    fill          a waiting request needs these pages
    prefetch      a request is likely to need them; of lower rank, and bounded in slots
    write_behind  a page that only a slot has is to be in the store, too
"""

import collections
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from jaxserve.kv.guarded import Guarded
from jaxserve.kv.store import KVStore, Outcome, StoreUnavailable
from jaxserve.kv.workers import Workers

logger = logging.getLogger(__name__)

SlotBytes = Callable[[int], list[memoryview]]  # the buffers of a slot, which are a page's bytes one after the other

_SETTLE_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A fill or prefetch has ended, and its slots are free of it.

    Attributes:
      outcomes: of each key in order; a slot holds its page under OK alone.
      cancelled: it was cancelled before it was asked of the store.
    """

    ticket: int
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    cancelled: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A write has ended, and its slot is free of it."""

    key: bytes
    slot: int
    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Bounds of transfers.

    Attributes:
      fill_threads, prefetch_threads, write_threads: calls of the store at once.
      max_fills, max_writes: that wait; beyond them a call is refused.
      max_prefetch_slots: slots of prefetches that were not settled.
      write_s: seconds that the store has for a page.
    """

    fill_threads: int = 2
    prefetch_threads: int = 1
    write_threads: int = 1
    max_fills: int = 64
    max_writes: int = 256
    max_prefetch_slots: int = 64
    write_s: float = 30.0


class _Fill:
    """A fill that has not ended. `cancelled` is set by the loop, and read by a thread before it begins."""

    __slots__ = ("cancelled", "deadline", "is_prefetch", "keys", "slots", "ticket")

    def __init__(
        self, ticket: int, keys: Sequence[bytes], slots: Sequence[int], deadline: float, is_prefetch: bool
    ) -> None:
        self.ticket = ticket
        self.keys = tuple(keys)
        self.slots = tuple(slots)
        self.deadline = deadline
        self.is_prefetch = is_prefetch
        self.cancelled = False


class Transfers:
    """Between the slots of one process and one store. Called by the loop; `flush` and `delete` by any thread.

    Attributes:
      counts: pages: fill_<outcome>, write_<outcome>, writes_skipped, prefetch_used, prefetch_late, prefetch_wasted;
        calls: fills_refused, cancelled.
      guard: the store with its breaker and counts.
    """

    def __init__(
        self,
        store: KVStore,
        slot_bytes: SlotBytes,
        *,
        options: TransferOptions | None = None,
        wake: Callable[[], None] = lambda: None,
        place: str = "store",
    ) -> None:
        """`wake` is called on a thread of a transfer when there is an event to poll; it must return at once."""
        options = TransferOptions() if options is None else options
        self.counts: collections.Counter[str] = collections.Counter()
        self.guard = store if isinstance(store, Guarded) else Guarded(store, place=place)
        self._slot_bytes = slot_bytes
        self._options = options
        self._wake = wake
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._tickets = itertools.count(1)
        self._fills: dict[int, _Fill] = {}
        self._prefetched: dict[int, int] = {}  # ticket -> slots, until settled
        self._loaded: dict[int, int] = {}  # ticket of a prefetch that has ended -> pages it brought
        self._writes: dict[bytes, bool] = {}  # key -> whether the store was asked
        self._dropped: set[bytes] = set()  # writes that wait and were flushed
        self._events: collections.deque[Filled | Written] = collections.deque()
        self._fill_workers = Workers("kv-fill", options.fill_threads, options.max_fills)
        self._prefetch_workers = Workers("kv-prefetch", options.prefetch_threads, options.max_fills)
        self._write_workers = Workers("kv-write", options.write_threads, options.max_writes)

    def fill(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> int | None:
        """Starts to fill `slots` with the pages of `keys`, within `deadline_s` seconds from now, waiting included.

        Returns its ticket, or None when too many fills wait; then the slots were not touched.
        """
        return self._start(self._fill_workers, keys, slots, deadline_s, is_prefetch=False)

    def prefetch(self, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float) -> int | None:
        """`fill` for a request that may come to need the pages. `settle` must follow its event."""
        with self._lock:
            if sum(self._prefetched.values()) + len(slots) > self._options.max_prefetch_slots:
                return None
        return self._start(self._prefetch_workers, keys, slots, deadline_s, is_prefetch=True)

    def settle(self, ticket: int, num_used: int) -> None:
        """Of the pages that a prefetch brought, so many were used, and the others were in vain."""
        with self._lock:
            loaded = self._loaded.pop(ticket)
            assert num_used <= loaded, (num_used, loaded)
            del self._prefetched[ticket]
            self.counts["prefetch_used"] += num_used
            self.counts["prefetch_wasted"] += loaded - num_used

    def cancel(self, ticket: int) -> None:
        """The pages are not needed any more. The event still comes, and the slots are the transfer's until then."""
        with self._lock:
            if ticket in self._fills:
                self._fills[ticket].cancelled = True

    def write_behind(self, key: bytes, slot: int) -> bool:
        """Starts to write a slot to the store. False: it is not written; too much waits, or the page is on its way.

        The slot must hold the page, and keep it, until the event.
        """
        with self._lock:
            accepted = key not in self._writes
            if accepted:
                self._writes[key] = False
        if accepted and not self._write_workers.submit(functools.partial(self._write, key, slot)):
            accepted = False
            with self._lock:
                del self._writes[key]
        if not accepted:
            with self._lock:
                self.counts["writes_skipped"] += 1
        return accepted

    def poll(self) -> list[Filled | Written]:
        """The events since the last time, in the order of their ends."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def wait(self, timeout_s: float) -> None:
        """Returns when there is an event to poll, or nothing pending that could bring one. Not for the loop."""
        with self._lock:
            self._ended.wait_for(lambda: self._events or not (self._fills or self._writes), timeout_s)

    @property
    def num_pending(self) -> int:
        """Transfers that have not ended."""
        with self._lock:
            return len(self._fills) + len(self._writes)

    def flush(self, scope: bytes | None) -> None:
        """Removes all pages of a scope, or all, from the store and the writes that wait. Raises StoreUnavailable.

        Blocks. Slots are the caller's: it drops those of the scope, and the results of fills that run now.
        """
        with self._lock:
            concerned = {key for key in self._writes if scope is None or key.startswith(scope)}
            asked = {key for key in concerned if self._writes[key]}
            self._dropped |= concerned - asked
            settled = self._ended.wait_for(lambda: not asked & self._writes.keys(), _SETTLE_S)
        if not settled:
            raise StoreUnavailable(f"{len(asked)} pages were being written for {_SETTLE_S:.0f} s; flush again")
        self.guard.flush(scope)

    def close(self, timeout_s: float = _SETTLE_S) -> bool:
        """Cancels fills that wait, and writes what waits to be written. The store stays open: others may use it.

        Returns whether all transfers have ended. If not, a thread hangs in the store, and its slots must not be used or
        freed while the process lives. Events can be polled afterwards.
        """
        with self._lock:
            for fill in self._fills.values():
                fill.cancelled = True
        deadline = time.monotonic() + timeout_s
        for workers in (self._fill_workers, self._prefetch_workers, self._write_workers):
            workers.close(max(0.0, deadline - time.monotonic()))
        return self.num_pending == 0

    def _start(
        self, workers: Workers, keys: Sequence[bytes], slots: Sequence[int], deadline_s: float, *, is_prefetch: bool
    ) -> int | None:
        assert len(keys) == len(slots) > 0
        fill = _Fill(next(self._tickets), keys, slots, time.monotonic() + deadline_s, is_prefetch)
        with self._lock:
            self._fills[fill.ticket] = fill
            if is_prefetch:
                self._prefetched[fill.ticket] = len(slots)
        if workers.submit(functools.partial(self._fill, fill)):
            return fill.ticket
        with self._lock:
            del self._fills[fill.ticket]
            self._prefetched.pop(fill.ticket, None)
            self.counts["fills_refused"] += 1
        return None

    def _fill(self, fill: _Fill) -> None:
        left_s = fill.deadline - time.monotonic()
        with self._lock:
            cancelled = fill.cancelled
        outcomes = [Outcome.LATE] * len(fill.keys)
        try:
            if not cancelled and left_s > 0:
                outcomes = [Outcome.FAILED] * len(fill.keys)
                outcomes = self._read(fill, left_s)
        finally:  # a slot whose event never comes is lost to the engine, whatever went wrong
            self._end_fill(fill, outcomes, cancelled=cancelled)

    def _end_fill(self, fill: _Fill, outcomes: Sequence[Outcome], *, cancelled: bool) -> None:
        event = Filled(ticket=fill.ticket, slots=fill.slots, outcomes=tuple(outcomes), cancelled=cancelled)
        with self._lock:
            del self._fills[fill.ticket]
            if cancelled:
                self.counts["cancelled"] += 1
            else:
                for outcome in outcomes:
                    self.counts[f"fill_{outcome.value}"] += 1
            if fill.is_prefetch:
                self._loaded[fill.ticket] = event.outcomes.count(Outcome.OK)
                if not cancelled:
                    self.counts["prefetch_late"] += event.outcomes.count(Outcome.LATE)
            self._events.append(event)
            self._ended.notify_all()
        self._wake()

    def _read(self, fill: _Fill, left_s: float) -> list[Outcome]:
        slots = [self._slot_bytes(slot) for slot in fill.slots]
        # A store knows one buffer a page, a slot may have one for each device.
        buffers = [
            views[0] if len(views) == 1 else memoryview(bytearray(sum(view.nbytes for view in views)))
            for views in slots
        ]
        outcomes = self.guard.get(fill.keys, buffers, left_s)
        for views, buffer, outcome in zip(slots, buffers, outcomes, strict=True):
            if outcome is Outcome.OK and len(views) > 1:
                start = 0
                for view in views:
                    view.cast("B")[:] = buffer[start : start + view.nbytes]
                    start += view.nbytes
        return outcomes

    def _write(self, key: bytes, slot: int) -> None:
        with self._lock:
            dropped = key in self._dropped
            self._dropped.discard(key)
            self._writes[key] = True
        outcome = Outcome.REFUSED
        try:
            if not dropped:
                outcome = Outcome.FAILED
                views = self._slot_bytes(slot)
                page = views[0] if len(views) == 1 else memoryview(b"".join(views))
                (outcome,) = self.guard.put([key], [page], self._options.write_s)
        finally:
            with self._lock:
                del self._writes[key]
                self.counts[f"write_{outcome.value}"] += 1
                self._events.append(Written(key=key, slot=slot, outcome=outcome))
                self._ended.notify_all()
            self._wake()
