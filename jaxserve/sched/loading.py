"""Fills of host slots from a store, while the sequences that need the pages wait in the queue.

A store (a directory, another machine) may be slow, wrong or gone, so nothing that the device does depends on it:
threads of the store fill slots, and plans move slots to pages, as they do for pages that were saved. A sequence waits
for its fills no longer than computing the tokens would take, and no longer than `SchedulerOptions.store_wait_s`; then
it is placed with what there is. Where fills have of late taken longer than computing, it does not wait at all. What the
device saved is written to the store behind the back of all.

Fills take free slots. Those of other pages they take for the first few blocks alone, and for the rest once these have
come: a prompt that no store has must not cost pages that are of use.

The first sequence in the queue has its pages filled. For the few behind it, and for itself while there is no row for
it, they are prefetched: after all fills, with a deadline that lies the later the further back it stands. Whether what
came so was used is settled when the sequence is placed.

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
LOOK_AHEAD = 4  # first sequences in the queue whose pages are prefetched
_LATE_S = 0.001  # before its deadline: a fill that ends then has not ended by itself
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

    def prefetch(self, keys: Seq[StoreKey], slots: Seq[int], deadline_s: float) -> int | None:
        """`fill` of lower rank. Once its event has come, `settle` follows."""
        ...

    def settle(self, ticket: int, num_used: int) -> None:
        """So many of the pages that a prefetch brought were used, and the others were in vain."""
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

    def flush(self, salt: str | None) -> None:
        """See `sched.base.Flushable`. The only method for other threads than the loop's."""
        ...


_Place = tuple[PageEntry, int]  # a block, and the group of its page


class _Wait:
    """What a waiting sequence waits for. Mutated by `Loader`.

    Attributes:
      num_tokens: of its prompt, that would have to be computed without these pages.
      until_s: when it stops to wait; None while it is not the first in the queue.
      more: it lacks pages that it had no slots for.
    """

    __slots__ = ("more", "num_tokens", "places", "until_s")

    def __init__(self, places: list[_Place], num_tokens: int, until_s: float | None, more: bool) -> None:
        self.places = places
        self.num_tokens = num_tokens
        self.until_s = until_s
        self.more = more


class _Fill:
    """Pages that were asked of the store. Mutated by `Loader`.

    Attributes:
      seq: for which they are prefetched; None for a fill, and once the sequence is placed or has ended.
      is_prefetch: whether the store has to hear what became of them.
      come: those that came; None before the event.
      asked_s, until_s: when they were asked for, and the deadline.
    """

    __slots__ = ("asked_s", "come", "is_prefetch", "places", "seq", "slots", "until_s")

    def __init__(
        self, places: list[_Place], slots: list[int], seq: Sequence | None, asked_s: float, until_s: float
    ) -> None:
        self.asked_s = asked_s
        self.until_s = until_s
        self.places = places
        self.slots = slots
        self.seq = seq
        self.is_prefetch = seq is not None
        self.come: set[_Place] | None = None


