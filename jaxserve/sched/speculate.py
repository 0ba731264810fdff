"""How many tokens the rows of a step may draw: the choice of width and rounds, by cost.

A step of width w lets each row feed its last token and w - 1 drafts of the tokens to come; in a step of several rounds
the device goes on by itself. Drafts change no token, so this choice moves times alone. Shapes that the device has are
in `Limits.buckets`; where the drafts come from is the device's affair.

The choice maximises tokens a millisecond. A round of a row draws 1 + a_1 + a_1 a_2 + ... tokens on average, where a_j
is how often the j-th draft is drawn, given that those before it were: learned for each sequence, with the average of
all sequences as the prior; sequences whose drafts the host makes, under a grammar, are judged apart, by the drafts that
there are. The times of the shapes are the device's (`Limits.step_ms`), the time that a launch costs beside them is
learned from the commits. Without times, the shape that could draw most is taken.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as Seq

from jaxserve.errors import ConfigError
from jaxserve.sched.plan import Drafted, Limits
from jaxserve.sched.state import Sequence

_FORGET = 0.95  # what a round counts after the next round of the same sequence
_PRIOR_ROUNDS = 4.0  # of the average of all sequences, for one that has none of its own
_FIRST_GUESS = 0.7  # how often a draft is drawn, before anything is known
_STICKY = 1.05  # another shape must be better by so much, or the choice would swing with the noise
_EXPLORE = 64  # plain steps after which a wider one is tried, since a plain one teaches nothing
_LAUNCH_SHARE = 0.1  # of the newest measurement in the time of a launch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Settings of the choice; the fields of `speculation:` in a config that concern the scheduler.

    Attributes:
      width, rounds: the most of each that a step may have.
      adaptive: choose by cost; False takes as much of both as the rows have room for.
      device_drafts: the device makes drafts; False where only rows with a grammar have any, which the host makes.
    """

    width: int = 8
    rounds: int = 64
    adaptive: bool = True
    device_drafts: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"speculation.{name} is {getattr(self, name)}, but must be 1 or more")


class Acceptance:
    """How often drafts at each place were drawn, of one sequence or of all. Mutated only by `Speculator`."""

    __slots__ = ("drawn", "reached")

    def __init__(self, num_places: int) -> None:
        self.reached = [0.0] * num_places
        self.drawn = [0.0] * num_places

    def add(self, width: int, accepted: int) -> None:
        """A round of `width`, whose first `accepted` drafts were drawn. A place without a draft counts as a miss."""
        for place in range(min(accepted + 1, width - 1)):
            self.reached[place] = self.reached[place] * _FORGET + 1.0
            self.drawn[place] = self.drawn[place] * _FORGET + (place < accepted)

    def rate(self, place: int, prior: float, weight: float) -> float:
        """The share at `place`, where `prior` counts as much as `weight` rounds."""
        return (self.drawn[place] + prior * weight) / (self.reached[place] + weight)


PLAIN = (1, 1)


