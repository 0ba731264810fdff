"""Smaller `Request.priority` first, with ageing so that nothing starves.

Owns the exchange rate between waiting and importance. Refuses a clock, because it needs none: at time t a sequence
stands at level `priority - (t - arrival) / ageing_s`. The part with t is the same for all, so the order between two of
them never changes, and comparing `priority * ageing_s + arrival` gives it: a key that is computed once.

A request of level p is overtaken only by those of better levels that arrive within (p - their level) * ageing_s after
it. That bound is the proof that it runs.
"""

from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence


class PriorityPolicy(Policy):
    """By priority less age."""

    uses_priority = True

    def key(self, seq: Sequence, now_s: float) -> float:
        """Seconds: the arrival, moved by what the priority is worth."""
        return seq.request.priority * self.options.ageing_s + seq.request.arrival_s
