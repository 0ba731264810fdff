"""The page pool: page ids, reference counts, and the order in which cached pages are evicted.

What a page contains is known to the prefix cache, which is told through `on_evict` when a page loses its content, and
through `on_idle` when a page with content has no holder any more. Bytes and layouts belong to the kernel backends: the
pool knows a page by its id alone, so one pool serves them all and the simulator.

Every page is exactly one of: free (no content), idle (content kept, no holder), held (one holder or more), withheld.
Every page that is held or idle has an owner, for whom it was allocated. An owner may have a share of the pages: what it
has, up to that, is evicted for nobody else. All others together are owner 0, which has none.

A pool that is made smaller while it is in use withholds free pages at once, then idle ones, and held ones as their
holders give them up. All operations are O(1) a page.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from jaxserve.sched.plan import DUMMY_PAGE

_FREE, _KEPT, _USED, _SHARED, _WITHHELD = b"fcusw"


def _ignore(page_id: int) -> None:
    """The default `on_evict`: no cache keeps content."""


class PagePool:
    """Pages 1..num_pages. Mutated only by `SequenceMemory` and `PrefixCache`, on the scheduler's thread.

    Attributes:
      num_grantable: pages that may be held at once from now on; `num_pages` unless `resize` has said less. More are
        held while the holders of the others still have them.
      num_shared: pages with two holders or more.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] = _ignore, shares: Sequence[float] = ()) -> None:
        """`shares`: of owners 1, 2, …; less than 1 in all."""
        assert num_pages >= 1, num_pages
        assert all(share >= 0 for share in shares) and sum(shares) < 1, shares
        self.num_pages = self.num_grantable = num_pages
        self.on_evict = on_evict
        self.on_idle: Callable[[int], None] | None = None
        self._withheld: list[int] = []
        self._free = list(range(num_pages, DUMMY_PAGE, -1))  # a stack, low ids first
        # Of each owner, least recently held first, each with the number of its release.
        self._idle: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(1 + len(shares))]
        self._num_releases = 0
        self._shares = (0.0, *shares)
        self._has_shares = bool(shares)
        self._owner = bytearray(num_pages + 1)
        self._num_owned = [0] * (1 + len(shares))  # counted where there are shares
        self.num_shared = 0
        self._num_refs = [0] * (num_pages + 1)
        self._has_content = bytearray(num_pages + 1)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give out: free ones and idle ones."""
        return len(self._free) + self.num_idle

    def num_available_to(self, owner: int) -> int:
        """Pages that `allocate` can give out to an owner: not those that are within the shares of others."""
        if not self._has_shares:
            return len(self._free) + len(self._idle[0])
        return len(self._free) + sum(self._num_evictable(at, owner) for at in range(len(self._idle)))

    def _num_evictable(self, at: int, owner: int) -> int:
        """Idle pages of owner `at` that may be given to `owner`."""
        num_idle = len(self._idle[at])
        return num_idle if at == owner else min(num_idle, max(0, self._num_owned[at] - self.num_reserved(at)))

    def num_reserved(self, owner: int, num_grantable: int | None = None) -> int:
        """Pages of an owner that no other evicts, in a pool of this size; None: of the present one."""
        return int(self._shares[owner] * (num_grantable or self.num_grantable))

    def most_for(self, owner: int, num_grantable: int | None = None) -> int:
        """Pages that an owner can have whatever the others have, in a pool of this size; None: of the present one."""
        others = (self.num_reserved(at, num_grantable) for at in range(len(self._shares)) if at != owner)
        return (num_grantable or self.num_grantable) - sum(others)

    def owner_of(self, page_id: int) -> int:
        """For whom a page that is held or idle was allocated; 0 where nobody has a share."""
        return self._owner[page_id]

    def is_within_share(self, owner: int) -> bool:
        """Nothing of what the owner has may be taken for another."""
        return 0 < self._num_owned[owner] <= self.num_reserved(owner)

    @property
    def num_idle(self) -> int:
        """Pages without a reference that still hold a cached prefix."""
        return sum(map(len, self._idle)) if self._has_shares else len(self._idle[0])

    @property
    def evicts_soon(self) -> bool:
        """Whether most pages that can be given out hold content, which is then lost."""
        return len(self._free) < self.num_idle

    @property
    def num_held(self) -> int:
        """Pages with a reference."""
        return self.num_pages - len(self._free) - self.num_idle - len(self._withheld)

    @property
    def num_withheld(self) -> int:
        """Pages that are not given out."""
        return len(self._withheld)

    @property
    def num_owed(self) -> int:
        """Held pages that will be withheld when their holders leave; then there is nothing free or idle."""
        return self.num_pages - self.num_grantable - len(self._withheld)

    def idle_ids(self) -> list[int]:
        """Pages with content and without a holder, those that were held last first."""
        if not self._has_shares:
            return [*reversed(self._idle[0])]
        numbered = [(number, page_id) for idle in self._idle for page_id, number in idle.items()]
        return [page_id for _, page_id in sorted(numbered, reverse=True)]

    def num_refs(self, page_id: int) -> int:
        """Number of sequences that hold the page."""
        return self._num_refs[page_id]

    def allocate(self, owner: int = 0) -> int:
        """One page with one reference; free pages first, then the idle page that was held least recently, but for those
        within the shares of other owners."""
        page_id = self._take(owner)
        self._num_refs[page_id] = 1
        if self._has_shares:
            self._owner[page_id] = owner
            self._num_owned[owner] += 1
        return page_id

    def _take(self, owner: int | None) -> int:
        """`owner` None: for nobody, whatever the shares."""
        if self._free:
            return self._free.pop()
        found = 0
        if self._has_shares:
            allowed = [
                (next(iter(idle.values())), at)
                for at, idle in enumerate(self._idle)
                if idle and (owner is None or self._num_evictable(at, owner))
            ]
            assert allowed, "allocate from a pool that has nothing for this owner: look at num_available_to first"
            _, found = min(allowed)
        assert self._idle[found], "allocate from an empty pool: the caller must look at num_available first"
        page_id, _ = self._idle[found].popitem(last=False)
        if self._has_shares:
            self._num_owned[found] -= 1
        self._has_content[page_id] = 0
        self.on_evict(page_id)
        return page_id

    def resize(self, num_grantable: int) -> None:
        """From now on so many pages are given out, of 1 to `num_pages`; see the head of this file."""
        assert 1 <= num_grantable <= self.num_pages, (num_grantable, self.num_pages)
        self.num_grantable = num_grantable
        while self._withheld and self.num_owed < 0:
            self._free.append(self._withheld.pop())
        while self.num_owed > 0 and self.num_available:
            self._withheld.append(self._take(None))

    def retain(self, page_id: int) -> None:
        """One more holder of a page that is held or idle."""
        if self._num_refs[page_id] == 0:
            idle = self._idle[self._owner[page_id]]
            assert page_id in idle, f"page {page_id} is free, so there is no content to share"
            del idle[page_id]
        self._num_refs[page_id] += 1
        self.num_shared += self._num_refs[page_id] == 2

    def release(self, page_ids: Iterable[int]) -> None:
        """One holder fewer of each page. Idle pages are evicted in the order in which they are given here."""
        num_refs, num_owed, owners, idle = self._num_refs, self.num_owed, self._owner, self._idle
        for page_id in page_ids:
            assert num_refs[page_id] > 0, f"page {page_id} is released more often than it was taken"
            num_refs[page_id] -= 1
            if num_refs[page_id] == 0:
                if num_owed > 0:
                    num_owed -= 1
                    self._withhold(page_id)
                elif self._has_content[page_id]:
                    self._num_releases += 1
                    idle[owners[page_id]][page_id] = self._num_releases
                    if self.on_idle is not None:
                        self.on_idle(page_id)
                else:
                    if self._has_shares:
                        self._num_owned[owners[page_id]] -= 1
                    self._free.append(page_id)
            elif num_refs[page_id] == 1:
                self.num_shared -= 1

    def _withhold(self, page_id: int) -> None:
        self._withheld.append(page_id)
        if self._has_shares:
            self._num_owned[self._owner[page_id]] -= 1
        if self._has_content[page_id]:
            self._has_content[page_id] = 0
            self.on_evict(page_id)

    def drop_content(self, page_id: int) -> None:
        """The content of the page is not to be found any more: an idle page is free now, a held one when it is left."""
        assert self._has_content[page_id], f"page {page_id} has no content"
        self._has_content[page_id] = 0
        owner = self._owner[page_id]
        if page_id in self._idle[owner]:
            del self._idle[owner][page_id]
            if self._has_shares:
                self._num_owned[owner] -= 1
            self._free.append(page_id)

    def keep_content(self, page_id: int) -> None:
        """From now on the page becomes idle, not free, when its last holder leaves."""
        assert self._num_refs[page_id] > 0, f"page {page_id} has no holder"
        self._has_content[page_id] = 1

    def states(self) -> bytes:
        """One letter a page, of page 1 on: f free, c idle with content (cached), u held once, s held more often, w
        withheld.

        For observers on other threads: the lists are copied one after the other, while the pool may change.
        """
        refs, has_content = self._num_refs[1:], self._has_content[1:]
        states = bytearray(
            [
                (_KEPT if kept else _FREE) if n == 0 else _SHARED if n > 1 else _USED
                for n, kept in zip(refs, has_content, strict=True)
            ]
        )
        for page_id in self._withheld.copy():
            states[page_id - 1] = _WITHHELD
        return bytes(states)

    def check(self, holders: Iterable[Sequence[int]] | None = None) -> None:
        """Proves the counts: each page in exactly one state and, when `holders` is given, as often held as listed."""
        free, idle, withheld = set(self._free), {p for pages in self._idle for p in pages}, set(self._withheld)
        held = {p for p in range(1, self.num_pages + 1) if self._num_refs[p] > 0}
        assert len(free) == len(self._free), f"pages twice in the free list: {sorted(self._free)}"
        assert not free & idle and not free & held and not idle & held, (free, idle, held)
        assert len(withheld) == len(self._withheld) and not withheld & (free | idle | held), withheld
        assert free | idle | held | withheld == set(range(1, self.num_pages + 1)), "a page is lost"
        assert self.num_owed == 0 or self.num_owed > 0 == self.num_available, "a page is given out that is owed"
        assert not any(self._has_content[p] for p in withheld), withheld
        assert all(self._has_content[p] for p in idle) and not any(self._has_content[p] for p in free), (free, idle)
        owned = Counter(self._owner[p] for p in idle | held)
        if self._has_shares:
            assert self._num_owned == [owned[at] for at in range(len(self._shares))], (self._num_owned, owned)
        assert all(self._owner[p] == at for at, pages in enumerate(self._idle) for p in pages)
        assert self.num_shared == sum(n > 1 for n in self._num_refs), (self.num_shared, self._num_refs)
        assert min(self._num_refs) == 0 == self._num_refs[DUMMY_PAGE], self._num_refs
        if holders is not None:
            expected = Counter(page_id for pages in holders for page_id in pages)
            actual = Counter({p: self._num_refs[p] for p in held})
            assert expected == actual, f"holders say {expected}, the pool says {actual}"
