"""The waiting queue: new and preempted sequences in lines, each line sorted in the order of the policy.

Most policies have one line. A policy with several (one for each tenant, say) moves a whole line by changing one number,
where a single line would have to be sorted again.

Where the order changes while sequences wait, each step computes only a few keys again, since all of them would take
longer than a step: the keys of the first sequences in order, which are about to be admitted, and the keys that were
computed longest ago. So the head of the queue is right, a queue of `RECHECKED` sequences is right throughout, and in a
longer queue a sequence whose key has fallen is found late. The bound is a number of keys, not of seconds, so that a
simulation repeats.
"""

import bisect
import collections
import heapq
import itertools
from collections.abc import Hashable
from typing import Any

from jaxserve.sched.policy import Policy, broken_rule
from jaxserve.sched.state import Sequence

RECHECKED = 16  # keys of each of the two kinds that a step computes again

Place = tuple[Any, int, int]  # within a line
Rank = tuple[Any, Any, int, int]


class WaitingQueue:
    """Mutated only by the scheduler."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lines: dict[
            Hashable, list[tuple[Place, Sequence]]
        ] = {}  # sorted; places differ, so nothing else is compared
        self._places: collections.OrderedDict[Sequence, Place] = collections.OrderedDict()  # the oldest keys first

    def __len__(self) -> int:
        return len(self._places)

    def rank(self, seq: Sequence, now_s: float) -> Rank:
        """The place in the order, among waiting and running sequences alike; never equal for two of them."""
        return (self._line_key(self._policy.line(seq)), *self._place(seq, now_s))

    def push(self, seq: Sequence, now_s: float) -> None:
        """Puts a sequence in its place."""
        self._insert(seq, self._place(seq, now_s))

    def remove(self, seq: Sequence) -> None:
        """Takes a sequence out, from wherever it stands."""
        place = self._places.pop(seq)
        name = self._policy.line(seq)
        line = self._lines[name]
        at = bisect.bisect_left(line, (place,))
        assert line[at][1] is seq, (seq, line[at])
        del line[at]
        if not line:
            del self._lines[name]

    def refresh(self, now_s: float) -> None:
        """Computes keys again, where the order changes: those the policy names, the oldest, the first of each line.

        Of more lines than `RECHECKED` only some are looked at, since the keys of lines are the policy's own numbers.
        """
        changed, self._policy.changed = self._policy.changed, []
        again = dict.fromkeys(seq for seq in changed if seq in self._places)
        again.update(dict.fromkeys(itertools.islice(self._places, RECHECKED)))
        share = max(1, RECHECKED // max(1, len(self._lines)))
        for line in itertools.islice(self._lines.values(), RECHECKED):
            again.update(dict.fromkeys([seq for _, seq in line[:share]]))
        for seq in again:
            place = self._place(seq, now_s)
            if place == self._places[seq]:
                self._places.move_to_end(seq)
            else:
                self.remove(seq)
                self._insert(seq, place)

    def first(self) -> Sequence | None:
        """The next sequence in order, which stays; None when the queue is empty."""
        if len(self._lines) <= 1:
            return next((line[0][1] for line in self._lines.values()), None)
        line_key = self._line_key
        return min((line_key(name), *line[0]) for name, line in self._lines.items())[2]

    def head(self, count: int) -> list[Sequence]:
        """The first sequences in order, `count` at most; the queue stays as it is."""
        if len(self._lines) <= 1:
            return [seq for line in self._lines.values() for _, seq in line[:count]]
        keys = [(self._line_key(name), line[:count]) for name, line in self._lines.items()]
        return [seq for *_, seq in heapq.nsmallest(count, ((key, *each) for key, line in keys for each in line))]

    def _insert(self, seq: Sequence, place: Place) -> None:
        line = self._lines.setdefault(self._policy.line(seq), [])
        try:
            bisect.insort(line, (place, seq))
        except TypeError as error:
            raise broken_rule(
                self._policy,
                "key",
                f"the key {place[0]!r:.80} of {seq.request_id!r} does not compare with {line[0][0][0]!r:.80} of "
                "another; it returns a number for all sequences, or a tuple of numbers for all",
            ) from error
        self._places[seq] = place

    def _place(self, seq: Sequence, now_s: float) -> Place:
        key = self._policy.key(seq, now_s)
        if _has_nan(key):
            raise broken_rule(
                self._policy, "key", f"the key of {seq.request_id!r} is {key!r}; NaN has no place in an order"
            )
        return (key, seq.order, seq.index)

    def _line_key(self, line: Hashable) -> float | tuple[float, ...]:
        key = self._policy.line_key(line)
        if _has_nan(key):
            raise broken_rule(self._policy, "line_key", f"the key of {line!r:.80} is NaN, without a place in an order")
        return key


def _has_nan(key: float | tuple[float, ...]) -> bool:
    return any(part != part for part in key) if isinstance(key, tuple) else key != key
