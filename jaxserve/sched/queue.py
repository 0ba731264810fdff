"""The waiting queue: a heap in the order of the policy.

Owns the order of those that wait, the preempted among them. Refuses to decide about admission. Sequences that end
while they wait are dropped when they surface, so that an abort is O(1).
"""

import heapq
from typing import Any

from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence, SequenceState

Rank = tuple[Any, int, int]


class WaitingQueue:
    """Mutated only by the scheduler."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Sequence]] = []
        self._num_ended = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def rank(self, seq: Sequence, now_s: float) -> Rank:
        """The place in the order, among waiting and running sequences alike; never equal for two of them."""
        return (self._policy.key(seq, now_s), seq.order, seq.index)

    def push(self, seq: Sequence, now_s: float) -> None:
        """Puts a sequence in its place."""
        heapq.heappush(self._heap, (self.rank(seq, now_s), seq))

    def note_end(self) -> None:
        """A sequence in the queue has become FINISHED."""
        self._num_ended += 1
        if self._num_ended > 64 and self._num_ended * 2 > len(self._heap):
            self._keep([entry for entry in self._heap if entry[1].state is not SequenceState.FINISHED])

    def reorder(self, now_s: float) -> None:
        """Computes all keys again, for policies whose order changes with time."""
        self._keep([(self.rank(seq, now_s), seq) for _, seq in self._heap if seq.state is not SequenceState.FINISHED])

    def first(self) -> Sequence | None:
        """The next in order, which stays; None when nobody waits."""
        while self._heap and self._heap[0][1].state is SequenceState.FINISHED:
            heapq.heappop(self._heap)
            self._num_ended -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the first out. Somebody must wait."""
        seq = self.first()
        assert seq is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        return seq

    def _keep(self, live: list[tuple[Rank, Sequence]]) -> None:
        self._heap = live
        heapq.heapify(live)
        self._num_ended = 0
