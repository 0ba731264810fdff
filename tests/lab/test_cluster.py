"""Clusters on paper: one replica is the plain simulator, and nobody is lost whatever dies, drains or grows."""

import dataclasses
import random

import pytest

from jaxserve.api import FinishReason, Request, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.lab import SimRequest, StepCost, simulate
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.cluster_values import Apart, Autoscale, Failure, Machine, ScaleTo, Slowdown
from jaxserve.lab.simulation.simulate import FixedCost
from jaxserve.routing import ROUTERS, RouterOptions
from jaxserve.sched.options import SchedulerOptions
from jaxserve.sched.plan import HostSlots
from jaxserve.sched.policies import FcfsPolicy
from jaxserve.testing import make_limits

COST = FixedCost(cost=StepCost(0.001, 0.01))
LIMITS = make_limits(max_rows=8, num_pages=300, page_size=4, max_model_len=128, token_buckets=(16, 64))


def make_trace(count: int, rate: float, *, seed: int = 0, families: int = 0, output_len: int = 12) -> list[SimRequest]:
    rng = random.Random(seed)
    now, trace = 0.0, []
    for i in range(count):
        now += rng.expovariate(rate)
        beginning = [rng.randrange(families)] * 48 if families else []
        request = Request(
            request_id=f"r{i}",
            prompt_token_ids=(*beginning, *[1000 + i] * rng.randint(2, 12)),
            sampling=SamplingParams(temperature=0.0, max_tokens=40),
            max_tokens=40,
            seed=0,
            stop_token_ids=frozenset({7_000_000}),
            arrival_s=now,
        )
        trace.append(SimRequest(request=request, arrival_s=now, output_len=rng.randint(1, 2 * output_len)))
    return trace


def test_one_replica_is_the_plain_simulator() -> None:
    trace = make_trace(200, 30.0)
    alone = simulate("fcfs", trace, COST, LIMITS, keep_steps=True, keep_token_times=True)
    cluster = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1, keep_steps=True, keep_token_times=True)
    assert cluster.total.requests == alone.requests
    assert cluster.replicas[0].steps == alone.steps
    assert cluster.total.num_steps == alone.num_steps
    assert cluster.replica_s == pytest.approx(alone.duration_s)


@pytest.mark.parametrize("router", ROUTERS.names())
def test_every_router_answers_everything(router: str) -> None:
    trace = make_trace(400, 300.0)
    result = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=5, router=router)
    assert sorted(r.request_id for r in result.total.requests) == sorted(t.request.request_id for t in trace)
    assert all(r.finish_reason is FinishReason.STOP for r in result.total.requests)
    assert [s.requests for s in result.replicas] == [
        sum(r.replica == number for r in result.total.requests) for number in range(5)
    ]
    assert min(s.requests for s in result.replicas) > 40


def test_router_sees_what_has_ended_by_the_arrival() -> None:
    # Affinity without any slack: the second request follows the first if that has ended by then.
    (first,) = make_trace(1, 1.0, families=1)
    one = simulate("fcfs", [first], COST, LIMITS).requests[0]
    assert one.last_token_s is not None
    for moment, expected in ((one.last_token_s - 1e-6, 1), (one.last_token_s, 1), (one.last_token_s + 1e-6, 0)):
        request = Request(
            request_id="x",
            prompt_token_ids=first.request.prompt_token_ids,
            sampling=first.request.sampling,
            max_tokens=1,
            seed=0,
            arrival_s=moment,
        )
        late = SimRequest(request=request, arrival_s=moment, output_len=1)
        options = RouterOptions(slack=0)
        result = simulate_cluster(
            "fcfs", [first, late], COST, LIMITS, replicas=2, router="prefix", router_options=options
        )
        assert [r.replica for r in result.total.requests if r.request_id == "x"] == [expected], moment


