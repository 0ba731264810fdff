"""The slo policy: more requests in time than first come, first served, and the parts it is made of."""

import dataclasses
import random

import pytest
from policy_trace import Times, run_trace

from jaxserve.api import Request
from jaxserve.errors import ConfigError
from jaxserve.sched import Bucket, Limits, SchedulerOptions, create_scheduler
from jaxserve.sched.policies import SloPolicy, StepTimes
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

LIMITS = Limits(
    max_rows=32,
    num_pages=8192,
    page_size=16,
    max_model_len=4096,
    buckets=(Bucket(32, 32, True), *(Bucket(n, 32, False) for n in (32, 64, 128, 256, 512, 1024, 2048))),
)
OPTIONS = SchedulerOptions(ttft_target_s=0.5, tpot_target_s=0.05)
FACTOR = 2.0  # that slo must be better by, in requests in time, when more comes than fits


def mixed_trace(seed: int, *, load: float, num_requests: int = 400) -> list[Request]:
    """Chats with tight targets, and one in eight a document that nobody waits for. `load` 1 is about what fits."""
    rng = random.Random(seed)
    now_s, made = 0.0, []
    for i in range(num_requests):
        now_s += rng.expovariate(load * 12.0)
        if i % 8 == 0:
            request = make_request(f"d{i}", [i, *range(rng.randint(1500, 3500))], 40, arrival_s=now_s)
            made.append(dataclasses.replace(request, ttft_target_s=30.0, tpot_target_s=0.25))
        else:
            made.append(make_request(f"c{i}", [i, *range(rng.randint(30, 200))], rng.randint(10, 40), arrival_s=now_s))
    return made


def goodput(requests: list[Request], times: dict[str, Times]) -> float:
    """The share of requests whose first token and all after it were in time."""
    num_good = 0
    for request in requests:
        ttft_s = OPTIONS.ttft_target_s if request.ttft_target_s is None else request.ttft_target_s
        tpot_s = OPTIONS.tpot_target_s if request.tpot_target_s is None else request.tpot_target_s
        entry = times[request.request_id]
        num_good += entry.ttft_s <= ttft_s and entry.tpot_s <= tpot_s
    return num_good / len(requests)


@pytest.mark.parametrize(("seed", "load"), [(0, 1.6), (1, 1.6), (2, 1.6), (3, 2.0)])
def test_more_are_in_time_than_with_fcfs(seed: int, load: float) -> None:
    requests = mixed_trace(seed, load=load)
    good = {
        policy: goodput(requests, run_trace(policy, LIMITS, requests, options=OPTIONS, per_token_s=1.2e-4))
        for policy in ("fcfs", "slo")
    }
    assert good["slo"] > 0.6, good
    assert good["slo"] >= FACTOR * good["fcfs"], good


def test_nobody_loses_where_there_is_time_for_all() -> None:
    requests = mixed_trace(0, load=0.1, num_requests=100)
    times = run_trace("slo", LIMITS, requests, options=OPTIONS, per_token_s=1.2e-4)
    assert goodput(requests, times) == 1.0


def test_a_request_brings_its_own_target() -> None:
    limits = make_limits(max_rows=1)
    patient = make_request("patient", [1], 2, arrival_s=0.0)
    hurried = dataclasses.replace(make_request("hurried", [2], 2, arrival_s=0.1), ttft_target_s=0.2)
    runner = FakeRunner(limits)
    drive(create_scheduler("slo", limits, clock=ManualClock()), runner, [patient, hurried])
    assert [s.request_id for p in runner.plans for s in p.setups] == ["hurried", "patient"]


def test_prompts_leave_time_for_those_who_stream() -> None:
    """With a step of 10 ms and 0.1 ms a token, a target of 50 ms leaves 400 tokens, less the rows that decode."""
    chats = [make_request(f"c{i}", [i, 1, 2], 40, arrival_s=0.0) for i in range(10)]
    flood = [make_request(f"d{i}", [i, *range(2000)], 2, arrival_s=0.15) for i in range(16)]
    worst = {}
    for policy in ("fcfs", "slo"):
        times = run_trace(policy, LIMITS, [*chats, *flood], options=OPTIONS, per_token_s=1e-4)
        worst[policy] = max(times[f"c{i}"].tpot_s for i in range(10))
    assert worst["slo"] < 0.05 and worst["fcfs"] > 0.075, worst


def test_budget_of_prompts() -> None:
    policy = SloPolicy(OPTIONS)
    scheduler = create_scheduler(policy, LIMITS, clock=ManualClock())
    drive(scheduler, FakeRunner(LIMITS), [make_request("r", [1, 2], 3)])
    scheduler.add(make_request("s", [1, 2], 3))
    scheduler.schedule()
    (seq,) = scheduler._running
    policy.step_times = StepTimes()
    assert policy.prefill_budget([seq]) is None, "nothing is known yet"
    for i in range(20):
        policy.step_times.add(10 * i, 0.01 + 10 * i * 1e-3)
    assert policy.prefill_budget([]) is None
    assert policy.prefill_budget([seq]) in (38, 39)
    policy.options = dataclasses.replace(OPTIONS, tpot_target_s=0.013)
    assert policy.prefill_budget([seq]) == 16, "less is mostly overhead"
    policy.options = dataclasses.replace(OPTIONS, tpot_target_s=0.005)
    assert policy.prefill_budget([seq]) is None, "cannot be met without prompts either"


def test_step_times_find_the_line_and_forget() -> None:
    times = StepTimes()
    for _ in range(50):
        times.add(64, 0.02)
    assert not times.known, "one size says nothing about another"
    for i in range(100):
        times.add(i, 0.01 + i * 1e-4)
    assert times.known
    for i in range(2000):
        times.add(i % 100, 0.03 + (i % 100) * 2e-4)
    assert times.base_s == pytest.approx(0.03, rel=1e-3)
    assert times.per_token_s == pytest.approx(2e-4, rel=1e-3)


@pytest.mark.parametrize("name", ["ttft_target_s", "tpot_target_s", "input_weight", "output_weight"])
def test_options_have_bounds(name: str) -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"sched.{name} is"):
            SchedulerOptions(**{name: value})
