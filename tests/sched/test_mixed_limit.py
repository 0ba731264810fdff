"""The limit on steps in which prompts stand beside rows that decode."""

import dataclasses

import pytest

from jaxserve.config import for_batches, load_config
from jaxserve.errors import ConfigError
from jaxserve.lab import world_of_device
from jaxserve.sched import ContinuousScheduler, Policy, SchedulerOptions, create_scheduler
from jaxserve.sched.budget import StepBudget
from jaxserve.sched.policies import FcfsPolicy
from jaxserve.testing import FakeRunner, make_limits, make_request


def run(limit: int | None, policy: str | type[Policy] = "fcfs", long: int = 60, **options):
    """Three short requests, and one long prompt that comes when they decode. Returns outputs and plans."""
    limits = make_limits(max_rows=4, num_pages=64, page_size=4, max_model_len=128, token_buckets=(8, 16, 32))
    runner = FakeRunner(dataclasses.replace(limits, max_mixed_tokens=limit), mode="context")
    scheduler = create_scheduler(policy, runner.limits, options=SchedulerOptions(**options))
    assert isinstance(scheduler, ContinuousScheduler)

    tokens: dict[str, list[int]] = {}
    for i in range(3):
        scheduler.add(make_request(f"s{i}", range(i, i + 5), 40))
    while scheduler.has_work():
        if runner.num_steps == 4:
            scheduler.add(make_request("long", range(100, 100 + long), 4))
        plan = scheduler.schedule()
        assert plan is not None
        for event in scheduler.commit(plan, runner.dispatch(plan).result()):
            tokens.setdefault(event.request_id, []).append(event.token_id)
    scheduler.check()
    assert len(tokens["long"]) == 4
    return tokens, runner.plans


def mixed_sizes(plans) -> list[int]:
    return [plan.num_tokens for plan in plans if plan.decode_rows and plan.chunks]


def test_mixed_steps_end_at_the_edge_of_the_limit_and_prompts_alone_do_not() -> None:
    free, plans = run(None)
    assert max(mixed_sizes(plans)) == 32
    for limit, size in ((8, 8), (15, 8), (16, 16), (1000, 32)):
        limited, plans = run(limit)
        assert max(mixed_sizes(plans)) == size, limit
        assert plans[0].num_tokens == 15 and not plans[0].decode_rows, "nobody decodes yet"
        assert limited == free, "no token depends on how a prompt is cut"


@pytest.mark.parametrize(
    ("decoding", "beside"), [(0, None), (1, 7), (6, 2), (7, 9), (8, 8), (15, 17), (16, 16), (31, 1)]
)
def test_a_quarter_of_a_step_is_left_where_a_bucket_allows_it(decoding: int, beside: int | None) -> None:
    limits = make_limits(max_rows=32, token_buckets=(8, 16, 32), mixed_rows={8: 8, 16: 16, 32: 32})
    assert StepBudget(dataclasses.replace(limits, max_mixed_tokens=8)).max_prefill_beside(decoding) == beside
    assert StepBudget(limits).max_prefill_beside(decoding) is None


def test_a_policy_may_allow_less_and_not_more() -> None:
    class Fewer(FcfsPolicy):
        def prefill_budget(self, decoding):
            return 2 if decoding else None

    class More(FcfsPolicy):
        def prefill_budget(self, decoding):
            return 29

    assert max(mixed_sizes(run(16, Fewer)[1])) == 5
    assert max(mixed_sizes(run(16, More)[1])) == 16


def test_a_prompt_that_must_not_be_cut_is_not() -> None:
    _, plans = run(8, long=29, chunked_prefill=False)
    assert [len(chunk.token_ids) for plan in plans for chunk in plan.chunks] == [5, 5, 5, 29]


def test_a_limit_that_nothing_could_keep_is_refused() -> None:
    config = load_config(None, {"sched.max_mixed_tokens": 64, "sched.chunked_prefill": False}).config
    with pytest.raises(ConfigError, match=r"max_mixed_tokens is 64 and sched.chunked_prefill is false"):
        world_of_device(config, "cpu:1")


def test_batches_have_no_limit_unless_they_ask_for_one() -> None:
    assert for_batches(load_config(None)).config.sched.max_mixed_tokens == 0
    asked = load_config(None, {"sched.max_mixed_tokens": 64})
    assert for_batches(asked).config.sched.max_mixed_tokens == 64
    assert load_config(None).config.sched.max_mixed_tokens is None
