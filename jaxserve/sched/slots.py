"""The pool of host slots: slot numbers, their states, and how many plans still read each.

A slot is a buffer of host memory that holds one page. Which content it holds is known to the host tier, the bytes to
the runner: the pool knows a slot by its number alone, so it serves real memory, the fake runner and the simulator.

Every slot is exactly one of: free; filling (a plan saves a page into it, whose result has not been read, or a store
fills it); ready. A ready slot may be pinned: a sequence will load it, a plan in flight does, it is being written to a
store, or a walk along its prefix is under way. It may be held for another engine, from before it is ready on. Its
content may then not be replaced.
"""


class SlotPool:
    """Slots 0..num_slots - 1. Mutated only by `HostTier`, on the scheduler's thread."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0, num_slots
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack, low numbers first
        self._filling: set[int] = set()
        self._num_pins = [0] * num_slots

    @property
    def num_used(self) -> int:
        """Slots that hold a page, or are being filled."""
        return self.num_slots - len(self._free)

    @property
    def num_filling(self) -> int:
        """Slots whose content is on its way."""
        return len(self._filling)

    def allocate(self) -> int | None:
        """A slot to be filled; None when none is free. It is never waited for."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._filling.add(slot)
        return slot

    def ready(self, slot: int) -> None:
        """The plan that saves into the slot has run, or the fill has ended."""
        self._filling.remove(slot)

    def is_ready(self, slot: int) -> bool:
        """Whether the content of a used slot may be loaded."""
        return slot not in self._filling

    def is_held(self, slot: int) -> bool:
        """Whether the content of a used slot must stay: it is on its way in, or read."""
        return slot in self._filling or self._num_pins[slot] > 0

    def pin(self, slot: int) -> None:
        """One more reader of a ready slot."""
        assert self.is_ready(slot), f"slot {slot} is read before it is filled"
        self._num_pins[slot] += 1

    def hold(self, slot: int) -> None:
        """One more reader of a used slot, which reads it once it is ready."""
        self._num_pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """One reader fewer."""
        assert self._num_pins[slot] > 0, f"slot {slot} has no reader"
        self._num_pins[slot] -= 1

    def free(self, slot: int) -> None:
        """The content is given up."""
        assert not self.is_held(slot), f"slot {slot} is given up while something reads or fills it"
        self._free.append(slot)

    def check(self, used: set[int], num_pins: dict[int, int]) -> None:
        """Proves the counts, given the slots that hold something and the readers of each."""
        free = set(self._free)
        assert len(free) == len(self._free), f"slots twice in the free list: {sorted(self._free)}"
        assert not free & used and free | used == set(range(self.num_slots)), (free, used)
        assert self._filling <= used, (self._filling, used)
        pinned = {slot: count for slot, count in enumerate(self._num_pins) if count}
        assert pinned == num_pins, f"readers say {num_pins}, the pool says {pinned}"
