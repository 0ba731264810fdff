"""`MemoryBlobs`: sealed pages in the memory of a `jaxserve kv-server` that has no directory."""

import collections
import threading
from collections.abc import Sequence

from jaxserve.kv.blobs import BlobTooLarge
from jaxserve.kv.bounded_index import BoundedIndex
from jaxserve.kv.names import BlobName
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy


class MemoryBlobs:
    """`Blobs` bounded in bytes. Used by several threads.

    Attributes:
      counts: evicted, bad.
    """

    def __init__(self, max_bytes: int, *, policy: str = "lru", admission: str = "always") -> None:
        """Raises ConfigError when the policy does not exist."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._data: dict[bytes, bytes] = {}
        self._index: BoundedIndex[str] = BoundedIndex(
            create_tier_policy(policy, TierOptions(admission=admission)), max_bytes
        )

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        with self._lock:
            return [_key(name) in self._data for name in names]

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        with self._lock:
            data = self._data.get(_key(name))
            self._index.touch(_key(name))
        if data is not None and len(data) > max_bytes:
            raise BlobTooLarge(f"it has {len(data)} bytes, of {max_bytes} at most")
        return data

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        key = _key(name)
        with self._lock:
            if key in self._data:  # sizes may differ: another compression of the same page
                self._index.remove(key)
                del self._data[key]
            elif not self._index.admit(key, len(data)):
                return False
            for _, gone in self._index.make_room(len(data), key):
                del self._data[gone]
                self.counts["evicted"] += 1
            self._index.insert(name.scope, key, len(data))
            self._data[key] = data
            return True

    def delete(self, names: Sequence[BlobName], timeout_s: float) -> None:
        with self._lock:
            for name in names:
                self._index.remove(_key(name))
                self._data.pop(_key(name), None)

    def flush(self, scope: str | None, timeout_s: float) -> None:
        with self._lock:
            for key in self._index.names(scope):
                self._index.remove(key)
                del self._data[key]

    def set_aside(self, name: BlobName, why: str) -> None:
        self.counts["bad"] += 1
        self.delete([name], 0.0)

    def close(self) -> None:
        self.flush(None, 0.0)


def _key(name: BlobName) -> bytes:
    return f"{name.scope}/{name.page}".encode()
