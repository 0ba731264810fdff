"""The figures of one simulated run in a study, and means with intervals over its seeds.

Beside the metrics of `workloads.metrics`, over the requests behind the warm-up:

    good_share   of all requests, those that keep every target; a failed one is not good
    jain         Jain's index over tenants of the mean time for each output token: 1 is equal for all, 1/n the least
    qoe          quality of experience after Andes (Liu et al., 2024), mean over requests; see `experience`
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from jaxserve.lab.simulation.fairness import fairness
from jaxserve.lab.simulation.results import outcome_of
from jaxserve.lab.simulation.values import SimulatedRequest, SimulationResult
from jaxserve.lab.study.spec import Targets
from jaxserve.lab.workloads.metrics import compute_metrics, request_times

_LEAST_S = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over seeds, and half the width of its interval of confidence: None with fewer than two values."""

    mean: float
    half_width: float | None


def run_figures(result: SimulationResult, warmup: float, targets: Targets, replica_s: float) -> dict[str, Any]:
    """One row of the frame. `warmup`: the share of the requests, by arrival, that is left out. `replica_s`: seconds
    that replicas existed, summed.

    None stands for what the run cannot have: times without an answer, `jain` with one tenant, `qoe` without targets of
    TTFT and TPOT, or without times of tokens.
    """
    by_arrival = sorted(result.requests, key=lambda request: request.arrival_s)
    counted = by_arrival[int(len(by_arrival) * warmup) :]
    outcomes = [outcome_of(request) for request in counted]
    end_s = max((outcome.end_s for outcome in outcomes), default=0.0)
    begin_s = counted[0].arrival_s if counted else 0.0
    goodput = targets.goodput()
    metrics = compute_metrics(
        outcomes, max(end_s - begin_s, _LEAST_S), goodput=goodput, percentiles=(90, 99), every_output=False
    )
    answered = [request_times(outcome) for outcome in outcomes if outcome.failure is None]
    queue_s = [request.admitted_s - request.arrival_s for request in counted if request.admitted_s is not None]
    left_out = ("failures", "total_drafted_tokens", "total_accepted_tokens", "tokens_per_round", "num_uncounted")
    row = {
        name: value
        for name, value in metrics.as_json().items()
        if name not in left_out and not name.endswith("itl_ms") and name != "max_output_tokens_per_s"
    }
    return row | {
        "good_share": None if goodput is None else sum(map(goodput.keeps, answered)) / max(len(counted), 1),
        "mean_queue_ms": statistics.fmean(queue_s) * 1e3 if queue_s else None,
        "preemptions": sum(request.preemptions for request in counted),
        "busy_share": result.device_s / max(replica_s, _LEAST_S),
        "replica_seconds": replica_s,
        "jain": fairness(counted),
        "qoe": _mean_experience(counted, targets),
    }


def distributions(result: SimulationResult, warmup: float) -> dict[str, list[float]]:
    """TTFT and TPOT of every counted answer in milliseconds, for the pictures."""
    by_arrival = sorted(result.requests, key=lambda request: request.arrival_s)
    outcomes = [outcome_of(request) for request in by_arrival[int(len(by_arrival) * warmup) :]]
    times = [request_times(outcome) for outcome in outcomes if outcome.failure is None]
    return {
        "ttft_ms": [one.ttft_s * 1e3 for one in times],
        "tpot_ms": [one.tpot_s * 1e3 for one in times if one.tpot_s is not None],
    }


def experience(delivered_s: Sequence[float], ttft_s: float, tpot_s: float) -> float:
    """Quality of experience of one answer, between 0 and 1.

    A user wants the first token after `ttft_s`, and reads one each `tpot_s`. A token is read when it is there and the
    one before it was read. The quality is the area under the count of tokens read, over that of the wanted ones, both
    until the last token is read. `delivered_s`: seconds from the request to each token.
    """
    assert delivered_s, "an answer has tokens"
    read_s: list[float] = []
    for time_s in delivered_s:
        read_s.append(max(time_s, read_s[-1] + tpot_s) if read_s else max(time_s, ttft_s))
    end_s = read_s[-1]
    got = sum(end_s - time_s for time_s in read_s)
    wanted = sum(max(0.0, end_s - (ttft_s + number * tpot_s)) for number in range(len(read_s)))
    return min(1.0, got / wanted) if wanted > _LEAST_S else 1.0


def interval(values: Sequence[float], confidence: float) -> Interval:
    """The mean, with Student's t for the few seeds that a study has."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, half_width=None)
    from scipy import stats  # a third of a second

    factor = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1))
    return Interval(mean=mean, half_width=factor * statistics.stdev(values) / math.sqrt(len(values)))


def _mean_experience(requests: Sequence[SimulatedRequest], targets: Targets) -> float | None:
    if targets.ttft is None or targets.tpot is None:
        return None
    ttft_s, tpot_s = targets.ttft / 1e3, targets.tpot / 1e3
    found = [
        experience([time_s - one.arrival_s for time_s in one.token_times_s], ttft_s, tpot_s)
        for one in requests
        if one.token_times_s
    ]
    return statistics.fmean(found) if found else None
