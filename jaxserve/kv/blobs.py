"""`Blobs`: sealed pages under names, where a `SealedStore` keeps them: a directory, another machine, a bucket.

An implementation blocks and raises; waiting no longer than a request can bear is the work of `SealedStore`, which calls
it from threads of its own.
"""

from collections.abc import Sequence
from typing import Protocol

from jaxserve.kv.names import BlobName


class BlobTooLarge(Exception):
    """There is something under the name, and it is longer than the reader allows. It was not read."""


class Blobs(Protocol):
    """Bytes under names. Every method may raise OSError, or BlobsError for what is none; threads call at once."""

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]: ...

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | bytearray | None:
        """None: there is nothing. Raises BlobTooLarge before it takes more than `max_bytes` of memory."""
        ...

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        """False: the store does not want it. A reader sees all of it or nothing."""
        ...

    # By position alone, since a class may be a `KVStore` as well, whose `delete` takes keys.
    def delete(self, names: Sequence[BlobName], timeout_s: float, /) -> None: ...

    def flush(self, scope: str | None, timeout_s: float) -> None:
        """Deletes all names of a scope; None: all names."""
        ...

    def set_aside(self, name: BlobName, why: str) -> None:
        """What is under the name is not what its reader needs: no reader shall find it again."""
        ...

    def close(self) -> None: ...


class BlobsError(Exception):
    """The place of the blobs did not do what it was asked; the message says which and why."""
