"""`Watchdog`: the thread that looks whether the loops of an engine come round.

A device that hangs holds its loop's thread inside of the device's runtime, where Python cannot interrupt it; so what is
to happen then happens here. At the deadline of a step the stacks go to the log, once, and the replica turns red: it is
not ready, and gets no new work while another advances. At twice the deadline it is fenced (`Engine.fence`): its
requests end there or move, its thread is left to its device, and whatever comes from it later is dropped.

A thread that holds the interpreter's lock for ever stops this thread, too. Then no probe is answered any more, which is
what probes of liveness are for.
"""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol

from jaxserve.errors import StepStalled

logger = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks
_MOST_S = 1.0  # that count of one look: a process that was halted, with this thread in it, has seen no hang
_JOIN_S = 5.0


class Watched(Protocol):
    """What the watchdog sees of an engine and does to it; `Engine` says more of each."""

    name: str
    red: bool

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def turn(self) -> int | None: ...

    @property
    def allowed_s(self) -> float: ...

    @property
    def may_be_fenced(self) -> bool: ...

    def fence(self, turn: int, error: StepStalled) -> bool: ...


class Watchdog:
    """Looks at the loops of some replicas. `look` belongs to its thread, or to a test that has none.

    Args:
      replicas: those that there are now, in an order that stays.
      on_death: called at each look with the number of a replica that has died, fenced ones included.
      clock: seconds, monotonic; that of the engines.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Watched]],
        *,
        on_death: Callable[[int], None] = lambda number: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._on_death = on_death
        self._clock = clock
        self._looked_s = clock()
        self._seen: dict[int, _Seen] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Looks from now on, on a thread of its own."""
        assert self._thread is None, "started twice"
        self._looked_s = self._clock()
        self._thread = threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def look(self) -> None:
        """Adds the time since the last look to the turns that have not ended, and does what is due."""
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, _MOST_S), now_s
        for number, engine in enumerate(self._replicas()):
            if engine.failure is not None:
                self._on_death(number)
                continue
            turn = engine.turn
            seen = self._seen.get(number)
            if turn is None or seen is None or seen.engine is not engine or seen.turn != turn:
                if engine.red:
                    engine.red = False
                    logger.warning("%s: the loop has come round again", engine.name)
                if turn is None:
                    self._seen.pop(number, None)
                else:
                    self._seen[number] = _Seen(engine, turn)
                continue
            seen.stalled_s += passed_s
            self._judge(engine, seen)

    def _judge(self, engine: Watched, seen: "_Seen") -> None:
        allowed_s = engine.allowed_s
        if seen.stalled_s >= allowed_s and not engine.red:
            engine.red = True
            logger.error(
                "%s: a step has not ended within its deadline of %.3g s; no new work comes here, and after as much "
                "time again it is given up\n%s",
                engine.name,
                allowed_s,
                _stacks(),
            )
        if seen.stalled_s >= 2 * allowed_s and engine.may_be_fenced:
            error = StepStalled(
                f"a step has not ended for {seen.stalled_s:.3g} s, twice its deadline of {allowed_s:.3g} s "
                "(watchdog.floor_s, watchdog.factor); the device may be stuck"
            )
            logger.error("%s is given up: %s", engine.name, error)
            if engine.fence(seen.turn, error):
                self._seen = {number: one for number, one in self._seen.items() if one is not seen}

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            try:
                self.look()
            except Exception:  # a defect here must not leave the engine without a watch
                logger.exception("the watchdog could not do its work")


class _Seen:
    """A turn that had not ended at the last look, and for how long the watchdog has seen it so. Mutated by it."""

    __slots__ = ("engine", "stalled_s", "turn")

    def __init__(self, engine: Watched, turn: int) -> None:
        self.engine = engine
        self.turn = turn
        self.stalled_s = 0.0


def _stacks() -> str:
    """What each thread of the process is doing."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            parts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(parts)
