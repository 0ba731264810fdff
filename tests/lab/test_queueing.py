"""Simulated queues of one row beside queueing theory: random service times, by arrival and by length."""

import math
import statistics

import numpy as np
import pytest

from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.study.figures import interval
from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.sched import Bucket, Limits, SchedulerOptions

STEP_S = 0.01
LOAD, SEEDS, COUNT = 0.7, 8, 600


def waits_of(policy: str, lengths: np.ndarray, seed: int) -> float:
    """The mean wait in seconds before the service of one row; a request of n outputs takes n steps."""
    rng = np.random.default_rng((7, seed))
    drawn = rng.choice(lengths, COUNT)
    times = np.cumsum(rng.exponential(lengths.mean() * STEP_S / LOAD, COUNT))
    shapes = [
        Shape(parts=(Part(k, 1),), output_len=int(n), arrival_s=float(at))
        for k, (at, n) in enumerate(zip(times, drawn, strict=True))
    ]
    cost = FixedCost(cost=StepCost(host_s=0.0, device_s=STEP_S))
    limits = Limits(
        max_rows=1, num_pages=200, page_size=16, max_model_len=2048, buckets=(Bucket(1, 1, True), Bucket(16, 1, False))
    )
    # So many seconds of waiting are worth one level of work, so that waiting changes no order.
    options = SchedulerOptions(lengths="asked", ageing_s=1e9)
    result = simulate(policy, list(sim_requests(shapes, ClientOptions())), cost, limits, options=options)
    counted = [request for request in result.requests if int(request.request_id) >= COUNT // 10]
    return statistics.fmean((request.first_token_s or 0.0) - STEP_S - request.arrival_s for request in counted)


@pytest.mark.parametrize("policy", ["fcfs", pytest.param("sjf", marks=pytest.mark.slow)])
def test_random_service_times_have_the_mean_waits_of_theory(policy: str) -> None:
    """M/G/1 with lognormal service: Pollaczek and Khinchine for the order of arrival, Cobham for the shortest first."""
    draws = np.random.default_rng(3).lognormal(math.log(8) - 0.32, 0.8, 4000)
    lengths = np.maximum(1, draws.round()).astype(int)
    rate = LOAD / (lengths.mean() * STEP_S)
    residual_s = rate * (lengths.astype(float) ** 2).mean() * STEP_S**2 / 2
    if policy == "fcfs":
        expected_s = residual_s / (1 - LOAD)
    else:
        loads = [rate * STEP_S * np.where(lengths <= n, lengths, 0).mean() for n in range(lengths.max() + 1)]
        expected_s = statistics.fmean(residual_s / ((1 - loads[n - 1]) * (1 - loads[n])) for n in lengths.tolist())
    found = interval([waits_of(policy, lengths, seed) for seed in range(SEEDS)], 0.99)
    assert found.half_width is not None
    assert found.half_width < expected_s / 2, "an interval that says something"
    assert abs(found.mean - expected_s) < found.half_width, (found, expected_s)
