"""`simulate`: a scheduler runs on a trace without a device; the same object, the same turns, a virtual clock.

A `CostModel` gives the time of each step. The result has the times of requests, from which `results` makes metrics.

Nothing of the scheduler is imitated. The engine's work around it (`engine.Engine.step`) is an order of few lines, and a
test compares the plans of both.
"""

import math
from collections.abc import Iterable

from jaxserve.engine.interpreter import collector_paused
from jaxserve.lab.simulation.arriving import Arrivals, Chains
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
    "simulate",
]


def simulate(
    scheduler: str | type[Policy] | Policy | SchedulerFactory | Scheduler,
    trace: Iterable[SimRequest] | Chains,
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
      trace: in the order of arrival; read as time goes on, so it may be a generator of any length. `Chains` are
        requests that arrive when others have ended.
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
    arrivals = Arrivals(trace)

    def end(outcome: SimulatedRequest) -> None:
        ended.append(outcome)
        arrivals.ended(outcome.request_id, clock.now_s if outcome.last_token_s is None else outcome.last_token_s)

    pages = None if store is None else SimulatedStore(store, clock)
    engine = SimulatedEngine(
        create_scheduler(scheduler, limits, options=options, clock=clock, store=pages),
        cost_model,
        limits,
        clock,
        end,
        accept=accept,
        store=pages,
        keep_steps=keep_steps,
        keep_plans=keep_plans,
        keep_token_times=keep_token_times,
    )
    with collector_paused():
        while True:
            while arrivals.next_s < math.inf and arrivals.next_s <= engine.next_turn_s:
                arriving = arrivals.take()
                engine.submit(arriving, arriving.arrival_s)
            if engine.next_turn_s == math.inf:
                return summarise([engine], ended, clock.now_s)
            engine.turn()
