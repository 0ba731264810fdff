"""`LargeReads`: what is large is read off the event loop, one message of a caller at a time.

To read some megabytes of JSON or of a message takes a twentieth of a second of Python's interpreter, which runs one
thread at a time. On the event loop nobody would be served meanwhile. On many threads at once it would be little better:
the loop would stand in line behind each of them whenever it comes back from its sockets, several times for one answer.
For the same reason a thread rests after each message for as long as it took, when others wait to be read: a parser
gives the interpreter to nobody while it reads.

What large messages have had, the allocator of C keeps for the next ones. A while after the last of them it is given
back to the system.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from jaxserve.engine.daemon_threads import DaemonThreads
from jaxserve.engine.free_memory import give_back_free_memory
from jaxserve.engine.interpreter import process_interpreter

T = TypeVar("T")

LARGE_BYTES = 100_000  # of a message that takes a millisecond and more
_MOST_REST_S = 0.2
_GIVE_BACK_S = 2.0  # after the last large message has been read; by then most have been answered
_THREADS, _SPARE_THREADS = 1, 1  # the spare one is for an owner of whom nothing is being read


class LargeReads:
    """The threads of one door. Used on one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        give_back: Callable[[], None] = give_back_free_memory,
        give_back_s: float = _GIVE_BACK_S,
    ) -> None:
        """`give_back`: called on a thread, `give_back_s` seconds after the last message has been read."""
        self._clock = clock
        self._give_back = give_back
        self._give_back_s = give_back_s
        self._later: asyncio.TimerHandle | None = None
        self._sleep = sleep
        self._rested_s = 0.0  # when the next may begin
        self._threads = DaemonThreads("jaxserve-large", _THREADS, spare=_SPARE_THREADS)

    async def run(self, owner: str, read: Callable[[], T]) -> T:
        """The result of `read`, which is done in its turn: owners take turns. Raises what it raises.

        After a cancel nobody gets the result, and work that waits is never begun.
        """
        try:
            return await asyncio.wrap_future(self._threads.submit(owner, lambda: self._read(read)))
        finally:
            if self._later is not None:
                self._later.cancel()
            self._later = asyncio.get_running_loop().call_later(self._give_back_s, self._submit_give_back)

    def close(self) -> None:
        """Lets the threads end. Nothing is read after it."""
        if self._later is not None:
            self._later.cancel()
        self._threads.close(cancel=True)

    def _submit_give_back(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was closed
            self._threads.submit("", self._give_back)

    def _read(self, read: Callable[[], T]) -> T:
        """`read`, while threads switch as often as they do beside an engine that works, and nothing is collected: the
        collector would look through very many new objects, which form no cycles, again and again."""
        rest_s = min(self._rested_s - self._clock(), _MOST_REST_S)
        if rest_s > 0:
            self._sleep(rest_s)
        interpreter = process_interpreter()
        interpreter.begin_work()
        begun_s = self._clock()
        try:
            return read()
        finally:
            now_s = self._clock()
            self._rested_s = now_s + (now_s - begun_s)
            interpreter.end_work()
