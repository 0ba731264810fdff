"""Room for an amount, such as sequences or bytes, that owners share: what one fills leaves a part for others."""

import collections
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_BEYOND = 4  # the most is exceeded by the last part of so many, for owners that have little
_NOTHING: Mapping[Any, int] = MappingProxyType({})


class SharedRoom(Generic[K]):
    """Used on one event loop, or under a lock of its user.

    Anybody is let in up to `most`, so an owner alone may have all of it. Beside it there is a quarter more, for owners
    that have no more than an even part of that quarter: one who holds all the rest, and may do so for long, shuts
    nobody out.

    Attributes:
      most: may be replaced.
      total: what all owners have.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._held: collections.Counter[K] = collections.Counter()

    def enter(self, owner: K, amount: int, *, at_any_rate: bool = False) -> bool:
        """Takes room, if there is some for this owner, or `at_any_rate`. Returns whether it was taken."""
        if not at_any_rate and self.lacking(owner, amount):
            return False
        self._held[owner] += amount
        self.total += amount
        return True

    def leave(self, owner: K, amount: int) -> None:
        """Gives room back."""
        self._held[owner] -= amount
        self.total -= amount
        assert self._held[owner] >= 0, (self._held[owner], amount)
        if not self._held[owner]:
            del self._held[owner]

    def clear(self) -> None:
        """Nobody has anything any more."""
        self._held.clear()
        self.total = 0

    def held(self, owner: K) -> int:
        """What an owner has."""
        return self._held[owner]

    @property
    def by_owner(self) -> Mapping[K, int]:
        """What each owner has, of those that have something. Changes with the room."""
        return self._held

    def part(self, owner: K, beside: Mapping[K, int] = _NOTHING) -> int:
        """What this owner may have while others have filled `most`."""
        owners = len(self._held.keys() | beside.keys() | {owner})
        return _divide_up(_divide_up(self.most, _BEYOND), owners)

    def lacking(self, owner: K, amount: int, beside: Mapping[K, int] = _NOTHING) -> int:
        """What must leave before there is room for so much of this owner; 0 when there is.

        `beside`: amounts by owner that are about to enter, and count as if they had.
        """
        total = self.total + sum(beside.values()) + amount
        beyond_most = total - self.most
        if beyond_most <= 0:
            return 0
        part = self.part(owner, beside)
        if amount > part:
            return beyond_most
        own = self._held[owner] + beside.get(owner, 0) + amount
        beyond_part = max(own - part, beyond_most - _divide_up(self.most, _BEYOND))
        return max(0, min(beyond_most, beyond_part))


def _divide_up(amount: int, by: int) -> int:
    """Rounded up: of the least room, too, something is left for others."""
    return -(-amount // by)
