"""The built-in policies of a tier: lru, lfu with ageing, arc, s3-fifo. `tier_policy` says what a policy is."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable

from jaxserve.sched.tier_policy import TierOptions, TierPolicy

Held = Callable[[bytes], bool]


class Lru(TierPolicy):
    """Gives up the page that was not used for the longest time."""

    def __init__(self, options: TierOptions | None = None) -> None:
        super().__init__(options)
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def insert(self, key: bytes) -> None:
        assert key not in self._order
        self._order[key] = None

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)

    def _touch(self, key: bytes) -> None:
        self._order.move_to_end(key)

    def _victim(self, incoming: bytes | None, held: Held) -> bytes | None:
        key = _first_free(self._order, held)
        if key is not None:
            del self._order[key]
        return key


class _Use:
    """A page in the heap of `AgeingLfu`. `count`: its uses; the others order the heap."""

    __slots__ = ("alive", "count", "key", "last", "priority")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.count = 0
        self.priority = 0
        self.last = 0
        self.alive = True


class AgeingLfu(TierPolicy):
    """LFU with dynamic ageing (Arlitt et al., Performance Evaluation Review 27(4), 2000).

    A page's priority is its number of uses plus the priority of the last page that was given up when it was used.
    So what was popular once sinks below what is used now; without that, such pages would stay for ever.
    Among equals the page unused for longest goes.
    """

    def __init__(self, options: TierOptions | None = None) -> None:
        super().__init__(options)
        self._uses: dict[bytes, _Use] = {}
        # (priority, time of last use, page). Priorities only rise, so an entry that is too low is found at the top.
        self._heap: list[tuple[int, int, _Use]] = []
        self._age = 0
        self._time = 0

    def __len__(self) -> int:
        return len(self._uses)

    def insert(self, key: bytes) -> None:
        assert key not in self._uses
        use = self._uses[key] = _Use(key)
        self._count(use)
        heapq.heappush(self._heap, (use.priority, use.last, use))

    def remove(self, key: bytes) -> None:
        use = self._uses.pop(key, None)
        if use is not None:
            use.alive = False
            if len(self._heap) > 2 * len(self._uses) + 64:
                self._heap = [(use.priority, use.last, use) for use in self._uses.values()]
                heapq.heapify(self._heap)

    def _touch(self, key: bytes) -> None:
        self._count(self._uses[key])

    def _count(self, use: _Use) -> None:
        self._time += 1
        use.count += 1
        use.priority = self._age + use.count
        use.last = self._time

    def _victim(self, incoming: bytes | None, held: Held) -> bytes | None:
        passed: list[tuple[int, int, _Use]] = []
        found = None
        while self._heap:
            priority, last, use = heapq.heappop(self._heap)
            if not use.alive:
                continue
            if last != use.last:
                heapq.heappush(self._heap, (use.priority, use.last, use))
            elif held(use.key):
                passed.append((priority, last, use))
            else:
                found = use
                break
        for entry in passed:
            heapq.heappush(self._heap, entry)
        if found is None:
            return None
        self._age = found.priority
        del self._uses[found.key]
        found.alive = False
        return found.key


class Arc(TierPolicy):
    """ARC (Megiddo and Modha, FAST 2003): pages used once and pages used again share the room.

    The keys of pages given up are remembered, at most as many as the tier has pages. One that comes back says which of
    the two lists was too short, and its share grows.

    Attributes:
      target: pages that those used once may have.
    """

    def __init__(self, options: TierOptions | None = None) -> None:
        super().__init__(options)
        self.target = 0.0
        self._once: OrderedDict[bytes, None] = OrderedDict()  # T1 in the paper
        self._again: OrderedDict[bytes, None] = OrderedDict()  # T2
        self._once_gone: OrderedDict[bytes, None] = OrderedDict()  # B1
        self._again_gone: OrderedDict[bytes, None] = OrderedDict()  # B2
        self._capacity = 0
        self._adapted: bytes | None = None  # the incoming key that has moved the target, which it does once

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def insert(self, key: bytes) -> None:
        assert key not in self._once and key not in self._again
        self._adapt(key)
        self._adapted = None
        if key in self._once_gone or key in self._again_gone:
            self._once_gone.pop(key, None)
            self._again_gone.pop(key, None)
            self._again[key] = None
        else:
            self._once[key] = None
        self._trim()

    def remove(self, key: bytes) -> None:
        for order in (self._once, self._again, self._once_gone, self._again_gone):
            order.pop(key, None)

    def _touch(self, key: bytes) -> None:
        self._once.pop(key, None)
        self._again.pop(key, None)
        self._again[key] = None

    def _victim(self, incoming: bytes | None, held: Held) -> bytes | None:
        self._capacity = len(self)
        if incoming is not None:
            self._adapt(incoming)
        is_again_ghost = incoming is not None and incoming in self._again_gone
        once = len(self._once)
        once_first = once > 0 and (once > self.target or (is_again_ghost and once == self.target))
        lists = ((self._once, self._once_gone), (self._again, self._again_gone))
        for order, gone in lists if once_first else lists[::-1]:
            key = _first_free(order, held)
            if key is not None:
                del order[key]
                gone[key] = None
                self._trim()
                return key
        return None

    def _adapt(self, incoming: bytes) -> None:
        if self._adapted == incoming:
            return
        self._adapted = incoming
        once, again = len(self._once_gone), len(self._again_gone)
        if incoming in self._once_gone:
            self.target = min(self.target + max(1.0, again / once), float(self._capacity))
        elif incoming in self._again_gone:
            self.target = max(self.target - max(1.0, once / again), 0.0)

    def _trim(self) -> None:
        """At most C keys were used once, there or gone, and at most 2 C are known: the paper's bounds."""
        capacity = max(self._capacity, len(self))
        while self._once_gone and len(self._once) + len(self._once_gone) > capacity:
            self._once_gone.popitem(last=False)
        while self._again_gone and len(self) + len(self._once_gone) + len(self._again_gone) > 2 * capacity:
            self._again_gone.popitem(last=False)


