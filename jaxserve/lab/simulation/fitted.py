"""A cost model fitted to a step log, with its error.

It does not extrapolate in silence: a kind of step that the log does not have is an error. (Steps of one token a row are
steps of several, of width 1, where a log with drafts has hardly any of them.)

The model. Seconds of a kind of step (decode alone, decode of several tokens a row, or with prompts) are a sum of a
constant and of features of the step, each with a price of at least 0; a bucket that the log knows well has a factor of
its own, since compilers do not treat all shapes alike. Prices are fitted by non-negative least squares (Lawson and
Hanson, 1974, chapter 23), each step weighted by one over its predicted seconds: errors count in proportion, and the sum
stays right.

The error is that of a fit to four fifths of the steps, on the fifth that it has not seen. The model itself is then
fitted to all. Steps that were not seen are still steps of the same shapes and loads; how far the prices carry to other
ones is told by several logs, each of which is predicted from the others.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.values import StepCost
from jaxserve.sched.draft_counts import DraftCounts
from jaxserve.sched.plan import Bucket, Drafted, Limits, StepPlan
from jaxserve.sched.record import StepRecord, context_tokens, rounds_run

_FEWEST = 10  # steps of a kind
_FEWEST_OF_BUCKET = 8
_HELD_OUT = 5  # one step in this many is held out
_ROUNDS = 4  # of weights that follow from the fit before
_PARTS = ("device", "host", "commit")
_KINDS = ("decode", "wide", "mixed")


def device_features(plan: StepPlan, bucket: Bucket) -> tuple[float, ...]:
    """Rounds, and for each of them padded tokens, padded rows, context tokens read; chunk tokens x their context;
    pictures that are encoded before the step, and their patches."""
    products = sum(len(chunk.token_ids) * (chunk.start + (len(chunk.token_ids) + 1) / 2) for chunk in plan.chunks)
    rounds = plan.rounds
    patches = [encode.num_patches for encode in plan.encodes if not encode.load]
    own = (rounds, rounds * bucket.tokens, rounds * bucket.rows, rounds * context_tokens(plan), products)
    return (*own, len(patches), sum(patches))


def host_features(plan: StepPlan, bucket: Bucket) -> tuple[float, ...]:
    """Constant, rows, chunk tokens, rows that begin: of planning and launching as of the commit."""
    return (1.0, plan.num_rows, sum(len(chunk.token_ids) for chunk in plan.chunks), len(plan.setups))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """Errors of predictions on steps that were held out.

    Attributes:
      steps: held out.
      median, p90: of |predicted - real| / real.
      sum_ratio: predicted seconds of all of them over the real ones.
    """

    steps: int
    median: float
    p90: float
    sum_ratio: float


class _Sample(NamedTuple):
    """The part of a record that is kept: plans of a long log would fill the memory."""

    bucket: Bucket
    features: tuple[float, ...]
    seconds: float


class _Prices:
    """One fitted sum. Immutable."""

    def __init__(self, samples: Sequence[_Sample]) -> None:
        x = np.array([sample.features for sample in samples], dtype=float)
        y = np.array([sample.seconds for sample in samples])
        typical = max(float(np.median(y)), 1e-9)
        weights = np.full(len(y), 1.0 / typical)
        prices = np.zeros(x.shape[1])
        for _ in range(_ROUNDS):
            prices = nonnegative_least_squares(x * weights[:, None], y * weights)
            weights = 1.0 / np.maximum(x @ prices, typical / 100)
        self.prices: tuple[float, ...] = tuple(float(p) for p in prices)
        predicted = x @ prices
        of_bucket: dict[Bucket, list[int]] = {}
        for place, sample in enumerate(samples):
            of_bucket.setdefault(sample.bucket, []).append(place)
        self.factors: dict[Bucket, float] = {
            bucket: float(y[places].sum() / predicted[places].sum())
            for bucket, places in of_bucket.items()
            if len(places) >= _FEWEST_OF_BUCKET and predicted[places].sum() > 0
        }

    def seconds(self, features: tuple[float, ...], bucket: Bucket) -> float:
        return sum(map(operator.mul, self.prices, features)) * self.factors.get(bucket, 1.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Prices of one kind of step."""

    device: _Prices
    host: _Prices
    commit: _Prices


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Taking:
    """The samples of one log: kind -> part -> samples; kind -> device times of steps that nobody waited for; and how
    many steps had pictures to encode."""

    samples: dict[str, dict[str, list[_Sample]]]
    late: dict[str, list[_Sample]]
    num_records: int
    num_encoding: int

    @classmethod
    def of(cls, records: Iterable[StepRecord], skip: int, load_ms: float, drafts: DraftCounts) -> "_Taking":
        samples: dict[str, dict[str, list[_Sample]]] = {kind: {part: [] for part in _PARTS} for kind in _KINDS}
        late: dict[str, list[_Sample]] = {kind: [] for kind in _KINDS}
        count = num_encoding = 0
        for number, record in enumerate(records):
            if number >= skip:
                count += 1
                num_encoding += any(not encode.load for encode in record.plan.encodes)
                kind = _kind(record.plan)
                _take(record, samples[kind], late[kind], load_ms)
                for rounds in _full_rounds(record):
                    drafts.add(rounds)
        return cls(samples=samples, late=late, num_records=count, num_encoding=num_encoding)


