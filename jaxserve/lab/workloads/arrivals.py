"""Arrival times of requests: Poisson, bursty, even, ramp, a day's curve, all at once, or as recorded.

The meaning of rate, burstiness and ramp is that of vLLM's `bench serve`.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Sample, Shape


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


_POINTS_A_DAY = 1440  # of the curve's integral, between which it is taken as straight


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diurnal:
    """The rate follows the hours of a day, day after day.

    Attributes:
      curve: requests a second at equal steps through the day, straight lines between; behind the last comes the first.
      day_s: seconds of a day; fewer than 86400 is a day in a hurry.
    """

    curve: tuple[float, ...]
    day_s: float = 86400.0

    def __post_init__(self) -> None:
        if not self.curve or not all(0 < rate < math.inf for rate in self.curve):
            raise ConfigError(f"the rates of a day are {self.curve!r:.80}; give one or more, each above 0")
        if not 0 < self.day_s < math.inf:
            raise ConfigError(f"a day has {self.day_s} seconds; it must have more than 0")

    @classmethod
    def wave(cls, low: float, high: float, day_s: float = 86400.0) -> "Diurnal":
        """From `low` at the start of the day to `high` in the middle and back, along a cosine of 96 steps."""
        steps = range(96)
        return cls(
            curve=tuple(low + (high - low) * (1 - math.cos(2 * math.pi * step / 96)) / 2 for step in steps),
            day_s=day_s,
        )

    @classmethod
    def parse(cls, text: str) -> "Diurnal":
        """A wave from '1:8:3600': low, high, seconds of a day. Raises ConfigError."""
        try:
            low, high, day_s = (float(part) for part in text.split(":"))
        except ValueError as error:
            raise ConfigError(f"--diurnal is {text!r}; write LOW:HIGH:SECONDS_OF_A_DAY, such as 1:8:3600") from error
        return cls.wave(low, high, day_s)

    def times(self, expected: np.ndarray) -> np.ndarray:
        """When `expected[k]` requests are due since the start of the first day: the integral of the rate, inverted."""
        share = np.linspace(0.0, 1.0, _POINTS_A_DAY + 1)
        rates = np.interp(share * len(self.curve), np.arange(len(self.curve) + 1), [*self.curve, self.curve[0]])
        passed = np.concatenate([[0.0], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(share * self.day_s))])
        days, rest = np.divmod(expected, passed[-1])
        return days * self.day_s + np.interp(rest, passed, share * self.day_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalOptions:
    """The distribution of requests over time.

    Attributes:
      rate: requests a second; inf: all at once, which with a limit of concurrency is a closed loop; None: as recorded
        where the dataset has times, else inf.
      burstiness: gaps are gamma distributed with this shape: 1 is a Poisson process, less is more bursty, more is more
        even, inf is one gap for all.
      ramp, diurnal: in place of `rate`.
    """

    rate: float | None = None
    burstiness: float = 1.0
    ramp: Ramp | None = None
    diurnal: Diurnal | None = None

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("burstiness", self.burstiness)):
            if value is not None and not value > 0:
                raise ConfigError(f"--{name} is {value}, but must be more than 0")
        if sum(value is not None for value in (self.rate, self.ramp, self.diurnal)) > 1:
            raise ConfigError("give one of --rate, --ramp and --diurnal, not two")

    def check_drawn(self) -> None:
        """Raises ConfigError for a burstiness where no gap is drawn."""
        if self.burstiness != 1.0 and self.recorded:
            raise ConfigError(
                f"--burstiness is {self.burstiness:g}, and without a rate no gap is drawn; give --rate, --ramp or "
                "--diurnal, or leave it out"
            )

    @property
    def recorded(self) -> bool:
        """Whether times are those of the dataset, if it has any."""
        return self.rate is None and self.ramp is None and self.diurnal is None

    def as_json(self) -> dict[str, Any]:
        """Every option as a plain value; infinity is the text "inf", as in vLLM's files."""
        return {
            "rate": "inf" if self.rate == math.inf else self.rate,
            "burstiness": "inf" if self.burstiness == math.inf else self.burstiness,
            "ramp": None if self.ramp is None else dataclasses.asdict(self.ramp),
            "diurnal": None if self.diurnal is None else dataclasses.asdict(self.diurnal),
        }

    @property
    def label(self) -> str:
        """A few words for tables; empty when the dataset decides, or nothing does."""
        if self.ramp is not None:
            return f"{self.ramp.kind} ramp from {self.ramp.start:g} to {self.ramp.end:g} requests / s"
        if self.diurnal is not None:
            low, high = min(self.diurnal.curve), max(self.diurnal.curve)
            return f"days of {self.diurnal.day_s:g} s, {low:g} to {high:g} requests / s"
        return "" if self.rate is None or self.rate == math.inf else f"rate {self.rate:g}"


