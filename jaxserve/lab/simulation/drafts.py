"""`SimulatedDrafts`: which drafts a simulated device accepts, where nobody knows the tokens.

Whether the draft of a token is right follows from a hash of the seed, the sequence and the position, against a rate for
each place of a round. So it does not depend on how a step was planned, and a fake device with the same function draws
the same numbers of tokens as the simulation.
"""

import dataclasses
import zlib
from collections.abc import Sequence

from jaxserve.errors import ConfigError

_MASK = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafts:
    """Accepts drafts at random, the same ones in each run.

    Attributes:
      rates: by place of a round, how often a draft is right, given that those before it were; the last one holds for
        all places behind it.
      seed: of the hash.

    Raises ConfigError for a rate that is no share, or for none.
    """

    rates: Sequence[float]
    seed: int = 0

    def __post_init__(self) -> None:
        bad = [rate for rate in self.rates if not 0 <= rate <= 1]
        if bad or not self.rates:
            what = f"{bad[0]:g}" if bad else "nothing"
            raise ConfigError(
                f"a rate of acceptance is {what}; give a number from 0 to 1 for each place, or one for all"
            )

    def __call__(self, request_id: str, index: int, position: int, count: int) -> int:
        """How many of `count` drafts are accepted, of tokens at `position` and behind it, up to the first wrong one."""
        own = zlib.crc32(f"{index}/{request_id}".encode()) + (self.seed << 32)
        last = len(self.rates) - 1
        for place in range(count):
            if _unit(own, position + place) >= self.rates[min(place, last)]:
                return place
        return count


def _unit(key: int, counter: int) -> float:
    """A number in [0, 1): the counter-th of a generator splitmix64 (Steele, Lea, Flood, 2014) that starts by `key`."""
    mixed = (key * 0xD1342543DE82EF95 + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ mixed >> 31) / 2**64
