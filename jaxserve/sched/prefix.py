"""The prefix cache: full pages, found again by their content.

It maps blocks (see `content`) to pages; reference counts and eviction belong to the pool. Keys are chained from a root,
so that tenants who do not share a salt never see each other's pages, and they are the same in every process. A hash
alone is never trusted: a hit counts only when everything that the key covers is equal (token ids, and the contents that
they stand for) and the page before it is the very entry that was matched before. So a collision costs a miss and never
a wrong answer.

The entry before is compared by identity, not by its key: with two contents A and B of equal key, a child recorded under
A would otherwise be found under B once A was evicted.
"""

import weakref
from collections.abc import Sequence

from jaxserve.content import Blocks, ContentSpan, HashBlock, block_key, root_key
from jaxserve.sched.pages import PagePool


class PageEntry:
    """One full page that can be found. Mutated only by `PrefixCache`; alive while `page_id` is not 0."""

    __slots__ = ("__weakref__", "content", "key", "page_id", "parent")

    def __init__(self, key: bytes, parent: "PageEntry | None", content: bytes, page_id: int) -> None:
        self.key = key
        self.parent = parent
        self.content = content
        self.page_id = page_id


class PrefixCache:
    """Mutated only by `SequenceMemory`, and by the pool when it evicts. `namespace`: see `root_key`."""

    def __init__(self, pool: PagePool, page_size: int, namespace: str = "", hash_block: HashBlock = block_key) -> None:
        self._pool = pool
        self._page_size = page_size
        self._namespace = namespace
        self._hash_block = hash_block
        self._by_key: dict[bytes, PageEntry] = {}
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
            key = root_key(self._namespace, salt, f"{self._page_size} tokens")
            root = self._roots[salt] = PageEntry(key, None, b"", -1)
        return root

    def blocks(self, salt: str, token_ids: Sequence[int], spans: tuple[ContentSpan, ...] = ()) -> Blocks:
        """The contents of the pages of a sequence; the list may grow."""
        return Blocks(self.root(salt).key, self._page_size, token_ids, spans, self._hash_block)

    def match(self, salt: str, blocks: Blocks) -> list[PageEntry]:
        """The longest cached chain of full pages at the start of a sequence with this salt.

        At most (len - 1) // page_size pages: one token at least must be computed, to have logits. Nothing is
        retained: the caller takes the pages from the pool before it does anything else.
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
            chain.append(entry)
            parent = entry
        return chain

    def record(self, parent: PageEntry, blocks: Blocks, number: int, page_id: int) -> PageEntry | None:
        """Makes a page findable, which holds block `number`. Returns the entry that now stands for this content.

        That is the entry of another page when two sequences computed the same content. None when the content can
        never be found: the key is taken by another one, or the page before has lost its content.
        """
        if parent.page_id == 0:
            return None
        if number == len(blocks.keys):
            blocks.extend()
        key, content = blocks.keys[number], blocks.contents[number]
        entry = self._by_key.get(key)
        if entry is not None:
            if entry.parent is parent:
                return entry if entry.content == content else None
            if entry.parent is not None and entry.parent.page_id != 0:
                return None
            unreachable = entry.page_id  # the page before it was evicted, so no match can lead here
            assert unreachable != page_id, page_id
            self._forget(unreachable)
            self._pool.drop_content(unreachable)
        entry = PageEntry(key, parent, content, page_id)
        self._by_key[key] = self._by_page[page_id] = entry
        self._pool.keep_content(page_id)
        return entry

    def _forget(self, page_id: int) -> None:
        entry = self._by_page.pop(page_id)
        del self._by_key[entry.key]
        entry.page_id = 0
        entry.parent = None  # so that a chain of dead entries is not kept alive by its last child
