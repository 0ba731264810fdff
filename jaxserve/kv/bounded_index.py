"""`BoundedIndex`: what a store of bounded size has, how much room that takes, and what goes when there is none."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from jaxserve.sched.tier_policy import TierPolicy

Scope = TypeVar("Scope", bound=Hashable)


class BoundedIndex(Generic[Scope]):
    """Sizes of named items, bounded in sum. Mutated under the lock of the store that owns it; it moves no bytes.

    Attributes:
      num_bytes: of all items.
    """

    def __init__(self, policy: TierPolicy, max_bytes: int) -> None:
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._policy = policy
        self._items: dict[bytes, tuple[Scope, int]] = {}
        self._scopes: dict[Scope, set[bytes]] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._items

    def touch(self, name: bytes) -> None:
        """The item was used."""
        if name in self._items:
            self._policy.touch(name)

    def admit(self, name: bytes, size: int) -> bool:
        """Whether an item that is not there is worth its room, and can have it at all."""
        return size <= self.max_bytes and self._policy.admit(name)

    def make_room(self, size: int, incoming: bytes | None = None) -> list[tuple[Scope, bytes]]:
        """Takes items out until `size` bytes are free, and returns them: the caller drops their bytes."""
        gone: list[tuple[Scope, bytes]] = []
        while self.num_bytes + size > self.max_bytes and (name := self._policy.victim(incoming)) is not None:
            gone.append((self._items[name][0], name))
            self._take_out(name)
        return gone

    def insert(self, scope: Scope, name: bytes, size: int) -> None:
        """Adds an item, or changes the size of one."""
        if name in self._items:
            self.num_bytes += size - self._items[name][1]
            self._items[name] = (scope, size)
            return
        self._items[name] = (scope, size)
        self._scopes.setdefault(scope, set()).add(name)
        self.num_bytes += size
        self._policy.insert(name)

    def remove(self, name: bytes) -> None:
        """The item is gone. An unknown one is left alone."""
        if name in self._items:
            self._take_out(name)
            self._policy.remove(name)

    def names(self, scope: Scope | None = None) -> list[bytes]:
        """Of one scope, or all."""
        return list(self._items) if scope is None else list(self._scopes.get(scope, ()))

    def _take_out(self, name: bytes) -> None:
        scope, size = self._items.pop(name)
        self.num_bytes -= size
        names = self._scopes[scope]
        names.discard(name)
        if not names:
            del self._scopes[scope]