class Speculator:
    """Chooses the shape of decode-only steps. Mutated only by the scheduler that made it.

    Attributes:
      shapes: width and rounds of all steps that the device has, one token a step first.
      active: whether there is anything to choose.
    """

    def __init__(self, options: SpeculationOptions, limits: Limits, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._all = {stepwise: Acceptance(0) for stepwise in (False, True)}
        self._of_sequence: dict[Sequence, Acceptance] = {}
        self._last = PLAIN
        self._num_plain = 0
        self._launch_ms = 0.0
        self._committed_s: float | None = None
        self.use_limits(limits)

    def use_limits(self, limits: Limits) -> None:
        """The shapes that there are from now on."""
        width, rounds = self._options.width, self._options.rounds
        wide = [b for b in limits.buckets if not b.plain and b.width <= width]
        self._limits = limits
        self._ms = dict(zip(limits.buckets, limits.step_ms, strict=False))
        self._widest = max((b.width for b in wide), default=1)
        self.shapes = tuple(
            sorted({PLAIN, *((b.width, r) for b in wide for r in {1, min(b.rounds, rounds)} if (b.width, r) != PLAIN)})
        )
        self.active = len(self.shapes) > 1
        self._offered: dict[int, tuple[tuple[int, int], ...]] = {}
        places = self._widest - 1
        if len(self._all[False].reached) < places:
            self._all = {stepwise: Acceptance(places) for stepwise in self._all}
            self._of_sequence.clear()

    def offered(self, num_rows: int) -> tuple[tuple[int, int], ...]:
        """Shapes (width, rounds) of a step of so many rows. Large widths are not compiled for many rows."""
        found = self._offered.get(num_rows)
        if found is None:
            found = self._offered[num_rows] = tuple(
                (width, rounds)
                for width, rounds in self.shapes
                if self._limits.find_bucket(num_rows * width, num_rows, True, width, rounds) is not None
            )
        return found

    def choose(self, decoding: Seq[Sequence]) -> tuple[int, int]:
        """Width and rounds of a step of these rows. No shape has more than one of the others has room for."""
        offered = self.offered(len(decoding))
        room = {shape: self._room(decoding, shape) for shape in offered}
        possible = {shape: self._tokens_per_ms(shape, decoding) for shape in offered}
        if not self._options.adaptive or any(speed == 0.0 for speed in possible.values()):
            return max(offered, key=lambda shape: (room[shape], -shape[0] * shape[1], shape))
        best = max(offered, key=lambda shape: possible[shape] * (_STICKY if shape == self._last else 1.0))
        if best[0] == 1:
            self._num_plain += 1
            if self._num_plain >= _EXPLORE:
                # A shape that has room for no draft would teach nothing.
                wider = [shape for shape in offered if room[shape] > self._room(decoding, (1, shape[1]))]
                if wider:
                    self._num_plain = 0
                    return min(wider)
        else:
            self._num_plain = 0
        self._last = best
        return best

    def room(self, seq: Sequence, width: int, rounds: int) -> int:
        """Tokens that `seq` could draw in a step of this shape, were all drafts right that it may have."""
        return seq.room(self._width_of(seq, width), rounds)

    def _width_of(self, seq: Sequence, width: int) -> int:
        """Tokens of `seq` in a round: one where nobody makes drafts for it."""
        return width if seq.stepwise or self._options.device_drafts else 1

    def _room(self, rows: Seq[Sequence], shape: tuple[int, int]) -> int:
        return sum(self.room(seq, *shape) for seq in rows)

    def _tokens_per_ms(self, shape: tuple[int, int], rows: Seq[Sequence]) -> float:
        """0 where nobody knows its time."""
        width, rounds = shape
        bucket = self._limits.find_bucket(len(rows) * width, len(rows), True, width, rounds)
        assert bucket is not None, (shape, len(rows))
        round_ms = self._ms.get(bucket, 0.0)
        if not round_ms:
            return 0.0
        tokens = sum(self._tokens_of(seq, width, rounds) for seq in rows)
        return tokens / (self._launch_ms + round_ms * rounds)

    def _tokens_of(self, seq: Sequence, width: int, rounds: int) -> float:
        """Tokens that a step of this shape draws for `seq`, on average."""
        width = self._width_of(seq, width)
        room = seq.room(width, rounds)
        own, all_, product, tokens = self._of_sequence.get(seq), self._all[seq.stepwise], 1.0, 1.0
        for place in range(min(width, room) - 1):
            rate = all_.rate(place, _FIRST_GUESS, 1.0)
            product *= rate if own is None else own.rate(place, rate, _PRIOR_ROUNDS)
            tokens += product
        return tokens if seq.stepwise else min(float(room), tokens * rounds)

    def learn(self, seq: Sequence, width: int, rounds: Seq[Drafted]) -> None:
        """What became of the drafts of one row."""
        own = self._of_sequence.get(seq)
        if own is None:
            own = self._of_sequence[seq] = Acceptance(self._widest - 1)
        for one in rounds:
            # The host says beforehand how many drafts it has: a place without one teaches nothing.
            width = one.drafted + 1 if seq.stepwise else width
            own.add(width, one.accepted)
            self._all[seq.stepwise].add(width, one.accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._of_sequence.pop(seq, None)

    def note_commit(self, num_rows: int, shape: tuple[int, int], steady: bool) -> None:
        """A decode-only step has been committed. `steady`: the device had the next step by then, and this one before
        the step before it was committed, so that the time between commits is what a step costs."""
        now_s, before_s = self._clock(), self._committed_s
        self._committed_s = now_s
        width, rounds = shape
        bucket = self._limits.find_bucket(num_rows * width, num_rows, True, width, rounds)
        round_ms = 0.0 if bucket is None else self._ms.get(bucket, 0.0)
        if before_s is None or not steady or not round_ms:
            return
        rest_ms = max(0.0, (now_s - before_s) * 1000 - round_ms * rounds)
        self._launch_ms += (min(rest_ms, 20 * round_ms) - self._launch_ms) * _LAUNCH_SHARE
