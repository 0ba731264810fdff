"""n > 1: one prompt, shared pages, copy-on-write, distinct seeds."""

import pytest

from jaxserve.api import PromptInfo, SamplingParams
from jaxserve.sched import PageCopy, SchedulerOptions, StepPlan, StepResult, create_scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.state import sequence_seed
from jaxserve.testing import FakeRunner, drive, make_limits, make_request


def many(n: int, max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens)


def build(**limits) -> ContinuousScheduler:
    scheduler = create_scheduler("fcfs", make_limits(**limits))
    assert isinstance(scheduler, ContinuousScheduler)
    return scheduler


def plan_of(scheduler: ContinuousScheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_children_share_full_prompt_pages_and_copy_the_last():
    scheduler = build(page_size=4, max_rows=4, token_buckets=(16,))
    scheduler.add(make_request("a", range(10), 6, sampling=many(3), seed=5))
    first = plan_of(scheduler)
    assert [(s.row, s.index) for s in first.setups] == [(0, 0)]
    assert scheduler.num_waiting == 2
    parent = first.grants[0].page_ids
    second = plan_of(scheduler)  # overlap: the prompt has not come back
    assert [s.index for s in second.setups] == [1, 2]
    for grant in second.grants:
        assert grant.page_ids[:2] == parent[:2]
        assert grant.page_ids[2] not in parent
    assert second.copies == tuple(PageCopy(parent[2], g.page_ids[2]) for g in second.grants)
    assert [(c.start, c.token_ids, c.sample) for c in second.chunks] == [(9, (9,), True)] * 2
    assert [s.seed for s in second.setups] == [sequence_seed(scheduler._groups["a"].request, i) for i in (1, 2)]
    scheduler.check()


def test_no_copy_when_the_last_position_starts_a_page():
    scheduler = build(page_size=4, max_rows=4, token_buckets=(16,))
    scheduler.add(make_request("a", range(9), 6, sampling=many(2)))
    plan_of(scheduler)
    second = plan_of(scheduler)
    assert second.copies == ()
    assert second.chunks[0].start == 8


def test_children_wait_for_the_whole_prompt():
    scheduler = build(page_size=4, max_rows=4, token_buckets=(8,))
    scheduler.add(make_request("a", range(20), 6, sampling=many(2)))
    for done in (8, 16, 20):
        plan = plan_of(scheduler)
        assert scheduler.num_waiting == (done == 20)
        scheduler.commit(plan, StepResult(token_ids=[1] * len(plan.sampled_rows)))


def test_children_stand_right_behind_their_parent():
    scheduler = build(max_rows=2, token_buckets=(8,))
    scheduler.add(make_request("a", [1, 2], 3, sampling=many(2), arrival_s=0))
    scheduler.add(make_request("b", [1, 2], 3, arrival_s=1))
    scheduler.add(make_request("c", [1, 2], 3, arrival_s=2))
    seen = []
    while scheduler.has_work():
        plan = plan_of(scheduler)
        seen += [(s.request_id, s.index) for s in plan.setups]
        scheduler.commit(plan, StepResult(token_ids=[1] * len(plan.sampled_rows)))
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("c", 0)], "b was admitted before a's second sequence existed"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_pages", [30, 60])
def test_each_sequence_equals_one_that_ran_alone(overlap: bool, page_size: int, prefix_caching: bool, num_pages: int):
    limits = make_limits(page_size=page_size, num_pages=num_pages, max_rows=3)
    scheduler = create_scheduler("fcfs", limits, options=SchedulerOptions(prefix_caching=prefix_caching))
    request = make_request("a", range(9), 12, sampling=many(5), seed=123)
    out = drive(scheduler, FakeRunner(limits, mode="context"), [request], overlap=overlap)
    texts = set()
    for index in range(5):
        single = make_request("s", range(9), 12, seed=sequence_seed(request, index))
        alone = drive(create_scheduler("fcfs", limits), FakeRunner(limits, mode="context"), [single])["s", 0]
        assert out["a", index].token_ids == alone.token_ids
        texts.add(tuple(alone.token_ids))
    assert len(texts) == 5


def test_a_child_whose_parent_is_gone_goes_through_the_prefix_cache():
    scheduler = build(page_size=4, max_rows=1, token_buckets=(16,))
    scheduler.add(make_request("a", range(10), 1, sampling=many(2, 1)))
    scheduler.commit(plan_of(scheduler), StepResult(token_ids=[1]))
    plan = plan_of(scheduler)
    assert plan.copies == ()
    assert [(c.start, len(c.token_ids)) for c in plan.chunks] == [(8, 2)]


def test_one_of_n_can_be_aborted():
    limits = make_limits(max_rows=4)
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    scheduler.add(make_request("a", [1, 2, 3], 6, sampling=many(3)))
    assert scheduler.abort("a", 2), "not begun yet"
    assert not scheduler.abort("a", 2)
    assert not scheduler.abort("a", 7)
    plan = scheduler.schedule()
    scheduler.commit(plan, runner.dispatch(plan).result())
    plan = scheduler.schedule()
    assert [s.index for s in plan.setups] == [1]
    scheduler.commit(plan, runner.dispatch(plan).result())
    assert scheduler.abort("a", 1)
    seen = set()
    while scheduler.has_work():
        plan = scheduler.schedule()
        seen |= {event.index for event in scheduler.commit(plan, runner.dispatch(plan).result())}
    assert seen == {0}


@pytest.mark.parametrize("begun", [True, False])
def test_aborting_the_first_leaves_the_others_to_run_the_prompt(begun: bool):
    limits = make_limits(token_buckets=(8,))
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits, mode="context")
    request = make_request("a", range(12), 6, sampling=many(3))
    scheduler.add(request)
    if begun:
        plan = scheduler.schedule()
        scheduler.commit(plan, runner.dispatch(plan).result())
    assert scheduler.abort("a", 0)
    assert scheduler.num_waiting == 2
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while scheduler.has_work():
        plan = scheduler.schedule()
        for event in scheduler.commit(plan, runner.dispatch(plan).result()):
            tokens[event.index].append(event.token_id)
    for index in (1, 2):
        single = make_request("s", range(12), 6, seed=sequence_seed(request, index))
        alone = drive(create_scheduler("fcfs", limits), FakeRunner(limits, mode="context"), [single])["s", 0]
        assert tokens[index] == alone.token_ids


def test_the_prompt_is_scored_once():
    limits = make_limits(token_buckets=(16,))
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    sampling = SamplingParams(n=2, max_tokens=2, prompt_logprobs=1)
    out = drive(scheduler, runner, [make_request("a", range(10), 2, sampling=sampling)])
    assert len(out["a", 0].prompt.logprobs) == 9
    assert out["a", 1].prompt == PromptInfo(9, None)
    assert [c.prompt_logprobs for p in runner.plans for c in p.chunks] == [True, False]
