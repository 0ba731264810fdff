"""First come, first served: the default policy.

Owns one line of order. Refuses to look at anything but arrival: that is what makes it fair enough and free of
starvation.
"""

from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence


class FcfsPolicy(Policy):
    """By arrival time."""

    def key(self, seq: Sequence, now_s: float) -> float:
        """Monotonic seconds of arrival."""
        return seq.request.arrival_s
