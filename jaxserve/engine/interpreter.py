"""The settings of Python's interpreter while a loop has work: garbage collection, and the time until a thread switch.

Both policies belong to the process and therefore to one object that all its loops share, those of several engines too
(`process_interpreter`). A program that has made these settings itself keeps them: where automatic collection is off,
objects are frozen or threads already switch sooner, nothing is changed.

By itself Python collects wherever an allocation happens to cross a threshold, and its oldest generation holds every
object of JAX, of the model and of a notebook: a tenth of a second and more, in the middle of a step. So, as long as a
loop has work, older objects are hidden from the collector (`gc.freeze`), automatic collection is off, and each loop
asks here once a turn, when its device has just been given work; a collection that is due by the interpreter's own
thresholds is made then. A loop that comes back from its device waits until the thread that writes to clients lets it
run: by default up to 5 ms, longer than many a step; here at most one. When the last loop has nothing to do, all
settings are as they were.
"""

import contextlib
import functools
import gc
import sys
import threading
import time
from collections.abc import Callable, Generator

from jaxserve.engine.observers import StepObserver

_OLDEST = 2
_OLDEST_EVERY_S = 30.0  # it holds what has come since the loop began to work: milliseconds, rarely worth them
_OWN_FROZEN = 1000  # CPython 3.12 begins with some 400 frozen objects of its own; a program freezes tens of thousands
_SWITCH_S = 0.001  # 0.2 ms keeps the device no busier, and costs a switch for each


class Interpreter(StepObserver):
    """One for all loops of a process; `begin_work` and `end_work` come in pairs. Any thread.

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

    def begin_work(self) -> None:
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
                self._froze = gc.get_freeze_count() < _OWN_FROZEN
                if self._froze:
                    gc.freeze()

    def end_work(self) -> None:
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


@functools.cache
def process_interpreter() -> Interpreter:
    """The one of this process. With one for each engine, the first idle engine would undo the others' settings."""
    return Interpreter()


@contextlib.contextmanager
def collector_paused() -> Generator[None, None, None]:
    """No cycle collection inside, for work that makes very many objects and no cycles.

    By itself the collector would look through all of a million new objects again and again, in vain: seconds of a large
    JSON text, an eighth of the time of a large simulation.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
