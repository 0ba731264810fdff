"""Who runs next: the part of the engine that a notebook replaces.

A scheduler turns requests into `StepPlan`s and results into events. It imports no JAX and knows no array: what it sees
of the device is a frozen `Limits`, what the device sees of it is the plan, a value that can be printed, logged,
replayed or sent to other hosts. The same object therefore drives a TPU, a GPU, a laptop, the fake runner of the tests
and the simulator.

How the package is cut:

    plan, base      the contract: the values that cross the seam, and the protocols on both sides
    core            the mechanism: one loop for all policies, with the rules of overlap
    policy          the seam for policies; fcfs and priority are what is built in
    queue, running  who waits, in the order of the policy; who has a row
    state, draft    one sequence; one plan in the making
    memory          pages of sequences, from: pages (reference counts, eviction) and prefix (content)
    budget          what the list of compiled shapes allows, and when less is cheaper
    admission       what can never run is refused, with the reason

The cut between mechanism and policy is where the difficulty changes. Paging, sharing, preemption and overlap have one
right answer, and a mistake shows as wrong tokens: they are written once, against invariants that the tests check after
every step. Order, victims and admission have no right answer, only trade-offs: they are four small methods.

Three choices shape the mechanism. Pages of all known tokens are granted at admission, so only decode rows can run the
pool dry, and the first in order can always take from those behind it: that is the whole proof that every request
ends. Preemption recomputes, since full pages stay in the prefix cache and are often found again. Decode rows come
first in every step, since a prompt can be cut and a stream of text cannot be made up for.

To bring another policy, derive from `Policy` and name it: an entry point in the group `jaxserve.schedulers`,
`package.module:Class`, or the class itself. To bring another scheduler altogether, give anything that keeps the
`Scheduler` protocol.
"""

import inspect
import time
from collections.abc import Callable
from typing import cast

from jaxserve.errors import ConfigError
from jaxserve.registry import Registry
from jaxserve.sched.base import InFlight, Runner, Scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.plan import Bucket, Chunk, Limits, PageCopy, PageGrant, RowMask, RowSetup, StepPlan, StepResult
from jaxserve.sched.policy import Policy, SchedulerOptions
from jaxserve.sched.state import Sequence, SequenceState

__all__ = [
    "SCHEDULERS",
    "Bucket",
    "Chunk",
    "ContinuousScheduler",
    "InFlight",
    "Limits",
    "PageCopy",
    "PageGrant",
    "Policy",
    "RowMask",
    "RowSetup",
    "Runner",
    "Scheduler",
    "SchedulerOptions",
    "Sequence",
    "SequenceState",
    "StepPlan",
    "StepResult",
    "create_scheduler",
    "uses_priority",
]

SchedulerFactory = Callable[[Limits, SchedulerOptions], Scheduler]

SCHEDULERS: Registry[type[Policy] | Policy | SchedulerFactory | Scheduler] = Registry(
    "scheduler",
    "jaxserve.schedulers",
    {"fcfs": "jaxserve.sched.fcfs:FcfsPolicy", "priority": "jaxserve.sched.priority:PriorityPolicy"},
)

_SCHEDULER_METHODS = ("add", "abort", "schedule", "commit", "has_work")  # of the protocol


def create_scheduler(
    policy: str | type[Policy] | Policy | SchedulerFactory | Scheduler,
    limits: Limits,
    *,
    chunked_prefill: bool = True,
    prefix_caching: bool = True,
    ageing_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Builds the scheduler that a config or a notebook asks for.

    Args:
      policy: a name (see `SCHEDULERS.names()`), `package.module:Name`, or the thing itself: a Policy class or object,
        a scheduler class or any function (called with `limits` and `SchedulerOptions`), or a finished scheduler
        (returned as it is).
      limits: of the runner.
      chunked_prefill, prefix_caching, ageing_s: see `SchedulerOptions`.
      clock: monotonic seconds; must be the clock that stamps `Request.arrival_s`.

    Raises:
      ConfigError: nothing has this name, an option is out of range, or what was found is no scheduler or policy.
      CapacityError: the buckets cannot hold all rows.
    """
    options = SchedulerOptions(chunked_prefill=chunked_prefill, prefix_caching=prefix_caching, ageing_s=ageing_s)
    found = SCHEDULERS.get(policy)
    if isinstance(found, type) and issubclass(found, Policy):
        if inspect.isabstract(found):
            lacking = ", ".join(sorted(found.__abstractmethods__))
            raise ConfigError(f"the policy {found.__name__} lacks the method {lacking}; add it to the class")
        found = found(options)
    if isinstance(found, Policy):
        return ContinuousScheduler(limits, found, options, clock)
    if isinstance(found, type) or (callable(found) and not callable(getattr(found, "schedule", None))):
        found = cast(SchedulerFactory, found)(limits, options)
    missing = [name for name in _SCHEDULER_METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"the scheduler {policy!r:.120} gives a {type(found).__name__} without {', '.join(missing)}; a scheduler "
            f"has the methods {', '.join(_SCHEDULER_METHODS)}, a policy derives from jaxserve.sched.Policy"
        )
    return cast(Scheduler, found)


def uses_priority(scheduler: Scheduler) -> bool:
    """Whether `Request.priority` may change anything. True for a scheduler of somebody else's: nobody knows."""
    return not isinstance(scheduler, ContinuousScheduler) or scheduler.policy.uses_priority
