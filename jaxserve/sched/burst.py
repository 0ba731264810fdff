"""How many steps a plan of decode rows asks for in one launch: K, and what each row takes of it.

Owns the rule for K and the pages of all K tokens. Refuses what follows from them: executors keep the rules of
`sched.plan`, and `core` those of overlap.

Why at all: the host touches a step before and after it, and where the device is faster than that, it waits. A launch of
K steps costs the host once. What it costs in return is time in which nobody is let in and nobody is told of a token.

The bound. Nothing is ever planned as a burst while somebody waits who could be let in before its end. Who arrives while
one runs waits for it, and, as the engine launches a plan before it reads the one before, for one burst more: at most 2K
decode steps in place of 2. Every token is on the host at most K decode steps after it was drawn.

K is the largest number for which all of this holds, and 1 where one of the first three does not:
  * nothing but decode rows is planned, no row waits for a page, and nobody draws under a grammar;
  * nobody waits; or all rows are taken, by sequences that go on, under a policy that preempts for no newcomer;
  * the pages of all tokens are there, none of them taken from a sequence;
  * where somebody waits, no row comes to its length limit before the last step;
  * of the places that the device computes (rows times steps), three quarters go to rows that have not come to their
    length limit;
  * the policy says no less.
"""

from jaxserve.sched.draft import Draft
from jaxserve.sched.memory import SequenceMemory
from jaxserve.sched.plan import PageGrant
from jaxserve.sched.policy import Policy
from jaxserve.sched.running import RunningSet
from jaxserve.sched.state import Sequence

_SINGLE: tuple[int, tuple[int, ...]] = (1, ())


class Bursts:
    """Mutated by nobody. Belongs to one scheduler, whose memory it takes pages from."""

    def __init__(self, max_burst: int, memory: SequenceMemory, policy: Policy) -> None:
        self._max_burst = max_burst
        self._memory = memory
        self._policy = policy

    def plan(
        self, decoding: list[Sequence], draft: Draft, running: RunningSet, num_waiting: int
    ) -> tuple[int, tuple[int, ...]]:
        """`num_steps` and `row_steps` of the plan; the pages beyond the first step are granted in `draft`."""
        if self._max_burst == 1 or not decoding or self._must_be_single(decoding, draft, running, num_waiting):
            return _SINGLE
        left = [seq.max_fed - seq.num_fed for seq in decoding]
        most = min(self._max_burst, min(left) if num_waiting else _worthwhile(left, self._max_burst))
        if most > 1:
            most = self._policy.burst(decoding, most)
            assert 1 <= most <= self._max_burst, f"{self._policy} wants a burst of {most}"
        while most > 1 and self._num_missing(decoding, left, most) > self._memory.pool.num_available:
            most //= 2
        if most == 1:
            return _SINGLE
        for seq, own in zip(decoding, left, strict=True):
            self._grow(seq, min(own, most), draft)
        return most, () if min(left) >= most else tuple([min(own, most) for own in left])

    def _must_be_single(self, decoding: list[Sequence], draft: Draft, running: RunningSet, num_waiting: int) -> bool:
        if draft.pieces or draft.stalled or draft.num_preempted or running.prefilling or running.has_stepwise:
            return True
        if not num_waiting:
            return False
        # Who runs and does not decode any more leaves with the commit of the step in flight.
        return self._policy.preemptive or running.has_free_row or len(running) > len(decoding)

    def _num_missing(self, decoding: list[Sequence], left: list[int], steps: int) -> int:
        """Pages that the rows need and do not have."""
        size = self._memory.page_size
        return sum(
            -(-(seq.num_fed + min(own, steps)) // size) - len(seq.page_ids)
            for seq, own in zip(decoding, left, strict=True)
            if seq.num_fed + min(own, steps) > seq.next_stop
        )

    def _grow(self, seq: Sequence, steps: int, draft: Draft) -> None:
        if seq.num_fed + steps <= seq.next_stop:
            return
        first, pages = len(seq.page_ids), []
        while seq.num_fed + steps > seq.next_stop:
            pages.append(self._memory.grow(seq))
        draft.grants.append(PageGrant(seq.row, first, tuple(pages)))


def advance(decoding: list[Sequence], num_steps: int, row_steps: tuple[int, ...]) -> None:
    """Counts the steps of a plan as fed."""
    if row_steps:
        for seq, steps in zip(decoding, row_steps, strict=True):
            seq.num_fed += steps
    else:
        for seq in decoding:
            seq.num_fed += num_steps


def _worthwhile(left: list[int], most: int) -> int:
    """The largest number of steps, up to `most`, of which rows with so many `left` take three quarters."""
    if min(left) >= most:
        return most
    most = min(most, max(left))
    while 4 * sum([min(own, most) for own in left]) < 3 * most * len(left):
        most -= 1  # ends at 1, of which all take all
    return most
