"""When requests are sent: Poisson, bursty, even, ramp, all at once, or as recorded.

Owns the arithmetic of arrival times. Refuses to wait (`load`). The meaning of rate, burstiness and ramp is that of
vLLM's `bench serve`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxserve.bench.samples import Sample
from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """The rate goes from `start` to `end` requests a second, over the requests."""

    kind: Literal["linear", "exponential"]
    start: float
    end: float

    @classmethod
    def parse(cls, text: str) -> "Ramp":
        """From 'linear:1:10'. Raises ConfigError."""
        kind, _, rates = text.partition(":")
        try:
            start, end = (float(rate) for rate in rates.split(":"))
        except ValueError as error:
            raise ConfigError(f"--ramp is {text!r}; write linear:START:END or exponential:START:END") from error
        if kind not in ("linear", "exponential") or not (0 < start < math.inf and 0 < end < math.inf):
            raise ConfigError(f"--ramp is {text!r}; it is linear or exponential, between rates of more than 0")
        return cls(kind=kind, start=start, end=end)

    def rates(self, count: int) -> np.ndarray:
        """Requests a second at each of `count` requests."""
        progress = np.arange(count) / max(count - 1, 1)
        if self.kind == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """How requests are spread over time.

    Attributes:
      rate: requests a second; inf: all at once, which with a limit of concurrency is a closed loop; None: as recorded
        where the dataset has times, else inf.
      burstiness: gaps are gamma distributed with this shape: 1 is a Poisson process, less is more bursty, more is more
        even, inf is one gap for all.
      ramp: in place of `rate`.
    """

    rate: float | None = None
    burstiness: float = 1.0
    ramp: Ramp | None = None

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} is {value}, but must be more than 0")
        if self.ramp is not None and self.rate is not None:
            raise ConfigError("give --rate or --ramp, not both")


def arrival_times(samples: Sequence[Sample], options: ArrivalOptions, seed: int) -> np.ndarray:
    """Seconds after the start at which each sample is due, never falling; raises ConfigError.

    Without a ramp the last one is due at exactly count / rate, so that seeds differ in the gaps and not in the load.
    """
    count = len(samples)
    if options.rate is None and options.ramp is None:
        return _recorded(samples)
    if options.rate == math.inf:
        return np.zeros(count)
    rates = np.full(count, options.rate) if options.ramp is None else options.ramp.rates(count)
    if options.burstiness == math.inf:
        gaps = 1.0 / rates
    else:
        gaps = np.random.default_rng(seed).gamma(options.burstiness, 1.0 / (rates * options.burstiness))
    times = np.cumsum(gaps)
    return times if options.rate is None else times * (count / options.rate / times[-1])


def _recorded(samples: Sequence[Sample]) -> np.ndarray:
    times = [s.arrival_s for s in samples if s.arrival_s is not None]
    if not times:
        return np.zeros(len(samples))
    if len(times) != len(samples):
        raise ConfigError(f"{len(samples) - len(times)} of {len(samples)} requests say no arrival time; give --rate")
    if times != sorted(times):
        raise ConfigError("the requests of the dataset are not in the order of their arrival; sort them")
    return np.array(times)
