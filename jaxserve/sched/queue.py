"""The waiting queue: lines, each a heap in the order of the policy.

Owns the order of those that wait, the preempted among them. Refuses to decide about admission. Sequences that end
while they wait are dropped when they surface, so that an abort is O(1). Most policies have one line; one with several
(tenants, say) moves a whole line by changing one number, where a single heap would have to be sorted again.
"""

import heapq
from typing import Any

from jaxserve.sched.policy import Policy
from jaxserve.sched.state import Sequence, SequenceState

Place = tuple[Any, int, int]  # within a line
Rank = tuple[float, Any, int, int]

_FINISHED = SequenceState.FINISHED


class WaitingQueue:
    """Mutated only by the scheduler."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[str, list[tuple[Place, Sequence]]] = {}
        self._num_entries = 0
        self._num_ended = 0

    def __len__(self) -> int:
        return self._num_entries - self._num_ended

    def rank(self, seq: Sequence, now_s: float) -> Rank:
        """The place in the order, among waiting and running sequences alike; never equal for two of them."""
        policy = self._policy
        return (policy.line_key(policy.line(seq)), policy.key(seq, now_s), seq.order, seq.index)

    def push(self, seq: Sequence, now_s: float) -> None:
        """Puts a sequence in its place."""
        line = self._lines.setdefault(self._policy.line(seq), [])
        heapq.heappush(line, (self._place(seq, now_s), seq))
        self._num_entries += 1

    def note_end(self) -> None:
        """A sequence in the queue has become FINISHED."""
        self._num_ended += 1
        if self._num_ended > 64 and self._num_ended * 2 > self._num_entries:
            self._keep({name: [e for e in line if e[1].state is not _FINISHED] for name, line in self._lines.items()})

    def reorder(self, now_s: float) -> None:
        """Computes all keys again, for policies whose order changes with time."""
        self._keep(
            {
                name: [(self._place(seq, now_s), seq) for _, seq in line if seq.state is not _FINISHED]
                for name, line in self._lines.items()
            }
        )

    def first(self) -> Sequence | None:
        """The next in order, which stays; None when nobody waits."""
        best: tuple[float, Place, Sequence] | None = None
        empty: list[str] = []
        for name, line in self._lines.items():
            while line and line[0][1].state is _FINISHED:
                heapq.heappop(line)
                self._num_entries -= 1
                self._num_ended -= 1
            if not line:
                empty.append(name)
                continue
            place, seq = line[0]
            candidate = (self._policy.line_key(name), place, seq)
            if best is None or candidate < best:  # places differ, so sequences are never compared
                best = candidate
        for name in empty:
            del self._lines[name]
        return best[2] if best is not None else None

    def pop(self, seq: Sequence) -> None:
        """Takes `seq` out, which `first` has just given."""
        line = self._lines[self._policy.line(seq)]
        assert line[0][1] is seq, (seq, line[0])
        heapq.heappop(line)
        self._num_entries -= 1

    def _place(self, seq: Sequence, now_s: float) -> Place:
        return (self._policy.key(seq, now_s), seq.order, seq.index)

    def _keep(self, lines: dict[str, list[tuple[Place, Sequence]]]) -> None:
        self._lines = {name: line for name, line in lines.items() if line}
        for line in self._lines.values():
            heapq.heapify(line)
        self._num_entries = sum(map(len, self._lines.values()))
        self._num_ended = 0
