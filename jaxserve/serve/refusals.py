"""Refused calls in the log: those of operators' clients can be found, and a flood of them does not fill a disk.

Lines of requests that ended are in `telemetry.requests`; a refused call has never been a request.
"""

import asyncio
import logging
from collections import Counter

from jaxserve.serve.counts import DoorCounts, Refusal

logger = logging.getLogger(__name__)

MOST = 10  # lines in a window
_WINDOW_S = 1.0


class RefusalLog:
    """One line for each refusal, as far as there is room in this second; then how many more there were. Used on the
    event loop of the doors."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        """`window_s`: seconds in which there are at most `MOST` lines, and one that counts the others."""
        self._window_s = window_s
        self._num_lines = 0
        self._left_out: Counter[str] = Counter()
        self._window: asyncio.TimerHandle | None = None

    @classmethod
    def begin(cls, counts: DoorCounts) -> "RefusalLog":
        """Logs what `counts` hears of, until `end`."""
        log = cls()
        counts.on_refusal = log.note
        return log

    def note(self, refusal: Refusal) -> None:
        if self._window is None:
            self._window = asyncio.get_running_loop().call_later(self._window_s, self.end)
        if self._num_lines == MOST:
            self._left_out[f"{refusal.door} {refusal.reason}"] += 1
            return
        self._num_lines += 1
        # A client chooses the id: with `%r` it ends where it seems to.
        logger.info(
            "call %r was refused: door=%s route=%s status=%s reason=%s",
            refusal.call_id or "",
            *(refusal.door, refusal.route, refusal.status, refusal.reason),
            extra={
                "request_id": refusal.call_id,
                "door": refusal.door,
                "route": refusal.route,
                "status": refusal.status,
                "reason": refusal.reason,
            },
        )

    def end(self) -> None:
        """Says what was left out so far. The next refusal begins anew."""
        if self._window is not None:
            self._window.cancel()
        if self._left_out:
            reasons = ", ".join(f"{what}: {count}" for what, count in sorted(self._left_out.items()))
            logger.info("%d more calls were refused: %s", self._left_out.total(), reasons)
        self._window, self._num_lines, self._left_out = None, 0, Counter()
