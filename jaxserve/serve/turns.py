"""Turns on an event loop, for work that takes long and has no place where it waits.

Such work is cut into pieces of a few milliseconds. Of all pieces that are due on a loop one is done each time it comes
round, whosever it is: many large answers at once take longer, and hold up others no more than one does.
"""

import asyncio
import collections


class Turns:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._due: collections.deque[asyncio.Future[None]] = collections.deque()
        self._giving = False

    async def next(self) -> None:
        """Returns when it is this piece's turn: after the loop has come round, and after the pieces that are due."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._due.append(turn)
        if not self._giving:
            self._giving = True
            loop.call_soon(self._give, loop)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._due:
            turn = self._due.popleft()
            if not turn.done():  # else whose it was has been cancelled
                turn.set_result(None)
                loop.call_soon(self._give, loop)  # behind the piece itself, and behind what else is due by then
                return
        self._giving = False
