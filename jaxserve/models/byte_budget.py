"""A limit on the bytes that threads hold at once.

A smaller pool of threads would not do: parameters differ a thousandfold in size, and a pool that is right for the
largest leaves the disk idle for the others.
"""

import contextlib
import threading
from collections.abc import Iterator


class ByteBudget:
    """Bytes that threads may hold at once. A thread that wants more than the limit gets them when it is alone."""

    def __init__(self, num_bytes: int) -> None:
        self._left = self._all = max(1, num_bytes)
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, num_bytes: int) -> Iterator[None]:
        """Waits until `num_bytes` are free, and takes them for the length of the block."""
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