def test_affinity_finds_cached_beginnings() -> None:
    limits = make_limits(max_rows=8, num_pages=80, page_size=4, max_model_len=128, token_buckets=(16, 64))
    trace = make_trace(600, 60.0, families=20, output_len=4)

    def hits(router: str, slack: int = 8) -> int:
        result = simulate_cluster(
            "fcfs", trace, COST, limits, replicas=4, router=router, router_options=RouterOptions(slack=slack)
        )
        return sum(r.cached_tokens for r in result.total.requests)

    assert hits("prefix") > 1.5 * hits("round_robin")


def test_lost_requests_begin_anew_elsewhere() -> None:
    trace = make_trace(300, 150.0)
    result = simulate_cluster(
        "fcfs",
        trace,
        COST,
        LIMITS,
        replicas=3,
        events=[Failure(at_s=1.0, replica=1, back_s=1.5)],
        keep_token_times=True,
    )
    requests = {r.request_id: r for r in result.total.requests}
    assert len(requests) == len(result.total.requests) == 300
    assert all(r.finish_reason is FinishReason.STOP for r in requests.values())
    restarted = [r for r in requests.values() if r.restarts]
    assert restarted and all(r.replica != 1 for r in restarted if r.last_token_s and r.last_token_s < 1.5)
    assert all(r.admitted_s is not None and r.arrival_s <= r.admitted_s < (r.first_token_s or 0) for r in restarted)
    seen = [r for r in restarted if r.first_token_s is not None and r.first_token_s <= 1.0]
    assert seen, "some had shown a token before"
    for one in requests.values():  # each token once, at the time at which it was seen first
        assert len(one.token_times_s) == one.output_tokens
        assert list(one.token_times_s) == sorted(one.token_times_s)
        assert (one.token_times_s[0], one.token_times_s[-1]) == (one.first_token_s, one.last_token_s)
    assert all(r.first_token_s is not None and r.first_token_s > r.arrival_s for r in restarted)
    assert result.sizes == ((0.0, 3), (1.0, 2), (1.5, 3))
    lives = [s for s in result.replicas if s.number == 1]
    assert [(s.started_s, s.ended_s < 1.6) for s in lives] == [(0.0, True), (1.5, False)]


def test_lost_requests_may_fail() -> None:
    trace = make_trace(300, 150.0)
    result = simulate_cluster(
        "fcfs", trace, COST, LIMITS, replicas=3, events=[Failure(at_s=1.0, replica=1)], restart_lost=False
    )
    failed = [r for r in result.total.requests if r.finish_reason is FinishReason.ERROR]
    assert 0 < len(failed) <= 30 and {r.error for r in failed} == {"replica 1 died"}
    assert len(result.total.requests) == 300


def test_without_any_replica_requests_wait_for_one_or_fail() -> None:
    trace = make_trace(50, 100.0)
    back = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1, events=[Failure(at_s=0.1, replica=0, back_s=9.0)])
    assert all(r.finish_reason is FinishReason.STOP for r in back.total.requests)
    assert max(r.last_token_s or 0.0 for r in back.total.requests) > 9.0
    gone = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1, events=[Failure(at_s=0.1, replica=0)])
    assert len(gone.total.requests) == 50
    assert {r.error for r in gone.total.requests if r.error} == {"no replica was left to run it"}


def test_a_slow_replica_hurts_round_robin_more_than_least_load() -> None:
    trace = make_trace(600, 120.0)
    events = [Slowdown(at_s=0.0, replica=0, factor=8.0)]

    def worst(router: str) -> float:
        result = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=4, router=router, events=events)
        return sorted((r.last_token_s or 0.0) - r.arrival_s for r in result.total.requests)[570]

    assert worst("least_load") < 0.7 * worst("round_robin")


def test_a_slowdown_ends() -> None:
    trace = make_trace(20, 100.0)
    slow = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1, events=[Slowdown(at_s=0, replica=0, factor=3.0)])
    plain = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1)
    short = simulate_cluster(
        "fcfs", trace, COST, LIMITS, replicas=1, events=[Slowdown(at_s=0, replica=0, factor=3.0, until_s=0.1)]
    )
    assert plain.total.duration_s < short.total.duration_s < slow.total.duration_s