class S3Fifo(TierPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue sorts out what is used once, a main queue gives second chances.

    A tenth of the room is the small queue's. A page leaves it for the main queue if it was used more than once, else
    the tier; the key of a page that left the tier is remembered, and goes to the main queue when it comes back.
    """

    _SMALL_SHARE = 0.1
    _MOST_USES = 3

    def __init__(self, options: TierOptions | None = None) -> None:
        super().__init__(options)
        self._small: OrderedDict[bytes, int] = OrderedDict()  # key -> uses since it was queued
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, key: bytes) -> None:
        assert key not in self._small and key not in self._main
        if key in self._gone:
            del self._gone[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def remove(self, key: bytes) -> None:
        for queue in (self._small, self._main, self._gone):
            queue.pop(key, None)

    def _touch(self, key: bytes) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self._MOST_USES)

    def _victim(self, incoming: bytes | None, held: Held) -> bytes | None:
        capacity = len(self)
        small_first = len(self._small) >= self._SMALL_SHARE * capacity
        found = self._from_small(held, capacity) if small_first else self._from_main(held)
        if found is None:
            found = self._from_main(held) if small_first else self._from_small(held, capacity)
        return found

    def _from_small(self, held: Held, capacity: int) -> bytes | None:
        while (key := _first_free(self._small, held)) is not None:
            if self._small.pop(key) > 1:
                self._main[key] = 0
                continue
            self._gone[key] = None
            while len(self._gone) > max(1, round((1 - self._SMALL_SHARE) * capacity)):
                self._gone.popitem(last=False)
            return key
        return None

    def _from_main(self, held: Held) -> bytes | None:
        while (key := _first_free(self._main, held)) is not None:
            uses = self._main.pop(key)
            if not uses:
                return key
            self._main[key] = uses - 1
        return None


def _first_free(keys: Iterable[bytes], held: Held) -> bytes | None:
    return next((key for key in keys if not held(key)), None)
