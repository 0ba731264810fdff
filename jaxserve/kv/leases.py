"""`Leases`: pages that wait for another server, each for a limited time. The states of a handoff on the sending side.

    reserved --> lent --> released (by the receiver) | expired (by the clock)
        \\--> given up (the prompt was not computed)

A lease ends `lease_s` seconds after it was made, or was last renewed: by its receiver, or by a frame that was sent. The
clock is this process's own and monotonic, and a name counts with the epoch of the process alone: so a receiver that is
gone strands slots for one lease, a sender that stood still refuses what has run out meanwhile, and a sender that was
started again at the same address knows nothing of the leases before it.
"""

import collections
import secrets
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from jaxserve.errors import JaxserveError, QueueFull

ID_BYTES = 16

T = TypeVar("T")


class LeaseGone(JaxserveError):
    """The lease has run out, was released, or never was."""


class OtherEpoch(JaxserveError):
    """The lease is of a process that was here before this one."""


class LeaseName(NamedTuple):
    """`transfer_id`: of the lease; `epoch`: of the process that made it. Random bits, 16 bytes each."""

    transfer_id: bytes
    epoch: bytes


class _Lease(Generic[T]):
    """Mutated by `Leases`, under its lock."""

    __slots__ = ("until_s", "what")

    def __init__(self, what: T, until_s: float) -> None:
        self.what = what
        self.until_s = until_s


class Leases(Generic[T]):
    """What is lent, `what` by name. Any thread.

    Attributes:
      epoch: of this process.
      counts: leases that ended, by how: released, expired.
    """

    def __init__(self, lease_s: float, max_leases: int, clock: Callable[[], float]) -> None:
        self.epoch = secrets.token_bytes(ID_BYTES)
        self.counts: collections.Counter[str] = collections.Counter()
        self.lease_s = lease_s
        self._max_leases = max_leases
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reserved = 0
        self._lent: dict[bytes, _Lease[T]] = {}

    def live(self) -> list[T]:
        """What is lent now."""
        with self._lock:
            return [lease.what for lease in self._lent.values()]

    def reserve(self) -> LeaseName:
        """Room for a lease, and its name; `lend` or `give_up` must follow. Raises QueueFull."""
        with self._lock:
            if len(self._lent) + self._num_reserved >= self._max_leases:
                first_s = min((lease.until_s for lease in self._lent.values()), default=self._clock())
                raise QueueFull(
                    f"the pages of {self._max_leases} prompts wait to be fetched (handoff.max_leases); try again later",
                    retry_after_s=max(0.1, first_s - self._clock()),
                )
            self._num_reserved += 1
        return LeaseName(secrets.token_bytes(ID_BYTES), self.epoch)

    def give_up(self) -> None:
        """Ends a reservation."""
        with self._lock:
            self._num_reserved -= 1

    def lend(self, name: LeaseName, what: T) -> None:
        """The reservation becomes a lease, which begins now."""
        with self._lock:
            self._num_reserved -= 1
            self._lent[name.transfer_id] = _Lease(what, self._clock() + self.lease_s)

    def renew(self, name: LeaseName) -> T:
        """What is lent, for the whole time from now on. Raises LeaseGone or OtherEpoch."""
        if name.epoch != self.epoch:
            raise OtherEpoch("the lease is of a process that was here before")
        with self._lock:
            now_s, lease = self._clock(), self._lent.get(name.transfer_id)
            if lease is None or lease.until_s <= now_s:
                raise LeaseGone("there is no such lease: it has run out, or was given back")
            lease.until_s = now_s + self.lease_s
            return lease.what

    def release(self, name: LeaseName) -> T | None:
        """Ends a lease whose receiver has what it needs. None: it had ended."""
        with self._lock:
            lease = self._lent.pop(name.transfer_id, None) if name.epoch == self.epoch else None
            if lease is None:
                return None
            self.counts["released"] += 1
            return lease.what

    def take_expired(self) -> list[T]:
        """What had been lent by leases that have run out by now. Called again and again by their owner."""
        with self._lock:
            now_s = self._clock()
            over = [name for name, lease in self._lent.items() if lease.until_s <= now_s]
            self.counts["expired"] += len(over)
            return [self._lent.pop(name).what for name in over]


class Offers:
    """Room that is set aside for requests which come from elsewhere, by their ids. Any thread."""

    def __init__(self, lease_s: float, max_offers: int, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self._max_offers = max_offers
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: dict[str, float] = {}

    def count(self) -> int:
        """Those that have not come and have not run out."""
        with self._lock:
            now_s = self._clock()
            self._until_s = {name: until_s for name, until_s in self._until_s.items() if until_s > now_s}
            return len(self._until_s)

    def take(self, request_id: str) -> None:
        """Sets room aside. Raises QueueFull."""
        if self.count() >= self._max_offers:
            raise QueueFull(
                f"{self._max_offers} requests are on their way here (handoff.max_offers); try again later",
                retry_after_s=1.0,
            )
        with self._lock:
            self._until_s[request_id] = self._clock() + self.lease_s

    def end(self, request_id: str) -> None:
        """The request is here."""
        with self._lock:
            self._until_s.pop(request_id, None)
