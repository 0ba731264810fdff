"""How many bytes threads may hold at once.

Owns the count. Refuses to hold anything. Why not a smaller pool of threads: parameters differ a thousandfold in size,
and a pool that is right for the largest leaves the disk idle for the others.
"""

import contextlib
import threading
from collections.abc import Iterator


class ByteBudget:
    """Bytes that threads may hold at once. One that alone wants more than there are gets them all."""

    def __init__(self, num_bytes: int) -> None:
        self._left = self._all = max(1, num_bytes)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Waits until so many bytes are free, and takes them for the length of the block."""
        taken = min(num_bytes, self._all)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= taken)
            self._left -= taken
        try:
            yield
        finally:
            with self._changed:
                self._left += taken
                self._changed.notify_all()
