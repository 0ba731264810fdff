"""The protocols at the joints: what a notebook replaces, and what runs a plan.

Owns the signatures and the contract of `Scheduler`, `Runner`, `InFlight` and `LaterBuckets`. Holds no code, so
that a scheduler needs no device and a device needs no scheduler.
"""

from typing import NamedTuple, Protocol, runtime_checkable

from jaxserve.api import Request, TokenEvent
from jaxserve.sched.plan import Limits, StepPlan, StepResult


class Scheduler(Protocol):
    """Decides who runs. Called from one thread only.

    The engine keeps at most one step in flight: `schedule` may be called once more before the previous plan is
    committed, never twice. `commit` is called once for each plan, in order.
    """

    def add(self, request: Request) -> None:
        """Takes a request. Raises RequestRejected when it could never run; then nothing has changed."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Ends all sequences of a request, or one. Frees their pages now. False when none was live. No event."""
        ...

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run before a commit or an add. Bookkeeping only.

        A row whose request has a `grammar` draws only in a step that is planned after its last token was committed:
        what it may draw follows from that. The engine puts the masks into the plan. A plan of several steps (see
        `StepPlan.num_steps`) is planned on as if each row had taken all of its own.
        """
        ...

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes the result of `plan`: appends tokens, ends sequences, frees pages; returns what clients must see."""
        ...

    def has_work(self) -> bool:
        """True while any sequence is unfinished."""
        ...


@runtime_checkable
class TakesLimits(Protocol):
    """A scheduler that wants to know of buckets that came later.

    One that does not goes on with those it was made with: whatever fits these still fits. It only plans chunks that
    end at their edges.
    """

    def use_limits(self, limits: Limits) -> None:
        """`limits` differ from those before by more buckets. Called between two steps, from the scheduler's thread."""
        ...


class InFlight(Protocol):
    """A step that has been launched."""

    def result(self) -> StepResult:
        """Waits for the device and copies the result to the host."""
        ...


class Runner(Protocol):
    """Executes plans in order."""

    @property
    def limits(self) -> Limits:
        """What a plan may hold. May gain buckets between two steps (`LaterBuckets`); nothing else changes."""
        ...

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Packs, transfers and launches; returns at once. Raises MissingBucket when no compiled shape fits."""
        ...


class BucketCounts(NamedTuple):
    """Step shapes by what became of them: there to be used, still to be built, and given up."""

    ready: int
    pending: int
    failed: int


class LaterBuckets(Protocol):
    """Step shapes that a runner gets while it already runs steps. Built by other threads, taken by the loop's."""

    @property
    def all_limits(self) -> Limits:
        """The runner's limits once every bucket is there."""
        ...

    @property
    def counts(self) -> BucketCounts: ...

    def start(self) -> None:
        """Begins to build. Called once."""
        ...

    def take(self) -> Limits | None:
        """Gives the runner what is finished. Returns its new limits, None when they are the old ones; never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing more will come. True when that was in time. The loop still has to `take`."""
        ...

    def close(self) -> None:
        """Begins no further one."""
        ...
