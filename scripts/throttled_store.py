"""A store of pages that is as slow as one says: files of a directory, read over a link of a given rate and latency.

Named by `store.kind: throttled_store:ThrottledStore` and `store.location: DIRECTORY?rate=BYTES_PER_S&latency=SECONDS`,
for `bench_tiers`. Nothing is written, so that the pages are those that somebody put there before.
"""

import time
from collections.abc import Sequence
from urllib.parse import parse_qs

from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import KVStore, Outcome, StoreOptions, create_store


class ThrottledStore:
    """A `KVStore`. Pages of a call come one after the other; what would come after the deadline is late."""

    def __init__(self, layout: PageLayout, options: StoreOptions) -> None:
        directory, _, query = options.needed("throttled", "location").partition("?")
        found = parse_qs(query, strict_parsing=True)
        self._page_s = layout.page_bytes / float(found["rate"][0])
        self._latency_s = float(found["latency"][0])
        inner = StoreOptions(location=directory, max_bytes=options.max_bytes, secret=options.secret)
        self._inner: KVStore = create_store("file", layout, inner)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains(keys)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        begin_s = time.monotonic()
        outcomes = self._inner.get(keys, into, deadline_s)
        in_time = max(0, int((deadline_s - self._latency_s) / self._page_s))
        there = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        for number in there[in_time:]:
            outcomes[number] = Outcome.LATE
        taken_s = deadline_s if there[in_time:] else self._latency_s + len(there) * self._page_s
        time.sleep(max(0.0, begin_s + taken_s - time.monotonic()))
        return outcomes

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return [Outcome.REFUSED] * len(keys)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._inner.delete(keys)

    def flush(self, scope: bytes | None) -> None:
        self._inner.flush(scope)

    def close(self) -> None:
        self._inner.close()
