"""Nobody is overtaken for ever: the bounds that `priority`, `preemptive`, `sjf` and `slo` state, on random floods."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_trace import run_trace

from jaxserve.api import Request
from jaxserve.sched import SchedulerOptions
from jaxserve.sched.policies import TOKENS_PER_LEVEL, TURNS
from jaxserve.testing import make_limits, make_request

AGEING_S = 2.0
OPTIONS = SchedulerOptions(ageing_s=AGEING_S, lengths="asked", watermark=0.0, growth=0.0)
ONE_ROW = make_limits(max_rows=1, num_pages=400, page_size=4, max_model_len=1200, token_buckets=(1200,))

# (seconds since the one before, prompt, tokens to generate, level)
arrivals = st.lists(
    st.tuples(st.floats(0, 1.5), st.integers(1, 900), st.integers(1, 8), st.integers(-3, 3)), min_size=4, max_size=25
)


def made_from(drawn: list[tuple[float, int, int, int]]) -> list[Request]:
    now_s, requests = 0.0, []
    for number, (gap_s, prompt_len, max_tokens, level) in enumerate(drawn):
        now_s += gap_s
        prompt = [number + 1] * prompt_len
        requests.append(make_request(f"r{number}", prompt, max_tokens, priority=level, arrival_s=now_s))
    return requests


def worth_s(policy: str, request: Request) -> float:
    """What the request is behind by, in seconds of arrival."""
    if policy == "sjf":
        return (len(request.prompt_token_ids) + request.max_tokens) * AGEING_S / TOKENS_PER_LEVEL
    return request.priority * AGEING_S


@settings(max_examples=60, derandomize=True)
@pytest.mark.parametrize("policy", ["priority", "sjf"])
@given(drawn=arrivals)
def test_overtaken_only_by_those_who_come_within_the_bound(policy: str, drawn) -> None:
    """One row: whoever runs before another either has the better key, or was running or alone when the other came."""
    requests = made_from(drawn)
    times = run_trace(policy, ONE_ROW, requests, options=OPTIONS, base_s=0.5)
    for late in requests:
        for early in requests:
            overtook = times[late.request_id].row_s < times[early.request_id].row_s
            waited = early.arrival_s <= times[late.request_id].row_s
            if overtook and waited and late.arrival_s > early.arrival_s:
                head_start_s = worth_s(policy, early) - worth_s(policy, late)
                assert late.arrival_s - early.arrival_s <= head_start_s + 1e-9, (late, early)


@pytest.mark.parametrize("policy", ["priority", "preemptive", "sjf"])
def test_a_flood_cannot_starve_the_one_it_overtakes(policy: str) -> None:
    """Small urgent jobs come faster than they are served. The large patient one ends long before they do."""
    patient = make_request("patient", [1] * 512, 4, priority=4, arrival_s=0.001)
    flood = [make_request(f"r{i}", [i + 2], 4, priority=0, arrival_s=i * 0.03) for i in range(1200)]
    times = run_trace(policy, ONE_ROW, [patient, *flood], options=OPTIONS)
    last_s = max(entry.end_s for entry in times.values())
    # Levels: 4 * 2 s. Work: 511 tokens, 256 for 2 s. And then those that were there before it.
    assert times["patient"].end_s < 25, (times["patient"].end_s, last_s)
    assert last_s > 45
    overtaken = sum(times[f"r{i}"].row_s < times["patient"].row_s for i in range(1200))
    assert overtaken > 2, "a flood that overtakes nobody proves nothing"


def test_without_ageing_the_flood_starves() -> None:
    patient = make_request("patient", [1] * 512, 4, priority=4, arrival_s=0.001)
    flood = [make_request(f"r{i}", [i + 2], 4, priority=0, arrival_s=i * 0.03) for i in range(1200)]
    options = SchedulerOptions(ageing_s=1e6, lengths="asked")
    for policy in ("priority", "sjf"):
        times = run_trace(policy, ONE_ROW, [patient, *flood], options=options)
        assert times["patient"].row_s == max(entry.row_s for entry in times.values())


def test_slo_gives_every_eighth_row_to_the_oldest() -> None:
    hopeless = [make_request(f"old{i}", [1, i], 1, arrival_s=(i + 1) * 1e-4) for i in range(4)]
    flood = [make_request(f"new{i}", [9, i], 1, arrival_s=2.0) for i in range(100)]
    options = SchedulerOptions(ttft_target_s=5.0, watermark=0.0, growth=0.0)
    blocker = make_request("blocker", [5], 400, arrival_s=0.0)
    # The blocker runs for 8 s with a step of 20 ms; by then the first four are hopeless and the flood is not.
    late = [make_request(r.request_id, r.prompt_token_ids, 1, arrival_s=6.0) for r in flood]
    times = run_trace("slo", ONE_ROW, [blocker, *hopeless, *late], options=options, base_s=0.02)
    order = sorted(times, key=lambda name: times[name].row_s)
    places = [order.index(f"old{i}") for i in range(4)]
    assert places == sorted(places)
    assert places[0] > 1, "the hopeless are behind"
    assert all(place <= TURNS * (i + 1) + 1 for i, place in enumerate(places)), places


def test_sjf_runs_short_jobs_first_and_counts_what_is_left() -> None:
    jobs = [make_request(f"j{n}", [n] * n, n, arrival_s=0.0) for n in (30, 5, 12)]
    times = run_trace("sjf", ONE_ROW, jobs, options=OPTIONS)
    assert sorted(times, key=lambda name: times[name].row_s) == ["j5", "j12", "j30"]


def test_sjf_halves_the_mean_time_of_a_mixed_queue() -> None:
    jobs = [make_request(f"j{i}", [i], 200 if i % 4 == 0 else 10, arrival_s=i * 1e-3) for i in range(40)]
    mean_s = {}
    for policy in ("fcfs", "sjf"):
        times = run_trace(policy, ONE_ROW, jobs, options=SchedulerOptions(lengths="asked"))
        mean_s[policy] = sum(entry.end_s - entry.arrival_s for entry in times.values()) / len(times)
    assert mean_s["sjf"] < 0.55 * mean_s["fcfs"], mean_s
