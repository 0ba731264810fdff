"""The prefix cache: full pages found again by the tokens that filled them.

Owns the chain of block hashes: the key of a page is hash(key of the page before it, its tokens), and the chain starts
from a salt, so that tenants who do not share a salt never see each other's pages. Refuses to trust a hash: a hit
counts only when the tokens are equal and the page before it is the very entry that was matched before, so a collision
costs a miss and never a wrong answer. Refuses reference counts and eviction, which belong to the pool.

Identity of the entry before, not equality of its key, is what is compared: with two contents A and B of equal key, a
child recorded under A would otherwise be found under B once A was evicted.
"""

import weakref
from collections.abc import Callable, Sequence

from jaxserve.sched.pages import PagePool

BlockHash = Callable[[int, tuple[int, ...]], int]


def hash_block(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """The default block hash. Python's own: hits are verified, so it need not resist attacks."""
    return hash((parent_key, token_ids))


class PageEntry:
    """One full page that can be found. Mutated only by `PrefixCache`; alive while `page_id` is not 0."""

    __slots__ = ("__weakref__", "key", "page_id", "parent", "token_ids")

    def __init__(self, key: int, parent: "PageEntry | None", token_ids: tuple[int, ...], page_id: int) -> None:
        self.key = key
        self.parent = parent
        self.token_ids = token_ids
        self.page_id = page_id


class PrefixCache:
    """Mutated only by `SequenceMemory`, and by the pool when it evicts."""

    def __init__(self, pool: PagePool, page_size: int, block_hash: BlockHash = hash_block) -> None:
        self._pool = pool
        self._page_size = page_size
        self._block_hash = block_hash
        self._by_key: dict[int, PageEntry] = {}
        self._by_page: dict[int, PageEntry] = {}
        # Weak: a root lives as long as a page or a sequence refers to it, so salts made up by clients do not pile up.
        self._roots: weakref.WeakValueDictionary[str, PageEntry] = weakref.WeakValueDictionary()
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._by_page)

    def root(self, salt: str) -> PageEntry:
        """The entry that stands before the first page of all sequences with this salt."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = PageEntry(hash(("jaxserve", salt)), None, (), -1)
        return root

    def match(self, salt: str, token_ids: Sequence[int]) -> list[PageEntry]:
        """The longest cached chain of full pages at the start of `token_ids`.

        At most (len - 1) // page_size pages: one token at least must be computed, to have logits. Nothing is
        retained: the caller takes the pages from the pool before it does anything else.
        """
        size = self._page_size
        chain: list[PageEntry] = []
        parent = self.root(salt)
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            block = tuple(token_ids[start : start + size])
            entry = self._by_key.get(self._block_hash(parent.key, block))
            if entry is None or entry.parent is not parent or entry.token_ids != block:
                break
            chain.append(entry)
            parent = entry
        return chain

    def record(self, parent: PageEntry, token_ids: tuple[int, ...], page_id: int) -> PageEntry | None:
        """Makes a full page findable. Returns the entry that now stands for this content.

        That is the entry of another page when two sequences computed the same content. None when the content cannot
        be found by anyone: the key is taken by other tokens, or the page before has lost its content.
        """
        if parent.page_id == 0:
            return None
        key = self._block_hash(parent.key, token_ids)
        entry = self._by_key.get(key)
        if entry is not None:
            if entry.parent is parent:
                return entry if entry.token_ids == token_ids else None
            if entry.parent is not None and entry.parent.page_id != 0:
                return None
            unreachable = entry.page_id  # the page before it was evicted, so no match can lead here
            assert unreachable != page_id, page_id
            self._forget(unreachable)
            self._pool.drop_content(unreachable)
        entry = PageEntry(key, parent, token_ids, page_id)
        self._by_key[key] = self._by_page[page_id] = entry
        self._pool.keep_content(page_id)
        return entry

    def _forget(self, page_id: int) -> None:
        entry = self._by_page.pop(page_id)
        del self._by_key[entry.key]
        entry.page_id = 0
        entry.parent = None  # so that a chain of dead entries is not kept alive by its last child