class Loader:
    """Mutated by the scheduler that made it.

    Attributes:
      num_filled, num_missed: pages that were asked for and came, and the others.
      num_late: sequences whose time to wait was over while pages were still on their way to them.
      costs: of fills; where computing has been faster, a sequence waits for no page of the store.
      writing: slots that are on their way to the store, and pinned.
      unwritten: slots that the store had no room for when they were saved, in the order of their saves.
      enabled: whether the store may be asked for pages and get any, by order of an operator.
      prefetches: pages of sequences further back in the queue are asked for.
      spared: the store is left alone meanwhile, see `ladder`.
    """

    def __init__(
        self, store: SlotStore, memory: SequenceMemory, tier: HostTier, wait_s: float, clock: Callable[[], float]
    ) -> None:
        assert memory.prefix is not None
        self.num_filled = self.num_missed = self.num_late = 0
        self.costs = FillCosts()
        self.enabled = True
        self.prefetches = True
        self.spared = False
        self.store = store
        self._memory = memory
        self._prefix = memory.prefix
        self._tier = tier
        self._wait_s = wait_s
        self._clock = clock
        self._unasked: dict[Sequence, None] = {}  # wait in the queue
        self._is_full = False  # no prefetch is taken before something has ended
        self._waits: dict[Sequence, _Wait] = {}
        self._fills: dict[int, _Fill] = {}  # that have not ended
        self._prefetches: dict[Sequence, dict[int, _Fill]] = {}  # until the sequence is placed or has ended
        self.writing: set[int] = set()
        self.unwritten: dict[int, None] = {}

    @property
    def is_used(self) -> bool:
        """Whether the store is asked for pages and gets any."""
        return self.enabled and not self.spared

    def begin(self, seq: Sequence) -> None:
        """`seq` enters the queue."""
        if not seq.needs_whole_prompt:
            self._unasked[seq] = None

    def look_ahead(self, seqs: Seq[Sequence]) -> None:
        """The first sequences of the queue, in order, after all that could be admitted were."""
        if not (self.is_used and self.prefetches):
            return
        for number, seq in enumerate(seqs):
            if self._is_full:
                return
            if seq in self._unasked:
                self._ask(seq, None, _TRIAL_BLOCKS, number)

    def _ask(self, seq: Sequence, until_s: float | None, evicting: int, ahead: int | None) -> None:
        """Asks the store for pages that `seq` lacks; the first `evicting` blocks may take the slots of other pages.

        `until_s`: when it stops to wait, if that has been said. `ahead`: how many sequences stand before it, for a
        prefetch; None: it is the first, and to be placed now.
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
        num_tokens = len(seq.tokens) - len(chain) * size
        if until_s is None and ahead is None:
            num_lacking = sum(num_blocks - max(first, len(chain)) for first in firsts)
            if self._is_slower(num_lacking, num_tokens):
                self._unasked.pop(seq, None)
                return
        places: list[_Place] = []
        asked: list[_Place] = []
        # A fill may take the slot of another page, but not of one that the sequence itself will load.
        owner = self._memory.owner_of(seq)
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
                    if not self._tier.begin_fill(entry, at, number < len(chain) + evicting, owner):
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
            if ahead is None or not more:
                self._unasked.pop(seq, None)
            else:
                self._is_full = True  # it is asked again once something has ended, or when it is the first
            return
        if until_s is None and ahead is None:
            until_s = now_s + self._patience_s(num_tokens)
        if asked and not self._start(seq, asked, ahead, until_s, now_s):
            return
        self._unasked.pop(seq, None)
        self._waits[seq] = _Wait(places, num_tokens, until_s, more)

    def _start(
        self, seq: Sequence, asked: list[_Place], ahead: int | None, until_s: float | None, now_s: float
    ) -> bool:
        """False: the store takes no more for now, and the slots are free again."""
        keys = [StoreKey(seq.request.cache_salt, store_key(entry, at)) for entry, at in asked]
        slots = [entry.slots[at] for entry, at in asked]
        if ahead is None:
            assert until_s is not None
            ticket = self.store.fill(keys, slots, until_s - now_s)
        else:
            until_s = now_s + (ahead + 1) * self._wait_s  # each of those before it may wait for so long
            ticket = self.store.prefetch(keys, slots, until_s - now_s)
        if ticket is None:
            # From the end: an entry without content lives as long as those that follow it.
            for slot in reversed(slots):
                self._tier.end_fill(slot, False)
            if ahead is None:
                self._unasked.pop(seq, None)
            else:
                self._is_full = True
            return False
        fill = self._fills[ticket] = _Fill(asked, slots, None if ahead is None else seq, now_s, until_s)
        if ahead is not None:
            self._prefetches.setdefault(seq, {})[ticket] = fill
        return True

    def _is_slower(self, num_pages: int, num_tokens: int) -> bool:
        """Whether the store takes longer for so many pages than computing the tokens takes, as far as is known."""
        is_slower = 0 < self._memory.costs.token_s * num_tokens < self.costs.page_s * num_pages
        if is_slower:
            self.costs.note_refusal()
        return is_slower

    def _patience_s(self, num_tokens: int) -> float:
        """Seconds that the first sequence waits for its pages: no longer than computing them is expected to take."""
        compute_s = self._memory.costs.token_s * num_tokens
        return min(self._wait_s, max(_LEAST_WAIT_S, compute_s)) if compute_s else self._wait_s

    def holds_back(self, seq: Sequence) -> bool:
        """Whether `seq`, the first in the queue, still waits for pages that may be there soon."""
        if self.is_used and seq in self._unasked:
            self._ask(seq, None, _TRIAL_BLOCKS, None)
        wait = self._waits.get(seq)
        if wait is None:
            return False
        if wait.until_s is None:  # its pages were prefetched
            wait.until_s = self._clock()
            num_pending = sum(self._is_pending(place) for place in wait.places)
            if not self._is_slower(num_pending, wait.num_tokens):
                wait.until_s += self._patience_s(wait.num_tokens)
            if wait.more and self.is_used:
                wait.more = False
                self._ask(seq, wait.until_s, _TRIAL_BLOCKS, None)
                wait = self._waits[seq]
        assert wait.until_s is not None
        pending = any(map(self._is_pending, wait.places))
        if pending and self._clock() < wait.until_s:
            return True
        if pending:
            self.num_late += 1
        del self._waits[seq]
        return False

    def _is_pending(self, place: _Place) -> bool:
        entry, at = place
        return entry.slots[at] != NO_SLOT and not self._tier.has(entry, at)

    def until_s(self, seq: Sequence) -> float:
        """The time until which `seq` waits, of which `holds_back` has said that it does."""
        until_s = self._waits[seq].until_s
        assert until_s is not None, seq
        return until_s

    def note_placed(self, seq: Sequence) -> None:
        """`seq` has its row and pages: what was prefetched for it and is not loaded now was in vain."""
        self._settle(seq, {(load.entry, load.at) for load in seq.loads})

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended. Fills that no other sequence waits for are called off."""
        self._unasked.pop(seq, None)
        self._settle(seq, set())
        wait = self._waits.pop(seq, None)
        if wait is None:
            return
        wanted = {place for other in self._waits.values() for place in other.places}
        for ticket, fill in self._fills.items():
            if not wanted.intersection(fill.places) and set(wait.places).intersection(fill.places):
                self.store.cancel(ticket)

    def _settle(self, seq: Sequence, used: set[_Place]) -> None:
        for ticket, fill in self._prefetches.pop(seq, {}).items():
            fill.seq = None
            if fill.come is not None:
                self.store.settle(ticket, len(fill.come & used))

    def poll(self) -> None:
        """Takes in what the store has done."""
        for event in self.store.poll():
            self._is_full = False
            if isinstance(event, Written):
                self.writing.remove(event.slot)
                self._tier.unpin((event.slot,))
                continue
            fill = self._fills.pop(event.ticket)
            for slot, ok in reversed([*zip(fill.slots, event.ok, strict=True)]):
                self._tier.end_fill(slot, ok)
            fill.come = {place for place, ok in zip(fill.places, event.ok, strict=True) if ok}
            if fill.is_prefetch and fill.seq is None:
                self.store.settle(event.ticket, 0)
            self.num_filled += len(fill.come)
            self.num_missed += len(fill.places) - len(fill.come)
            now_s, num_come = self._clock(), len(fill.come)
            late = num_come < len(fill.places) and now_s >= fill.until_s - _LATE_S
            self.costs.note_fill(now_s - fill.asked_s, num_come, late=late)
            self._go_on(fill)

    def _go_on(self, fill: _Fill) -> None:
        """Whoever waits for these pages asks for what it had no slots for, if the store has all these."""
        assert fill.come is not None
        places, has_all = set(fill.places), len(fill.come) == len(fill.places)
        for seq, wait in [*self._waits.items()]:
            if wait.more and places.intersection(wait.places):
                wait.more = False
                if has_all and self.is_used:
                    self._ask(seq, wait.until_s, len(seq.tokens), None if wait.until_s is not None else LOOK_AHEAD)

    def write(self, plan: StepPlan) -> None:
        """The saves of the plan have run: their slots go to the store."""
        if not self.is_used:
            return
        for save in plan.saves:
            self.unwritten.pop(save.slot, None)
            if not self._write(save.slot):
                self.unwritten[save.slot] = None

    def write_rest(self) -> None:
        """Offers the store what it had no room for, until it has none again."""
        for slot in [*self.unwritten]:
            if not self._write(slot):
                return
            del self.unwritten[slot]

    def _write(self, slot: int) -> bool:
        """False: the store has no room for it now."""
        owner = self._tier.owner(slot)
        if owner is None or not self._tier.has(*owner) or slot in self.writing:  # it has another page since, or none
            return True
        key = StoreKey(self._prefix.salt_of(owner[0]), store_key(*owner))
        if not self.store.write(key, slot):
            return False
        self._tier.pin(*owner)
        self.writing.add(slot)
        return True


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
