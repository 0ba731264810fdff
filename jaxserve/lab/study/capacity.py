"""The highest rate of requests at which a system still meets its targets: a search by bisection."""

import dataclasses
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from jaxserve.errors import ConfigError

Run = TypeVar("Run")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HighestRate(Generic[Run]):
    """What `highest_rate` found.

    Attributes:
      rate: requests a second; None where even the lowest rate does not meet the targets.
      is_bound: even the highest rate of the search meets them, so the real one may be higher.
      run: at that rate; at the lowest one where `rate` is None.
    """

    rate: float | None
    is_bound: bool
    run: Run


def highest_rate(
    run: Callable[[float], Run], meets: Callable[[Run], bool], *, low: float, high: float, within: float = 0.05
) -> HighestRate[Run]:
    """The highest rate between `low` and `high` whose run meets the targets, as far as these get harder with the rate.

    The logarithm of the rate is halved until the bounds are a factor of 1 + `within` apart. The bounds themselves are
    tried first. For even results each rate should meet the same requests, closer together or further apart, as a
    `Trace` with another `ArrivalOptions.rate` does.

    Raises ConfigError for bounds that cannot be.
    """
    if not (0 < low < high < math.inf and within > 0):
        raise ConfigError(f"rates from {low} to {high} within {within} cannot be searched; give 0 < low < high")
    best = run(low)
    if not meets(best):
        return HighestRate(rate=None, is_bound=False, run=best)
    if meets(top := run(high)):
        return HighestRate(rate=high, is_bound=True, run=top)
    while high > low * (1 + within):
        middle = math.sqrt(low * high)
        if meets(tried := run(middle)):
            low, best = middle, tried
        else:
            high = middle
    return HighestRate(rate=low, is_bound=False, run=best)
