"""A trace on a virtual clock, for tests that judge policies by times: no runner, results are made up.

A step takes `base_s` and `per_token_s` for each of its tokens.
"""

import dataclasses
from collections.abc import Callable, Iterable

from jaxserve.api import Request
from jaxserve.sched import ContinuousScheduler, Limits, Policy, SchedulerOptions, StepResult, create_scheduler
from jaxserve.testing import ManualClock


@dataclasses.dataclass(slots=True, kw_only=True)
class Times:
    """Of one request, seconds on the virtual clock. Mutated only by `run_trace`."""

    arrival_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    num_tokens: int = 0
    row_s: float = -1.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_s) / max(1, self.num_tokens - 1)


def run_trace(
    policy: str | type[Policy],
    limits: Limits,
    requests: Iterable[Request],
    *,
    options: SchedulerOptions | None = None,
    base_s: float = 0.01,
    per_token_s: float = 0.0,
    after_step: Callable[[ContinuousScheduler], None] = lambda scheduler: None,
) -> dict[str, Times]:
    """Runs all requests, each added when the clock reaches its arrival, to their limits."""
    clock = ManualClock()
    scheduler = create_scheduler(policy, limits, options=options or SchedulerOptions(), clock=clock)
    assert isinstance(scheduler, ContinuousScheduler)
    coming = sorted(requests, key=lambda request: request.arrival_s, reverse=True)
    times = {request.request_id: Times(arrival_s=request.arrival_s) for request in coming}
    while coming or scheduler.has_work():
        if coming and not scheduler.has_work():
            clock.advance(max(0.0, coming[-1].arrival_s - clock()))
        while coming and coming[-1].arrival_s <= clock() + 1e-9:  # the clock adds floats
            scheduler.add(coming.pop())
        plan = scheduler.schedule()
        assert plan is not None, "work is left, and nothing is planned"
        for setup in plan.setups:
            if times[setup.request_id].row_s < 0:
                times[setup.request_id].row_s = clock()
        clock.advance(base_s + per_token_s * plan.num_tokens)
        for event in scheduler.commit(plan, StepResult(token_ids=[1_000] * len(plan.sampled_rows))):
            entry = times[event.request_id]
            entry.num_tokens += 1
            entry.end_s = clock()
            if entry.num_tokens == 1:
                entry.first_s = clock()
        after_step(scheduler)
    return times
