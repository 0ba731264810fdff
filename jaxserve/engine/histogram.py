"""Counts of values by size, kept for as long as the process lives; the form needs no metrics system.

One thread adds; any thread may read a `HistogramSnapshot`, which is consistent with itself: its number of values is
the sum of its counts.
"""

import bisect
from typing import NamedTuple

SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKENS = (1.0, 2.0, 5.0, *(float(n * 10**k) for k in range(1, 6) for n in (1, 2, 5)))


class HistogramSnapshot(NamedTuple):
    """Values counted so far. `counts[i]` are those above bounds[i-1] and at most bounds[i]; the last is above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # the sum of the values

    @property
    def num_values(self) -> int:
        """Number of values counted."""
        return sum(self.counts)


class Histogram:
    """Mutated by one thread, through `add`."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: ascending upper ends, inclusive."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts `value` as `times` values."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramSnapshot:
        """A copy of the counts so far. Any thread."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)
