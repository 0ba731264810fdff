"""How Python runs while a loop has work: when it collects garbage, and how soon a waiting thread gets its turn.

Owns both policies, which belong to the process and therefore to one object that all its loops share. Refuses to decide
for those who decide themselves: where automatic collection is off, objects are frozen or threads already switch sooner,
that is left alone.

By itself Python collects wherever an allocation happens to cross a threshold, and its oldest generation holds every
object of JAX, of the model and of a notebook: a tenth of a second and more, in the middle of a step. So, as long as a
loop has work, what was there before is out of sight (`gc.freeze`), automatic collection is off, and each loop asks here
once a turn, when its device has just been given work. What is due is then collected by the interpreter's own
thresholds. A loop that comes back from its device waits until the thread that writes to clients lets it run, up to
5 ms by itself, longer than many a step; here at most one. When the last loop has nothing to do, all is as it was.
"""

import gc
import sys
import threading
import time
from collections.abc import Callable

_OLDEST = 2
_OLDEST_EVERY_S = 30.0  # it holds what has come since the loop began to work: milliseconds, rarely worth them
_SWITCH_S = 0.001  # 0.2 ms keeps the device no busier, and costs a switch for each


class Interpreter:
    """One for all loops of a process; `begin` and `end` come in pairs. Any thread.

    Attributes:
      num_collections, total_s, longest_s: of those that `rest` has made.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_collections = 0
        self.total_s = self.longest_s = 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._num_busy = 0
        self._ours = self._froze = False
        self._switch_s: float | None = None  # as it was before
        self._oldest_s = clock()

    def begin(self) -> None:
        """A loop has work."""
        with self._lock:
            self._num_busy += 1
            if self._num_busy > 1:
                return
            found_s = sys.getswitchinterval()
            self._switch_s = found_s if found_s > _SWITCH_S else None
            if self._switch_s is not None:
                sys.setswitchinterval(_SWITCH_S)
            self._ours = gc.isenabled()
            if self._ours:
                gc.disable()
                self._froze = gc.get_freeze_count() == 0
                if self._froze:
                    gc.freeze()

    def end(self) -> None:
        """A loop has nothing more to do."""
        with self._lock:
            self._num_busy -= 1
            assert self._num_busy >= 0, "more loops have ended than begun"
            if self._num_busy:
                return
            if self._switch_s is not None:
                sys.setswitchinterval(self._switch_s)
            if not self._ours:
                return
            if self._froze:
                gc.unfreeze()
            gc.enable()
            self._ours = self._froze = False

    def rest(self) -> None:
        """A device is busy, and its loop is not: collects what is due."""
        if not self._ours:
            return
        counts, thresholds = gc.get_count(), gc.get_threshold()
        if counts[0] <= thresholds[0]:
            return
        begun_s = self._clock()
        generation = 0
        if 0 < thresholds[1] < counts[1]:
            generation = 1
            if 0 < thresholds[2] < counts[2] and begun_s - self._oldest_s > _OLDEST_EVERY_S:
                generation = _OLDEST
                self._oldest_s = begun_s
        gc.collect(generation)
        took_s = self._clock() - begun_s
        self.num_collections += 1
        self.total_s += took_s
        self.longest_s = max(self.longest_s, took_s)
