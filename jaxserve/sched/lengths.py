"""Predictors of output length, used by the projection of page growth (`headroom`) and by the policy `sjf`.

There are two: one takes the limit of the request, the other learns from outputs that ended before. A predictor that
reads prompts would be a class from elsewhere with the same two methods.

Learning pays because clients ask for far more tokens than they get (null means all the context): a cache planned by
their limits stays half empty, and a cache planned without any prediction preempts.
"""

from typing import Protocol

from jaxserve.errors import ConfigError
from jaxserve.sched.state import Sequence
from jaxserve.values.registry import Registry

DEFAULT_LENGTHS = "learned"
"""The name of the predictor that a scheduler has unless another is named."""
_MIN_SAMPLES = 8  # of one class, before its past says more than the request does
_MEMORY = 512  # samples of one class after which all of them count half
_NUM_BUCKETS = 32


class LengthPredictor(Protocol):
    """Guesses numbers of generated tokens. Called from the scheduler's thread, often: each call must be short."""

    def expected_len(self, seq: Sequence) -> int:
        """Tokens that `seq` will have generated at its end: more than it has, at most what it may have."""
        ...

    def learn(self, seq: Sequence) -> None:
        """`seq` came to its own end, by a stop or by its limit."""
        ...


def max_output_len(seq: Sequence) -> int:
    """Tokens that `seq` may generate at most."""
    return seq.max_fed + 1 - seq.prompt_len


class AskedLengths:
    """Every output is as long as its limit: right where outputs are cut by `max_tokens`, too long elsewhere."""

    def expected_len(self, seq: Sequence) -> int:
        """The limit of the request."""
        return max_output_len(seq)

    def learn(self, seq: Sequence) -> None:
        """Nothing to learn."""


class _Past:
    """Lengths that ended, by powers of two. `means[b]` is the mean of those of 2**(b-1) tokens or more."""

    __slots__ = ("counts", "means", "sums", "total")

    def __init__(self) -> None:
        self.counts = [0.0] * _NUM_BUCKETS
        self.sums = [0.0] * _NUM_BUCKETS
        self.means: list[float] = []
        self.total = 0.0

    def add(self, length: int) -> None:
        bucket = min(length.bit_length(), _NUM_BUCKETS - 1)
        if self.total >= _MEMORY:
            self.counts = [count / 2 for count in self.counts]
            self.sums = [value / 2 for value in self.sums]
            self.total /= 2
        self.counts[bucket] += 1
        self.sums[bucket] += length
        self.total += 1
        self.means = []

    def mean_from(self, bucket: int) -> float:
        """The mean of lengths in this bucket and above; 0 when there were none."""
        if not self.means:
            count = value = 0.0
            means = []
            for more, length in zip(reversed(self.counts), reversed(self.sums), strict=True):
                count, value = count + more, value + length
                means.append(value / count if count else 0.0)
            self.means = means[::-1]
        return self.means[min(bucket, _NUM_BUCKETS - 1)]


class LearnedLengths:
    """The mean length of ended requests that asked for about as much, and had got about as far.

    Requests are told apart by the power of two below their limit. Until enough of a class have ended, the limit itself
    is what is expected. A sequence that outlives all examples is expected to go on to its limit.
    """

    def __init__(self) -> None:
        self._pasts: dict[int, _Past] = {}

    def expected_len(self, seq: Sequence) -> int:
        """See the class; at least one more than `seq` has."""
        limit = seq.max_fed + 1 - seq.prompt_len
        past = self._pasts.get(limit.bit_length())
        if past is None or past.total < _MIN_SAMPLES:
            return limit
        num_outputs = len(seq.tokens) - seq.prompt_len
        mean = past.mean_from(num_outputs.bit_length())
        return min(limit, max(num_outputs + 1, round(mean))) if mean else limit

    def learn(self, seq: Sequence) -> None:
        """Takes the length of an output into account."""
        self._pasts.setdefault(max_output_len(seq).bit_length(), _Past()).add(seq.num_outputs)


LENGTHS: Registry[LengthPredictor | type[LengthPredictor]] = Registry(
    "length predictor",
    "jaxserve.length_predictors",
    {DEFAULT_LENGTHS: "jaxserve.sched.lengths:LearnedLengths", "asked": "jaxserve.sched.lengths:AskedLengths"},
)
"""What `sched.lengths` can name: the two of this module, and the entry points of `jaxserve.length_predictors`."""


def create_lengths(choice: str | LengthPredictor | type[LengthPredictor]) -> LengthPredictor:
    """The predictor of this name, path or class, or the object itself. Raises ConfigError."""
    found = LENGTHS.get(choice)
    made = found() if isinstance(found, type) else found
    missing = [name for name in ("expected_len", "learn") if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"the length predictor {choice!r:.120} gives a {type(made).__name__} without {' and '.join(missing)}"
        )
    return made
