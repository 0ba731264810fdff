"""Room for an amount, such as bytes, that callers share: what a caller alone fills leaves a part for others."""

import collections

_KEPT = 4  # the last part of so many is for owners that have little


class SharedRoom:
    """On one event loop.

    Anybody is let in up to three quarters of the room. The last quarter is for owners that have no more than an even
    part of it, so that one who holds all the rest, and may do so for long, shuts nobody out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: collections.Counter[bytes] = collections.Counter()
        self.total = 0  # of all owners

    def enter(self, owner: bytes, amount: int, *, at_any_rate: bool = False) -> bool:
        """Takes room, if there is some for this owner, or `at_any_rate`. Returns whether it was taken."""
        if not at_any_rate and not self._has_room(owner, amount):
            return False
        self._held[owner] += amount
        self.total += amount
        return True

    def leave(self, owner: bytes, amount: int) -> None:
        """Gives room back."""
        self._held[owner] -= amount
        self.total -= amount
        assert self._held[owner] >= 0, (self._held[owner], amount)
        if not self._held[owner]:
            del self._held[owner]

    def held(self, owner: bytes) -> int:
        """What an owner has."""
        return self._held[owner]

    def _has_room(self, owner: bytes, amount: int) -> bool:
        total, own = self.total + amount, self._held[owner] + amount
        if total <= self._most - self._most // _KEPT:
            return True
        owners = len(self._held.keys() | {owner})
        return total <= self._most and own <= self._most // (_KEPT * owners)
