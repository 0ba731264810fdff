"""The prefix cache: full pages, found again by their content.

It maps blocks (see `content`) to pages, one in each group of layers; reference counts and eviction belong to the pool.
A page that the device gives up may go on in a slot of the host tier, and the entry with it: what is found there must be
loaded. Keys are chained from a root, so that tenants who do not share a salt never see each other's pages, and they are
the same in every process. A hash alone is never trusted: a hit counts only when everything that the key covers is equal
(token ids, and the contents that they stand for) and the page before it is the very entry that was matched before. So a
collision costs a miss and never a wrong answer.

The entry before is compared by identity, not by its key: with two contents A and B of equal key, a child recorded under
A would otherwise be found under B once A was evicted.
"""

import collections
import weakref
from collections.abc import Sequence

from jaxserve.sched.entry import NO_SLOT, PageEntry
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.page_watch import PageWatcher
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import DUMMY_PAGE, PageGroup
from jaxserve.values.content import Blocks, ContentSpan, HashBlock, block_key, root_key, salts_agree


class PrefixCache:
    """Mutated only by `SequenceMemory`, and by the pool when it evicts. `namespace`: see `root_key`.

    Attributes:
      watcher: is told of every page of the device; that of the host tier of every slot.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        namespace: str = "",
        groups: tuple[PageGroup, ...] = (PageGroup(),),
        hash_block: HashBlock = block_key,
        tier: HostTier | None = None,
    ) -> None:
        self.watcher = PageWatcher()
        self._tier = tier
        self._pool = pool
        self._page_size = page_size
        self._groups = groups
        self._full = [at for at, group in enumerate(groups) if group.window is None]
        self._windowed = [at for at, group in enumerate(groups) if group.window is not None]
        self._namespace = namespace
        self._hash_block = hash_block
        self._by_key: dict[bytes, PageEntry] = {}
        self._by_page: dict[int, PageEntry] = {}
        # Weak: a root lives as long as a page or a sequence refers to it, so salts made up by clients do not pile up.
        self._roots: weakref.WeakValueDictionary[str, PageEntry] = weakref.WeakValueDictionary()
        pool.on_evict = self._forget
        if tier is not None:
            tier.on_drop = self._drop
            pool.on_idle = self._offer

    def __len__(self) -> int:
        """Pages of the device that can be found."""
        return len(self._by_page)

    def root(self, salt: str) -> PageEntry:
        """The entry that stands before the first page of all sequences with this salt."""
        root = self._roots.get(salt)
        if root is None:
            key = root_key(self._namespace, salt, f"{self._page_size} tokens")
            root = self._roots[salt] = PageEntry(key, None, salt.encode("utf-8", "surrogatepass"), 0)
        return root

    def blocks(self, salt: str, token_ids: Sequence[int], spans: tuple[ContentSpan, ...] = ()) -> Blocks:
        """The contents of the pages of a sequence; the list may grow."""
        return Blocks(self.root(salt).key, self._page_size, token_ids, spans, self._hash_block)

    def match(self, salt: str, blocks: Blocks) -> list[PageEntry]:
        """The longest cached chain of full blocks at the start of a sequence with this salt.

        Each group has the pages that the token after them can see, on the device or in slots of the host tier. At most
        (len - 1) // page_size blocks: one token at least must be computed, to have logits. Nothing is retained: the
        caller takes the pages from the pool, and pins the slots, before it does anything else.
        """
        chain: list[PageEntry] = []
        parent = self.root(salt)
        keys, contents = blocks.keys, blocks.contents
        for number in range((blocks.num_tokens - 1) // self._page_size):
            if number == len(keys):
                blocks.extend()
            entry = self._by_key.get(keys[number])
            if entry is None or entry.parent is not parent or entry.content != contents[number]:
                break
            found = entry.page_ids if self._tier is None else self._found(self._tier, entry)
            if not all(map(found.__getitem__, self._full)):
                break
            chain.append(entry)
            parent = entry
        return chain[: self.usable_lengths(chain)[-1]] if self._windowed else chain

    def usable_lengths(self, chain: Sequence[PageEntry]) -> list[int]:
        """How many of the first entries of a matched chain may be used, ascending: those after which each group has the
        pages that the next token can see. 0 is one of them."""
        lengths, unbroken = [0], [0] * len(self._groups)
        for number, entry in enumerate(chain, start=1):
            found = entry.page_ids if self._tier is None else self._found(self._tier, entry)
            usable = True
            for at in self._windowed:
                unbroken[at] = unbroken[at] + 1 if found[at] else 0
                first = self._groups[at].first_column(number * self._page_size, self._page_size)
                usable &= unbroken[at] >= number - first
            if usable:
                lengths.append(number)
        return lengths

    def record(self, parent: PageEntry, blocks: Blocks, number: int, page_ids: Sequence[int]) -> PageEntry | None:
        """Makes the pages of all groups findable that hold block `number`. Returns the entry for this content.

        Some or all pages of the entry are those of another sequence when two computed the same content. None when the
        content can never be found: the key is taken by another one, or nothing leads to the block before.
        """
        entry = self.expect(parent, blocks, number)
        if entry is None:
            return None
        for at, page_id in enumerate(page_ids):
            if page_id:
                self.keep(entry, at, page_id)
        return entry

    def expect(self, parent: PageEntry, blocks: Blocks, number: int) -> PageEntry | None:
        """The entry for the content of block `number`, a new one where there is none. A new one must get a page, a slot
        or a child at once, or be given to `prune`. None: as for `record`."""
        if not parent.alive:
            return None
        while number >= len(blocks.keys):
            blocks.extend()
        key, content = blocks.keys[number], blocks.contents[number]
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._by_key[key] = PageEntry(key, parent, content, len(self._groups))
            parent.num_children += 1
        elif entry.parent is not parent or entry.content != content:
            return None
        return entry

    def salt_of(self, entry: PageEntry) -> str:
        """The salt of the chain that the entry is part of."""
        while entry.parent is not None:
            entry = entry.parent
        return entry.content.decode("utf-8", "surrogatepass")

    def keep(self, entry: PageEntry, at: int, page_id: int) -> None:
        """Makes `page_id` findable, which has the content of `entry` in group `at`, unless another page has it, or the
        entry was flushed."""
        if entry.page_ids[at] or not entry.alive:
            return
        entry.page_ids[at] = page_id
        self._by_page[page_id] = entry
        self._pool.keep_content(page_id)
        self.watcher.stored(entry, at, "device")
        if self._tier is not None and self._tier.saves_early:
            self._tier.offer(entry, at)

    @staticmethod
    def _found(tier: HostTier, entry: PageEntry) -> list[int]:
        """Of each group, something true where its page is on the device or can be loaded."""
        return [page_id or tier.has(entry, at) for at, page_id in enumerate(entry.page_ids)]

    def idle_pages(self) -> list[tuple[PageEntry, int]]:
        """Blocks and groups of the pages that no sequence holds, those that the device would give up last first."""
        found = ((self._by_page[page_id], page_id) for page_id in self._pool.idle_ids())
        return [(entry, entry.page_ids.index(page_id)) for entry, page_id in found]

    def rename(self, namespace: str) -> None:
        """Forgets all, and keys what comes from now on under another namespace (see `root_key`)."""
        self.flush(None)
        self._namespace = namespace
        self._roots = weakref.WeakValueDictionary()

    def flush(self, salt: str | None) -> tuple[int, int]:
        """Forgets all that was found under a salt, or all; returns the numbers of pages and of slots that held it.

        Sequences keep the pages that they hold. Takes time in proportion to the number of entries.
        """
        roots = [] if salt is None else [root for key, root in self._roots.items() if salts_agree(key, salt)]
        if salt is not None and not roots:
            return 0, 0
        below: dict[PageEntry | None, None] = dict.fromkeys(roots)
        for entry in self._by_key.values():  # an entry stands behind its parent
            if salt is None or entry.parent in below:
                below[entry] = None
        for root in roots:
            del below[root]
        num_pages = num_slots = 0
        for entry in below:
            assert entry is not None and entry.parent is not None
            for at, page_id in enumerate(entry.page_ids):
                if page_id:
                    del self._by_page[page_id]
                    self._pool.drop_content(page_id)
                    entry.page_ids[at] = DUMMY_PAGE
                    self.watcher.removed(entry, at, "device")
                    num_pages += 1
                if self._tier is not None and entry.slots[at] != NO_SLOT:
                    self._tier.drop(entry, at)
                    num_slots += 1
            entry.parent.num_children -= 1
            entry.alive = False
            del self._by_key[entry.key]
        for entry in below:
            assert entry is not None
            entry.parent = None
        return num_pages, num_slots

    def check(self) -> None:
        """Proves that entries, pages and children agree."""
        children: collections.Counter[int] = collections.Counter()
        for key, entry in self._by_key.items():
            assert entry.key == key and entry.alive and entry.parent is not None and entry.parent.alive, entry.key
            assert entry.num_children or not entry.is_empty, "an entry leads to nothing"
            children[id(entry.parent)] += 1
            assert all(self._by_page[page_id] is entry for page_id in entry.page_ids if page_id), entry.page_ids
        assert all(entry.num_children == children[id(entry)] for entry in self._by_key.values())
        assert len(self._by_page) == sum(map(bool, (p for e in self._by_key.values() for p in e.page_ids)))

    def _offer(self, page_id: int) -> None:
        """The page has no holder any more, so the device may come to give it up."""
        assert self._tier is not None
        if self._pool.evicts_soon:
            entry = self._by_page[page_id]
            self._tier.offer(entry, entry.page_ids.index(page_id))

    def _forget(self, page_id: int) -> None:
        """The device gives the page to another sequence."""
        entry = self._by_page.pop(page_id)
        at = entry.page_ids.index(page_id)
        if self._tier is not None and entry.slots[at] == NO_SLOT:
            self._tier.save(entry, at, page_id)  # may drop other entries, but not this one, which still has its page
        entry.page_ids[at] = DUMMY_PAGE
        self.watcher.removed(entry, at, "device")
        self.prune(entry)

    def _drop(self, entry: PageEntry, at: int) -> None:
        """The host tier has given up a slot of the entry."""
        self.prune(entry)

    def prune(self, entry: PageEntry) -> None:
        """Forgets the entry if nothing of it is left, and so those before it."""
        while entry.parent is not None and entry.num_children == 0 and entry.is_empty:
            parent = entry.parent
            del self._by_key[entry.key]
            entry.alive = False
            entry.parent = None  # so that a chain of dead entries is not kept alive by its last child
            parent.num_children -= 1
            entry = parent