def arrival_times(samples: Sequence[Sample], options: ArrivalOptions, seed: int) -> np.ndarray:
    """Seconds after the start at which each sample is due, never falling; raises ConfigError."""
    return _recorded(samples) if options.recorded else draw_times(len(samples), options, seed)


def draw_times(count: int, options: ArrivalOptions, seed: int) -> np.ndarray:
    """Seconds after the start at which `count` requests are due, for options that do not leave it to the dataset.

    With a rate the last one is due at exactly count / rate, so that seeds differ in the gaps and not in the load.
    """
    assert not options.recorded, options
    if options.rate == math.inf:
        return np.zeros(count)
    with np.errstate(all="ignore"):
        times = _draw(count, options, seed)
    if not np.isfinite(times).all():
        raise ConfigError(
            f"no times of {count} requests can be drawn for {options.label} and burstiness {options.burstiness:g}: "
            "gaps are too long or too uneven for a number; raise the rate, or the burstiness"
        )
    return times


def _draw(count: int, options: ArrivalOptions, seed: int) -> np.ndarray:
    if options.burstiness == math.inf:
        gaps = np.ones(count)
    else:
        gaps = np.random.default_rng(seed).gamma(options.burstiness, 1.0 / options.burstiness, count)
    if options.diurnal is not None:
        return options.diurnal.times(np.cumsum(gaps))
    if options.ramp is not None:
        return np.cumsum(gaps / options.ramp.rates(count))
    assert options.rate is not None, "one of the three is given"
    times = np.cumsum(gaps)
    return times * (count / options.rate / times[-1])


def time_shapes(
    shapes: Iterable[Shape], options: ArrivalOptions, seed: int, count: int | None = None
) -> Iterator[Shape]:
    """Shapes with their times, one at a time. Raises ConfigError for times that are missing or fall.

    `count` is how many there are; without it, and without times of their own, all are read before the first is given.
    """
    if options.recorded:
        yield from _with_own_times(shapes)
        return
    if count is None:
        shapes = list(shapes)
        count = len(shapes)
    for shape, time_s in zip(shapes, draw_times(count, options, seed).tolist(), strict=True):
        yield dataclasses.replace(shape, arrival_s=time_s)


def _with_own_times(shapes: Iterable[Shape]) -> Iterator[Shape]:
    """All at once where the first has no time."""
    before: Shape | None = None
    for shape in shapes:
        if before is not None and (shape.arrival_s is None) != (before.arrival_s is None):
            raise ConfigError("some requests of the dataset say no arrival time; give --rate")
        if before is not None and (shape.arrival_s or 0.0) < (before.arrival_s or 0.0):
            raise ConfigError("the requests of the dataset are not in the order of their arrival; sort them")
        yield shape if shape.arrival_s is not None else dataclasses.replace(shape, arrival_s=0.0)
        before = shape


def _recorded(samples: Sequence[Sample]) -> np.ndarray:
    times = [s.arrival_s for s in samples if s.arrival_s is not None]
    if not times:
        return np.zeros(len(samples))
    if len(times) != len(samples):
        raise ConfigError(f"{len(samples) - len(times)} of {len(samples)} requests say no arrival time; give --rate")
    if times != sorted(times):
        raise ConfigError("the requests of the dataset are not in the order of their arrival; sort them")
    return np.array(times)
