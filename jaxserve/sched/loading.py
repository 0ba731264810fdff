"""Fills of host slots from a store, while the sequences that need the pages wait in the queue.

A store (a directory, another machine) may be slow, wrong or gone, so nothing that the device does depends on it:
threads of the store fill slots, and plans move slots to pages, as they do for pages that were saved. A sequence waits
for its fills no longer than computing the tokens would take, and no longer than `SchedulerOptions.store_wait_s`; then
it is placed with what there is. What the device saved is written to the store behind the back of all.

The keys of a store are chained like those of the prefix cache, with 256 bits, since pages from a store are found by
their key alone: nothing else of them could be compared that is not forged with it.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.host_tier import NO_SLOT, HostTier
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import Limits, StepPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.prefix import PageEntry
from jaxserve.sched.state import Sequence

_BLOCK = hashlib.blake2b(digest_size=32, person=b"jaxserve page 1")
_LEAST_WAIT_S = 0.02  # even a store in memory needs a thread's turn


class StoreKey(NamedTuple):
    """A page for a store: the salt of its requests, and 32 bytes that follow from all content up to its end."""

    salt: str
    content: bytes


class Filled(NamedTuple):
    """A fill has ended. `ok`: of each slot, whether it has its page now."""

    ticket: int
    ok: tuple[bool, ...]


class Written(NamedTuple):
    """A slot has been written to the store, or has not, and may be used for something else."""

    slot: int


class StoreCounts(NamedTuple):
    """What a store has done since the start. `pages`: by event. `breaks`: how often it was left alone for a while."""

    pages: Mapping[str, int]
    breaks: int


class SlotStore(Protocol):
    """A store as the scheduler sees it: calls return at once, and `Engine.wake` follows each event."""

    @property
    def counts(self) -> StoreCounts:
        """For observers, in any thread."""
        ...

    def fill(self, keys: Seq[StoreKey], slots: Seq[int], deadline_s: float) -> int | None:
        """Starts to fill the slots, within `deadline_s` seconds from now. Returns a ticket; None: too much waits."""
        ...

    def cancel(self, ticket: int) -> None:
        """The pages are not needed any more. The event still comes."""
        ...

    def write(self, key: StoreKey, slot: int) -> bool:
        """Starts to write a slot, which holds its page until the event. False: it is not written."""
        ...

    def poll(self) -> Seq[Filled | Written]:
        """The events since the last call."""
        ...


class _Wait:
    """What a waiting sequence waits for. Mutated by `Loader`."""

    __slots__ = ("places", "until_s")

    def __init__(self, places: list[tuple[PageEntry, int]], until_s: float) -> None:
        self.places = places
        self.until_s = until_s


class Loader:
    """Mutated by the scheduler that made it.

    Attributes:
      num_filled, num_missed: pages that were asked for and came, and the others.
      num_late: sequences that were placed before all their fills had ended.
      writing: slots that are on their way to the store, and pinned.
    """

    def __init__(
        self, store: SlotStore, memory: SequenceMemory, tier: HostTier, wait_s: float, clock: Callable[[], float]
    ) -> None:
        assert memory.prefix is not None
        self.num_filled = self.num_missed = self.num_late = 0
        self._store = store
        self._memory = memory
        self._prefix = memory.prefix
        self._tier = tier
        self._wait_s = wait_s
        self._clock = clock
        self._waits: dict[Sequence, _Wait] = {}
        self._fills: dict[int, list[tuple[PageEntry, int]]] = {}
        self.writing: set[int] = set()

    @property
    def store_counts(self) -> StoreCounts:
        """Of the store."""
        return self._store.counts

    def begin(self, seq: Sequence) -> None:
        """`seq` enters the queue: what it lacks is asked of the store, as far as there are slots."""
        if seq.needs_whole_prompt:
            return
        prefix, size = self._prefix, self._memory.page_size
        blocks = self._memory.blocks_of(prefix, seq)
        chain = prefix.match(seq.request.cache_salt, blocks)
        parent = chain[-1] if chain else prefix.root(seq.request.cache_salt)
        num_blocks = (len(seq.tokens) - 1) // size
        firsts = [group.first_column(num_blocks * size, size) for group in self._memory.groups]
        places: list[tuple[PageEntry, int]] = []
        asked: list[tuple[PageEntry, int]] = []
        for number in range(len(chain), num_blocks):
            entry = prefix.expect(parent, blocks, number)
            if entry is None:
                break
            for at, first in enumerate(firsts):
                if number < first or entry.page_ids[at] or self._tier.has(entry, at):
                    continue
                if entry.slots[at] == NO_SLOT:
                    if not self._tier.begin_fill(entry, at):
                        break
                    asked.append((entry, at))
                places.append((entry, at))
            else:
                parent = entry
                continue
            prefix.prune(entry)
            break
        prefix.prune(parent)
        if not places:
            return
        now_s = self._clock()
        num_tokens = len(seq.tokens) - len(chain) * size
        compute_s = self._memory.costs.token_s * num_tokens
        wait_s = min(self._wait_s, max(_LEAST_WAIT_S, compute_s)) if compute_s else self._wait_s
        if asked:
            keys = [StoreKey(seq.request.cache_salt, store_key(entry, at)) for entry, at in asked]
            ticket = self._store.fill(keys, [entry.slots[at] for entry, at in asked], wait_s)
            if ticket is None:
                for entry, at in reversed(asked):
                    self._tier.end_fill(entry, at, False)
                return
            self._fills[ticket] = asked
        self._waits[seq] = _Wait(places, now_s + wait_s)

    def holds_back(self, seq: Sequence) -> bool:
        """Whether `seq` still waits for pages that may be there soon."""
        wait = self._waits.get(seq)
        if wait is None:
            return False
        pending = any(entry.slots[at] != NO_SLOT and not self._tier.has(entry, at) for entry, at in wait.places)
        if pending and self._clock() < wait.until_s:
            return True
        self.num_late += pending
        del self._waits[seq]
        return False

    def until_s(self, seq: Sequence) -> float | None:
        """The time until which `seq` waits, if `holds_back` has said that it does."""
        wait = self._waits.get(seq)
        return None if wait is None else wait.until_s

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended. Fills that no other sequence waits for are called off."""
        wait = self._waits.pop(seq, None)
        if wait is None:
            return
        wanted = {place for other in self._waits.values() for place in other.places}
        for ticket, places in self._fills.items():
            if not wanted.intersection(places) and set(wait.places).intersection(places):
                self._store.cancel(ticket)

    def poll(self) -> None:
        """Takes in what the store has done."""
        for event in self._store.poll():
            if isinstance(event, Written):
                self.writing.remove(event.slot)
                self._tier.unpin((event.slot,))
                continue
            places = self._fills.pop(event.ticket)
            # From the end: an entry without content lives as long as those that follow it.
            for (entry, at), ok in reversed([*zip(places, event.ok, strict=True)]):
                self._tier.end_fill(entry, at, ok)
            num_ok = sum(event.ok)
            self.num_filled += num_ok
            self.num_missed += len(places) - num_ok

    def write(self, plan: StepPlan) -> None:
        """The saves of the plan have run: their slots go to the store."""
        for save in plan.saves:
            entry, at = self._tier.owner(save.slot)
            assert isinstance(entry, PageEntry)
            if self._store.write(StoreKey(self._prefix.salt_of(entry), store_key(entry, at)), save.slot):
                self._tier.pin(entry, at)
                self.writing.add(save.slot)


