"""Priorities that do not wait: a newcomer of a better class takes the row and the pages of a worse one.

Owns the choice of the victim. Refuses to lose work: the victim's tokens stay, and are computed again when it gets a
row, so its output is what it would have been.

The order is that of `priority`, ageing included, and it never changes between two sequences. A victim must be of a
worse class and stand behind in that order too. So nobody preempts in a circle, and whoever has waited or run long
enough is safe: after (p - q) * ageing_s, a sequence of class p no longer gives way to a newcomer of class q.

Among those who may be taken, the one that is cheapest to compute again goes: its tokens, less those that the prefix
cache keeps. Pages that it shares with others cost nothing, and free nothing.
"""

from collections.abc import Sequence as Seq

from jaxserve.sched.priority import PriorityPolicy
from jaxserve.sched.state import Sequence


class PreemptivePolicy(PriorityPolicy):
    """`priority`, with preemption at admission."""

    preemptive = True

    def victim_for_page(self, seq: Sequence, behind: Seq[Sequence]) -> Sequence | None:
        """The cheapest that has a page to give."""
        giving = [other for other in behind if self.memory.num_own(other) > 0]
        return self._cheapest(giving, 1) if giving else behind[-1]

    def victim_for_admission(self, seq: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """The cheapest of a worse class that stands behind; None when all of them together are not enough."""
        key = self.key(seq, 0.0)
        worse = [
            other for other in running if other.request.priority > seq.request.priority and self.key(other, 0.0) > key
        ]
        num_missing = self.memory.num_missing(seq)
        if num_missing == 0:
            return self._cheapest(worse, len(seq.tokens) // self.memory.page_size) if worse else None
        if sum(self.memory.num_own(other) for other in worse) < num_missing:
            return None
        return self._cheapest([other for other in worse if self.memory.num_own(other) > 0], num_missing)

    def _cheapest(self, among: Seq[Sequence], num_wanted: int) -> Sequence:
        """The last in order of those with the fewest tokens to compute again."""
        return min(reversed(among), key=lambda other: self.memory.recompute_len(other, num_wanted))
