"""`LoopWatch`: the thread that sees when the event loop of the doors is held up, and by what.

While one callback runs, no client is served and no probe is answered. asyncio reports such callbacks only in its debug
mode, which costs each of them. Here a thread asks the loop to answer, some times a second; when no answer has come for
a while it looks at the stack of the loop's thread. A callback pays nothing.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

OTHER = "other"  # nothing of this package runs, or all names have been given
# All callbacks of 0.1 s and more are seen, and none below 0.05 s: one begins at most a pause before it is asked for.
_PAUSE_S = _LATE_S = 0.05
_LOG_EVERY_S = 60.0  # for each name
_MOST_NAMES = 100
_JOIN_S = 5.0


class LoopWatch:
    """Watches the event loop that runs where it is started."""

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        package: str = "jaxserve",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note` is called on the watching thread with the name of the function that holds the loop up: the innermost
        one of `package`, as MODULE.FUNCTION, or "other". There are at most 101 names."""
        self._note = note
        self._package = package
        self._clock = clock
        self._names: dict[str, tuple[int, float]] = {}  # times since the last line of the log, and when that was
        self._answered = threading.Event()
        self._stopped = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._thread = threading.Thread(target=self._run, name="jaxserve-loop-watch", daemon=True)

    def start(self) -> None:
        """Watches from now on, on a thread of its own. Called on the event loop."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._answered.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        assert self._loop is not None
        while not self._stopped.wait(_PAUSE_S):
            self._answered.clear()
            try:
                self._loop.call_soon_threadsafe(self._answered.set)
            except RuntimeError:  # it has closed
                return
            if not self._answered.wait(_LATE_S) and not self._stopped.is_set():
                self._tell(self._where())
                self._answered.wait()

    def _where(self) -> str:
        """The innermost function of the package that the loop runs."""
        frame: FrameType | None = sys._current_frames().get(self._loop_thread)
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if module == asyncio.base_events.__name__:  # the loop itself: what is outside has started it
                break
            if module.split(".")[0] == self._package:
                return f"{module}.{frame.f_code.co_qualname}"
            frame = frame.f_back
        return OTHER

    def _tell(self, where: str) -> None:
        if where not in self._names and len(self._names) >= _MOST_NAMES:
            where = OTHER
        count, logged_s = self._names.get(where, (0, -_LOG_EVERY_S))
        count, now_s = count + 1, self._clock()
        if now_s - logged_s >= _LOG_EVERY_S:
            times = "once" if count == 1 else f"{count} times"
            what = "other code" if where == OTHER else where
            logger.warning("the event loop was held up %s by %s: no client was served meanwhile", times, what)
            count, logged_s = 0, now_s
        self._names[where] = (count, logged_s)
        self._note(where)