def test_scaling_at_given_times() -> None:
    trace = make_trace(900, 150.0)
    events = [ScaleTo(at_s=1.0, replicas=4), ScaleTo(at_s=4.0, replicas=2)]
    result = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=1, router="least_load", events=events)
    assert len(result.total.requests) == 900 and all(not r.error for r in result.total.requests)
    assert result.sizes == ((0.0, 1), (1.0, 4), (4.0, 2))
    drained = [s for s in result.replicas if s.number >= 2]
    assert all(4.0 <= s.ended_s < result.total.duration_s for s in drained)
    assert result.replica_s < 4 * result.total.duration_s


def test_scaling_by_load_follows_a_wave() -> None:
    burst = make_trace(2000, 400.0)
    tail = make_trace(50, 2.0, seed=1)
    moved = []
    for i, t in enumerate(tail):
        at = t.arrival_s + burst[-1].arrival_s
        request = Request(
            request_id=f"tail{i}",
            prompt_token_ids=t.request.prompt_token_ids,
            sampling=t.request.sampling,
            max_tokens=40,
            seed=0,
            stop_token_ids=t.request.stop_token_ids,
            arrival_s=at,
        )
        moved.append(SimRequest(request=request, arrival_s=at, output_len=t.output_len))
    rule = Autoscale(target=6.0, min_replicas=1, max_replicas=10, interval_s=0.25, start_up_s=0.5, down_after_s=2.0)
    result = simulate_cluster("fcfs", burst + moved, COST, LIMITS, replicas=1, router="least_load", autoscale=rule)
    counts = [count for _, count in result.sizes]
    assert len(result.total.requests) == 2050 and all(not r.error for r in result.total.requests)
    assert max(counts) >= 5 and counts[-1] <= 2
    grown = next(at for at, count in result.sizes if count > 1)
    assert grown >= 0.5  # starting takes its time
    cold = [summary for summary in result.replicas if summary.number]
    assert cold and all(one.started_s - one.asked_s == pytest.approx(0.5) for one in cold)  # and is paid for
    assert result.replica_s == pytest.approx(sum(one.ended_s - one.asked_s for one in result.replicas))


def test_replicas_may_be_unlike() -> None:
    trace = make_trace(400, 120.0)
    slow = Machine(
        cost_model=FixedCost(cost=StepCost(0.001, 0.04)),
        limits=make_limits(max_rows=4, num_pages=150, page_size=4, max_model_len=128, token_buckets=(16, 32)),
    )
    done = simulate_cluster(
        "fcfs", trace, COST, LIMITS, replicas=3, router="least_load", unlike={1: slow}, keep_steps=True
    )
    assert all(one.finish_reason is FinishReason.STOP for one in done.total.requests)
    fast, other, _ = done.replicas
    assert {step.device_s for step in other.steps} == {0.04}
    assert (
        max(step.decode_rows + step.chunks for step in other.steps)
        <= 4
        < max(step.decode_rows + step.chunks for step in fast.steps)
    )
    assert 2 * other.requests < fast.requests, "the router sees that it has more to do"
    # A replica that died has its own machine again.
    died = [Failure(at_s=1.0, replica=1, back_s=1.5)]
    again = simulate_cluster(
        "fcfs", trace, COST, LIMITS, replicas=3, unlike={1: slow}, events=died, keep_steps=True
    ).replicas
    assert [{step.device_s for step in life.steps} for life in again if life.number == 1] == [{0.04}, {0.04}]
    alike = Machine(cost_model=COST, limits=LIMITS)
    plain = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=3)
    assert simulate_cluster("fcfs", trace, COST, LIMITS, replicas=3, unlike={2: alike}).total == plain.total
    with pytest.raises(ConfigError, match="numbered to 2"):
        simulate_cluster("fcfs", trace, COST, LIMITS, replicas=3, unlike={3: slow})


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 replicas"):
        simulate_cluster("fcfs", [], COST, LIMITS, replicas=0)
    policy = FcfsPolicy(SchedulerOptions())
    with pytest.raises(ConfigError, match="give its class"):
        simulate_cluster(policy, [], COST, LIMITS, replicas=2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError):
        ScaleTo(at_s=1.0, replicas=0)
    with pytest.raises(ConfigError):
        Slowdown(at_s=0.0, replica=0, factor=0.0)
    with pytest.raises(ConfigError):
        Autoscale(target=0.0, min_replicas=1, max_replicas=2)
    assert Autoscale(target=1e-320, min_replicas=1, max_replicas=2).wanted(5) == 2


