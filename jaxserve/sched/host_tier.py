"""The host tier: pages that the device gave up, kept in slots of host memory, and found again like any prefix.

When a device page loses its content, the plan that gives the page to another sequence first saves it into a slot; the
cache's entry then names the slot, and a later placement has the slot's content loaded into a fresh page. A preempted
sequence takes the same way as a new prompt: there is no second path for swapping. The bytes come back as they were
written, so a token never depends on whether its context was loaded, kept or computed again.

The scheduler waits for no slot: without one, or with too many pages on their way to their slots, a page is not saved,
which costs a recomputation later. (The thread that dispatches may wait, for a page that it loads while that page is
still on its way to its slot.)

A slot counts for the owner of the page in it, see `pages`. An owner may have a share of the slots: what it has, up to
that, gives way to nobody else's pages. Beyond that, the owner gives way first that has most beyond its share. Which of
its contents stays is up to a `TierPolicy` of each owner, which has seen its pages alone; reference counts of slots are
in `slots`, the choice between loading and computing in `refill`, entries in `entry`.
"""

import collections
from collections.abc import Callable, Iterable, Sequence

from jaxserve.sched.entry import NO_SLOT, PageEntry
from jaxserve.sched.page_watch import PageWatcher
from jaxserve.sched.plan import HostSlots, PageLoad, PageSave, StepPlan
from jaxserve.sched.slots import SlotPool
from jaxserve.sched.tier_policy import TierPolicy


