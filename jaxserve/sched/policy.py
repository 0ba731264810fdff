"""`Policy`: the decisions of a policy and its hooks, the seam between the mechanism in `core` and policies.

Each decision and each hook has a default here. A policy moves no sequence and touches no page: it is asked, and `core`
acts. One loop serves all policies, so a rule of correctness (overlap, paging, copies) is written and tested once.
"""

import abc
import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

from jaxserve.errors import PolicyError
from jaxserve.sched.lengths import AskedLengths, LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.state import Sequence

__all__ = ["Policy", "SchedulerOptions"]


def broken_rule(policy: "Policy", method: str, problem: str) -> PolicyError:
    """The error of a policy whose `method` did what it must not."""
    return PolicyError(f"the policy {type(policy).__name__} breaks a rule of its method `{method}`: {problem}")


class Policy(abc.ABC):
    """Base of all policies; each method but `key` has the default that most keep. Belongs to one scheduler.

    `dynamic_order` says whether a key can change while a sequence waits. If so, some keys are computed again in each
    step in which a sequence could be admitted: those of `changed`, of the first in order, and those computed longest
    ago (`queue.RECHECKED` of each), so that the cost of a step does not grow with the queue. Keys of different moments
    are compared then, so a part that grows with time for all alike must be left out of them. `preemptive` says whether
    `victim_for_admission` is always worth asking; else `may_preempt` says when. `uses_priority` says whether
    `Request.priority` changes anything: if not, requests with a priority are refused.

    A decision against the rule of its method (the text of each says it) raises PolicyError, which ends the engine.

    A class may have parameters of its own: those of its `__init__` beside `options`. They are given by name
    (`my_module:Mine?quantum=32`), or keep their defaults.

    Attributes:
      options: as given; the defaults without any.
      lengths, clock, memory: the scheduler's, from `bind` on. A policy only asks them.
      changed: a policy with a dynamic order adds a sequence whose key it has just changed by itself, so that the key
        is computed again before the next admission.
    """

    dynamic_order = False
    preemptive = False
    uses_priority = False
    memory: SequenceMemory

    def __init__(self, options: SchedulerOptions | None = None) -> None:
        self.options = SchedulerOptions() if options is None else options
        self.lengths: LengthPredictor = AskedLengths()
        self.clock: Callable[[], float] = time.monotonic
        self.changed: list[Sequence] = []

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Called once, by the scheduler that will ask. A policy with state begins here."""
        self.memory = memory
        self.lengths = lengths
        self.clock = clock
        self.changed = []

    # ---- decisions -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def key(self, seq: Sequence, now_s: float) -> float | tuple[float, ...]:
        """Smaller runs first. Ties go by order of arrival at the scheduler, then by index.

        A number for all sequences, or a tuple of numbers for all; never NaN.
        """

    def line(self, seq: Sequence) -> Hashable:
        """The line that `seq` waits in; never changes. Within a line `key` decides."""
        return ""

    def line_key(self, line: Any) -> float | tuple[float, ...]:
        """The line with the smallest one is next; a number for all, or a tuple of numbers for all, never NaN.

        May change at any time, and costs nothing until asked.
        """
        return 0.0

    def may_admit(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        """Whether the first sequence in the queue may start. False lets it, and all behind it, wait for this step.

        A policy must return True sooner or later, and at once when nothing runs: else nothing could ever run again.
        """
        return True

    def prefill_budget(self, decoding: Seq[Sequence]) -> int | None:
        """Tokens of prompts that may stand beside `decoding` in this step; None: all that fit.

        Must be 1 or more. Asked when a prompt waits, can be cut (chunked prefill) and could run.
        """
        return None

    def prefill_parts(self, begun: Seq[Sequence], room: int, may_enter: bool) -> Seq[int] | None:
        """The most tokens that each of `begun` may have in this step, which has `room` for prompts; None: all that fit.

        `begun` are the prompts that are partly computed, in the order in which they go on, one or more; `may_enter`
        says whether the first in the queue could begin beside them. What they leave is for the queue. The first must
        have 1 or more. Asked when prompts can be cut (chunked prefill).
        """
        return None

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        """The victim for `seq`, a running sequence that needs a page when none is left. None makes it wait.

        `behind` are the running sequences that come after it, in order; never empty. Taking pages only from
        these guarantees progress: the first in order always runs to its end. Returns one of `behind`; None only while a
        step is in flight whose end frees pages.
        """
        return behind[-1]

    def may_preempt(self) -> bool:
        """Whether `victim_for_admission` is worth asking now. Asked in each step in which the first in the queue waits.

        So it should take no time. While it is False, such a step costs nothing else.
        """
        return self.preemptive

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """The victim for `seq`, the first in the queue, which does not fit. None lets it wait. See `may_preempt`.

        `running` are the sequences that may be preempted in this step, in order. The victim must be one of them, and
        stand behind `seq` by `line_key` and `key`: else the two would preempt each other for ever. It loses its row
        only if `seq` needs a row or pages right now; where `seq` fits but for the growth of others, it is admitted
        beside them.
        """
        return None

    def speculate(self, decoding: Seq[Sequence], shapes: Seq[tuple[int, int]]) -> tuple[int, int] | None:
        """Width and rounds of a step of the rows `decoding`, one of `shapes`; None: as costs tell (`speculate`).

        Asked for each step without prompts, where the device has more than one shape. Changes times, never tokens.
        """
        return None

    # ---- what it is told -------------------------------------------------------------------------------------------

    def on_wait(self, seq: Sequence) -> None:  # noqa: B027  (a hook, as all below)
        """`seq` is about to enter the queue: new, or preempted."""

    def on_run(self, seq: Sequence) -> None:  # noqa: B027
        """`seq` left the queue and has a row; `seq.num_cached` of its tokens need not be computed."""

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:  # noqa: B027
        """Called once for each plan, with its sequences; `prefills` with their number of tokens."""

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:  # noqa: B027
        """The result of `plan` has come: one token or more for each of `served` that is not FINISHED by now.

        `served` is the same list in successive steps as long as the same rows decode, and is never changed in place.
        """

    def on_end(self, seq: Sequence) -> None:  # noqa: B027
        """`seq` ends now, by itself or by an abort; `seq.state` is the one that it leaves."""
