"""What goes into a step: decode rows first, prompts cut to the budget, edges of buckets."""

import dataclasses

import pytest
from sched_world import BLIND

from jaxserve.sched import Bucket, Limits, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.sched.budget import StepBudget
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.testing import FakeRunner, drive, make_limits, make_request

WHOLE = SchedulerOptions(chunked_prefill=False)


def build(limits: Limits, options: SchedulerOptions | None = None) -> ContinuousScheduler:
    scheduler = create_scheduler("fcfs", limits, options=options)
    assert isinstance(scheduler, ContinuousScheduler)
    return scheduler


def step(scheduler: ContinuousScheduler, token: int = 99) -> StepPlan:
    """Schedules and commits at once, every row yielding `token`."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, StepResult(token_ids=[token] * len(plan.sampled_rows)))
    return plan


def lengths(plan: StepPlan) -> list[int]:
    return [len(c.token_ids) for c in plan.chunks]


def test_prompts_share_a_step_and_are_cut_to_the_budget():
    scheduler = build(make_limits(max_rows=4, token_buckets=(16,)))
    for i, prompt_len in enumerate((6, 7, 8)):
        scheduler.add(make_request(f"r{i}", [i] * prompt_len, arrival_s=i))
    plan = step(scheduler)
    assert lengths(plan) == [6, 7, 3]
    assert [c.sample for c in plan.chunks] == [True, True, False]
    plan = step(scheduler)
    assert plan.decode_rows == (0, 1)
    assert plan.decode_positions == (6, 7)
    assert [(c.start, len(c.token_ids), c.sample) for c in plan.chunks] == [(3, 5, True)]


def test_decode_rows_come_first_and_are_never_cut():
    scheduler = build(make_limits(max_rows=4, token_buckets=(8,), num_pages=64))
    for i in range(3):
        scheduler.add(make_request(f"r{i}", [i], 40))
    step(scheduler)
    scheduler.add(make_request("long", [9] * 30, 10))
    for done in range(6):
        plan = step(scheduler)
        assert len(plan.decode_rows) == 3
        assert lengths(plan) == [5], done
        assert plan.num_tokens == 8


def test_pages_of_the_whole_prompt_come_with_its_first_chunk():
    scheduler = build(make_limits(max_rows=2, token_buckets=(8,), page_size=4))
    scheduler.add(make_request("a", range(19), 2))
    plan = step(scheduler)
    assert [(g.row, g.first, len(g.page_ids)) for g in plan.grants] == [(0, 0, 5)]
    assert (plan.setups[0].num_tokens, plan.chunks[0].token_ids) == (19, tuple(range(8)))
    assert step(scheduler).grants == ()


def test_a_decode_row_gets_its_page_when_it_reaches_it():
    scheduler = build(make_limits(max_rows=2, page_size=4))
    scheduler.add(make_request("a", range(6), 10))
    granted = {}
    for _ in range(9):
        plan = step(scheduler)
        if plan.decode_rows and plan.grants:
            granted[plan.decode_positions[0]] = plan.grants[0].first
    assert granted == {8: 2, 12: 3}


@pytest.mark.parametrize(
    ("prompt_len", "first"),
    [
        (20, 16),  # 12 of 32 would be padding, more than a quarter: end at 16
        (24, 24),  # 8 of 32 is a quarter: take all
        (23, 16),  # 9 of 32: trim
        (32, 32),
        (16, 16),
        (9, 8),
        (5, 5),  # no smaller bucket
    ],
)
def test_chunks_end_at_bucket_edges(prompt_len: int, first: int):
    scheduler = build(make_limits(max_rows=4, token_buckets=(8, 16, 32)))
    scheduler.add(make_request("a", [1] * prompt_len, 4))
    assert lengths(step(scheduler)) == [first]
    if first < prompt_len:
        assert lengths(step(scheduler)) == [prompt_len - first]


def test_trimming_keeps_at_least_half_of_the_chunk_and_all_decode_rows():
    budget = StepBudget(make_limits(max_rows=8, token_buckets=(8, 16, 32)))
    # 7 decode rows and 10 tokens of a prompt: 15 of 32 wasted; one token less ends at 16.
    assert budget.trim(17, 8, 10) == 1
    # 15 decode rows and 3: ending at 16 takes 2 of the 3, which would make a prompt crawl.
    assert StepBudget(make_limits(max_rows=16, token_buckets=(16, 32))).trim(18, 16, 3) == 0
    assert StepBudget(make_limits(max_rows=16, token_buckets=(16, 32))).trim(18, 16, 4) == 2


def test_a_whole_prompt_is_not_trimmed_without_chunks():
    scheduler = build(make_limits(max_rows=4, token_buckets=(8, 16, 32)), WHOLE)
    scheduler.add(make_request("a", [1] * 20, 4))
    assert lengths(step(scheduler)) == [20]


def test_rows_of_mixed_buckets_limit_the_step():
    buckets = (Bucket(4, 4, True), Bucket(8, 2, False), Bucket(16, 4, False))
    limits = Limits(max_rows=4, num_pages=64, page_size=4, max_model_len=64, buckets=buckets)
    scheduler = build(limits)
    for i in range(4):
        scheduler.add(make_request(f"r{i}", [i] * 2, 8))
    plan = step(scheduler)
    assert limits.find_bucket(plan.num_tokens, plan.num_rows, False) == Bucket(16, 4, False)
    assert plan.num_rows == 4
    assert step(scheduler).decode_rows == (0, 1, 2, 3)


def test_a_large_bucket_with_few_rows_does_not_mislead():
    """32 tokens exist for 2 rows only: a third row must fit the bucket of 8 tokens."""
    buckets = (Bucket(4, 4, True), Bucket(8, 4, False), Bucket(32, 2, False))
    limits = Limits(max_rows=4, num_pages=64, page_size=4, max_model_len=64, buckets=buckets)
    scheduler = build(limits)
    runner = FakeRunner(limits)
    requests = [make_request(f"r{i}", [i] * n, 6) for i, n in enumerate((3, 30, 30, 5))]
    out = drive(scheduler, runner, requests)
    assert all(len(o.token_ids) == 6 for o in out.values())
    assert max(p.num_tokens for p in runner.plans) > 8


def test_without_chunks_decode_rows_wait_for_a_prompt_that_needs_the_step():
    scheduler = build(make_limits(max_rows=4, token_buckets=(8,), num_pages=64), WHOLE)
    for i in range(3):
        scheduler.add(make_request(f"r{i}", [i], 40))
    step(scheduler)
    scheduler.add(make_request("fits", [9] * 5, 2))
    plan = step(scheduler)
    assert (len(plan.decode_rows), lengths(plan)) == (3, [5])
    while scheduler.num_running == 4:
        step(scheduler)
    scheduler.add(make_request("long", [8] * 8, 10))
    plan = step(scheduler)
    assert (plan.decode_rows, lengths(plan)) == ((), [8])
    assert len(step(scheduler).decode_rows) == 4


def test_requests_wait_for_rows():
    scheduler = build(make_limits(max_rows=2, token_buckets=(8,)))
    for i in range(5):
        scheduler.add(make_request(f"r{i}", [i], 3))
    step(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    scheduler.check()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_pool_run_dry_preempts_the_last_and_loses_nothing(overlap: bool):
    limits = make_limits(max_rows=3, num_pages=9, page_size=2, max_model_len=20)
    scheduler, runner = (
        build(limits, dataclasses.replace(BLIND, prefix_caching=False)),
        FakeRunner(limits, mode="context"),
    )
    requests = [make_request(f"r{i}", [i, 1, 2], 12, arrival_s=i) for i in range(3)]
    finished: list[str] = []
    order: list[str] = []

    def watch(turn: int) -> None:
        scheduler.check()
        alive = {key for key, group in scheduler._groups.items() if group.live}
        finished[:] = [r.request_id for r in requests if r.request_id not in alive]
        order.extend(name for name in finished if name not in order)

    out = drive(scheduler, runner, requests, overlap=overlap, after_step=watch)
    assert scheduler.num_preemptions > 0
    assert order == ["r0", "r1", "r2"], "the first to come is never the victim"
    for request in requests:
        alone = drive(build(limits), FakeRunner(limits, mode="context"), [request])[request.request_id, 0]
        assert out[request.request_id, 0].token_ids == alone.token_ids
    setups = [s for p in runner.plans for s in p.setups if s.request_id == "r2"]
    assert len(setups) > 1
    assert setups[-1].prompt_len == 3 < setups[-1].num_tokens, "output so far is computed again, as output"


def test_a_preempted_sequence_finds_its_pages_again():
    limits = make_limits(max_rows=2, num_pages=10, page_size=2, max_model_len=20)
    scheduler, runner = build(limits, options=BLIND), FakeRunner(limits)
    drive(scheduler, runner, [make_request(f"r{i}", [i, 1, 2, 3, 4, 5], 10, arrival_s=i) for i in range(2)])
    assert scheduler.num_preemptions == 1
    again = [p for p in runner.plans for s in p.setups if s.request_id == "r1"][-1]
    assert again.chunks[-1].start > 0


def test_nothing_to_do_is_none():
    scheduler = build(make_limits())
    assert scheduler.schedule() is None
    assert not scheduler.has_work()
    assert not scheduler.abort("nobody")


def test_figures():
    limits = make_limits(max_rows=2, page_size=2)
    scheduler = build(limits)
    for i in range(3):
        scheduler.add(make_request(f"r{i}", [1, 2, 3, 4, i], 4))
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_held_pages) == (3, 0, 0)
    step(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_held_pages) == (1, 2, 6)
    while scheduler.has_work():
        step(scheduler)
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_held_pages) == (0, 0, 0)
    assert (scheduler.memory.num_queried_tokens, scheduler.memory.num_hit_tokens) == (15, 4)