class HostTier:
    """Mutated only by `SequenceMemory` and `PrefixCache`, on the scheduler's thread.

    Attributes:
      limits: of the slots.
      watcher: is told of every slot.
      page_owner: of a page of the device.
      on_drop: called with the entry and the group whose slot has been given up.
      num_saved, num_loaded: pages, since the start.
      num_skipped: pages that were lost since no slot was free, or too many were on their way to one.
      num_declined: pages that the policy did not take in.
      saves_early: full pages are saved as soon as there is room, and not only when the device gives them up: for a
        store that is to have them after this process. They are not offered to the policy before the device gives them
        up, or each would be seen twice; while it is strict, they take free slots alone.
      enabled: whether anything is taken in. See `switch`.
      holds: slots that are kept for `page_exchange`, and how often each.
    """

    def __init__(self, limits: HostSlots, policy: TierPolicy, owners: Sequence[tuple[TierPolicy, float]] = ()) -> None:
        """`policy`: of owner 0, which is everybody without a share. `owners`: policy and share of owners 1, 2, …; the
        shares are less than 1 in all."""
        assert limits.num_slots > 0 and limits.max_draining > 0 and limits.max_loads > 0, limits
        self.limits = limits
        self.watcher = PageWatcher()
        self.page_owner: Callable[[int], int] = lambda page_id: 0
        self.on_drop: Callable[[PageEntry, int], None] = lambda entry, at: None
        self.num_saved = self.num_loaded = self.num_skipped = self.num_declined = 0
        self.saves_early = False
        self.enabled = True
        self._saves_pages = True
        self.holds: collections.Counter[int] = collections.Counter()
        self._offers: collections.deque[tuple[PageEntry, int]] = collections.deque(maxlen=limits.num_slots)
        self._slots = SlotPool(limits.num_slots)
        self._policies = (policy, *(one for one, _ in owners))
        self._num_reserved = (0, *(int(share * limits.num_slots) for _, share in owners))
        self._owner_of = bytearray(limits.num_slots)
        self._owners: dict[int, tuple[PageEntry, int]] = {}
        self._slot_of: dict[bytes, int] = {}  # by the policy's key
        self._doomed: set[int] = set()  # slots without an owner that something still fills or reads
        self._saves: list[PageSave] = []  # for the next plan
        # Pages on their way when the last result was read, and pages of each plan since.
        self._num_draining = 0
        self._in_flight: collections.deque[int] = collections.deque()

    @property
    def num_used(self) -> int:
        """Slots that hold a page, or will."""
        return self._slots.num_used

    @property
    def has_saves(self) -> bool:
        """Whether the next plan has pages to save, beside those that were offered."""
        return bool(self._saves)

    @property
    def num_filling(self) -> int:
        """Slots whose page is on its way."""
        return self._slots.num_filling

    @property
    def has_room(self) -> bool:
        """Whether one more page may be on its way to a slot."""
        num_draining = self._num_draining + sum(self._in_flight) + len(self._saves)
        return num_draining < self.limits.max_draining

    def has(self, entry: PageEntry, at: int) -> bool:
        """Whether the page of group `at` can be loaded."""
        slot = entry.slots[at]
        return slot != NO_SLOT and self._slots.is_ready(slot)

    def save(self, entry: PageEntry, at: int, page_id: int) -> None:
        """The next plan saves `page_id`, which holds the content of `entry` in group `at`, if there is room for it."""
        assert entry.slots[at] == NO_SLOT, entry.slots
        if not (self.enabled and self._saves_pages):
            return
        owner = self.page_owner(page_id)
        if not self._policies[owner].admit(_key(entry, at)):
            self.num_declined += 1
            return
        if not self.has_room:
            self.num_skipped += 1
            return
        if self._take_slot(entry, at, owner):
            self._saves.append(PageSave(page_id, entry.slots[at]))
            self.num_saved += 1
        else:
            self.num_skipped += 1

    def save_now(self, entry: PageEntry, at: int) -> bool:
        """The next plan saves the page that the device has, whatever the policy thinks of it; there is room. False: no
        slot can be had."""
        page_id = entry.page_ids[at]
        assert page_id and self.has_room, entry.page_ids
        if not self.enabled or not self._take_slot(entry, at, self.page_owner(page_id)):
            return False
        self._saves.append(PageSave(page_id, entry.slots[at]))
        self.num_saved += 1
        return True

    def offer(self, entry: PageEntry, at: int) -> None:
        """A page of the device has got its content, or lost its last holder, in the plan that is being made or before:
        a plan with room for more saves than it must have saves it, so that it may be given up at any time."""
        if self.enabled and self._saves_pages:
            self._offers.append((entry, at))

    @property
    def has_free_slot(self) -> bool:
        """Whether a page can be taken in without giving up another."""
        return self._slots.num_used < self.limits.num_slots

    def begin_fill(self, entry: PageEntry, at: int, may_evict: bool, owner: int = 0) -> bool:
        """Gives `entry` a slot that something else than a plan fills, and that counts for `owner`: a free one, or with
        `may_evict` that of another page. False when there is none, or half are being filled: saves need slots, too."""
        if not self.enabled or not (may_evict or self.has_free_slot):
            return False
        if 2 * self._slots.num_filling >= self.limits.num_slots:
            return False
        return self._take_slot(entry, at, owner)

    def end_fill(self, slot: int, ok: bool) -> None:
        """The fill has ended; without its page the slot is free again, and the entry may be forgotten."""
        self._slots.ready(slot)
        owner = self._owners.get(slot)
        if owner is None:
            self._settle(slot)
        elif not ok:
            self.drop(*owner)
            self.on_drop(*owner)

    def owner(self, slot: int) -> tuple[PageEntry, int] | None:
        """The entry whose page the slot holds, and its group; None where it was dropped meanwhile."""
        return self._owners.get(slot)

    def _take_slot(self, entry: PageEntry, at: int, owner: int) -> bool:
        key = _key(entry, at)
        slot, dropped = self._slots.allocate(), None
        if slot is None:
            dropped = self._drop_one(key, owner)
            slot = self._slots.allocate()
        if slot is not None:
            self._policies[owner].insert(key)
            self._slot_of[key] = slot
            self._owner_of[slot] = owner
            self._owners[slot] = (entry, at)
            entry.slots[at] = slot
            self.watcher.stored(entry, at, "host")
        if dropped is not None:
            self.on_drop(*dropped)  # only now: the last child of an empty entry takes that with it
        return slot is not None

    def pin(self, entry: PageEntry, at: int) -> int:
        """The slot of `entry` in group `at`, which stays as it is until `unpin`."""
        slot = entry.slots[at]
        self._slots.pin(slot)
        return slot

    def hold(self, slot: int) -> None:
        """The content of the slot, which may be on its way, stays until `let_go`."""
        self._slots.hold(slot)
        self.holds[slot] += 1

    def let_go(self, slots: Iterable[int]) -> None:
        """Ends one hold of each."""
        for slot in slots:
            self.holds[slot] -= 1
            if not self.holds[slot]:
                del self.holds[slot]
            self.unpin((slot,))

    def touch(self, entry: PageEntry, at: int) -> None:
        """The page of group `at` was found here and is used: the policy hears of it."""
        self._policies[self._owner_of[entry.slots[at]]].touch(_key(entry, at))

    def unpin(self, slots: Iterable[int]) -> None:
        """One reader fewer of each."""
        for slot in slots:
            self._slots.unpin(slot)
            self._settle(slot)

    def drop(self, entry: PageEntry, at: int) -> None:
        """The content of the slot is not to be found any more. The slot is free once nothing fills or reads it."""
        key = _key(entry, at)
        self._policies[self._owner_of[self._slot_of[key]]].remove(key)
        self._give_up(key)

    def use_saves(self, saves: bool) -> None:
        """Whether pages of the device are taken in from now on. What is there stays, and a store still fills slots."""
        self._saves_pages = saves
        if not saves:
            self._offers.clear()

    def switch(self, enabled: bool) -> None:
        """Whether pages are taken in from now on. Off, all contents are dropped; loads that are planned go on."""
        self.enabled = enabled
        if not enabled:
            self._offers.clear()
            for entry, at in [*self._owners.values()]:
                self.drop(entry, at)
                self.on_drop(entry, at)

    def take_saves(self) -> tuple[PageSave, ...]:
        """What the plan that is now complete must save. Offers of this plan come after: their pages are not written."""
        while self._offers and self.has_room:
            entry, at = self._offers[0]
            owner = self.page_owner(entry.page_ids[at])
            policy = self._policies[owner]
            # A strict policy would see a page twice that it refuses here and is offered when the device gives it up.
            if policy.strict and not (self.saves_early and self.has_free_slot):
                if len(self._policies) == 1:
                    break
                self._offers.popleft()  # those of other owners may stand behind it
                continue
            self._offers.popleft()
            if (page_id := entry.page_ids[at]) and entry.slots[at] == NO_SLOT:
                if not self.saves_early and not policy.admit(_key(entry, at)):
                    self.num_declined += 1
                    continue
                if not self._take_slot(entry, at, owner):
                    if len(self._policies) == 1:
                        break  # nothing may give way: it is saved when the device gives it up
                    continue
                self._saves.append(PageSave(page_id, entry.slots[at]))
                self.num_saved += 1
        saves, self._saves = tuple(self._saves), []
        self._in_flight.append(len(saves))
        return saves

    def commit(self, plan: StepPlan, num_draining: int) -> None:
        """The result of the oldest plan in flight has been read. `num_draining`: see `StepResult`."""
        self._in_flight.popleft()
        self._num_draining = num_draining
        for save in plan.saves:
            self._slots.ready(save.slot)
            self._settle(save.slot)
        self.unpin(load.slot for load in plan.loads)

    def check(self, leased: Iterable[int], loading: Iterable[PageLoad]) -> None:
        """Proves the counts, given the slots that are read otherwise, and the loads of plans in flight."""
        pins = collections.Counter(leased) + self.holds
        pins.update(load.slot for load in loading)
        assert not self._doomed & self._owners.keys() and all(map(self._slots.is_held, self._doomed)), self._doomed
        self._slots.check(self._doomed | self._owners.keys(), dict(pins))
        assert {slot: _key(entry, at) for slot, (entry, at) in self._owners.items()} == {
            slot: key for key, slot in self._slot_of.items()
        }
        assert all(entry.slots[at] == slot for slot, (entry, at) in self._owners.items())
        counts = collections.Counter(self._owner_of[slot] for slot in self._owners)
        assert [len(policy) for policy in self._policies] == [counts[at] for at in range(len(self._policies))], counts

    def _drop_one(self, incoming: bytes, owner: int) -> tuple[PageEntry, int] | None:
        """Gives up the content of one slot for that of the key `incoming`, which is `owner`'s, and says whose.

        None: all are in use, or within the shares of other owners.
        """
        excess = [
            (len(policy) - reserved, at)
            for at, (policy, reserved) in enumerate(zip(self._policies, self._num_reserved, strict=True))
        ]
        for beyond, at in sorted(excess, reverse=True):
            if beyond <= 0 and at != owner:
                continue
            key = incoming if at == owner else None  # a policy remembers its own owner's keys alone
            victim = self._policies[at].victim(key, lambda key: self._slots.is_held(self._slot_of[key]))
            if victim is not None:
                return self._give_up(victim)
        return None

    def _give_up(self, key: bytes) -> tuple[PageEntry, int]:
        slot = self._slot_of.pop(key)
        entry, at = self._owners.pop(slot)
        entry.slots[at] = NO_SLOT
        self.watcher.removed(entry, at, "host")
        self._doomed.add(slot)
        self._settle(slot)
        return entry, at

    def _settle(self, slot: int) -> None:
        """A dropped slot is free as soon as nothing fills or reads it."""
        if slot in self._doomed and not self._slots.is_held(slot):
            self._doomed.remove(slot)
            self._slots.free(slot)


def _key(entry: PageEntry, at: int) -> bytes:
    """The policy's key: a block has a page in each group of layers, and each has a slot of its own."""
    return entry.key + at.to_bytes(2, "little")
