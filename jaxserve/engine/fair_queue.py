"""A queue of several owners: who holds fewest is next, and of those the one that has waited longest."""

import collections
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[K, T]):
    """Things that wait for places, each of an owner. Used on one event loop, or under a lock of its user.

    An owner that begins to wait gets its part as soon as places of others come back, however many of theirs wait.

    Attributes:
      num_held: places that are held now.
    """

    def __init__(self, count: int, spare: int = 0) -> None:
        """`count`: places; `spare`: further ones, only for owners that hold none."""
        self._count = count
        self._most = count + spare
        self.num_held = 0
        self._held: collections.Counter[K] = collections.Counter()
        self._waiting: dict[K, dict[T, None]] = {}  # owners by when they began to wait, or were served last

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def held(self, owner: K) -> int:
        """Places that the owner has now."""
        return self._held[owner]

    def waiting(self) -> list[T]:
        """All that waits."""
        return [thing for things in self._waiting.values() for thing in things]

    def wait(self, owner: K, thing: T) -> None:
        """Puts a thing behind those of its owner. It must not wait already."""
        self._waiting.setdefault(owner, {})[thing] = None

    def forget(self, owner: K, thing: T) -> None:
        """The thing waits no more, if it did."""
        things = self._waiting.get(owner)
        if things is not None and things.pop(thing, self) is not self and not things:
            del self._waiting[owner]

    def next(self) -> tuple[K, T] | None:
        """Gives a place to what is next, and returns it with its owner; None: nothing waits, or there is no place."""
        if not self._waiting or self.num_held >= self._most:
            return None
        owner = min(self._waiting, key=self._held.__getitem__)
        if self.num_held >= self._count and self._held[owner]:
            return None
        things = self._waiting.pop(owner)
        thing = next(iter(things))
        del things[thing]
        if things:
            self._waiting[owner] = things  # behind the others that hold as many
        self._held[owner] += 1
        self.num_held += 1
        return owner, thing

    def leave(self, owner: K) -> None:
        """Gives a place back."""
        self.num_held -= 1
        self._held[owner] -= 1
        assert self._held[owner] >= 0, owner
        if not self._held[owner]:
            del self._held[owner]
