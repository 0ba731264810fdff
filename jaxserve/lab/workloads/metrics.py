"""Metrics of a run, as functions of the outcomes of its requests.

TTFT, ITL, TPOT, E2EL, throughput and goodput are defined as in vLLM's `bench serve`.

    TTFT   first output - start
    ITL    each gap between two outputs that follow each other, of all requests together
    TPOT   (E2EL - TTFT) / (output tokens - 1), of requests with more than one token
    E2EL   last output - start

Failed requests count nowhere but under failures. With several tokens in a piece of output (speculation, or a server
that bundles), ITL is a time between pieces, and TPOT stays a time for a token.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.outcome import Outcome

_GOODPUT_NAMES = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Limits, in milliseconds, all of which a good request keeps; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> "Goodput | None":
        """From ('ttft:200', 'tpot:50'); None for none. Raises ConfigError."""
        limits: dict[str, float] = {}
        for pair in pairs:
            name, _, value = pair.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = -1.0
            if name not in _GOODPUT_NAMES or not 0 < limit < math.inf or name in limits:
                raise ConfigError(
                    f"--goodput {pair!r}: write NAME:MILLISECONDS, each name once, of {', '.join(_GOODPUT_NAMES)}"
                )
            limits[name] = limit
        return cls(**{f"{name}_ms": limit for name, limit in limits.items()}) if limits else None

    def keeps(self, request: "RequestTimes") -> bool:
        """A request of one token has no TPOT and keeps any limit of it."""
        measured = (
            (self.ttft_ms, request.ttft_s),
            (self.tpot_ms, request.tpot_s or 0.0),
            (self.e2el_ms, request.e2el_s),
        )
        return all(limit is None or seconds * 1e3 <= limit for limit, seconds in measured)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """One answered request, in seconds. `tpot_s` is None with one token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    itls_s: tuple[float, ...]
    output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution in milliseconds. `std` is that of the population; None everywhere when there is no value."""

    count: int
    mean: float | None
    median: float | None
    std: float | None
    percentiles: Mapping[float, float | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """All figures of one run.

    Attributes:
      duration_s: from the start of the load until the last request ended.
      failures: how many of each kind.
      cached_tokens: of the prompts; None when the server did not report them.
      drafted_tokens, accepted_tokens: drafts of the server, and output tokens that were drafts; None when it reported
        none.
      request_goodput: requests a second that keep every limit; None without limits.
      max_output_tokens_per_s: pieces of output in the best second, counted from the first start; None when the times
        of single pieces are unknown, and then there are no ITLs either.
      max_concurrency: answered requests that were open at once.
      num_short: answers of fewer tokens than were requested.
      num_uncounted: answers whose tokens the server did not count; their pieces of output are taken instead.
    """

    duration_s: float
    completed: int
    failed: int
    failures: Mapping[str, int]
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    drafted_tokens: int | None
    accepted_tokens: int | None
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2el_ms: Spread
    max_output_tokens_per_s: float | None
    max_concurrency: int
    num_short: int
    num_uncounted: int

    @property
    def tokens_per_round(self) -> float | None:
        """Output tokens of each forward pass that a sequence took part in: each gives one token that is no draft."""
        if self.accepted_tokens is None or self.output_tokens <= self.accepted_tokens:
            return None
        return self.output_tokens / (self.output_tokens - self.accepted_tokens)

    def as_json(self) -> dict[str, Any]:
        """Plain values, under the names of vLLM's result files where it has them."""
        tree: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "failures": dict(self.failures),
            "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_drafted_tokens": self.drafted_tokens,
            "total_accepted_tokens": self.accepted_tokens,
            "tokens_per_round": self.tokens_per_round,
            "request_throughput": self.request_throughput,
            "request_goodput": self.request_goodput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrency,
            "num_short": self.num_short,
            "num_uncounted": self.num_uncounted,
        }
        for name in ("ttft", "tpot", "itl", "e2el"):
            spread: Spread = getattr(self, f"{name}_ms")
            tree |= {f"{kind}_{name}_ms": getattr(spread, kind) for kind in ("mean", "median", "std")}
            tree |= {f"p{percent:g}_{name}_ms": value for percent, value in spread.percentiles.items()}
        return tree


