"""`Translated`: a store whose pages have another arrangement of bytes than the slots of this process."""

from collections.abc import Callable, Sequence

from jaxserve.kv.store import KVStore, Outcome


class Translated:
    """A `KVStore` around another one, which keeps what `encode` makes of a page.

    The arrangement is part of neither keys nor names: it is the caller's promise that all users of the store agree.
    """

    def __init__(
        self,
        store: KVStore,
        page_bytes: int,
        encode: Callable[[memoryview], bytes],
        decode: Callable[[memoryview, memoryview], None],
    ) -> None:
        """`page_bytes`: of what `encode` gives. `decode(stored, page)` fills a page with it. Any thread calls both."""
        self._store = store
        self._page_bytes = page_bytes
        self._encode = encode
        self._decode = decode

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._store.contains(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        stored = [memoryview(bytearray(self._page_bytes)) for _ in keys]
        outcomes = self._store.get(keys, stored, deadline_s)
        for outcome, found, page in zip(outcomes, stored, into, strict=True):
            if outcome is Outcome.OK:
                self._decode(found, page)
        return outcomes

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return self._store.put(keys, [memoryview(self._encode(page)) for page in pages], deadline_s)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._store.delete(keys)

    def flush(self, scope: bytes | None) -> None:
        self._store.flush(scope)

    def close(self) -> None:
        self._store.close()
