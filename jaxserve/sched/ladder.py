"""`Ladder`: what an engine does without under pressure, one rung after the other, and takes back in the reverse order.

A pure value: `observe` gives the ladder after a look at the pressure, and nothing here reads a clock or measures. The
signals are measured in `engine.degrading`, which has a `sched.base.Degrades` carry out what a rung means. A simulation
may do the same on its own clock.

A rung is taken when the pressure has been too high for `up_s` seconds without a break, and given back when it has been
below `calm` for `down_s` seconds. Between the two nothing changes, so that a load near the limit does not make the
engine change its ways again and again. Rungs that spare a store answer to a store in trouble as well; the others would
not help it.
"""

import dataclasses
import enum
from typing import NamedTuple, Self

from jaxserve.errors import ConfigError


class Rung(enum.IntEnum):
    """How far down the engine is. Each rung includes those before it."""

    NONE = 0
    NO_PREFETCH = 1  # pages of requests further back in the queue are not asked of a store
    NO_SAVES = 2  # pages that the device gives up are lost
    NO_STORE = 3  # a store is asked for nothing; host memory still is
    NO_SPECULATION = 4  # a row draws one token a step
    SMALL_CHUNKS = 5  # prompts take a quarter of a step beside rows that decode
    REFUSE = 6  # new requests are refused while others wait
    DRAIN = 7  # the server is shut down; there is no way back

    @property
    def label(self) -> str:
        """As in settings and metrics."""
        return self.name.lower()

    @classmethod
    def of(cls, label: str) -> "Rung":
        """The rung of a label."""
        return cls[label.upper()]


class Pressure(NamedTuple):
    """What was measured, as a share of what is meant to be at most: from 1 on it is too much.

    Attributes:
      queue: the longest wait for a first token now.
      steps: the time of a step of late.
      tiers: calls of a store that failed or were late of late.
    """

    queue: float = 0.0
    steps: float = 0.0
    tiers: float = 0.0

    def of_rung(self, rung: Rung) -> float:
        """The pressure that this rung may relieve."""
        load = max(self.queue, self.steps)
        return max(load, self.tiers) if rung <= Rung.NO_STORE else load


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LadderOptions:
    """When rungs are taken and given back; the fields of `degrade:` in a config.

    Attributes:
      highest: no rung beyond it is taken.
      up_s: seconds of too much pressure before each rung.
      down_s: seconds of calm before a rung is given back.
      calm: pressure below which it is calm.

    Raises ConfigError when a value is out of range.
    """

    highest: Rung = Rung.REFUSE
    up_s: float = 5.0
    down_s: float = 30.0
    calm: float = 0.5

    def __post_init__(self) -> None:
        for name in ("up_s", "down_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"degrade.{name} is {getattr(self, name)}, but must be 0 seconds or more")
        if not 0 < self.calm < 1:
            raise ConfigError(f"degrade.calm is {self.calm}, but must be between 0 and 1")


class _Side(enum.Enum):
    CALM = -1
    BETWEEN = 0
    HIGH = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Where an engine stands, and since when the pressure is where it is.

    Attributes:
      rung: the last one that was taken.
      side, since_s: where the pressure was at the last look, and since when, or since the last change of rung.
    """

    options: LadderOptions
    rung: Rung = Rung.NONE
    side: _Side = _Side.BETWEEN
    since_s: float = 0.0

    def observe(self, now_s: float, pressure: Pressure) -> Self:
        """The ladder after a look at the pressure. One rung changes at most."""
        side = self._side_of(pressure)
        if side is not self.side:
            return dataclasses.replace(self, side=side, since_s=now_s)._moved(now_s)
        return self._moved(now_s)

    def _side_of(self, pressure: Pressure) -> _Side:
        above = Rung(min(self.rung + 1, Rung.DRAIN))
        if pressure.of_rung(above) >= 1:
            return _Side.HIGH
        return _Side.CALM if pressure.of_rung(self.rung) < self.options.calm else _Side.BETWEEN

    def _moved(self, now_s: float) -> Self:
        options, lasted_s, rung = self.options, now_s - self.since_s, self.rung
        if self.side is _Side.HIGH and lasted_s >= options.up_s and rung < options.highest:
            rung = Rung(rung + 1)
        elif self.side is _Side.CALM and lasted_s >= options.down_s and Rung.NONE < rung < Rung.DRAIN:
            rung = Rung(rung - 1)
        return self if rung is self.rung else dataclasses.replace(self, rung=rung, since_s=now_s)
