"""`StepObserver`: what watches the loop, or looks after it, and has no part in the work of a step.

The engine has a list of observers and knows none of them by name: the log of steps, their deadlines, degradation under
pressure, Python's interpreter. An observer overrides the methods that it needs; the engine never calls the others.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxserve.engine.live import LiveRequests
from jaxserve.engine.stats import EngineStats
from jaxserve.engine.waiting import Waiting
from jaxserve.sched.base import Scheduler
from jaxserve.sched.plan import Limits, StepPlan, StepResult


class WatchedLoop(NamedTuple):
    """The parts of an engine that an observer may read, and whose switches it may set, between two steps."""

    scheduler: Scheduler
    live: LiveRequests
    waiting: Waiting
    stats: EngineStats


class StepTimes(NamedTuple):
    """When each part of one step began and ended, in seconds on the engine's clock.

    Attributes:
      begun_s, planned_s, launched_s: planning began, it ended, `dispatch` returned.
      asked_s, ready_s: the loop began to wait for the result, and had it.
      previous_s: when it had the result of the step before; NaN for the first.
      commit_s: time to take its tokens in and to hand them out; the launch of a step between the two is left out.
    """

    begun_s: float
    planned_s: float
    launched_s: float
    asked_s: float
    ready_s: float
    previous_s: float
    commit_s: float

    def since(self, begun_s: float) -> float:
        """Seconds from `begun_s`, or from the end of the step before if that was later, to the result."""
        return self.ready_s - (self.previous_s if self.previous_s > begun_s else begun_s)  # `>` is false for NaN


class EndedStep(NamedTuple):
    """A step whose tokens the scheduler and the clients have.

    `limits`: those of the device when the step was launched.
    """

    plan: StepPlan
    limits: Limits
    result: StepResult
    times: StepTimes


class StepObserver:
    """Its methods are called on the loop's thread, but for `close`. What one raises ends the loop."""

    def watch(self, loop: WatchedLoop) -> None:
        """Called once for each engine, before its first turn."""

    def begin_turn(self, now_s: float) -> None:
        """A turn of the loop begins: it may plan a step, and finishes the one before. Nearly all calls return at once.

        `now_s`: on the engine's clock.
        """

    def allowed_s(self, planned: StepPlan | None, running: StepPlan | None) -> float:
        """How many seconds a turn may take that launches `planned` and waits for `running`, before it counts as stuck.

        None: there is no such step. The engine takes the least of all observers; infinity sets no limit.
        """
        raise NotImplementedError

    def begin_work(self) -> None:
        """The loop had nothing to do, and has work now."""

    def end_work(self) -> None:
        """The loop has nothing more to do. Called as often as `begin_work`."""

    def rest(self) -> None:
        """The device is at work and the clients have been told: what is done now delays nobody."""

    def note(self, step: EndedStep) -> None:
        """A step has ended."""

    def close(self) -> None:
        """The loop has ended. May be called again, and from any thread."""


def calls(observers: Iterable[StepObserver], method: str) -> tuple[Callable[..., Any], ...]:
    """The method of all that override it, in their order."""
    plain = getattr(StepObserver, method)
    return tuple(getattr(each, method) for each in observers if getattr(type(each), method) is not plain)
