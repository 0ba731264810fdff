"""The protocols between scheduler, engine and device: `Scheduler`, `Runner` and their optional extensions.

There is no code here, so that a scheduler needs no device and a device needs no scheduler.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from jaxserve.api import Request, TokenEvent
from jaxserve.sched.ladder import Rung
from jaxserve.sched.plan import Limits, StepPlan, StepResult

if TYPE_CHECKING:
    from jaxserve.sched.page_exchange import PageExchange


class Scheduler(Protocol):
    """Decides which sequences run. Called from one thread only.

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
        """The next step, or None when nothing can run before a commit, an add or what it `waits` for. Bookkeeping only.

        A row whose request has a `grammar` draws only in a step that is planned after its last token was committed:
        what it may draw follows from that. The engine puts the masks into the plan. How many tokens the step in flight
        draws for a row may be unknown (`StepPlan.row_tokens`): what is planned then are upper bounds.
        """
        ...

    def commit(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Takes the result of `plan`: appends tokens, ends sequences, frees pages; returns what clients must see."""
        ...

    def has_work(self) -> bool:
        """True while any sequence is unfinished."""
        ...


@runtime_checkable
class MayWait(Protocol):
    """A scheduler whose work may wait for something that neither a step nor a request brings, such as a page from afar.

    For any other scheduler it is a defect when work is left, nothing is in flight and nothing is planned: a policy that
    admits no sequence while nothing runs has broken its rule.
    """

    def waits(self) -> bool:
        """Whether all work that is left waits. Asked when nothing is in flight and `schedule` has planned nothing.

        The answer is about the state that this `schedule` saw; later changes come with a wake. After True the loop
        sleeps. The code that completes a wait first records it, so that `schedule` finds it, and then calls
        `Engine.wake`, from any thread. Requests can still be aborted, and end at their deadline.
        """
        ...

    def waits_until_s(self) -> float:
        """When the loop is to look again though nobody woke it, on the scheduler's clock; `math.inf`: never.

        Asked after `waits` was True, about the same state.
        """
        ...


@runtime_checkable
class TakesLimits(Protocol):
    """A scheduler that is told of buckets that were compiled after it was made.

    A scheduler without this method goes on with the buckets it was made with: whatever fits these still fits. Its
    chunks end at the edges of those buckets.
    """

    def use_limits(self, limits: Limits) -> None:
        """`limits` differ from those before by more buckets. Called between two steps, from the scheduler's thread."""
        ...


@runtime_checkable
class TakesEnds(Protocol):
    """A scheduler that is told which sequences ended by themselves although no token marked the end.

    A stop string ends a text, and a complete grammar a sequence, where more tokens could follow. For a scheduler
    without this method both are aborts.
    """

    def finish(self, request_id: str, index: int) -> bool:
        """Ends one sequence, as `abort` does, as complete. Its last token has been committed."""
        ...


@runtime_checkable
class TakesDrafts(Protocol):
    """A scheduler that is told for which sequences the host itself has drafts.

    A scheduler without this method plans a token a step for sequences with a grammar.
    """

    def note_drafts(self, request_id: str, index: int, count: int) -> None:
        """There are drafts of the next `count` tokens of a sequence with a grammar, all of whose tokens are committed.

        Called between two steps, from the scheduler's thread. Sequences that are unknown or have no grammar are
        ignored.
        """
        ...


class Flushed(NamedTuple):
    """Pages of the device and slots of host memory whose content was forgotten."""

    pages: int
    slots: int


class CacheState(NamedTuple):
    """The cache of one scheduler, as an operator sees it.

    Attributes:
      pages: of the device, all of which were made at the start.
      grantable: that may be held at once; the others are withheld.
      held: that sequences hold, more than `grantable` until those that a smaller pool does not leave room for end.
      host, store: whether host memory and a store take pages in; None where there is none.
      rung: of the ladder of degradation, see `ladder.Rung`.
    """

    pages: int
    grantable: int
    held: int
    host: bool | None
    store: bool | None
    rung: str = Rung.NONE.label


class Flushable(Protocol):
    """A store of pages behind host memory, or several of them. Used by any thread."""

    def flush(self, salt: str | None) -> None:
        """Removes the pages of requests with this cache salt, or all, and those on their way to the store.

        Waits. Raises a typed error when one may remain.
        """
        ...


@runtime_checkable
class Operable(Protocol):
    """A scheduler whose cache an operator may change while it runs. Methods are called between two steps, from the
    scheduler's thread."""

    @property
    def cache_state(self) -> CacheState: ...

    @property
    def store(self) -> "Flushable | None":
        """Where host slots are filled from; the caller flushes it, on a thread that may wait."""
        ...

    def flush(self, salt: str | None) -> Flushed:
        """Forgets what the device and host memory have of requests with this cache salt, or of all.

        Sequences that run keep their pages, which nobody finds afterwards. Takes time in proportion to the cache.
        """
        ...

    def begin_anew(self, namespace: str, *, recompute: bool) -> None:
        """Keys and values follow from something else from now on, such as other weights: nothing from before is found.

        Called while no step is in flight. `namespace`: of the keys of pages (see `content.root_key`). `recompute`:
        sequences that run give up their pages, too, and compute them anew with the tokens that they have; else they
        keep them, and nobody else finds these.
        """
        ...

    def resize_pool(self, num_pages: int, *, preempt: bool) -> None:
        """From now on so many pages are given out.

        Idle pages go first, by way of host memory. Held ones go as their sequences end or give way to others, or with
        `preempt` at the next step, from the last sequence in order on. Raises InvalidRequest for more pages than there
        are, and for fewer than a live request may need.
        """
        ...

    def use_tiers(self, *, host: bool | None = None, store: bool | None = None) -> None:
        """Switches tiers on and off; None leaves one as it is.

        Host memory that is off has given up all its pages; a store that is off keeps its own, is asked for none and
        gets none. Raises InvalidRequest for a tier that is not there.
        """
        ...


@runtime_checkable
class Exports(Protocol):
    """A scheduler that can bring what its device has to a store, for the servers that go on with its requests."""

    def export(self, done: Callable[[int], None]) -> None:
        """Nothing is computed from now on: plans save pages, until the store has all that it may take.

        `done` is called once with 0 then, on the scheduler's thread; or by `end_export`, with the pages that are left.
        Called between two steps.
        """
        ...

    def end_export(self) -> None:
        """It takes too long: no further page is saved."""
        ...


@runtime_checkable
class Degrades(Protocol):
    """A scheduler that can do without some things under pressure, and take them back. See `ladder`."""

    def degrade(self, rung: Rung) -> None:
        """From now on it stands on this rung, up or down. Called between two steps, from the scheduler's thread."""
        ...

    @property
    def store_pages(self) -> Mapping[str, int]:
        """Pages by what a store did with them, since the start; empty without one."""
        ...


@runtime_checkable
class Exchanges(Protocol):
    """A scheduler that gives pages of prompts to other engines, and takes pages of others."""

    @property
    def exchange(self) -> "PageExchange | None":
        """None without slots of host memory. Used between two steps, from the scheduler's thread."""
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
        """The limits of plans. They may gain buckets between two steps (`LaterBuckets`); nothing else changes."""
        ...

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Packs, transfers and launches; returns at once. Raises MissingBucket when no compiled shape fits."""
        ...


@runtime_checkable
class Renewable(Protocol):
    """A runner whose weights may change, and whose device may be given back. Methods are called while no step is in
    flight, from the thread that dispatches."""

    def use_weights(self, weights: Any) -> None:
        """Steps from now on have these, which must be made for this runner; those before are freed."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Frees the weights and the cache. `keep_weights`: in the memory of the host until `wake_up`."""
        ...

    def wake_up(self, weights: Any | None) -> None:
        """Takes the device again, with an empty cache. `weights`: None takes those that were kept.

        Raises CapacityError when the device has no room for both; it sleeps on then.
        """
        ...


@runtime_checkable
class Releasable(Protocol):
    """A runner that gives back its memory for good."""

    def release(self) -> None:
        """Frees weights and cache, asleep or not, whoever else still refers to them. No plan comes any more."""
        ...


class BucketCounts(NamedTuple):
    """Numbers of step shapes by state: ready for use, still to be built, and given up."""

    ready: int
    pending: int
    failed: int


class LaterBuckets(Protocol):
    """Step shapes that a runner gets while it already runs steps: other threads build them, the loop's takes them."""

    @property
    def all_limits(self) -> Limits:
        """The runner's limits once every bucket is there."""
        ...

    @property
    def counts(self) -> BucketCounts:
        """How many of them are ready, still to be built, and given up."""
        ...

    def start(self) -> None:
        """Begins to build. Called once."""
        ...

    def take(self) -> Limits | None:
        """Gives the runner the finished buckets. Returns its new limits, None when nothing is new; never waits."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no bucket is left to build. False on a timeout. The loop still has to `take`."""
        ...

    def note_work(self, working: bool) -> None:
        """The loop has steps in flight, or no longer: those who build are to give way to them. Never waits."""
        ...

    def close(self) -> None:
        """Builds no further bucket."""
        ...
