"""Fills of host slots from a store, while the sequences that need the pages wait in the queue.

A store (a directory, another machine) may be slow, wrong or gone, so nothing that the device does depends on it:
threads of the store fill slots, and plans move slots to pages, as they do for pages that were saved. A sequence waits
for its fills no longer than computing the tokens would take, and no longer than `SchedulerOptions.store_wait_s`; then
it is placed with what there is. Where fills have of late taken longer than computing, the store is not asked at all.
What the device saved is written to the store behind the back of all.

Fills take free slots. Those of other pages they take for the first few blocks alone, and for the rest once these have
come: a prompt that no store has must not cost pages that are of use.

The keys of a store are chained like those of the prefix cache, with 256 bits, since pages from a store are found by
their key alone: nothing else of them could be compared that is not forged with it.
"""

import hashlib
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from jaxserve.sched.entry import NO_SLOT, PageEntry
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.refill import FillCosts
from jaxserve.sched.state import Sequence

_BLOCK = hashlib.blake2b(digest_size=32, person=b"jaxserve page 1")
_TRIAL_BLOCKS = 4  # of a sequence may take the slots of other pages before the store has shown that it has anything
_LATE_S = 0.001  # before the end of a wait: a fill that ends then has not ended by itself
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
    """What a waiting sequence waits for. Mutated by `Loader`. `more`: it lacks pages that it had no slots for."""

    __slots__ = ("more", "places", "until_s")

    def __init__(self, places: list[tuple[PageEntry, int]], until_s: float, more: bool) -> None:
        self.places = places
        self.until_s = until_s
        self.more = more


class _Fill(NamedTuple):
    """Pages that the store was asked for, when, and until when."""

    places: list[tuple[PageEntry, int]]
    asked_s: float
    until_s: float


class Loader:
    """Mutated by the scheduler that made it.

    Attributes:
      num_filled, num_missed: pages that were asked for and came, and the others.
      num_late: sequences that were placed before all their fills had ended.
      num_refused: sequences for which the store was not asked, since computing is faster.
      costs: of fills.
      writing: slots that are on their way to the store, and pinned.
    """

    def __init__(
        self, store: SlotStore, memory: SequenceMemory, tier: HostTier, wait_s: float, clock: Callable[[], float]
    ) -> None:
        assert memory.prefix is not None
        self.num_filled = self.num_missed = self.num_late = self.num_refused = 0
        self.costs = FillCosts()
        self._store = store
        self._memory = memory
        self._prefix = memory.prefix
        self._tier = tier
        self._wait_s = wait_s
        self._clock = clock
        self._waits: dict[Sequence, _Wait] = {}
        self._fills: dict[int, _Fill] = {}
        self.writing: set[int] = set()

    @property
    def store_counts(self) -> StoreCounts:
        """Of the store."""
        return self._store.counts

    def begin(self, seq: Sequence) -> None:
        """`seq` enters the queue: what it lacks is asked of the store, as far as there are slots."""
        if not seq.needs_whole_prompt:
            self._ask(seq, None, _TRIAL_BLOCKS)

    def _ask(self, seq: Sequence, until_s: float | None, evicting: int) -> None:
        """Asks the store for pages that `seq` lacks; the first `evicting` blocks may take the slots of other pages.

        `until_s`: when it stops to wait, if that has been said.
        """
        now_s = self._clock()
        if until_s is not None and until_s <= now_s:
            return
        prefix, size = self._prefix, self._memory.page_size
        blocks = self._memory.blocks_of(prefix, seq)
        chain = prefix.match(seq.request.cache_salt, blocks)
        parent = chain[-1] if chain else prefix.root(seq.request.cache_salt)
        num_blocks = (len(seq.tokens) - 1) // size
        firsts = [group.first_column(num_blocks * size, size) for group in self._memory.groups]
        compute_s = self._memory.costs.token_s * (len(seq.tokens) - len(chain) * size)
        num_lacking = sum(num_blocks - max(first, len(chain)) for first in firsts)
        if until_s is None and 0 < compute_s < self.costs.page_s * num_lacking:
            self.num_refused += 1
            self.costs.note_refusal()
            return
        places: list[tuple[PageEntry, int]] = []
        asked: list[tuple[PageEntry, int]] = []
        # A fill may take the slot of another page, but not of one that the sequence itself will load.
        pinned = [self._tier.pin(e, at) for e in chain for at in range(len(firsts)) if self._tier.has(e, at)]
        more = False
        for number in range(len(chain), num_blocks):
            entry = prefix.expect(parent, blocks, number)
            if entry is None:
                break
            for at, first in enumerate(firsts):
                if self._tier.has(entry, at):
                    pinned.append(self._tier.pin(entry, at))
                    continue
                if number < first or entry.page_ids[at]:
                    continue
                if entry.slots[at] == NO_SLOT:
                    if not self._tier.begin_fill(entry, at, number < len(chain) + evicting):
                        more = True
                        break
                    asked.append((entry, at))
                places.append((entry, at))
            else:
                parent = entry
                continue
            prefix.prune(entry)
            break
        prefix.prune(parent)
        self._tier.unpin(pinned)
        if not places:
            return
        if until_s is None:
            wait_s = min(self._wait_s, max(_LEAST_WAIT_S, compute_s)) if compute_s else self._wait_s
            until_s = now_s + wait_s
        if asked:
            keys = [StoreKey(seq.request.cache_salt, store_key(entry, at)) for entry, at in asked]
            ticket = self._store.fill(keys, [entry.slots[at] for entry, at in asked], until_s - now_s)
            if ticket is None:
                for entry, at in reversed(asked):
                    self._tier.end_fill(entry, at, False)
                return
            self._fills[ticket] = _Fill(asked, now_s, until_s)
        self._waits[seq] = _Wait(places, until_s, more)

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
        for ticket, fill in self._fills.items():
            places = fill.places
            if not wanted.intersection(places) and set(wait.places).intersection(places):
                self._store.cancel(ticket)

    def poll(self) -> None:
        """Takes in what the store has done."""
        for event in self._store.poll():
            if isinstance(event, Written):
                self.writing.remove(event.slot)
                self._tier.unpin((event.slot,))
                continue
            places, asked_s, until_s = self._fills.pop(event.ticket)
            # From the end: an entry without content lives as long as those that follow it.
            for (entry, at), ok in reversed([*zip(places, event.ok, strict=True)]):
                self._tier.end_fill(entry, at, ok)
            num_ok = sum(event.ok)
            self.num_filled += num_ok
            self.num_missed += len(places) - num_ok
            now_s = self._clock()
            late = num_ok < len(places) and now_s >= until_s - _LATE_S
            self.costs.note_fill(now_s - asked_s, num_ok, late=late)
            if num_ok == len(places):
                self._ask_for_more(places)

    def _ask_for_more(self, places: list[tuple[PageEntry, int]]) -> None:
        """The store has all these: whoever waits for them asks for what it had no slots for, while there is time."""
        come = set(places)
        for seq, wait in [*self._waits.items()]:
            if wait.more and come.intersection(wait.places):
                wait.more = False
                self._ask(seq, wait.until_s, len(seq.tokens))

    def write(self, plan: StepPlan) -> None:
        """The saves of the plan have run: their slots go to the store."""
        for save in plan.saves:
            entry, at = self._tier.owner(save.slot)
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
