"""Whether one more may get in without somebody being thrown out soon: admission that looks ahead.

Owns the watermark and the projection of growth. Refuses to know an order, and to be exact: it is asked to make
preemption rare, and the preemption in `core` is what keeps an error harmless.

The projection: every running sequence grows by a token a step until its expected end, and then gives all back. Sorted
by what is left, longest first, the k-th to last end comes when k sequences have grown by what it has left, and the
others are gone. The pages needed at the worst of these moments are what an admission must leave. (LightLLM plans its
admissions by the same peak.)

The defaults are measured (`scripts/measure_admission.py`, a cache that is short all the time). Of 1500 chats 4 were
preempted, and of 1000 essays 335, against 680 and 1415 with no look ahead, at 2 % and 6 % more tokens a second. To plan
for all that is expected, or for all that was asked, preempts less, and leaves so many rows empty that it is slower.
"""

import math

from jaxserve.sched.lengths import LengthPredictor
from jaxserve.sched.memory import Placement, SequenceMemory
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.running import RunningSet
from jaxserve.sched.state import Sequence

_TRUSTED = 32  # admissions that may be granted from one projection


class Headroom:
    """Mutated only by the scheduler that made it."""

    def __init__(self, memory: SequenceMemory, options: SchedulerOptions, lengths: LengthPredictor) -> None:
        self._memory = memory
        self._lengths = lengths
        self._growth = options.growth
        self._watermark = math.ceil(options.watermark * memory.pool.num_pages)
        self._spare = 0.0  # pages that were left over at the last projection, less what was granted since
        self._num_trusted = 0

    def admits(self, seq: Sequence, placement: Placement, running: RunningSet) -> bool:
        """Whether `seq` fits now, and the others keep room to grow. Who would be alone need only fit."""
        if not running:
            return self._memory.fits(placement, 0)
        if not self._memory.fits(placement, self._watermark):
            return False
        if not self._growth:
            return True
        # A projection costs a look at each running sequence. As long as there is plenty, the last one still holds: all
        # that a newcomer can add to the peak is its own size.
        num_taken = self._memory.num_taken(placement)
        full_size = num_taken + self._left(seq) / self._memory.page_size
        if self._num_trusted == 0 or self._spare < full_size:
            available = self._memory.pool.num_available - self._watermark
            self._num_trusted = _TRUSTED
            self._spare = available - self._peak(self._rows(running))
            if self._spare < full_size:
                self._spare = 0.0
                rows = [*self._rows(running), (self._left(seq), placement.num_fresh)]
                return num_taken + self._peak(rows) <= available
        self._num_trusted -= 1
        self._spare -= full_size
        return True

    def _left(self, seq: Sequence) -> float:
        """Tokens it is expected to grow by."""
        return self._growth * (self._lengths.expected_len(seq) - (len(seq.tokens) - seq.prompt_len))

    def _rows(self, running: RunningSet) -> list[tuple[float, int]]:
        """Of each: tokens it has left, and pages that its end will free."""
        size = self._memory.page_size
        # Pages that it shared when it came are not counted: others may hold them.
        return [(self._left(seq), len(seq.page_ids) - seq.num_cached // size) for seq in running]

    def _peak(self, rows: list[tuple[float, int]]) -> float:
        """The most pages that will ever be needed beyond those held now, when nobody else comes."""
        size = self._memory.page_size
        rows.sort(reverse=True)
        held = sum(own for _, own in rows)
        peak = 0.0
        for num_alive, (left, own) in enumerate(rows, 1):
            held -= own
            peak = max(peak, num_alive * left / size - held)
        return peak
