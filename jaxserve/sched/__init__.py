"""The scheduler: which sequences the next step computes. It is the part of the engine that a notebook replaces.

A scheduler turns requests into `StepPlan`s and results into events. It imports no JAX and knows no array: what it sees
of the device is a frozen `Limits`, what the device sees of it is the plan, a value that can be printed, logged,
replayed or sent to other hosts. The same object therefore drives a TPU, a GPU, a laptop, the fake runner of the tests
and the simulator.

How the package is cut:

    plan, base      the contract: the values that cross the seam, and the protocols on both sides
    core            the mechanism: one loop for all policies, with the rules of overlap
    policy          what a policy may decide; options are the settings of all policies
    policies        the built-in ones
    queue, running  the waiting sequences, in the order of the policy; the sequences that have a row
    state, draft    one sequence; one plan in the making
    memory          pages of sequences, from: pages (reference counts, eviction) and prefix (which page holds what)
    host_tier       pages that the device gave up, from: slots (their states) and tier_policy (which stay); refill
                    chooses between loading and computing, loading fills slots from a store while sequences wait,
                    page_exchange lends slots to other engines and fills slots with pages of theirs
    budget          what the list of compiled shapes allows, and what can never run, which is refused with the reason
    speculate       how many tokens the rows of a step may draw
    headroom        who gets in only when the others keep room to grow; lengths guesses by how much
    create          from a name to a scheduler

The cut between mechanism and policy is where the difficulty changes. Paging, sharing, preemption and overlap have one
right answer, and a mistake shows as wrong tokens: they are written once, against invariants that the tests check after
every step. Order, victims and admission have no right answer, only trade-offs: they are a few small methods.

Three choices shape the mechanism. Pages of all known tokens are granted at admission, so only decode rows can run the
pool dry, and the first sequence in order can always take pages from those behind it: that is the whole proof that every
request ends. A preempted sequence is placed like a new one: its full pages stay in the prefix cache, or in the host
tier behind it, and what is found in neither is computed again; admission looks ahead, so that preemption is rare.
Decode rows come first in every step: a prompt can be cut into chunks, while a pause in a stream of text is seen by its
reader.

To bring another policy, derive from `Policy` and name it: an entry point in the group `jaxserve.schedulers`,
`package.module:Class`, or the class itself. To bring another scheduler altogether, give anything that keeps the
`Scheduler` protocol.
"""

from jaxserve.sched.base import BucketCounts, InFlight, LaterBuckets, MayWait, Runner, Scheduler, TakesLimits
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.create import SCHEDULERS, create_scheduler, find_scheduler, uses_priority
from jaxserve.sched.lengths import create_lengths
from jaxserve.sched.plan import (
    Bucket,
    Chunk,
    Limits,
    PageCopy,
    PageGrant,
    PageGroup,
    PoolSpan,
    RowDraft,
    RowMask,
    RowSetup,
    StepPlan,
    StepResult,
)
from jaxserve.sched.policy import Policy, SchedulerOptions
from jaxserve.sched.speculate import SpeculationOptions
from jaxserve.sched.state import Sequence, SequenceState

__all__ = [
    "SCHEDULERS",
    "Bucket",
    "BucketCounts",
    "Chunk",
    "ContinuousScheduler",
    "InFlight",
    "LaterBuckets",
    "Limits",
    "MayWait",
    "PageCopy",
    "PageGrant",
    "PageGroup",
    "Policy",
    "PoolSpan",
    "RowDraft",
    "RowMask",
    "RowSetup",
    "Runner",
    "Scheduler",
    "SchedulerOptions",
    "Sequence",
    "SequenceState",
    "SpeculationOptions",
    "StepPlan",
    "StepResult",
    "TakesLimits",
    "create_lengths",
    "create_scheduler",
    "find_scheduler",
    "uses_priority",
]
