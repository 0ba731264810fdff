"""`Rebuilder`: replicas that have died are built again, each on a thread of its own, until they stay down.

A fault that passes deserves another try, and one that stays must not be tried for ever: each try takes the machine's
time from the replicas that live.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from jaxserve.engine.engine import Engine
from jaxserve.errors import ReplicaDown

logger = logging.getLogger(__name__)

_LONGEST_S = 60.0  # between two tries
_BUILD_S = 60.0  # weights and executables are there; a device that hangs does not even make its pages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartOptions:
    """The settings of `watchdog:` about replicas that have died.

    Attributes:
      most: tries of one replica within `window_s`; 0: none.
      window_s: seconds.
      backoff_s: seconds before the first try; before each further one within the window twice as many, at most 60.
      wait_s: seconds that accepted requests wait for a replica that is built again, if no other is left; 0: none waits.
    """

    most: int = 3
    window_s: float = 600.0
    backoff_s: float = 1.0
    wait_s: float = 30.0


class Restarts:
    """The tries of one replica. Mutated by the thread that builds it."""

    def __init__(self, options: RestartOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._tries: collections.deque[float] = collections.deque()

    def next_wait_s(self) -> float | None:
        """Counts one more try. Returns the seconds to wait before it; None when there have been too many."""
        now_s, options = self._clock(), self._options
        while self._tries and self._tries[0] <= now_s - options.window_s:
            self._tries.popleft()
        if len(self._tries) >= options.most:
            return None
        wait_s = min(options.backoff_s * 2 ** len(self._tries), _LONGEST_S)
        self._tries.append(now_s)
        return wait_s


class Rebuilder:
    """Builds dead replicas again. `begin` belongs to the watchdog; the rest may be used from any thread.

    Args:
      rebuild: makes an engine in the place of a dead one, which has been closed; may raise anything, or hang.
      adopt: takes the new engine.
    """

    def __init__(
        self,
        num_replicas: int,
        rebuild: Callable[[int, Engine], Engine],
        options: RestartOptions,
        adopt: Callable[[int, Engine], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        build_s: float = _BUILD_S,
    ) -> None:
        self._rebuild = rebuild
        self._options = options
        self._adopt = adopt
        self._build_s = build_s
        self._restarts = [Restarts(options, clock) for _ in range(num_replicas)]
        self._busy: set[int] = set()
        self._down: dict[int, ReplicaDown] = {}
        self._stopped = threading.Event()

    def hopes(self, number: int) -> bool:
        """A dead replica may come back."""
        return number not in self._down

    def say(self, number: int) -> str:
        """How often it was tried, to end a sentence about a replica that is down; else nothing."""
        return f" ({self._down[number]})" if number in self._down else ""

    def begin(self, number: int, dead: Engine) -> None:
        """Builds it again behind the caller's back, unless that goes on already or is given up."""
        if number in self._busy or number in self._down or self._stopped.is_set():
            return
        self._busy.add(number)
        name = f"jaxserve-restart-{number}"
        threading.Thread(target=self._work, args=(number, dead), name=name, daemon=True).start()

    def stop(self) -> None:
        """Begins no further try."""
        self._stopped.set()

    def _work(self, number: int, dead: Engine) -> None:
        try:
            try:
                dead.close()
            except Exception:  # what is left of it must not keep its successor away
                logger.exception("%s could not be closed", dead.name)
            while (wait_s := self._restarts[number].next_wait_s()) is not None:
                logger.warning("%s is built again in %.3g s", dead.name, wait_s)
                if self._stopped.wait(wait_s):
                    return
                if (engine := self._try(number, dead)) is not None:
                    self._adopt(number, engine)
                    return
            options = self._options
            down = ReplicaDown(
                f"stays down: {options.most} restarts within {options.window_s:g} s are the most that are tried "
                "(watchdog.restarts); restart the process"
            )
            self._down[number] = down
            logger.error("%s %s", dead.name, down)
        finally:
            self._busy.discard(number)

    def _try(self, number: int, dead: Engine) -> Engine | None:
        """A new engine, or None: the try has failed, or hangs and is left to its device."""
        made: concurrent.futures.Future[Engine] = concurrent.futures.Future()

        def build() -> None:
            engine: Engine | None = None
            try:
                engine = self._rebuild(number, dead)
                made.set_result(engine)
            except concurrent.futures.InvalidStateError:  # nobody waits for it any more
                assert engine is not None, "the future is cancelled before it has a result"
                logger.warning("%s has been built again too late, and is closed", dead.name)
                engine.stop()
            except BaseException as error:  # the boundary of the thread
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    made.set_exception(error)

        threading.Thread(target=build, name=f"jaxserve-build-{number}", daemon=True).start()
        concurrent.futures.wait([made], self._build_s)
        if made.cancel():
            logger.error("%s could not be built again within %g s; the device may be stuck", dead.name, self._build_s)
            return None
        if (error := made.exception()) is not None:
            logger.error("%s could not be built again", dead.name, exc_info=error)
            return None
        return made.result()