class Fitted:
    """A `CostModel`. Immutable after the fit.

    Args:
      logs: records of real steps, in any order; `jaxserve.sched.record.read_records` reads them from a log. Several are
        of one model on the same devices, with other loads, or servers of other shapes.
      skip: number of records left out at the beginning of each, while caches are cold.
      load_ms: of a page from a host slot, in each log; the time of loads is no part of what is fitted (see
        `CostModel`). Empty: 0.

    Attributes:
      errors: 'device', 'host', 'commit' -> 'decode', 'wide' or 'mixed' -> `FitError`.
      left_out: for each log kind -> `FitError` of the device's time, by prices of the other logs alone; a kind that
        these hardly have is not there. Empty with one log.
      num_records: number of records used.
      drafts: what became of drafts in all of them; a place with room for a draft and none counts as a wrong one.

    Raises ConfigError when there are fewer than 10 records of every kind.
    """

    def __init__(self, *logs: Iterable[StepRecord], skip: int = 0, load_ms: Sequence[float] = ()) -> None:
        drafts = DraftCounts()
        takings = [
            _Taking.of(log, skip, load, drafts) for log, load in zip(logs, load_ms or (0.0,) * len(logs), strict=True)
        ]
        self.num_records = sum(taking.num_records for taking in takings)
        self._num_encoding = sum(taking.num_encoding for taking in takings)
        self.drafts = drafts.totals()
        self.errors: dict[str, dict[str, FitError]] = {part: {} for part in _PARTS}
        self._counts = {kind: sum(len(taking.samples[kind]["host"]) for taking in takings) for kind in _KINDS}
        self._kinds: dict[str, _Kind] = {}
        for kind in _KINDS:
            if self._counts[kind] < _FEWEST:
                continue
            parts = _parts(takings, kind)
            self._kinds[kind] = _Kind(**{part: _Prices(parts[part]) for part in _PARTS})
            for part in _PARTS:
                trained = _Prices([sample for i, sample in enumerate(parts[part]) if i % _HELD_OUT])
                self.errors[part][kind] = _error(trained, parts[part][::_HELD_OUT])
        self.left_out = [_left_out(takings, number) for number in range(len(takings))] if len(takings) > 1 else []
        if not self._kinds:
            raise ConfigError(
                f"{self.num_records} step records are too few to learn from: a kind of step needs {_FEWEST}; "
                "record a longer run"
            )

    def step_seconds(self, plan: StepPlan, bucket: Bucket) -> StepCost:
        """See `CostModel`. Raises ConfigError for a kind of step that the records hardly have.

        A step of one token a row counts as a wide one of that width where there are hardly any: an engine with drafts
        has such steps for rows at the end of their room.
        """
        name = _kind(plan)
        kind = self._kinds.get(name)
        if kind is None and name == "decode":
            kind = self._kinds.get("wide")
        if kind is None:
            raise ConfigError(
                f"the step log has {self._counts[name]} {name} steps, and {_FEWEST} are needed to say what one takes; "
                "record a run that has them"
            )
        if self._num_encoding < _FEWEST and any(not encode.load for encode in plan.encodes):
            raise ConfigError(
                f"the step log has {self._num_encoding} steps that encode pictures, and {_FEWEST} are needed to say "
                "what a picture takes; record a run that has them"
            )
        of_host = host_features(plan, bucket)
        return StepCost(
            kind.host.seconds(of_host, bucket),
            kind.device.seconds(device_features(plan, bucket), bucket),
            kind.commit.seconds(of_host, bucket),
        )

    def step_ms(self, limits: Limits) -> Limits:
        """The limits with the time of a round of each decode bucket, for the choice among them: as the device measured
        it, else without context as fitted to steps of its kind, or to those of the other where there are none."""
        measured = dict(zip(limits.buckets, limits.step_ms, strict=False))
        times = {}
        for bucket in limits.buckets:
            names = ("decode", "wide") if bucket.plain else ("wide", "decode")
            kind = next((self._kinds[name] for name in names if name in self._kinds), None)
            if bucket.decode_only and kind is not None:
                fitted_s = kind.device.seconds((1.0, bucket.tokens, bucket.rows, 0.0, 0.0), bucket)
                times[bucket] = measured.get(bucket) or 1e3 * fitted_s
        return limits.with_buckets(limits.buckets, times)

    def knows(self, kind: str) -> bool:
        """Whether the records have enough steps of a kind: 'decode', 'wide' or 'mixed'."""
        return kind in self._kinds

    def prices(self, part: str, kind: str) -> tuple[float, ...]:
        """Seconds of each feature, in the order of `device_features` or `host_features`, for inspection."""
        found: _Prices = getattr(self._kinds[kind], part)
        return found.prices


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes |a x - b| least. a: [rows, columns], b: [rows]."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    columns = a.shape[1]
    x, free = np.zeros(columns), np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(a.T @ b).max(initial=0.0)))
    for _ in range(3 * columns):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        if gradient.max(initial=-np.inf) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(columns)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            step = float(np.min(x[low] / np.maximum(x[low] - trial[low], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-12 * max(1.0, float(np.abs(x).max()))
            x[~free] = 0.0
            if not free.any():
                trial = x
                break
        x = trial
    return x / scale


def _parts(takings: Sequence[_Taking], kind: str) -> dict[str, list[_Sample]]:
    """The samples of all logs, by part. Times that nobody waited for count where there are hardly any others."""
    parts = {part: [sample for taking in takings for sample in taking.samples[kind][part]] for part in _PARTS}
    if len(parts["device"]) < _FEWEST:
        parts["device"] += [sample for taking in takings for sample in taking.late[kind]]
    return parts


def _left_out(takings: Sequence[_Taking], number: int) -> dict[str, FitError]:
    """By kind: the error on one log of prices that were fitted to the others."""
    others = [taking for place, taking in enumerate(takings) if place != number]
    errors = {}
    for kind in _KINDS:
        trained, own = (_parts(some, kind)["device"] for some in (others, [takings[number]]))
        if len(trained) >= _FEWEST and own:
            errors[kind] = _error(_Prices(trained), own)
    return errors


def _kind(plan: StepPlan) -> str:
    if plan.row_tokens:
        return "wide"
    return "decode" if plan.decode_only else "mixed"


def _take(record: StepRecord, parts: dict[str, list[_Sample]], late: list[_Sample], load_ms: float) -> None:
    """Adds a record's times to the samples of each part of a step."""
    plan, bucket = record.plan, record.bucket
    if plan.rounds > 1:
        plan = dataclasses.replace(plan, rounds=rounds_run(record))
    of_host = host_features(plan, bucket)
    parts["host"].append(_Sample(bucket, of_host, (record.schedule_ms + record.pack_ms) / 1e3))
    parts["commit"].append(_Sample(bucket, of_host, record.commit_ms / 1e3))
    # Where the host never waited, the device was done before the host checked: its time is not known.
    waited = record.wait_ms > 0.01 * record.device_ms
    device_ms = max(0.0, record.device_ms - len(plan.loads) * load_ms)
    of_device = _Sample(bucket, device_features(plan, bucket), device_ms / 1e3)
    (parts["device"] if waited else late).append(of_device)


def _full_rounds(record: StepRecord) -> Iterator[list[Drafted]]:
    """The rounds of each row, as if its drafter had filled all places that there were."""
    plan = record.plan
    for rounds, room in zip(record.drafts or (), plan.row_tokens, strict=False):
        full: list[Drafted] = []
        for _, accepted in rounds:
            full.append(Drafted(min(plan.width, room) - 1, accepted))
            room -= accepted + 1
        yield full


def _error(prices: _Prices, held_out: Sequence[_Sample]) -> FitError:
    real = np.array([sample.seconds for sample in held_out])
    predicted = np.array([prices.seconds(sample.features, sample.bucket) for sample in held_out])
    off = np.abs(predicted - real) / np.maximum(real, 1e-9)
    return FitError(
        steps=len(held_out),
        median=float(np.median(off)),
        p90=float(np.percentile(off, 90)),
        sum_ratio=float(predicted.sum() / max(real.sum(), 1e-9)),
    )
