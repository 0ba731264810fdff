"""The rules for a step in flight, one test each (they are listed in `jaxserve.sched.core`)."""

import random

import pytest
from sched_world import BLIND, first_tokens

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.sched import Limits, StepPlan, StepResult, create_scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.draft import Draft
from jaxserve.testing import FakeRunner, drive, make_limits, make_request


def build(**limits) -> ContinuousScheduler:
    return build_of(make_limits(**limits))


def build_of(limits: Limits) -> ContinuousScheduler:
    scheduler = create_scheduler("fcfs", limits, options=BLIND)
    assert isinstance(scheduler, ContinuousScheduler)
    return scheduler


def plan_of(scheduler: ContinuousScheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def answer(scheduler: ContinuousScheduler, plan: StepPlan, *tokens: int):
    return scheduler.commit(plan, StepResult(token_ids=list(tokens)))


def test_a_row_is_planned_again_without_knowing_its_input():
    scheduler = build()
    scheduler.add(make_request("a", [1, 2, 3], 5))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert first.chunks[0].sample
    assert (second.decode_rows, second.decode_positions) == ((0,), (3,))
    assert [e.token_id for e in answer(scheduler, first, 50)] == [50]
    third = plan_of(scheduler)
    assert third.decode_positions == (4,)


def test_never_two_steps_ahead():
    scheduler = build()
    scheduler.add(make_request("a", [1, 2, 3], 5))
    plan_of(scheduler)
    plan_of(scheduler)
    with pytest.raises(AssertionError, match="in flight"):
        scheduler.schedule()


def test_results_come_in_order():
    scheduler = build()
    scheduler.add(make_request("a", [1, 2, 3], 5))
    plan_of(scheduler)
    second = plan_of(scheduler)
    with pytest.raises(AssertionError, match="step 1 committed, expected 0"):
        answer(scheduler, second, 1)


@pytest.mark.parametrize(("max_tokens", "max_model_len", "expected"), [(3, 64, 3), (50, 6, 3), (1, 64, 1)])
def test_a_length_limit_wastes_no_step(max_tokens: int, max_model_len: int, expected: int):
    limits = make_limits(max_model_len=max_model_len)
    scheduler, runner = create_scheduler("fcfs", limits), FakeRunner(limits)
    out = drive(scheduler, runner, [make_request("a", [1, 2, 3], max_tokens)])["a", 0]
    assert len(out.token_ids) == expected
    assert out.finish_reason == FinishReason.LENGTH
    assert runner.num_steps == expected


def test_the_row_of_a_length_limit_goes_to_another_in_the_next_plan():
    """With one row and 3 tokens each, no step is without a token: the next prompt comes beside the last token."""
    scheduler = build(max_rows=1, page_size=8)
    scheduler.add(make_request("a", [1, 2, 3], 3))
    scheduler.add(make_request("b", [4, 5], 1))
    scheduler.add(make_request("c", [6], 2))
    first, second = plan_of(scheduler), plan_of(scheduler)
    answer(scheduler, first, 50)
    third = plan_of(scheduler)
    assert third.decode_rows == (0,)
    answer(scheduler, second, 51)
    fourth = plan_of(scheduler)
    assert (fourth.freed_rows, fourth.setups[0].request_id, fourth.setups[0].row) == ((0,), "b", 0)
    assert scheduler.num_held_pages == 2, "those of a are free when its last token is here"
    assert [(e.request_id, e.token_id, e.finish_reason) for e in answer(scheduler, third, 52)] == [("a", 52, "length")]
    fifth = plan_of(scheduler)
    assert (fifth.freed_rows, fifth.setups[0].request_id) == ((0,), "c"), "whose only token comes with the prompt"
    assert [(e.request_id, e.finish_reason) for e in answer(scheduler, fourth, 60)] == [("b", "length")]
    sixth = plan_of(scheduler)
    assert [e.request_id for e in answer(scheduler, fifth, 70)] == ["c"]
    assert [e.finish_reason for e in answer(scheduler, sixth, 71)] == ["length"]
    scheduler.check()
    assert (scheduler.num_held_pages, scheduler.has_work()) == (0, False)


def test_an_abort_after_the_row_was_given_up_drops_the_last_token():
    scheduler = build(max_rows=1, page_size=8)
    scheduler.add(make_request("a", [1, 2, 3], 1))
    scheduler.add(make_request("b", [4], 2))
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    assert (second.freed_rows, second.setups[0].request_id) == ((0,), "b")
    assert scheduler.abort("a")
    scheduler.check()
    assert scheduler.num_held_pages == 1
    assert answer(scheduler, first, 50) == []
    assert [e.request_id for e in answer(scheduler, second, 60)] == ["b"]


def test_no_row_is_idle_while_others_wait():
    """200 requests that end by their limits, 16 tokens in the mean, on 8 rows."""
    rng = random.Random(3)
    limits = make_limits(max_rows=8, num_pages=200, page_size=4, max_model_len=64)
    runner, scheduler = FakeRunner(limits, mode="context"), build_of(limits)
    idle = []

    class Watching:
        def dispatch(self, plan: StepPlan):
            if scheduler.num_waiting:
                idle.append(limits.max_rows - plan.num_rows)
            return runner.dispatch(plan)

        limits = runner.limits

    requests = [make_request(f"r{i}", [i % 50 + 1] * rng.randint(1, 5), rng.randint(1, 31)) for i in range(200)]
    out = drive(scheduler, Watching(), requests)
    assert len(idle) > 300 and sum(idle) == 0
    alone = {r.request_id: drive(build_of(limits), FakeRunner(limits, mode="context"), [r]) for r in requests[::20]}
    for name, (expected,) in ((name, found.values()) for name, found in alone.items()):
        assert out[name, 0].token_ids == expected.token_ids


def test_one_token_is_wasted_after_a_stop_id_and_its_result_dropped():
    scheduler = build(page_size=4)
    scheduler.add(make_request("a", [1, 2, 3], 20, stop=[7]))
    first, second = plan_of(scheduler), plan_of(scheduler)
    answer(scheduler, first, 50)
    third = plan_of(scheduler)
    (event,) = answer(scheduler, second, 7)
    assert event.finish_reason == FinishReason.STOP
    assert (scheduler.num_held_pages, scheduler.num_running) == (0, 0), "free from the commit that saw the end"
    assert not scheduler.has_work()
    scheduler.add(make_request("b", [9, 9, 9], 20))
    fourth = plan_of(scheduler)
    assert fourth.freed_rows == (0,)
    assert fourth.setups[0].row == 0, "the row is used again while its last step still runs"
    assert third.decode_rows == (0,)
    assert answer(scheduler, third, 51) == []
    assert [e.request_id for e in answer(scheduler, fourth, 1)] == ["b"]


def test_the_wasted_token_cannot_hurt_who_gets_the_pages():
    limits = make_limits(max_rows=2, num_pages=8, page_size=1, max_model_len=6)
    forced = {(f"r{i}", 0): {1: 0} for i in range(6)}
    runner = FakeRunner(limits, mode="context", forced=forced)
    scheduler = create_scheduler("fcfs", limits)
    requests = [make_request(f"r{i}", [i + 1, 1], 4, stop=[0]) for i in range(6)]
    out = drive(scheduler, runner, requests)
    assert all(len(o.token_ids) == 2 and o.finish_reason == "stop" for o in out.values())
    waste = sum(p.num_tokens for p in runner.plans) - sum(len(r.prompt_token_ids) + 1 for r in requests)
    assert waste == 6, "one each"


def test_abort_in_flight_drops_the_result_and_frees_at_once():
    scheduler = build()
    scheduler.add(make_request("a", [1, 2, 3], 20))
    scheduler.add(make_request("b", [4, 5, 6], 20))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert scheduler.num_running == 1
    scheduler.check()
    assert [e.request_id for e in answer(scheduler, first, 50, 60)] == ["b"]
    third = plan_of(scheduler)
    assert third.freed_rows == (0,)
    assert [e.request_id for e in answer(scheduler, second, 51, 61)] == ["b"]
    assert plan_of(scheduler).freed_rows == (), "a row is freed once"
    assert third.decode_rows == (1,)


def test_abort_while_waiting():
    scheduler = build(max_rows=1)
    for name in "abc":
        scheduler.add(make_request(name, [1], 3))
    plan = plan_of(scheduler)
    assert scheduler.abort("b")
    assert scheduler.num_waiting == 1
    answer(scheduler, plan, 5)
    names = []
    while scheduler.has_work():
        plan = plan_of(scheduler)
        names += [s.request_id for s in plan.setups]
        answer(scheduler, plan, 5)
    assert names == ["c"]


def test_a_row_given_up_with_nothing_to_plan_is_freed_by_a_later_plan():
    scheduler = build()
    scheduler.add(make_request("a", [1], 1))
    answer(scheduler, plan_of(scheduler), 5)
    assert scheduler.schedule() is None
    scheduler.add(make_request("b", [1], 1))
    plan = plan_of(scheduler)
    assert plan.freed_rows == (0,)
    answer(scheduler, plan, 5)


def test_preemption_in_flight_keeps_the_token_and_waits_for_it():
    """Pages of 4, four of them: when a feeds position 8 both hold two, and b, which came later, gives way."""
    scheduler = build(max_rows=2, num_pages=4, page_size=4, max_model_len=16, token_buckets=(8,))
    scheduler.add(make_request("a", [1, 2, 3, 4], 8, arrival_s=0))
    scheduler.add(make_request("b", [5, 6, 7], 8, arrival_s=1))
    previous = plan_of(scheduler)
    for output in range(4):
        plan = plan_of(scheduler)
        assert plan.decode_rows == (0, 1)
        answer(scheduler, previous, 50 + output, 60 + output)
        previous = plan
    plan = plan_of(scheduler)
    assert (plan.decode_rows, plan.decode_positions, plan.freed_rows) == ((0,), (8,), (1,))
    assert scheduler.num_preemptions == 1
    scheduler.check()
    events = answer(scheduler, previous, 54, 64)
    assert [(e.request_id, e.token_id) for e in events] == [("a", 54), ("b", 64)], "b was preempted, its token counts"
    while (following := scheduler.schedule()) is None or not following.setups:
        assert plan is not None
        answer(scheduler, plan, 99)
        plan = following
    assert following.setups[0].request_id == "b"
    assert first_tokens(following) == (5, 6, 7, 60, 61, 62, 63, 64)


def test_the_last_in_order_waits_rather_than_preempting_one_before_it():
    scheduler = build(max_rows=2, num_pages=5, page_size=2, max_model_len=8, token_buckets=(8,))
    scheduler.add(make_request("a", [1, 2, 3], 4, arrival_s=0))
    scheduler.add(make_request("b", [4, 5, 6], 4, arrival_s=1))
    first, second = plan_of(scheduler), plan_of(scheduler)
    assert second.decode_rows == (0, 1)
    answer(scheduler, first, 50, 60)
    third = plan_of(scheduler)  # both need a page for position 4; one is left
    assert (third.decode_rows, third.freed_rows) == ((0,), ())
    answer(scheduler, second, 51, 61)
    fourth = plan_of(scheduler)
    assert fourth.decode_rows == (0,)
    answer(scheduler, third, 52)
    assert scheduler.schedule() is None, "a is planned to its end, b waits for its pages"
    assert answer(scheduler, fourth, 53)[0].finish_reason == FinishReason.LENGTH
    fifth = plan_of(scheduler)
    assert (fifth.decode_rows, fifth.decode_positions) == ((1,), (4,))
    assert scheduler.num_preemptions == 0


def test_a_preempted_sequence_is_not_admitted_before_its_token_is_known():
    scheduler = build(max_rows=2, num_pages=8, page_size=2, max_model_len=12, token_buckets=(8,))
    scheduler.add(make_request("a", [1, 2, 3], 4))
    first = plan_of(scheduler)
    (seq,) = scheduler._running
    scheduler._preempt(seq, Draft(scheduler._step_id, scheduler._budget, True))
    assert scheduler.schedule() is None, "its token is in flight"
    answer(scheduler, first, 50)
    assert first_tokens(plan_of(scheduler)) == (1, 2, 3, 50)


def test_a_preempted_prompt_is_not_begun_again_before_its_part_in_flight_is_known():
    """What that part tells of the prompt, such as sums of hidden states, would be counted twice."""
    scheduler = build(max_rows=2, num_pages=8, page_size=2, max_model_len=12, token_buckets=(4,))
    scheduler.add(make_request("a", [1, 2, 3, 4, 5, 6], 4))
    first = plan_of(scheduler)
    assert [chunk.sample for chunk in first.chunks] == [False]
    (seq,) = scheduler._running
    scheduler._preempt(seq, Draft(scheduler._step_id, scheduler._budget, True))
    assert scheduler.schedule() is None, "a part of its prompt is in flight"
    answer(scheduler, first)
    assert plan_of(scheduler).setups[0].request_id == "a"


def test_a_preempted_sequence_may_end_by_the_token_in_flight():
    scheduler = build()
    scheduler.add(make_request("a", [1, 2, 3], 4, stop=[7]))
    first = plan_of(scheduler)
    (seq,) = scheduler._running
    scheduler._preempt(seq, Draft(scheduler._step_id, scheduler._budget, True))
    (event,) = answer(scheduler, first, 7)
    assert event.finish_reason == FinishReason.STOP
    assert not scheduler.has_work()
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_ids_before_min_tokens_do_not_stop(overlap: bool):
    limits = make_limits()
    sampling = SamplingParams(temperature=0, max_tokens=10, min_tokens=3)
    request = make_request("a", [1, 2, 3], 10, sampling=sampling, stop=[4, 9])
    # The fake bans 4 like a device does: 5 comes in its place. 9 is output number 5, past the minimum.
    out = drive(create_scheduler("fcfs", limits), FakeRunner(limits), [request], overlap=overlap)["a", 0]
    assert out.token_ids == [5, 6, 7, 8, 9]
    assert out.finish_reason == FinishReason.STOP
    # What no ban could prevent is not an end either.
    scheduler = build()
    scheduler.add(request)
    reasons = [answer(scheduler, plan_of(scheduler), 9)[0].finish_reason for _ in range(4)]
    assert reasons == [None, None, None, FinishReason.STOP]


@pytest.mark.parametrize("overlap", [True, False])
def test_prompt_info_comes_with_the_first_token_only(overlap: bool):
    limits = make_limits(page_size=2, token_buckets=(4,))
    sampling = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=1)
    out = drive(
        create_scheduler("fcfs", limits),
        FakeRunner(limits),
        [make_request("a", range(10, 21), 3, sampling=sampling)],
        overlap=overlap,
    )["a", 0]
    assert out.prompt is not None  # `take` has checked that no other token brought one
    assert [entry.token_id for entry in out.prompt.logprobs or ()] == list(range(11, 21))
    assert [entry and entry.token_id for entry in out.logprobs] == out.token_ids == [21, 22, 23]
