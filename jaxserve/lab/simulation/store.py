"""A store of pages on a virtual clock: what it holds, and when a fill or a write ends.

The model of its input and output. Each direction has as many turns as `Transfers` has threads for it; a call begins
when a turn is free, waits for the latency, and then its pages cross the link one after the other. Reads share one link,
writes another, and each moves a page at a time. Pages that would come after the deadline of their fill do not come, and
the fill ends then. Which pages stay is up to a policy of `sched.tier_policy`.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.config.schema import StoreConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.transfer import TransferOptions
from jaxserve.lab.simulation.values import VirtualClock
from jaxserve.sched.loading import Filled, StoreCounts, StoreKey, Written
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy

_BOUNDLESS = 2**40  # pages of a store that somebody else bounds
_BOUNDS = TransferOptions()  # of the engine, which has no others


class StoreLink(NamedTuple):
    """Seconds before the first byte of a call, and bytes a second in each direction."""

    latency_s: float
    bandwidth: float


# Assumed where nobody has said better: memory of the process, a local NVMe drive, a network of 10 Gbit/s, a bucket.
LINKS = {
    "memory": StoreLink(0.0, 10e9),
    "file": StoreLink(100e-6, 3e9),
    "remote": StoreLink(500e-6, 1e9),
    "object": StoreLink(20e-3, 0.5e9),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreModel:
    """A store on paper. Each replica has one of its own.

    Attributes:
      num_pages: that it holds.
      page_bytes: of a page, as it crosses the link.
      latency_s: of each call, before its first byte.
      bandwidth: bytes a second, of each direction.
      policy, admission: which pages stay, and which are taken in; see `sched.tier_policy`.

    Raises ConfigError when a value is out of range, or the policy does not exist.
    """

    num_pages: int
    page_bytes: int
    latency_s: float
    bandwidth: float
    policy: str = "lru"
    admission: str = "always"

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a simulated store is {getattr(self, name)}, but must be 1 or more")
        if not 0 <= self.latency_s < math.inf or not 0 < self.bandwidth < math.inf:
            raise ConfigError(
                f"a simulated store has a latency of {self.latency_s} s and {self.bandwidth} bytes a second; they must "
                "be a number from 0, and one above 0"
            )
        create_tier_policy(self.policy, TierOptions(admission=self.admission))


def model_of_store(store: StoreConfig, page_bytes: int, link: StoreLink | None) -> StoreModel | None:
    """The store that a config names, None for none. `link`: None takes that of `LINKS` for its kind.

    Raises ConfigError for a store that is not among these, without a link.
    """
    if store.kind is None:
        if link is not None:
            raise ConfigError("the link of a store was given, but store.kind is not set; name a store, or leave it out")
        return None
    if link is None:
        link = LINKS.get(store.kind)
    if link is None:
        raise ConfigError(
            f"store.kind is {store.kind!r}, and nothing is known of how fast it is; give --store-latency-ms and "
            "--store-bandwidth"
        )
    if not page_bytes:
        raise ConfigError(
            "store.kind is set, but it fills slots of host memory and there are none: set cache.host_bytes"
        )
    return StoreModel(
        num_pages=_BOUNDLESS if store.max_bytes is None else max(1, store.max_bytes // page_bytes),
        page_bytes=page_bytes,
        latency_s=link.latency_s,
        bandwidth=link.bandwidth,
        policy=store.policy or "lru",
        admission=store.admission or "always",
    )


class _Link:
    """One direction. Mutated by the store."""

    def __init__(self, streams: int, latency_s: float, page_s: float) -> None:
        self._free_s = [0.0] * streams  # a heap: when each turn is free
        self._latency_s = latency_s
        self._page_s = page_s
        self._busy_until_s = 0.0

    def move(self, num_pages: int, now_s: float, deadline_s: float) -> tuple[int, float]:
        """Takes a turn. Returns the number of pages that are there by `deadline_s`, and when the call ends."""
        start_s = max(now_s, heapq.heappop(self._free_s))
        first_s = max(start_s + self._latency_s, self._busy_until_s)
        in_time = num_pages
        if first_s + num_pages * self._page_s > deadline_s:
            in_time = max(0, min(num_pages, math.floor((deadline_s - first_s) / self._page_s)))
        end_s = first_s + in_time * self._page_s if in_time == num_pages else deadline_s
        self._busy_until_s = max(self._busy_until_s, first_s + in_time * self._page_s if in_time else 0.0)
        heapq.heappush(self._free_s, max(end_s, start_s))
        return in_time, end_s


class SimulatedStore:
    """A `sched.loading.SlotStore`. Mutated by the scheduler and the simulated engine that it belongs to.

    A page that is being written is there when its write ends.
    """

    def __init__(self, model: StoreModel, clock: VirtualClock) -> None:
        page_s = model.page_bytes / model.bandwidth
        self._model = model
        self._clock = clock
        self._reads = _Link(_BOUNDS.fill_threads, model.latency_s, page_s)
        self._writes = _Link(_BOUNDS.write_threads, model.latency_s, page_s)
        self._policy = create_tier_policy(model.policy, TierOptions(admission=model.admission))
        self._kept: dict[bytes, str] = {}  # by content; its salt
        self._tickets = itertools.count(1)
        self._events: list[tuple[float, int, Filled | Written, StoreKey | None]] = []  # a heap
        self._order = itertools.count()
        self._num_fills = self._num_writes = 0
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def counts(self) -> StoreCounts:
        """See `SlotStore`; a simulated store is never left alone."""
        return StoreCounts(dict(self._counts), 0)

    @property
    def next_event_s(self) -> float:
        """When there is something to poll; infinity: nothing is on its way."""
        return self._events[0][0] if self._events else math.inf

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        if self._num_fills >= _BOUNDS.max_fills:
            return None
        ticket, now_s = next(self._tickets), self._clock.now_s
        there = [key.content in self._kept for key in keys]
        for key, found in zip(keys, there, strict=True):
            if found:
                self._policy.touch(key.content)
        in_time, end_s = self._reads.move(sum(there), now_s, now_s + deadline_s)
        ok = []
        for found in there:
            ok.append(found and in_time > 0)
            in_time -= found
        self._counts["filled"] += sum(ok)
        self._counts["missed"] += len(there) - sum(there)
        self._counts["late"] += sum(there) - sum(ok)
        self._num_fills += 1
        self._add(end_s, Filled(ticket, tuple(ok)), None)
        return ticket

    def prefetch(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`. A later fill does not overtake it here."""
        return self.fill(keys, slots, deadline_s)

    def settle(self, ticket: int, num_used: int) -> None:
        """See `SlotStore`."""
        self._counts["prefetch_used"] += num_used

    def flush(self, salt: str | None) -> None:
        """See `SlotStore`."""
        for key in [key for key, its_salt in self._kept.items() if salt in (None, its_salt)]:
            self._policy.remove(key)
            del self._kept[key]

    def cancel(self, ticket: int) -> None:
        """See `SlotStore`. Pages that are on their way come."""

    def write(self, key: StoreKey, slot: int) -> bool:
        """See `SlotStore`."""
        if self._num_writes >= _BOUNDS.max_writes:
            self._counts["write_skipped"] += 1
            return False
        _, end_s = self._writes.move(1, self._clock.now_s, math.inf)
        self._num_writes += 1
        self._add(end_s, Written(slot), key)
        return True

    def poll(self) -> list[Filled | Written]:
        """See `SlotStore`."""
        events: list[Filled | Written] = []
        while self._events and self._events[0][0] <= self._clock.now_s:
            _, _, event, key = heapq.heappop(self._events)
            if key is None:
                self._num_fills -= 1
            else:
                self._num_writes -= 1
                self._take_in(*key)
            events.append(event)
        return events

    def _add(self, end_s: float, event: Filled | Written, key: StoreKey | None) -> None:
        heapq.heappush(self._events, (end_s, next(self._order), event, key))

    def _take_in(self, salt: str, key: bytes) -> None:
        policy = self._policy
        if key in self._kept:
            policy.touch(key)
            return
        if not policy.admit(key):
            self._counts["write_refused"] += 1
            return
        while len(self._kept) >= self._model.num_pages:
            gone = policy.victim(key)
            assert gone is not None, "nothing is held here"
            del self._kept[gone]
        policy.insert(key)
        self._kept[key] = salt
        self._counts["written"] += 1
