"""The slots of the device for LoRA adapters: which adapter has which, and which one gives way.

A step multiplies with the adapters that are in slots. A sequence holds the slot of its adapter while it has pages; a
slot that no sequence holds keeps its adapter until another one needs the slot, and the one that was used longest ago
gives way first. Weights move by the loads of a plan (`plan.AdapterLoad`).
"""

import collections
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.sched.plan import AdapterLoad
from jaxserve.values.content import Adapter


class AdapterCounts(NamedTuple):
    """What one scheduler has of adapters.

    Attributes:
      slots: adapters that one step can have.
      running, waiting: names of adapters, with their sequences that have a row, or wait for one.
      loads: adapters that have been put into a slot so far.
    """

    slots: int
    running: Mapping[str, int]
    waiting: Mapping[str, int]
    loads: int


class AdapterSlots:
    """Mutated only by the scheduler that made it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[bytes, int] = {}  # digest -> slot, the one that was used longest ago first
        self._free = list(range(num_slots, 0, -1))
        self._holders: collections.Counter[bytes] = collections.Counter()  # sequences by digest
        self._running: dict[str, int] = {}  # sequences by name, of which several may have one digest
        self._waiting: dict[str, int] = {}
        self.num_loads = 0
        self._loads: list[AdapterLoad] = []  # that no plan has yet

    @property
    def counts(self) -> "AdapterCounts":
        """What there is now. Any thread."""
        return AdapterCounts(self.num_slots, self._running.copy(), self._waiting.copy(), self.num_loads)

    def note_waiting(self, adapter: Adapter | None, change: int) -> None:
        """So many sequences more, or less, wait for a row."""
        if adapter is not None:
            _count(self._waiting, adapter.name, change)

    def has_room(self, adapter: Adapter | None) -> bool:
        """Whether a sequence with this adapter could hold its slot."""
        if adapter is None or adapter.digest in self._slots:
            return True
        return bool(self._free) or len(self._holders) < self.num_slots

    def hold(self, adapter: Adapter | None) -> int:
        """The slot of the adapter for one more sequence, 0 for none. `has_room` must be true."""
        if adapter is None:
            return 0
        digest = adapter.digest
        slot = self._slots.pop(digest, 0)
        if not slot:
            slot = self._free.pop() if self._free else self._slots.pop(self._oldest_idle())
            self._loads.append(AdapterLoad.of(slot, adapter))
            self.num_loads += 1
        self._slots[digest] = slot
        self._holders[digest] += 1
        _count(self._running, adapter.name, 1)
        return slot

    def release(self, adapter: Adapter | None) -> None:
        """One sequence gives up the slot."""
        if adapter is None:
            return
        self._holders[adapter.digest] -= 1
        if not self._holders[adapter.digest]:
            del self._holders[adapter.digest]
        _count(self._running, adapter.name, -1)

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """The loads since the last call: each stands in one plan."""
        loads, self._loads = self._loads, []
        return tuple(loads)

    def forget_idle(self) -> None:
        """The device may have lost what no sequence holds."""
        for digest in [digest for digest in self._slots if digest not in self._holders]:
            self._free.append(self._slots.pop(digest))

    def check(self) -> None:
        """Proves that no slot is lost or owned twice."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self.num_slots + 1)), "a slot is lost"
        assert set(self._holders) <= set(self._slots), "a sequence holds a slot that its adapter does not have"
        assert all(number > 0 for number in self._holders.values()), self._holders
        assert sum(self._holders.values()) == sum(self._running.values()), "a name has other sequences than its slots"

    def _oldest_idle(self) -> bytes:
        return next(digest for digest in self._slots if digest not in self._holders)


def _count(counts: dict[str, int], name: str, change: int) -> None:
    """A name without sequences is not there."""
    number = counts.get(name, 0) + change
    assert number >= 0, (name, number)
    if number:
        counts[name] = number
    else:
        del counts[name]