def check_percentiles(percentiles: Sequence[float]) -> None:
    """Raises ConfigError for a number that is no percentile."""
    if any(not 0 < percent < 100 for percent in percentiles):
        raise ConfigError(f"percentiles are between 0 and 100, got {list(percentiles)}")


def request_times(outcome: Outcome) -> RequestTimes:
    """The figures of one answered request."""
    assert outcome.failure is None, outcome
    assert outcome.output_times_s, "an answer has output"
    times = outcome.output_times_s
    ttft_s, e2el_s = times[0] - outcome.start_s, times[-1] - outcome.start_s
    tokens = outcome.output_tokens or len(times)
    return RequestTimes(
        ttft_s=ttft_s,
        e2el_s=e2el_s,
        tpot_s=(e2el_s - ttft_s) / (tokens - 1) if tokens > 1 else None,
        itls_s=tuple(b - a for a, b in itertools.pairwise(times)),
        output_tokens=tokens,
    )


def compute_metrics(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    goodput: Goodput | None,
    percentiles: Sequence[float],
    every_output: bool = True,
) -> Metrics:
    """All figures of a run that took `duration_s` seconds.

    `every_output` False: outcomes have the times of their first and last output only.
    """
    answered = [o for o in outcomes if o.failure is None]
    requests = [request_times(o) for o in answered]
    input_tokens = sum(o.prompt_tokens for o in answered)
    output_tokens = sum(r.output_tokens for r in requests)
    cached = [o.cached_tokens for o in answered if o.cached_tokens is not None]
    return Metrics(
        duration_s=duration_s,
        completed=len(answered),
        failed=len(outcomes) - len(answered),
        failures=dict(collections.Counter(o.failure for o in outcomes if o.failure is not None).most_common()),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        drafted_tokens=sum(o.drafted_tokens or 0 for o in answered) or None,
        accepted_tokens=sum(o.accepted_tokens or 0 for o in answered)
        if any(o.drafted_tokens for o in answered)
        else None,
        request_throughput=len(answered) / duration_s,
        request_goodput=None if goodput is None else sum(map(goodput.keeps, requests)) / duration_s,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        ttft_ms=spread_ms([r.ttft_s for r in requests], percentiles),
        tpot_ms=spread_ms([r.tpot_s for r in requests if r.tpot_s is not None], percentiles),
        itl_ms=spread_ms([itl for r in requests for itl in r.itls_s] if every_output else [], percentiles),
        e2el_ms=spread_ms([r.e2el_s for r in requests], percentiles),
        max_output_tokens_per_s=_best_second(answered) if every_output else None,
        max_concurrency=_most_open(answered),
        num_short=sum(r.output_tokens < o.asked_tokens for o, r in zip(answered, requests, strict=True)),
        num_uncounted=sum(not o.output_tokens for o in answered),
    )


def spread_ms(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
    """Mean, median, deviation and percentiles (linear between two values), in milliseconds."""
    if not seconds:
        return Spread(count=0, mean=None, median=None, std=None, percentiles=dict.fromkeys(percentiles))
    values = np.asarray(seconds) * 1e3
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        median=float(np.median(values)),
        std=float(values.std()),
        percentiles={percent: float(np.percentile(values, percent)) for percent in percentiles},
    )


def _best_second(answered: Sequence[Outcome]) -> float:
    if not answered:
        return 0.0
    first_s = min(o.start_s for o in answered)
    seconds = np.array([int(t - first_s) for o in answered for t in o.output_times_s])
    return float(np.bincount(seconds).max())


def _most_open(answered: Sequence[Outcome]) -> int:
    """The most requests open at once. One that ends as another begins leaves its place to it."""
    edges = sorted([(o.start_s, 1) for o in answered] + [(o.output_times_s[-1], -1) for o in answered])
    best = now = 0
    for _, change in edges:
        now += change
        best = max(best, now)
    return best
