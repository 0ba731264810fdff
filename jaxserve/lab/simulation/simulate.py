"""`simulate`: a scheduler runs on a trace without a device; the same object, the same turns, a virtual clock.

A `CostModel` gives the time of each step. The result has the times of requests, from which `results` makes metrics.

Nothing of the scheduler is imitated. The engine's work around it (`engine.Engine.step`) is an order of few lines, and a
test compares the plans of both.
"""

import math
from collections.abc import Iterable, Iterator

from jaxserve.engine.interpreter import collector_paused
from jaxserve.errors import InvalidRequest
from jaxserve.lab.simulation.engine import AcceptDrafts, SimulatedEngine, summarise
from jaxserve.lab.simulation.store import SimulatedStore, StoreModel
from jaxserve.lab.simulation.values import (
    CostModel,
    FixedCost,
    SimRequest,
    SimulatedRequest,
    SimulatedStep,
    SimulationResult,
    StepCost,
    VirtualClock,
)
from jaxserve.sched.base import Scheduler
from jaxserve.sched.create import SchedulerFactory, create_scheduler
from jaxserve.sched.plan import Limits
from jaxserve.sched.policy import Policy, SchedulerOptions

__all__ = [
    "CostModel",
    "FixedCost",
    "SimRequest",
    "SimulatedEngine",
    "SimulatedRequest",
    "SimulatedStep",
    "SimulationResult",
    "StepCost",
    "VirtualClock",
    "in_order",
    "simulate",
]


def simulate(
    scheduler: str | type[Policy] | Policy | SchedulerFactory | Scheduler,
    trace: Iterable[SimRequest],
    cost_model: CostModel,
    limits: Limits,
    *,
    options: SchedulerOptions | None = None,
    accept: AcceptDrafts | None = None,
    store: StoreModel | None = None,
    clock: VirtualClock | None = None,
    keep_steps: bool = False,
    keep_plans: bool = False,
    keep_token_times: bool = False,
) -> SimulationResult:
    """Runs the trace to its end on one engine.

    Args:
      scheduler: as for `create_scheduler`: a name, a policy, a scheduler. A finished scheduler must have been made with
        `clock`.
      trace: in the order of arrival; read as time goes on, so it may be a generator of any length.
      cost_model: seconds of each step.
      limits: of the device.
      options: of the scheduler that is made here.
      accept: says which drafts are right, such as `SimulatedDrafts`; only for `limits` with steps of several tokens.
      store: behind the host slots of `limits`; only for a scheduler that is made here.
      keep_steps, keep_plans, keep_token_times: what to collect beside the requests.

    Raises ConfigError as `create_scheduler` and `SimulatedEngine`, InvalidRequest when the trace goes back in time. A
    request that the scheduler refuses is in the result, with its error.
    """
    clock = VirtualClock() if clock is None else clock
    ended: list[SimulatedRequest] = []
    pages = None if store is None else SimulatedStore(store, clock)
    engine = SimulatedEngine(
        create_scheduler(scheduler, limits, options=options, clock=clock, store=pages),
        cost_model,
        limits,
        clock,
        ended.append,
        accept=accept,
        store=pages,
        keep_steps=keep_steps,
        keep_plans=keep_plans,
        keep_token_times=keep_token_times,
    )
    arrivals = in_order(trace)
    with collector_paused():
        upcoming = next(arrivals, None)
        while True:
            while upcoming is not None and upcoming.arrival_s <= engine.next_turn_s:
                engine.submit(upcoming, upcoming.arrival_s)
                upcoming = next(arrivals, None)
            if engine.next_turn_s == math.inf:
                return summarise([engine], ended, clock.now_s)
            engine.turn()


def in_order(trace: Iterable[SimRequest]) -> Iterator[SimRequest]:
    """The requests of a trace. Raises InvalidRequest at one that arrives before the one before it, or before 0."""
    last_s = 0.0
    for request in trace:
        if not last_s <= request.arrival_s < math.inf:
            raise InvalidRequest(
                f"request {request.request.request_id!r} arrives at {request.arrival_s} s, after one at {last_s} s; "
                "sort the trace by arrival, from 0 on"
            )
        last_s = request.arrival_s
        yield request
