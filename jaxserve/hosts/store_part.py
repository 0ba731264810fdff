"""`StorePart`: the store of one process of several, which carries out the orders of process 0.

A page of a model that several hosts share lies in parts: each process has the shards of its own devices in its slots,
and keeps them in a store of its own. Every process has one of these, process 0 as well.
"""

import threading
from collections.abc import Callable
from typing import Protocol

from jaxserve.errors import JaxserveError
from jaxserve.hosts.store_orders import Cancel, Fill, Flush, Order, Outcome, Settle, Write
from jaxserve.sched.loading import Filled, SlotStore


class LocalStore(SlotStore, Protocol):
    """The store of this process alone. Calls `wake`, which is set before the first order, on any thread after each
    event."""

    wake: Callable[[], None]

    def close(self) -> None:
        """Writes what waits to be written. May be called twice."""
        ...


class StorePart:
    """Orders come on the thread that dispatches plans, in their place among the plans; outcomes leave on any thread.

    That place matters: a slot is free for a fill, or has the page to write, once the plans before the order have gone
    to the device.
    """

    def __init__(self, store: LocalStore, answer: Callable[[int, Outcome], None]) -> None:
        """`store` belongs to this object from now on. `answer` is called once for each fill, write and flush, with its
        number; it must return at once."""
        self._store = store
        self._answer = answer
        self._lock = threading.Lock()  # guards all below, and makes one step of a call of the store and what it gave
        self._closed = False
        self._tickets: dict[int, int] = {}  # order -> ticket: fills that run, prefetches that were not settled
        self._fills: dict[int, int] = {}  # ticket -> order, of fills and prefetches that run
        self._writes: dict[int, int] = {}  # slot -> order
        self._prefetches: set[int] = set()  # orders
        store.wake = self._collect

    def carry_out(self, number: int, order: Order) -> None:
        """Starts what the order says. What the store does not take is answered at once: as pages that it lacks, or as
        a write that has ended."""
        match order:
            case Fill():
                if not self._fill(number, order):
                    self._answer(number, Outcome(ok=[False] * len(order.slots)))
            case Write():
                if not self._write(number, order):
                    self._answer(number, Outcome())
            case Settle():
                self._settle(order)
            case Cancel():
                with self._lock:
                    if order.of in self._tickets:
                        self._store.cancel(self._tickets[order.of])
            case Flush():  # it waits for the store, which the plans behind it must not
                threading.Thread(
                    target=self._flush, args=(number, order.salt), name="jaxserve-flush", daemon=True
                ).start()

    def close(self) -> None:
        """Closes the store, which writes what waits. Later orders are answered as those that it does not take."""
        with self._lock:
            self._closed = True
        self._store.close()

    def _fill(self, number: int, order: Fill) -> bool:
        is_prefetch = order.do == "prefetch"
        start = self._store.prefetch if is_prefetch else self._store.fill
        with self._lock:
            if self._closed:
                return False
            ticket = start([page.key for page in order.pages], order.slots, order.deadline_s)
            if ticket is None:
                return False
            self._tickets[number] = ticket
            self._fills[ticket] = number
            if is_prefetch:
                self._prefetches.add(number)
            return True

    def _write(self, number: int, order: Write) -> bool:
        with self._lock:
            if self._closed or not self._store.write(order.page.key, order.slot):
                return False
            self._writes[order.slot] = number
            return True

    def _settle(self, order: Settle) -> None:
        with self._lock:
            if order.of in self._prefetches:  # else the store did not take it
                self._prefetches.remove(order.of)
                self._store.settle(self._tickets.pop(order.of), order.num_used)

    def _flush(self, number: int, salt: str | None) -> None:
        try:
            self._store.flush(salt)
        except JaxserveError as error:  # StoreUnavailable, for one
            self._answer(number, Outcome.failed(error))
        except Exception as error:  # the boundary of the thread: somebody waits for an answer
            self._answer(number, Outcome.failed(error))
            raise
        else:
            self._answer(number, Outcome())

    def _collect(self) -> None:
        """Answers what has ended since the last time."""
        ended: list[tuple[int, Outcome]] = []
        with self._lock:
            for event in self._store.poll():
                if isinstance(event, Filled):
                    number = self._fills.pop(event.ticket)
                    if number not in self._prefetches:
                        del self._tickets[number]
                    ended.append((number, Outcome(ok=[*event.ok])))
                else:
                    ended.append((self._writes.pop(event.slot), Outcome()))
        for number, outcome in ended:
            self._answer(number, outcome)
