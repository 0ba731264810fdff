"""Deadlines: as many requests as possible get their first token, and all after it, in time.

Owns the order by slack, and how much of a step prompts may take from those who decode. Refuses to promise: what cannot
be in time any more goes behind what can.

The target of a request is its own (`Request.ttft_target_s`, `tpot_target_s`) or that of the options. It must begin by
its arrival plus the target, less the time that its prompt takes to compute: least slack first is earliest of these
first. One that is past it is hopeless and waits behind the others, in order of arrival. So that hopeless is not for
ever, every eighth row goes to whoever has waited longest: with k before it, a sequence runs after 8 * (k + 1) others.

Those who stream are protected twice: they come before all who do not when a page is needed, and a step holds only as
many prompt tokens as the tightest target beside them allows, by the measured time of steps.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.sched.lengths import LengthPredictor
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.plan import StepPlan
from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence, SequenceState
from jaxserve.sched.step_times import StepTimes

TURNS = 8  # of so many rows, one goes to whoever has waited longest
_MIN_CHUNK = 16  # tokens of prompts in a step at least: less is mostly overhead
_LONGEST, _STREAMING, _IN_TIME, _HOPELESS = range(4)


class SloPolicy(Policy):
    """By slack to the first token."""

    dynamic_order = True

    def bind(self, memory: SequenceMemory, lengths: LengthPredictor, clock: Callable[[], float]) -> None:
        """Begins with nobody waiting and no step measured."""
        super().bind(memory, lengths, clock)
        self.step_times = StepTimes()
        self._arrivals: collections.deque[Sequence] = (
            collections.deque()
        )  # who waits, in order, and some who no longer do
        self._longest: Sequence | None = None
        self._num_rows = 0
        self._planned: collections.deque[tuple[float, int]] = collections.deque()
        self._served_s = 0.0
        self._last_step_id = -1

    def key(self, seq: Sequence, now_s: float) -> tuple[float, ...]:
        """The kind, and within it seconds: the latest moment to begin, or the arrival."""
        arrival_s = seq.request.arrival_s
        if seq is self._longest:
            return (_LONGEST, arrival_s)
        if seq.num_outputs > 0:
            return (_STREAMING, arrival_s)
        begin_s = arrival_s + self.ttft_target_s(seq) - seq.prompt_len * self.step_times.per_token_s
        return (_IN_TIME, begin_s) if begin_s >= now_s else (_HOPELESS, arrival_s)

    def ttft_target_s(self, seq: Sequence) -> float:
        """Seconds from the arrival to the first token."""
        own = seq.request.ttft_target_s
        return self.options.ttft_target_s if own is None else own

    def tpot_target_s(self, seq: Sequence) -> float:
        """Seconds for each token after the first."""
        own = seq.request.tpot_target_s
        return self.options.tpot_target_s if own is None else own

    def prefill_budget(self, decoding: Seq[Sequence]) -> int | None:
        """What the tightest of `decoding` leaves. None where even a step without prompts is too slow for it."""
        times = self.step_times
        if not decoding or not times.known:
            return None
        target_s = min(map(self.tpot_target_s, decoding))
        num_tokens = int((target_s - times.base_s) / times.per_token_s) - len(decoding)
        return max(_MIN_CHUNK, num_tokens) if num_tokens >= 1 else None

    def on_wait(self, seq: Sequence) -> None:
        """Whoever begins to wait is the last in order of arrival."""
        self._arrivals.append(seq)

    def on_run(self, seq: Sequence) -> None:
        """Counts the rows that were given, and names who gets the next one."""
        self._num_rows += 1
        if seq is self._longest:
            self._longest = None
        if self._num_rows % TURNS == 0:
            waits = (SequenceState.WAITING, SequenceState.PREEMPTED)
            while self._arrivals and self._arrivals[0].state not in waits:
                self._arrivals.popleft()
            self._longest = self._arrivals[0] if self._arrivals else None

    def on_end(self, seq: Sequence) -> None:
        """Nobody holds a turn after the end."""
        if seq is self._longest:
            self._longest = None

    def observe(self, decoding: Seq[Sequence], prefills: Seq[tuple[Sequence, int]]) -> None:
        """Notes when a step was planned, and its size."""
        self._planned.append((self.clock(), len(decoding) + sum(length for _, length in prefills)))

    def on_served(self, plan: StepPlan, served: Seq[Sequence]) -> None:
        """Measures the step: from its plan, or from the end of the one before, to now; a burst as equal steps."""
        if plan.step_id == self._last_step_id:
            return  # a later step of a burst, which has been measured as a whole
        self._last_step_id = plan.step_id
        now_s = self.clock()
        planned_s, num_tokens = self._planned.popleft()
        if served or plan.num_steps == 1:  # a burst of rows that had all ended took no time
            self.step_times.add(num_tokens, (now_s - max(planned_s, self._served_s)) / plan.num_steps)
        self._served_s = now_s
