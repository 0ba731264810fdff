"""`MemoryStore`: pages in the memory of this process, bounded in bytes. Replicas of one process can share it.

As `KVStore` it keeps pages as they are: whoever reads this memory reads the device's, too. As `Blobs` it keeps the
sealed pages of a `jaxserve kv-server` that has no directory.
"""

import collections
import threading
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import BlobTooLarge
from jaxserve.kv.bounded_index import BoundedIndex
from jaxserve.kv.names import SCOPE_BYTES, BlobName
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import Outcome, StoreOptions
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy


class MemoryStore:
    """A `KVStore` and `Blobs`. Used by several threads.

    Attributes:
      counts: "evicted" pages, "bad" ones.
    """

    def __init__(
        self, page_bytes: int | None, max_bytes: int, *, policy: str = "lru", admission: str = "always"
    ) -> None:
        """`page_bytes`: of every page; None for sealed pages, whose sizes differ.

        Raises ConfigError when not even one page fits, or the policy does not exist.
        """
        if page_bytes is not None and max_bytes < page_bytes:
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
            page = self._page(key)
            if page is None:
                outcomes.append(Outcome.MISS)
            elif buffer.nbytes != len(page):
                outcomes.append(Outcome.BAD)
            else:
                buffer.cast("B")[:] = page
                outcomes.append(Outcome.OK)
        return outcomes

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return [
            Outcome.OK if page.nbytes == self._page_bytes and self._keep(key, bytes(page)) else Outcome.REFUSED
            for key, page in zip(keys, pages, strict=True)
        ]

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        return self.contains([_key(name) for name in names])

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        data = self._page(_key(name))
        if data is not None and len(data) > max_bytes:
            raise BlobTooLarge(f"it has {len(data)} bytes, of {max_bytes} at most")
        return data

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        return self._keep(_key(name), data)

    def delete(self, keys: Sequence[bytes | BlobName], timeout_s: float = 0.0) -> None:
        with self._lock:
            for key in map(_key, keys):
                self._index.remove(key)
                self._pages.pop(key, None)

    def flush(self, scope: bytes | str | None, timeout_s: float = 0.0) -> None:
        with self._lock:
            for key in self._index.names(bytes.fromhex(scope) if isinstance(scope, str) else scope):
                self._index.remove(key)
                del self._pages[key]

    def set_aside(self, name: BlobName, why: str) -> None:
        self.counts["bad"] += 1
        self.delete([name])

    def close(self) -> None:
        self.flush(None)
        with self._lock:
            self._closed = True

    def _page(self, key: bytes) -> bytes | None:
        with self._lock:
            self._index.touch(key)
            return self._pages.get(key)

    def _keep(self, key: bytes, page: bytes) -> bool:
        with self._lock:
            if self._closed or (key not in self._index and not self._index.admit(key, len(page))):
                return False
            if len(self._pages.get(key, page)) != len(page):  # another compression of the same page
                self._index.remove(key)
                del self._pages[key]
            if key not in self._index:
                for _, gone in self._index.make_room(len(page), key):
                    del self._pages[gone]
                    self.counts["evicted"] += 1
            self._index.insert(key[:SCOPE_BYTES], key, len(page))
            self._pages[key] = page
            return True


def memory_store(layout: PageLayout, options: StoreOptions) -> MemoryStore:
    """The factory of the name "memory"."""
    options.only("memory", "max_bytes", "policy", "admission")
    if options.max_bytes is None:
        raise ConfigError("the memory store needs max_bytes")
    return MemoryStore(
        layout.page_bytes, options.max_bytes, policy=options.policy or "lru", admission=options.admission or "always"
    )


def _key(name: bytes | BlobName) -> bytes:
    """Keys begin with the scope, and so do names."""
    return name if isinstance(name, bytes) else bytes.fromhex(name.scope + name.page)
