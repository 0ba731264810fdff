"""What a policy may decide, and what it is told: the seam between the mechanism in `core` and the small classes here.

Owns the decisions and the hooks, each with its default. Refuses the mechanism: a policy moves no sequence and touches
no page; it is asked, and `core` acts. One loop serves all policies, so a rule of correctness (overlap, paging, copies)
is written and tested once.
"""

import abc
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.sched.lengths import AskedLengths, LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.state import Sequence

__all__ = ["Policy", "SchedulerOptions"]


class Policy(abc.ABC):
    """Base of all policies; each method but `key` has the default that most keep. Belongs to one scheduler.

    `dynamic_order` says whether a key can change while a sequence waits. If so the queue is sorted again at each step
    in which somebody could be admitted. `preemptive` says whether `victim_for_admission` is worth asking.
    `uses_priority` says whether `Request.priority` changes anything: if not, requests that bring one are refused.

    Attributes:
      options: as given.
      lengths, clock, memory: the scheduler's, from `bind` on. A policy only asks them.
    """

    dynamic_order = False
    preemptive = False
    uses_priority = False
    memory: SequenceMemory

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.lengths: LengthPredictor = AskedLengths()
        self.clock: Callable[[], float] = time.monotonic

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Called once, by the scheduler that will ask. Whoever keeps state begins with it here."""
        self.memory = memory
        self.lengths = lengths
        self.clock = clock

    # ---- decisions -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def key(self, seq: Sequence, now_s: float) -> float | tuple[float, ...]:
        """Smaller runs first. Ties go by order of arrival at the scheduler, then by index."""

    def line(self, seq: Sequence) -> str:
        """The line that `seq` waits in; never changes. Within a line `key` decides."""
        return ""

    def line_key(self, line: str) -> float:
        """The line with the smallest one is next. May change at any time, and costs nothing until it is asked."""
        return 0.0

    def may_admit(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        """Asked of the first in the queue. False leaves it, and all behind it, waiting for this step.

        A policy must say True sooner or later, and at once when nothing runs.
        """
        return True

    def prefill_budget(self, decoding: Seq[Sequence]) -> int | None:
        """Tokens of prompts that may stand beside `decoding` in this step; None: all that fit. Asked when any wait.

        Must be 1 or more. Not asked without chunked prefill, where a prompt cannot be cut.
        """
        return None

    def burst(self, decoding: Seq[Sequence], most: int) -> int:
        """Steps of `decoding` alone that one launch may hold, 1 to `most`: so long nobody can be let in, or told of a
        token. Asked where `burst` (see there) finds nobody who would have to wait for the end of it.
        """
        return most

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        """`seq` runs and needs a page, and none is left: whose pages it gets. None makes it wait.

        `behind` are the running sequences that come after it, in order; never empty. Taking only from those behind is
        what guarantees progress: the first in order always runs to its end.
        """
        return behind[-1]

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """`seq` is the first in the queue and does not fit. None lets it wait. Asked only of a `preemptive` policy.

        `running` are those that may be preempted in this step, in order. A policy that preempts here must not let
        two sequences preempt each other for ever. Whoever is named loses its row only if `seq` needs a row or pages
        right now; where only the growth of others speaks against `seq`, it gets in beside them.
        """
        return None

    # ---- what it is told -------------------------------------------------------------------------------------------

    def on_wait(self, seq: Sequence) -> None:  # noqa: B027  (a hook, as all below)
        """`seq` is about to enter the queue: new, or preempted."""

    def on_run(self, seq: Sequence) -> None:  # noqa: B027
        """`seq` left the queue and has a row; `seq.num_cached` of its tokens need not be computed."""

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:  # noqa: B027
        """Told once a plan what was planned; `prefills` with their number of tokens. A burst is one plan."""

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:  # noqa: B027
        """The result of `plan` is here: one token for each of `served` that is not FINISHED by now.

        Called once for each step of a burst that was taken, in order, each with those that took it; once with nobody
        where none was.
        `served` is the same list in successive steps as long as the same rows decode, and is never changed in place.
        """

    def on_end(self, seq: Sequence) -> None:  # noqa: B027
        """`seq` ends now, by itself or by an abort; `seq.state` is the one that it leaves."""
