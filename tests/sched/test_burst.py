"""Bursts: what a plan asks for, when it does, and what becomes of rows that end on the way."""

import dataclasses

import pytest
from sched_world import BLIND, POLICIES

from jaxserve.api import FinishReason, SamplingParams, StructuredOutput
from jaxserve.sched import Policy, StepPlan, StepResult, create_scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.draft import Draft
from jaxserve.sched.fair import FairPolicy
from jaxserve.sched.fcfs import FcfsPolicy
from jaxserve.sched.slo import SloPolicy
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request


def build(policy: str | type[Policy] = "fcfs", max_burst: int = 4, **limits) -> ContinuousScheduler:
    scheduler = create_scheduler(policy, make_limits(max_burst=max_burst, **limits), options=BLIND, clock=ManualClock())
    assert isinstance(scheduler, ContinuousScheduler)
    return scheduler


def plan_of(scheduler: ContinuousScheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def start(scheduler: ContinuousScheduler, *requests) -> None:
    """Prompts that run in one step, whose first tokens are 50."""
    for request in requests:
        scheduler.add(request)
    plan = plan_of(scheduler)
    assert len(plan.chunks) == len(requests)
    scheduler.commit(plan, StepResult(token_ids=[50] * len(requests)))


def test_a_burst_grants_the_pages_of_all_its_steps() -> None:
    scheduler = build(page_size=2)
    start(scheduler, make_request("a", [1, 2, 3], 20), make_request("b", [1, 2], 20))
    plan = plan_of(scheduler)
    assert (plan.decode_rows, plan.decode_positions, plan.num_steps, plan.row_steps) == ((0, 1), (3, 2), 4, ())
    # a feeds 3..6 and has pages of 0..3; b feeds 2..5, has 0..1, and its first page comes as in any step.
    assert [(g.row, g.first, len(g.page_ids)) for g in plan.grants] == [(1, 1, 1), (0, 2, 2), (1, 2, 1)]
    assert (plan.num_tokens, plan.num_fed, plan.steps_of_rows) == (2, 8, (4, 4))
    following = plan_of(scheduler)
    assert following.decode_positions == (7, 6), "planned on as if all steps were taken"


def test_plans_of_one_step_are_written_as_before() -> None:
    scheduler = build()
    start(scheduler, make_request("a", [1, 2, 3], 20))
    burst = plan_of(scheduler)
    single = dataclasses.replace(burst, num_steps=1)
    assert "steps" not in single.to_json()
    assert '"num_steps":4' in burst.to_json() and "row_steps" not in burst.to_json()
    cut = dataclasses.replace(burst, row_steps=(3,))
    for plan in (single, burst, cut):
        assert StepPlan.from_json(plan.to_json()) == plan


def test_tokens_are_taken_in_the_order_of_steps_and_rows() -> None:
    scheduler = build(max_burst=3)
    start(scheduler, make_request("a", [1], 20, stop=[7]), make_request("b", [2], 20), make_request("c", [3], 20))
    plan = plan_of(scheduler)
    events = scheduler.commit(plan, StepResult(token_ids=[10, 20, 30, 7, 21, 31, 22, 32], counts=[2, 3, 3]))
    assert [(e.request_id, e.token_id) for e in events] == [
        ("a", 10), ("b", 20), ("c", 30), ("a", 7), ("b", 21), ("c", 31), ("b", 22), ("c", 32),
    ]  # fmt: skip
    assert [e.finish_reason for e in events if e.request_id == "a"] == [None, FinishReason.STOP]
    assert scheduler.num_running == 2
    scheduler.check()


def test_counts_that_do_not_add_up_are_a_defect() -> None:
    scheduler = build()
    start(scheduler, make_request("a", [1], 20))
    with pytest.raises(AssertionError):
        scheduler.commit(plan_of(scheduler), StepResult(token_ids=[1, 2], counts=[3]))
    with pytest.raises(AssertionError, match="took 2 of 4 steps and goes on"):
        scheduler.commit(plan_of(scheduler), StepResult(token_ids=[1, 2], counts=[2]))


def test_a_length_limit_ends_a_row_within_a_burst_and_wastes_nothing() -> None:
    limits = make_limits(max_burst=8)
    runner = FakeRunner(limits)
    out = drive(create_scheduler("fcfs", limits), runner, [make_request("a", [1, 2, 3], 6)])["a", 0]
    assert out.token_ids == [4, 5, 6, 7, 8, 9]
    assert [p.num_steps for p in runner.plans] == [1, 5], "the first token comes with the prompt"
    # Five rows, of which one has two tokens left: the burst goes on for the others.
    limits = make_limits(max_burst=4, max_rows=8)
    runner = FakeRunner(limits)
    requests = [make_request(f"r{i}", [i], 3 if i == 0 else 13) for i in range(5)]
    outputs = drive(create_scheduler("fcfs", limits), runner, requests)
    assert [len(o.token_ids) for o in outputs.values()] == [3, 13, 13, 13, 13]
    assert runner.plans[1].row_steps == (2, 4, 4, 4, 4)


def test_a_burst_ends_early_where_too_many_rows_would_idle() -> None:
    limits = make_limits(max_burst=8)
    runner = FakeRunner(limits)
    drive(create_scheduler("fcfs", limits), runner, [make_request("a", [1], 3), make_request("b", [2], 17)])
    assert (runner.plans[1].num_steps, runner.plans[1].row_steps) == (4, (2, 4)), "of eight places two are left empty"
    for plan in runner.plans:
        assert 4 * plan.num_fed >= 3 * plan.num_steps * len(plan.decode_rows) or not plan.decode_only


def test_one_step_while_somebody_waits_who_could_get_in() -> None:
    scheduler = build(max_rows=4, num_pages=6, page_size=4, max_model_len=24)
    start(scheduler, make_request("a", [1] * 8, 16))  # two of six pages
    scheduler.add(make_request("b", [2] * 20, 4))  # needs five: waits for the end of a, and rows are free
    for _ in range(3):
        plan = plan_of(scheduler)
        assert (plan.decode_rows, plan.num_steps) == ((0,), 1)
        scheduler.commit(plan, StepResult(token_ids=[50]))
    assert scheduler.abort("b")
    assert plan_of(scheduler).num_steps == 4


def test_with_all_rows_taken_a_burst_ends_with_the_first_row() -> None:
    scheduler = build(max_rows=2, max_burst=8)
    start(scheduler, make_request("a", [1], 4), make_request("b", [2], 30))
    scheduler.add(make_request("c", [3], 30))
    plan = plan_of(scheduler)
    assert (plan.num_steps, plan.row_steps) == (3, ()), "a has three to go"
    following = plan_of(scheduler)
    assert (following.decode_rows, following.num_steps) == ((1,), 1), "a leaves with the commit before"
    scheduler.commit(plan, StepResult(token_ids=[9] * 6, counts=[3, 3]))
    assert plan_of(scheduler).setups[0].request_id == "c"


def test_a_preemptive_policy_takes_single_steps_while_anybody_waits() -> None:
    scheduler = build("preemptive", max_rows=1)
    start(scheduler, make_request("a", [1], 30))
    assert plan_of(scheduler).num_steps == 4
    scheduler.add(make_request("b", [2], 30))
    assert plan_of(scheduler).num_steps == 1


def test_no_page_is_taken_from_anybody_for_a_burst() -> None:
    scheduler = build(max_burst=8, max_rows=2, num_pages=7, page_size=2, max_model_len=14)
    start(scheduler, make_request("a", [1, 2, 3], 11), make_request("b", [1, 2, 4], 11))
    plan = plan_of(scheduler)  # two pages each, three left: eight steps would take eight
    assert plan.num_steps == 2
    assert sum(len(g.page_ids) for g in plan.grants) == 2
    following = plan_of(scheduler)
    assert following.num_steps == 1 and scheduler.num_preemptions == 0


def test_a_grammar_makes_all_steps_single() -> None:
    scheduler = build()
    sampling = SamplingParams(max_tokens=20, structured=StructuredOutput(regex="a*"))
    start(scheduler, make_request("a", [1], 20), make_request("b", [2], 20, sampling=sampling))
    plan = plan_of(scheduler)
    assert (plan.decode_rows, plan.num_steps) == ((0, 1), 1)
    following = plan_of(scheduler)
    assert (following.decode_rows, following.num_steps) == ((0,), 1), "or b would wait for the whole burst"


def test_the_policy_may_ask_for_less() -> None:
    class Careful(FcfsPolicy):
        def burst(self, decoding, most):
            return min(most, 2)

    scheduler = build(Careful)
    start(scheduler, make_request("a", [1], 20))
    assert plan_of(scheduler).num_steps == 2


def test_a_newcomer_waits_for_two_bursts_at_most() -> None:
    """The bound of `burst`: with one in flight and one launched behind it, the third plan has the prompt."""
    scheduler = build()
    start(scheduler, make_request("a", [1], 40))
    first = plan_of(scheduler)
    second = plan_of(scheduler)
    scheduler.add(make_request("b", [2], 5))
    scheduler.commit(first, StepResult(token_ids=[9] * 4, counts=[4]))
    third = plan_of(scheduler)
    assert [p.num_steps for p in (first, second, third)] == [4, 4, 1]
    assert third.setups[0].request_id == "b"


@pytest.mark.parametrize("next_is_burst", [True, False])
def test_a_row_that_ended_in_a_burst_takes_no_step_of_the_next(next_is_burst: bool) -> None:
    limits = make_limits(max_burst=4)
    scheduler = build()
    runner = FakeRunner(limits, forced={("a", 0): {2: 99}})
    requests = [make_request("a", [1], 30, stop=[99]), make_request("b", [40], 30)]
    for request in requests:
        scheduler.add(request)
    scheduler.commit(plan := plan_of(scheduler), runner.dispatch(plan).result())
    first = plan_of(scheduler)
    of_first = runner.dispatch(first)
    if not next_is_burst:
        scheduler.add(make_request("c", [80], 3))
    second = plan_of(scheduler)
    of_second = runner.dispatch(second).result()
    assert of_first.result().counts == [2, 4]
    events = scheduler.commit(first, of_first.result())
    assert [e.token_id for e in events if e.request_id == "a"] == [3, 99]
    assert scheduler.num_held_pages == len({p for s in scheduler._running for p in s.page_ids})
    if next_is_burst:
        assert of_second.counts == [0, 4]
    else:
        assert len(of_second.token_ids) == 3, "one wasted token of a"
    events = scheduler.commit(second, of_second)
    assert "a" not in {e.request_id for e in events}
    scheduler.check()


def test_when_all_rows_ended_the_next_burst_takes_no_step() -> None:
    limits = make_limits(max_burst=4)
    runner = FakeRunner(limits, forced={("a", 0): {2: 99}})
    out = drive(create_scheduler("slo", limits), runner, [make_request("a", [1], 30, stop=[99])])["a", 0]
    assert out.token_ids == [2, 3, 99]
    assert [p.num_steps for p in runner.plans] == [1, 4, 4]


def test_a_preempted_row_keeps_all_tokens_of_its_burst() -> None:
    scheduler = build()
    start(scheduler, make_request("a", [1, 2, 3], 30), make_request("b", [4], 30))
    burst = plan_of(scheduler)
    victim = next(seq for seq in scheduler._running if seq.request_id == "a")
    scheduler._preempt(victim, Draft(scheduler._step_id, scheduler._budget, True))
    plan = plan_of(scheduler)
    assert (plan.decode_rows, plan.num_steps, plan.setups) == ((1,), 1, ()), "it waits for its tokens"
    events = scheduler.commit(burst, StepResult(token_ids=[10, 20, 11, 21, 12, 22, 13, 23], counts=[4, 4]))
    assert [e.token_id for e in events if e.request_id == "a"] == [10, 11, 12, 13]
    assert plan_of(scheduler).setups[0].token_ids == (1, 2, 3, 50, 10, 11, 12, 13)


def test_an_aborted_row_in_a_burst_is_dropped() -> None:
    scheduler = build()
    start(scheduler, make_request("a", [1], 30), make_request("b", [2], 30))
    burst = plan_of(scheduler)
    assert scheduler.abort("a")
    events = scheduler.commit(burst, StepResult(token_ids=[10, 20, 11, 21, 12, 22, 13, 23], counts=[4, 4]))
    assert {e.request_id for e in events} == {"b"}
    assert plan_of(scheduler).freed_rows == (0,)


def test_full_pages_of_a_burst_are_found_by_later_prompts() -> None:
    limits = make_limits(page_size=2, max_burst=8, max_rows=1)
    scheduler, runner = build(page_size=2, max_burst=8, max_rows=1), FakeRunner(limits, mode="context")
    first = drive(scheduler, runner, [make_request("a", [1, 2, 3], 9)])["a", 0]
    prompt = [1, 2, 3, *first.token_ids, 5]
    out = drive(scheduler, runner, [make_request("b", prompt, 2)])["b", 0]
    assert out.prompt is not None and out.prompt.num_cached_tokens == 10, "all but the last token, in whole pages"


def test_fair_charges_each_token_that_was_taken() -> None:
    scheduler = build("fair")
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    start(scheduler, make_request("a", [1], 30, stop=[7], tenant="x"), make_request("b", [2], 30, tenant="y"))
    before = dict(policy.counters)
    scheduler.commit(plan_of(scheduler), StepResult(token_ids=[10, 20, 7, 21, 22, 23], counts=[2, 4]))
    charged = {name: policy.counters[name] - before[name] for name in "xy"}
    assert charged == {"x": 2 * 2.0, "y": 4 * 2.0}


def test_slo_measures_a_burst_as_equal_steps() -> None:
    scheduler = build("slo")
    policy = scheduler.policy
    assert isinstance(policy, SloPolicy) and isinstance(scheduler._clock, ManualClock)
    start(scheduler, make_request("a", [1], 30))
    seen: list[tuple[int, float]] = []
    policy.step_times.add = lambda num_tokens, seconds: seen.append((num_tokens, seconds))  # type: ignore[method-assign]
    plan = plan_of(scheduler)
    scheduler._clock.advance(0.4)
    scheduler.commit(plan, StepResult(token_ids=[1, 2, 3, 4], counts=[4]))
    assert seen == [(1, pytest.approx(0.1))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_do_not_depend_on_the_burst(policy: str, overlap: bool) -> None:
    sampling = SamplingParams(max_tokens=15, min_tokens=2, logprobs=1, n=2)

    def outputs(max_burst: int):
        limits = make_limits(max_burst=max_burst, num_pages=24, page_size=2, max_model_len=30)
        requests = [make_request(f"r{i}", [i, 2, 3], 15, seed=i, stop=[2, 5], sampling=sampling) for i in range(7)]
        runner = FakeRunner(limits, vocab_size=13, mode="context")
        return drive(create_scheduler(policy, limits), runner, requests, overlap=overlap), runner

    single, _ = outputs(1)
    burst, runner = outputs(5)
    assert any(p.num_steps > 1 for p in runner.plans)
    assert {k: (o.token_ids, o.finish_reason, o.logprobs) for k, o in single.items()} == {
        k: (o.token_ids, o.finish_reason, o.logprobs) for k, o in burst.items()
    }
