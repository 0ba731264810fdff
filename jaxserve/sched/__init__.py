"""Who runs next: the part of the engine that a notebook replaces.

A scheduler turns requests into `StepPlan`s and results into events. It imports no JAX and knows no array: what it sees
of the device is a frozen `Limits`, what the device sees of it is the plan, a value that can be printed, logged,
replayed or sent to other hosts. The same object therefore drives a TPU, a GPU, a laptop, the fake runner of the tests
and the simulator.

How the package is cut:

    plan, base      the contract: the values that cross the seam, and the protocols on both sides
    core            the mechanism: one loop for all policies, with the rules of overlap
    policy          the seam for policies; options are what all of them may be told
    fcfs, priority, preemptive, sjf, fair, slo (with step_times)    the built-in ones
    queue, running  who waits, in the order of the policy; who has a row
    state, draft    one sequence; one plan in the making
    memory          pages of sequences, from: pages (reference counts, eviction) and prefix (content)
    budget          what the list of compiled shapes allows, and when less is cheaper
    admission       what can never run is refused, with the reason
    burst           how many steps of decode rows one launch holds
    headroom        who gets in only when the others keep room to grow; lengths guesses by how much
    create          from a name to a scheduler
    simulate        the same scheduler on a trace and a cost model, with a virtual clock

The cut between mechanism and policy is where the difficulty changes. Paging, sharing, preemption and overlap have one
right answer, and a mistake shows as wrong tokens: they are written once, against invariants that the tests check after
every step. Order, victims and admission have no right answer, only trade-offs: they are a few small methods.

Three choices shape the mechanism. Pages of all known tokens are granted at admission, so only decode rows can run the
pool dry, and the first in order can always take from those behind it: that is the whole proof that every request
ends. Preemption recomputes, since full pages stay in the prefix cache and are often found again; admission looks ahead,
so that it is rare. Decode rows come first in every step, since a prompt can be cut and a stream of text cannot be made
up for.

To bring another policy, derive from `Policy` and name it: an entry point in the group `jaxserve.schedulers`,
`package.module:Class`, or the class itself. To bring another scheduler altogether, give anything that keeps the
`Scheduler` protocol.
"""

from jaxserve.sched.base import BucketCounts, InFlight, LaterBuckets, Runner, Scheduler, TakesLimits
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.create import SCHEDULERS, create_scheduler, uses_priority
from jaxserve.sched.plan import Bucket, Chunk, Limits, PageCopy, PageGrant, RowMask, RowSetup, StepPlan, StepResult
from jaxserve.sched.policy import Policy, SchedulerOptions
from jaxserve.sched.simulate import CostModel, SimRequest, SimulationResult, StepCost, VirtualClock, simulate
from jaxserve.sched.state import Sequence, SequenceState

__all__ = [
    "SCHEDULERS",
    "Bucket",
    "BucketCounts",
    "Chunk",
    "ContinuousScheduler",
    "CostModel",
    "InFlight",
    "LaterBuckets",
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
    "SimRequest",
    "SimulationResult",
    "StepCost",
    "StepPlan",
    "StepResult",
    "TakesLimits",
    "VirtualClock",
    "create_scheduler",
    "simulate",
    "uses_priority",
]
