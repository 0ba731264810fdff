"""Places that several callers share: a caller alone may have all of them, and beside others an even part."""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FairPlaces(Generic[K]):
    """On one event loop. A place that is free goes to the owner that holds fewest, then to the one that waits longest.

    So an owner that begins to wait gets its part as soon as places of others come back, however many of theirs wait.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: collections.Counter[K] = collections.Counter()
        self._waiting: dict[K, collections.deque[asyncio.Future[None]]] = {}  # owners by when they began to wait

    @contextlib.asynccontextmanager
    async def place(self, owner: K) -> AsyncIterator[None]:
        """Waits for a place, and holds it within."""
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave(owner)

    def num_held(self, owner: K) -> int:
        """Places that the owner has now."""
        return self._held[owner]

    async def _enter(self, owner: K) -> None:
        if self._free and not self._waiting:
            self._take(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, collections.deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(owner)  # it was given a place in the same turn of the loop
            else:
                self._forget(owner, turn)
            raise

    def _take(self, owner: K) -> None:
        self._free -= 1
        self._held[owner] += 1

    def _leave(self, owner: K) -> None:
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self._free and self._waiting:
            next_owner = min(self._waiting, key=self._held.__getitem__)
            turn = self._waiting[next_owner][0]
            self._forget(next_owner, turn)
            if not turn.cancelled():  # else its task has been cancelled, and will hear of it in this turn of the loop
                self._take(next_owner)
                turn.set_result(None)

    def _forget(self, owner: K, turn: asyncio.Future[None]) -> None:
        """The owner waits once less. One that waits on comes after the others that hold as many."""
        turns = self._waiting.pop(owner, collections.deque())
        if turn in turns:
            turns.remove(turn)
        if turns:
            self._waiting[owner] = turns
