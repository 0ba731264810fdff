"""`MemoryStore`: pages in the memory of this process, bounded in bytes. Replicas of one process can share it."""

import collections
import threading
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.kv.bounded_index import BoundedIndex
from jaxserve.kv.names import SCOPE_BYTES
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import Outcome, StoreOptions
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy


class MemoryStore:
    """A `KVStore`. Nothing is compressed or sealed: whoever reads this memory reads the device's, too.

    Attributes:
      counts: "evicted" pages.
    """

    def __init__(self, page_bytes: int, max_bytes: int, *, policy: str = "lru", admission: str = "always") -> None:
        """Raises ConfigError when not even one page fits, or the policy does not exist."""
        if max_bytes < page_bytes:
            raise ConfigError(f"a memory store of {max_bytes} bytes holds no page of {page_bytes}; raise max_bytes")
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._page_bytes = page_bytes
        self._pages: dict[bytes, bytes] = {}
        self._index: BoundedIndex[bytes] = BoundedIndex(
            create_tier_policy(policy, TierOptions(admission=admission)), max_bytes
        )
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._pages for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        outcomes = []
        for key, buffer in zip(keys, into, strict=True):
            with self._lock:
                page = self._pages.get(key)
                self._index.touch(key)
            if page is None:
                outcomes.append(Outcome.MISS)
            elif buffer.nbytes != len(page):
                outcomes.append(Outcome.BAD)
            else:
                buffer.cast("B")[:] = page
                outcomes.append(Outcome.OK)
        return outcomes

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return [self._put(key, page) for key, page in zip(keys, pages, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._index.remove(key)
                self._pages.pop(key, None)

    def flush(self, scope: bytes | None) -> None:
        with self._lock:
            for key in self._index.names(scope):
                self._index.remove(key)
                del self._pages[key]

    def close(self) -> None:
        self.flush(None)
        with self._lock:
            self._closed = True

    def _put(self, key: bytes, page: memoryview) -> Outcome:
        if page.nbytes != self._page_bytes:
            return Outcome.REFUSED
        with self._lock:
            if self._closed or (key not in self._index and not self._index.admit(key, page.nbytes)):
                return Outcome.REFUSED
            if key not in self._index:
                for _, gone in self._index.make_room(page.nbytes, key):
                    del self._pages[gone]
                    self.counts["evicted"] += 1
            self._index.insert(key[:SCOPE_BYTES], key, page.nbytes)
            self._pages[key] = bytes(page)
            return Outcome.OK


def memory_store(layout: PageLayout, options: StoreOptions) -> MemoryStore:
    """The factory of the name "memory"."""
    options.only("memory", "max_bytes", "policy", "admission")
    if options.max_bytes is None:
        raise ConfigError("the memory store needs max_bytes")
    return MemoryStore(
        layout.page_bytes, options.max_bytes, policy=options.policy or "lru", admission=options.admission or "always"
    )