def store_key(entry: PageEntry, at: int) -> bytes:
    """32 bytes for the page of `entry` in group `at`."""
    key = _BLOCK.copy()
    key.update(_chained(entry) + at.to_bytes(2, "little"))
    return key.digest()


def _chained(entry: PageEntry) -> bytes:
    """The wide key of a block: of its content and of the wide key of the block before it; kept with the entry."""
    missing: list[PageEntry] = []
    while not entry.wide_key and entry.parent is not None:
        missing.append(entry)
        entry = entry.parent
    for later in reversed(missing):
        key = _BLOCK.copy()
        key.update((entry.wide_key or entry.key) + later.content)
        later.wide_key = key.digest()
        entry = later
    return entry.wide_key or entry.key


class LoadingScheduler(ContinuousScheduler):
    """A `ContinuousScheduler` whose sequences may wait for a store. A `sched.base.MayWait`."""

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        options: SchedulerOptions,
        clock: Callable[[], float],
        store: SlotStore,
    ) -> None:
        super().__init__(limits, policy, options, clock)
        assert self.memory.tier is not None, "a store fills slots of host memory, and there are none"
        self.memory.tier.saves_early = True
        self.loader = self._loader = Loader(store, self.memory, self.memory.tier, options.store_wait_s, clock)

    def waits(self) -> bool:
        """See `MayWait`. What the plan found counts, not the clock, which may have passed the time since."""
        return self._until_s() is not None

    def waits_until_s(self) -> float:
        """See `MayWait`."""
        until_s = self._until_s()
        return math.inf if until_s is None else until_s

    def _until_s(self) -> float | None:
        first = self._queue.first()
        return None if first is None else self.loader.until_s(first)
