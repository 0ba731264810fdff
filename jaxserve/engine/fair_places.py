"""Places that several callers share: a caller alone may have all of them, and beside others an even part."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import Generic, TypeVar

from jaxserve.engine.fair_queue import FairQueue

K = TypeVar("K", bound=Hashable)


class FairPlaces(Generic[K]):
    """On one event loop. A place that is free goes to the owner that holds fewest, then to the one that waits longest.

    So an owner that begins to wait gets its part as soon as places of others come back, however many of theirs wait.
    """

    def __init__(self, count: int) -> None:
        self._queue: FairQueue[K, asyncio.Future[None]] = FairQueue(count)

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
        return self._queue.held(owner)

    async def _enter(self, owner: K) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.wait(owner, turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(owner)  # it was given a place in the same turn of the loop
            else:
                self._queue.forget(owner, turn)
            raise

    def _leave(self, owner: K) -> None:
        self._queue.leave(owner)
        self._hand_out()

    def _hand_out(self) -> None:
        while (given := self._queue.next()) is not None:
            owner, turn = given
            if turn.cancelled():  # its task has been cancelled, and will hear of it in this turn of the loop
                self._queue.leave(owner)
            else:
                turn.set_result(None)
