"""`StepDeadlines`: how long a turn of the loop may take before its device counts as stuck.

Nothing is known of a step beforehand but the steps before it. So its time is predicted from that of the latest ones of
its size, and the deadline is many times the prediction: a step that takes longer does not end by itself.
"""

import math

from jaxserve.engine.observers import EndedStep, StepObserver
from jaxserve.sched.plan import StepPlan

_DECAY = 0.05  # of the way that an estimate goes down to a faster step; up it goes at once


class StepDeadlines(StepObserver):
    """Estimates of steps by size, and the deadlines that follow from them. Mutated by the loop's thread.

    A size is a power of two of the tokens that a step computes, as shapes are, with its rounds, which follow one
    another on the device. Contexts grow by a token a step, so the estimates follow them.
    """

    def __init__(self, floor_s: float, factor: float) -> None:
        """`floor_s`: no deadline is earlier, in seconds. `factor`: the deadline in predicted times of a step."""
        self._floor_s = floor_s
        self._factor = factor
        self._seconds: dict[tuple[int, int], float] = {}

    def predict_s(self, plan: StepPlan) -> float:
        """The expected time of a step on the device; 0 before any was measured.

        One of a size that no step had yet takes as long, for each token, as those of the next smaller size.
        """
        found = self._seconds.get(key := _size(plan))
        return self._extrapolate_s(*key) if found is None else found

    def note(self, step: EndedStep) -> None:
        """The device had the step since it was planned, or since the step before was done."""
        self.learn(step.plan, step.times.since(step.times.planned_s))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long on the device."""
        key = _size(plan)
        before = self._seconds.get(key, 0.0)
        self._seconds[key] = seconds if seconds >= before else before + (seconds - before) * _DECAY

    def allowed_s(self, planned: StepPlan | None, running: StepPlan | None) -> float:
        """The deadline of the longer of two steps; see `StepObserver.allowed_s`."""
        longest_s = max((self.predict_s(plan) for plan in (planned, running) if plan is not None), default=0.0)
        return max(self._floor_s, self._factor * longest_s)

    def _extrapolate_s(self, size: int, rounds: int) -> float:
        smaller = [key for key in self._seconds if key[0] <= size]
        if not smaller:
            return max(self._seconds.values(), default=0.0)
        nearest = max(smaller)
        return self._seconds[nearest] * math.ldexp(1.0, size - nearest[0]) * max(1.0, rounds / nearest[1])


def _size(plan: StepPlan) -> tuple[int, int]:
    return (plan.num_tokens - 1).bit_length(), plan.rounds
