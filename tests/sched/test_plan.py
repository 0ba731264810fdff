"""Plans are values: they survive JSON, and what a log holds can be replayed."""

from jaxserve.api import SamplingParams
from jaxserve.sched import StepPlan, create_scheduler
from jaxserve.testing import FakeRunner, drive, make_limits, make_request


def test_a_log_of_plans_replays_to_the_same_tokens():
    limits = make_limits(max_rows=3, num_pages=24, page_size=2, max_model_len=30)
    runner = FakeRunner(limits, mode="context")
    sampling = SamplingParams(n=2, max_tokens=10, logit_bias={3: 1.5}, logprobs=1, prompt_logprobs=1, stop=["x"])
    requests = [make_request(f"r{i}", [i, 1, 2, 3, 4, 5], 10, sampling=sampling, stop=[7]) for i in range(4)]
    first = drive(create_scheduler("fcfs", limits), runner, requests)
    log = [plan.to_json() for plan in runner.plans]
    assert all("\n" not in line for line in log)
    assert any(p.copies for p in runner.plans)
    again = FakeRunner(limits, mode="context")
    results = [again.dispatch(StepPlan.from_json(line)).result() for line in log]
    assert again.plans == runner.plans
    seen = {token for result in results for token in result.token_ids}
    assert {token for o in first.values() for token in o.token_ids} <= seen
