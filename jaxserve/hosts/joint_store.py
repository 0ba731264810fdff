"""`JointStore`: the stores of all processes as one, for the scheduler of process 0.

    process 0                                              every other process
    ---------                                              -------------------
    Loader.fill -> JointStore --- order 7 among plans ---> Follower.frames
                       |                                        |
                  Execution -> StorePart -> its store      Execution -> StorePart -> its store
                       |                                        |
    Loader.poll <- all of 7 <--- outcome of 7 ------------------+

The scheduler alone decides what is loaded, by plans, and it plans to load only what every process has said to have. So
a store that lacks a page, is late or fails costs the page, and nothing that processes do can differ: the plans are the
same for all. A slot belongs to its order until the last process has answered, so an order that one of them is slow at
keeps the slots, and the engine does not wait for it.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from jaxserve.errors import PlanCorrupt
from jaxserve.hosts.frames import Frame
from jaxserve.hosts.store_orders import (
    Cancel,
    Fill,
    Flush,
    Order,
    Outcome,
    Page,
    Settle,
    Write,
    decode_outcome,
    encode_order,
)
from jaxserve.hosts.store_part import LocalStore, StorePart
from jaxserve.kv.store import StoreUnavailable
from jaxserve.kv.transfer import TransferOptions
from jaxserve.sched.loading import Filled, StoreCounts, StoreKey, Written

_MOST = TransferOptions()  # of a process; not more is ordered, so that no process has to refuse any


class _Pending:
    """An order that some processes have not answered. Guarded by the store's lock.

    Attributes:
      waiting: the processes that have not answered.
      ok: of each slot of a fill, whether all that have answered have its page; empty for the others.
      mine: the same of process 0 alone.
      reasons: of those whose flush has failed.
    """

    __slots__ = ("mine", "ok", "order", "reasons", "waiting")

    def __init__(self, order: Order, processes: range) -> None:
        self.order = order
        self.waiting = {*processes}
        self.ok = [True] * (len(order.slots) if isinstance(order, Fill) else 0)
        self.mine = self.ok
        self.reasons: dict[int, str] = {}


class JointStore:
    """A `SlotStore`. Called by the loop, but for `flush` (any thread) and `take` (the threads of the connections).

    Attributes:
      wake: see `SlotStore`; set before the first call.
    """

    def __init__(
        self,
        store: LocalStore,
        *,
        num_processes: int,
        send: Callable[[int, bytes], bool],
        in_order: Callable[[Callable[[], None]], object],
    ) -> None:
        """`store`: of process 0, which belongs to this object from now on.

        `send` sends a number and its order to all other processes, behind the plans so far; False: it is too long, and
        was not sent.
        `in_order` runs a function on the thread that dispatches, behind the plans so far.
        """
        self.wake: Callable[[], None] = lambda: None
        self._store = store
        self._part = StorePart(store, self._take)
        self._processes = range(num_processes)
        self._send = send
        self._in_order = in_order
        self._changed = threading.Condition()  # guards all below, and keeps orders in the order of their numbers
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._num_fills = self._num_prefetches = 0  # orders that have not ended
        self._prefetched: dict[int, int] = {}  # order -> slots, until it is settled
        self._writing: set[StoreKey] = set()
        self._events: deque[Filled | Written] = deque()
        self._num_filled = self._num_apart = self._num_skipped = 0
        self._end: str | None = None  # why nothing more comes

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        with self._changed:
            if self._num_fills == _MOST.max_fills:
                return None
            number = self._order(Fill(do="fill", pages=_pages(keys), slots=[*slots], deadline_s=deadline_s))
            self._num_fills += number is not None
            return number

    def prefetch(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        with self._changed:
            if (
                self._num_prefetches == _MOST.max_fills
                or sum(self._prefetched.values()) + len(slots) > _MOST.max_prefetch_slots
            ):
                return None
            number = self._order(Fill(do="prefetch", pages=_pages(keys), slots=[*slots], deadline_s=deadline_s))
            if number is not None:
                self._num_prefetches += 1
                self._prefetched[number] = len(slots)
            return number

    def settle(self, ticket: int, num_used: int) -> None:
        """See `SlotStore`."""
        with self._changed:
            del self._prefetched[ticket]
            self._order(Settle(of=ticket, num_used=num_used))

    def cancel(self, ticket: int) -> None:
        """See `SlotStore`."""
        with self._changed:
            if ticket in self._pending:
                self._order(Cancel(of=ticket))

    def write(self, key: StoreKey, slot: int) -> bool:
        """See `SlotStore`."""
        with self._changed:
            accepted = (
                len(self._writing) < _MOST.max_writes
                and key not in self._writing
                and self._order(Write(page=_page(key), slot=slot)) is not None
            )
            if accepted:
                self._writing.add(key)
            else:
                self._num_skipped += 1
            return accepted

    def poll(self) -> list[Filled | Written]:
        """See `SlotStore`."""
        with self._changed:
            events = [*self._events]
            self._events.clear()
            return events

    def flush(self, salt: str | None) -> None:
        """See `SlotStore`. Blocks until every process has removed the pages. Raises StoreUnavailable."""
        with self._changed:
            number = self._order(Flush(salt=salt))
            if number is None:
                raise StoreUnavailable(
                    f"a cache salt of {len(salt or ''):,} characters is too long to be sent to the other processes; "
                    "raise hosts.max_plan_bytes on all hosts"
                )
            pending = self._pending[number]
            self._changed.wait_for(lambda: not pending.waiting or self._end is not None)
            waiting, end = sorted(pending.waiting), self._end
        if waiting:
            names = ", ".join(map(str, waiting))
            raise StoreUnavailable(f"pages may remain in the store of process {names}: {end}; flush again")
        if pending.reasons:
            found = "; ".join(f"process {process_id}: {reason}" for process_id, reason in pending.reasons.items())
            raise StoreUnavailable(f"pages may remain: {found}")

    @property
    def counts(self) -> StoreCounts:
        """See `SlotStore`. Those of process 0; but a page is filled if every process had it, and missed if another
        lacked it."""
        found = self._store.counts
        with self._changed:
            joint = {
                "filled": self._num_filled,
                "missed": found.pages["missed"] + self._num_apart,
                "write_skipped": found.pages["write_skipped"] + self._num_skipped,
            }
        return StoreCounts({**found.pages, **joint}, found.breaks)

    def take(self, process_id: int, frame: Frame) -> None:
        """A frame of kind OUTCOME has come from another process. Raises PlanCorrupt where it makes no sense."""
        self._note(process_id, frame.seq, decode_outcome(frame))

    def fail(self, error: BaseException) -> None:
        """The service has failed, for this reason: whoever waits for a flush waits no more."""
        self._give_up(str(error))

    def close(self) -> None:
        """Closes the store of this process, which writes what waits. Each other process closes its own at its end."""
        self._give_up("the service has ended")
        self._part.close()

    def _order(self, order: Order) -> int | None:
        """The number of the order, which has gone to all; None: it is too long. Its answers may come before this has
        returned, and wait for the lock."""
        number = next(self._numbers)
        if not self._send(number, encode_order(order)):
            return None
        if isinstance(order, Fill | Write | Flush):
            self._pending[number] = _Pending(order, self._processes)
        self._in_order(lambda: self._part.carry_out(number, order))
        return number

    def _take(self, number: int, outcome: Outcome) -> None:
        self._note(0, number, outcome)

    def _note(self, process_id: int, number: int, outcome: Outcome) -> None:
        with self._changed:
            pending = self._pending.get(number)
            if pending is None or process_id not in pending.waiting:
                raise PlanCorrupt(f"an outcome of order {number} arrived, which was not due")
            if len(outcome.ok) != len(pending.ok):
                raise PlanCorrupt(f"the outcome of order {number} is of {len(outcome.ok)} slots, not {len(pending.ok)}")
            pending.waiting.remove(process_id)
            pending.ok = [ours and its for ours, its in zip(pending.ok, outcome.ok, strict=True)]
            if process_id == 0:
                pending.mine = outcome.ok
            if outcome.reason:
                pending.reasons[process_id] = outcome.reason
            if pending.waiting:
                return
            del self._pending[number]
            match pending.order:
                case Fill(do=kind):
                    if kind == "fill":
                        self._num_fills -= 1
                    else:
                        self._num_prefetches -= 1
                    self._num_filled += sum(pending.ok)
                    self._num_apart += sum(pending.mine) - sum(pending.ok)
                    self._events.append(Filled(number, tuple(pending.ok)))
                case Write(page=page, slot=slot):
                    self._writing.remove(page.key)
                    self._events.append(Written(slot))
                case _:
                    self._changed.notify_all()
        self.wake()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            if self._end is None:
                self._end = reason
            self._changed.notify_all()


def _pages(keys: Sequence[StoreKey]) -> list[Page]:
    return [_page(key) for key in keys]


def _page(key: StoreKey) -> Page:
    return Page(salt=key.salt, content=key.content)