SLOTS = dataclasses.replace(LIMITS, slots=HostSlots(200, 32, 32, 0.1, 0.1, 1024))


def test_replicas_that_compute_prompts_for_others() -> None:
    trace = make_trace(300, 60.0, families=20)
    way = Apart(prefill=2, above=20, bandwidth=1e6, latency_s=0.002, token_bytes=256.0)
    result = simulate_cluster("fcfs", trace, COST, SLOTS, replicas=5, apart=way)
    requests = {one.request_id: one for one in result.total.requests}
    assert len(requests) == 300 and all(one.finish_reason is FinishReason.STOP for one in requests.values())
    assert all(one.replica >= 2 for one in requests.values())
    assert sum(summary.requests for summary in result.replicas[:2]) == 300  # all are longer than 20 tokens
    num_full = sum((len(request.request.prompt_token_ids) - 1) // 4 * 4 for request in trace)
    # The scheduler may compute what it has, where it believes that to be faster than loading it.
    assert 0.9 * num_full < sum(one.cached_tokens for one in requests.values()) <= num_full
    together = simulate_cluster("fcfs", trace, COST, SLOTS, replicas=5)
    assert {one.request_id: one.output_tokens for one in together.total.requests} == {
        name: one.output_tokens for name, one in requests.items()
    }


def test_first_tokens_wait_for_the_link() -> None:
    trace = make_trace(60, 5.0)
    way = Apart(prefill=1, above=0, bandwidth=1e4, token_bytes=100.0, wait_s=60.0)
    done = simulate_cluster("fcfs", trace, COST, SLOTS, replicas=2, apart=way).total.requests
    for one in done:  # 10 ms for each token of a full page; a prompt of 4 has none
        sent_s = 0.01 * ((one.prompt_tokens - 1) // 4 * 4)
        assert one.first_token_s is not None and one.first_token_s - one.arrival_s > sent_s
        assert one.last_token_s is not None and one.last_token_s - one.first_token_s < 2.0
    # One that waits no longer than 50 ms computes what has not come by then.
    way = dataclasses.replace(way, wait_s=0.05)
    late = simulate_cluster("fcfs", trace, COST, SLOTS, replicas=2, apart=way).total.requests
    assert 0 < sum(one.cached_tokens for one in late) < sum(one.cached_tokens for one in done)
    assert max(one.cached_tokens for one in late) <= 4  # of 10 ms each, in whole pages of 4
    assert all(one.first_token_s is not None and one.first_token_s - one.arrival_s < 1.0 for one in late)
    with pytest.raises(ConfigError, match="so that none answers"):
        simulate_cluster("fcfs", trace, COST, SLOTS, replicas=1, apart=way)
    with pytest.raises(ConfigError, match="host_bytes"):
        simulate_cluster("fcfs", trace, COST, LIMITS, replicas=2, apart=way)
    other = Machine(cost_model=COST, limits=dataclasses.replace(SLOTS, page_size=8))
    with pytest.raises(ConfigError, match="pages of 4 and 8 tokens"):
        simulate_cluster("fcfs", trace, COST, SLOTS, replicas=2, apart=way, unlike={1: other})
