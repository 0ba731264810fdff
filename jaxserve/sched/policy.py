"""What a policy may decide: the seam between the mechanism in `core` and the small classes beside it.

Owns the four decisions and their defaults. Refuses the mechanism: a policy moves no sequence and touches no page; it
is asked, and `core` acts. One loop serves all policies, so a rule of correctness (overlap, paging, copies) is written
and tested once.
"""

import abc
import dataclasses
from collections.abc import Sequence as Seq

from jaxserve.errors import ConfigError
from jaxserve.sched.state import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Settings of the mechanism and of the built-in policies; the fields of `sched:` and `cache:` in a config.

    Attributes:
      chunked_prefill: cut prompts to fill steps; False runs each prompt in one piece.
      prefix_caching: share pages of equal prompt beginnings.
      ageing_s: `priority` policy, seconds of waiting that are worth one level.
    """

    chunked_prefill: bool = True
    prefix_caching: bool = True
    ageing_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.ageing_s > 0:
            raise ConfigError(f"sched.ageing_s is {self.ageing_s}, but must be more than 0 seconds")


class Policy(abc.ABC):
    """Base of all policies; each method but `key` has the default that most keep.

    `dynamic_order` says whether a key can change while a sequence waits. If so the queue is sorted again at each step
    in which somebody could be admitted. `preemptive` says whether `victim_for_admission` is worth asking.
    `uses_priority` says whether `Request.priority` changes anything: if not, requests that bring one are refused.
    """

    dynamic_order = False
    preemptive = False
    uses_priority = False

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options

    @abc.abstractmethod
    def key(self, seq: Sequence, now_s: float) -> float | tuple[float, ...]:
        """Smaller runs first. Ties go by order of arrival at the scheduler, then by index."""

    def may_admit(self, seq: Sequence, running: Seq[Sequence]) -> bool:
        """Asked of the first in the queue. False leaves it, and all behind it, waiting for this step.

        A policy must say True sooner or later, and at once when nothing runs.
        """
        return True

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        """`seq` runs and needs a page, and none is left: whose pages it gets. None makes it wait.

        `behind` are the running sequences that come after it, in order; never empty. Taking only from those behind is
        what guarantees progress: the first in order always runs to its end.
        """
        return behind[-1]

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """`seq` is the first in the queue and does not fit. None lets it wait. Asked only of a `preemptive` policy.

        `running` are those that may be preempted in this step, in order. A policy that preempts here must not let
        two sequences preempt each other for ever.
        """
        return None

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:  # noqa: B027  (a hook)
        """Told once a step what was planned (`prefills` with their number of tokens), to charge tenants by."""
