"""`DraftCounts`: what became of drafts, summed over rounds: by metrics, summaries of step logs and simulations."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.sched.plan import Drafted


class DraftTotals(NamedTuple):
    """A copy of the sums.

    Attributes:
      rounds: of rows that fed one draft or more.
      drafted, accepted: drafts that were fed, and those of them that were drawn as well.
      reached: by place, drafts whose predecessors in the round were all drawn; the first place comes first.
      drawn: by place, how many of these were drawn themselves. Their sum is `accepted`.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """By place, the share of drafts that were drawn, of those whose predecessors were."""
        return tuple(drawn / reached for drawn, reached in zip(self.drawn, self.reached, strict=True))

    @property
    def rate(self) -> float:
        """The share of all drafts that were drawn; 0 without any."""
        return self.accepted / self.drafted if self.drafted else 0.0


class DraftCounts:
    """Mutated by `add` alone."""

    __slots__ = ("_accepted", "_drafted", "_drawn", "_reached", "_rounds")

    def __init__(self) -> None:
        self._rounds = self._drafted = self._accepted = 0
        self._reached: list[int] = []
        self._drawn: list[int] = []

    def add(self, rounds: Iterable[Drafted]) -> None:
        """Counts the rounds of a row; those without a draft are none."""
        for drafted, accepted in rounds:
            if not drafted:
                continue
            self._rounds += 1
            self._drafted += drafted
            self._accepted += accepted
            while len(self._reached) < drafted:
                self._reached.append(0)
                self._drawn.append(0)
            for place in range(min(accepted + 1, drafted)):
                self._reached[place] += 1
                self._drawn[place] += place < accepted

    def totals(self) -> DraftTotals:
        """The sums so far. A place that no draft has reached ends the lists."""
        places = next((place for place, count in enumerate(self._reached) if not count), len(self._reached))
        return DraftTotals(
            self._rounds, self._drafted, self._accepted, tuple(self._reached[:places]), tuple(self._drawn[:places])
        )


def sum_drafts(parts: Iterable[DraftTotals]) -> DraftTotals:
    """The sums over several devices."""
    found = list(parts)
    reached, drawn = (
        tuple(map(sum, itertools.zip_longest(*lists, fillvalue=0)))
        for lists in ([one.reached for one in found], [one.drawn for one in found])
    )
    return DraftTotals(
        sum(one.rounds for one in found),
        sum(one.drafted for one in found),
        sum(one.accepted for one in found),
        reached,
        drawn,
    )
