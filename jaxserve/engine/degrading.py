"""The pressure on one engine, and what follows from it: the loop looks a few times a second, see `sched.ladder`.

The scheduler carries out the rungs that concern steps and pages, `Waiting` refuses requests, and the last rung, the end
of the server, is for whoever serves.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.engine.observers import StepObserver, WatchedLoop
from jaxserve.sched.base import Degrades
from jaxserve.sched.ladder import Ladder, LadderOptions, Pressure, Rung

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_BAD = frozenset({"late", "failed", "bad", "write_late", "write_failed", "write_skipped"})
_CALLS = _BAD | {"filled", "missed", "written", "write_refused"}
_BAD_SHARE = 0.5  # of the pages of a store that may fail or be late
_LEAST_CALLS = 8  # that say something about a store
_FORGET_S = 5.0  # after which fewer do


class DegradeOptions(NamedTuple):
    """`queue_s`: seconds that the request that waits longest may wait. `step_s`: that a step may take, on average."""

    ladder: LadderOptions
    queue_s: float
    step_s: float


class Degrading(StepObserver):
    """Mutated by the loop alone."""

    _loop: WatchedLoop

    def __init__(self, options: DegradeOptions) -> None:
        self._options = options
        self._ladder = Ladder(options=options.ladder)
        self._next_s = 0.0
        self._steps, self._steps_s = 0, 0.0  # at the last look
        self._tiers = _StorePressure()

    def watch(self, loop: WatchedLoop) -> None:
        self._loop = loop

    def begin_turn(self, now_s: float) -> None:
        """Looks at the pressure, a few times a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LOOK_S
        pressure, before = self._measure(now_s), self._ladder.rung
        self._ladder = self._ladder.observe(now_s, pressure)
        rung = self._ladder.rung
        if rung is not before:
            logger.log(
                logging.WARNING if rung > before else logging.INFO,
                "degradation goes from %s to %s: queue %.2f, steps %.2f, tiers %.2f of what is meant to be at most",
                before.label, rung.label, *pressure,
            )  # fmt: skip
            self._loop.waiting.sheds = rung >= Rung.REFUSE
            if isinstance(self._loop.scheduler, Degrades):
                self._loop.scheduler.degrade(rung)
        self._loop.stats.note_pressure(rung, pressure)  # last: what figures say is so already

    def _measure(self, now_s: float) -> Pressure:
        steps, steps_s = self._loop.stats.step_sums
        num_steps, self._steps = steps - self._steps, steps
        elapsed_s, self._steps_s = steps_s - self._steps_s, steps_s
        pages = self._loop.scheduler.store_pages if isinstance(self._loop.scheduler, Degrades) else {}
        return Pressure(
            queue=self._loop.live.longest_wait_s(now_s) / self._options.queue_s,
            steps=elapsed_s / num_steps / self._options.step_s if num_steps else 0.0,
            tiers=self._tiers.look(now_s, pages),
        )


class _StorePressure:
    """The share of a store's pages that failed or were late, of the last few."""

    def __init__(self) -> None:
        self._calls = self._bad = 0  # when they were last judged
        self._judged_s = 0.0
        self._pressure = 0.0

    def look(self, now_s: float, pages: Mapping[str, int]) -> float:
        """`pages`: by what a store did with them, since the start."""
        calls = sum(count for event, count in pages.items() if event in _CALLS)
        bad = sum(count for event, count in pages.items() if event in _BAD)
        num_calls, num_bad = calls - self._calls, bad - self._bad
        if num_calls >= _LEAST_CALLS or now_s - self._judged_s >= _FORGET_S:
            self._pressure = num_bad / max(num_calls, _LEAST_CALLS) / _BAD_SHARE
            self._calls, self._bad, self._judged_s = calls, bad, now_s
        return self._pressure
