"""The preemptive policy: newcomers of a better class take rows and pages, and no victim's output changes."""

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_world import BLIND, World, expected_output

from jaxserve.api import Request
from jaxserve.sched import ContinuousScheduler, StepResult, create_scheduler
from jaxserve.sched.policies import PreemptivePolicy
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

VOCAB = 7

jobs = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 12), st.integers(-3, 3)), min_size=2, max_size=9
)


@settings(max_examples=150, derandomize=True)
@given(drawn=jobs, max_rows=st.integers(1, 4), num_pages=st.integers(11, 20), ahead=st.booleans(), common=st.booleans())
def test_every_output_is_what_it_would_be_alone(drawn, max_rows, num_pages, ahead, common) -> None:
    """`World.finish` compares each token with a model that knows no scheduler."""
    limits = make_limits(max_rows=max_rows, num_pages=num_pages, page_size=2, max_model_len=22, token_buckets=(4, 8))
    world = World(limits, policy="preemptive", look_ahead=ahead)
    for number, (gap, prompt_len, max_tokens, level) in enumerate(drawn):
        for _ in range(gap):
            world.schedule()
            world.commit()
        prompt = [*([1, 2, 3, 4] if common else []), *(number % VOCAB for _ in range(prompt_len))]
        world.add(make_request(f"q{number}", prompt, max_tokens, priority=level, seed=number, arrival_s=world.clock()))
    world.finish()


def test_victims_are_many_and_their_outputs_right() -> None:
    rng, num_preemptions, victims = random.Random(0), 0, 0
    for seed in range(20):
        limits = make_limits(max_rows=3, num_pages=16, page_size=2, max_model_len=24, token_buckets=(8, 16))
        world = World(limits, policy="preemptive")
        setups: collections.Counter[str] = collections.Counter()
        for number in range(12):
            request = make_request(
                f"q{number}", [seed % VOCAB, number % VOCAB, 3], rng.randint(4, 18), priority=rng.randint(-2, 2),
                seed=number, arrival_s=world.clock(),
            )  # fmt: skip
            world.add(request)
            for _ in range(rng.randint(1, 4)):
                world.schedule()
                setups.update(s.request_id for s in world.flights[-1][0].setups) if world.flights else None
                world.commit()
        num_preemptions += world.scheduler.num_preemptions
        victims += sum(count > 1 for count in setups.values())
        world.finish()
        for request in world.requests.values():
            assert world.outputs[request.request_id, 0].token_ids == expected_output(request, 0, 24)[0]
    assert num_preemptions > 50 and victims > 20, (num_preemptions, victims)


def make(**limits) -> ContinuousScheduler:
    made = create_scheduler("preemptive", make_limits(**limits), options=BLIND, clock=ManualClock())
    assert isinstance(made, ContinuousScheduler)
    return made


def step(scheduler: ContinuousScheduler, times: int = 1) -> list[str]:
    """Plans and commits; returns who got a row."""
    names = []
    for _ in range(times):
        plan = scheduler.schedule()
        assert plan is not None
        names += [setup.request_id for setup in plan.setups]
        scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows)))
    return names


def running(scheduler: ContinuousScheduler) -> set[str]:
    return {seq.request_id for seq in scheduler._running}


def test_a_row_is_taken_at_once_from_the_cheapest_of_a_worse_class() -> None:
    scheduler = make(max_rows=3, num_pages=40)
    scheduler.add(make_request("long", [1] * 12, 20, priority=2))
    scheduler.add(make_request("same", [2], 20, priority=0))
    scheduler.add(make_request("short", [3, 3], 20, priority=2))
    step(scheduler, 3)
    scheduler.add(make_request("urgent", [4], 2, priority=0, arrival_s=1.0))
    assert step(scheduler) == ["urgent"]
    assert running(scheduler) == {"long", "same", "urgent"}, "the short one costs least"


def test_what_the_prefix_cache_keeps_costs_nothing() -> None:
    """The long one has its pages in the cache, and nobody takes them: a token or two to compute again."""
    scheduler = make(max_rows=2, num_pages=40, page_size=4)
    scheduler.add(make_request("cached", [1] * 17, 20, priority=2))
    scheduler.add(make_request("open", [2] * 3, 20, priority=2))
    step(scheduler, 2)
    scheduler.memory.publish(next(s for s in scheduler._running if s.request_id == "cached"), 17)
    step(scheduler, 2)
    costs = {s.request_id: scheduler.memory.refill_cost(s, 1) for s in scheduler._running}
    assert costs["cached"] < costs["open"], costs
    scheduler.add(make_request("urgent", [4], 2, priority=0, arrival_s=1.0))
    step(scheduler)
    assert running(scheduler) == {"open", "urgent"}


def test_pages_are_taken_only_if_all_that_may_be_taken_are_enough() -> None:
    scheduler = make(max_rows=4, num_pages=8, page_size=2, max_model_len=16)
    scheduler.add(make_request("equal", [1] * 8, 4, priority=0))
    scheduler.add(make_request("worse", [2] * 4, 4, priority=2))
    step(scheduler)
    scheduler.add(make_request("large", [3] * 12, 2, priority=0, arrival_s=0.5))
    step(scheduler)
    assert running(scheduler) == {"equal", "worse"}, "six pages are asked for, and the worse one has three"
    scheduler.abort("large")
    scheduler.add(make_request("fits", [3] * 4, 2, priority=0, arrival_s=0.5))
    step(scheduler)
    assert running(scheduler) == {"equal", "fits"}
    assert scheduler.num_preemptions == 1


def test_age_protects() -> None:
    """ageing_s is 10: a sequence of level 1 no longer gives way to those of level 0 that come 10 s after it."""
    for later_s, taken in ((9.0, True), (11.0, False)):
        scheduler = make(max_rows=1)
        scheduler.add(make_request("old", [1], 20, priority=1, arrival_s=0.0))
        step(scheduler, 2)
        scheduler.add(make_request("new", [2], 2, priority=0, arrival_s=later_s))
        step(scheduler)
        assert running(scheduler) == ({"new"} if taken else {"old"})


def test_an_equal_class_never_takes() -> None:
    limits = make_limits(max_rows=2)
    scheduler = create_scheduler("preemptive", limits, options=BLIND)
    requests: list[Request] = [make_request(f"r{i}", [i], 6, priority=1, arrival_s=i) for i in range(6)]
    drive(scheduler, FakeRunner(limits), requests)
    assert isinstance(scheduler, ContinuousScheduler) and isinstance(scheduler.policy, PreemptivePolicy)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("level", [1, 3])
def test_age_alone_takes_nothing(level: int) -> None:
    """One that stands before the running one in the order, and is not of a better class, waits."""
    scheduler = make(max_rows=1)
    scheduler.add(make_request("running", [1], 20, priority=1, arrival_s=100.0))
    step(scheduler, 2)
    scheduler.add(make_request("old", [2], 2, priority=level, arrival_s=0.0))
    step(scheduler)
    assert running(scheduler) == {"running"}


def test_growth_alone_costs_nobody_its_row() -> None:
    """With room for the newcomer now, those of a worse class go on until pages are really short."""
    limits = make_limits(max_rows=3, num_pages=16, page_size=2, max_model_len=30)
    scheduler = create_scheduler("preemptive", limits, clock=ManualClock())
    assert isinstance(scheduler, ContinuousScheduler)
    scheduler.add(make_request("worse", [1, 2], 28, priority=2))
    step(scheduler)
    scheduler.add(make_request("better", [3, 4], 20, priority=0, arrival_s=0.1))
    assert step(scheduler) == ["better"]
    assert running(scheduler) == {"worse", "better"}
