"""The fair policy against the bound of its paper, and the cases around it."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_world import BLIND

from jaxserve.sched import ContinuousScheduler, Limits, SchedulerOptions, StepResult, create_scheduler
from jaxserve.sched.policies import FairPolicy
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

LIMITS = make_limits(max_rows=4, num_pages=24, page_size=2, max_model_len=24, token_buckets=(8, 16))


def make(policy: str = "fair", limits: Limits = LIMITS, options: SchedulerOptions = BLIND) -> ContinuousScheduler:
    made = create_scheduler(policy, limits, options=options, clock=ManualClock())
    assert isinstance(made, ContinuousScheduler)
    return made


class Service:
    """What each tenant got, from events and setups alone, while all of them always have somebody waiting."""

    def __init__(self, scheduler: ContinuousScheduler, jobs: dict[str, list[tuple[int, int]]]) -> None:
        self.scheduler = scheduler
        self.jobs = jobs
        self.got: collections.Counter[str] = collections.Counter(dict.fromkeys(jobs, 0))
        self.trail: list[dict[str, float]] = []
        self.longest_prompt = self.most_together = 0
        self._number = 0
        self._paid: set[str] = set()

    def run(self, num_steps: int) -> None:
        options = self.scheduler.policy.options
        for _ in range(num_steps):
            self._keep_waiting()
            plan = self.scheduler.schedule()
            assert plan is not None
            for setup in plan.setups:
                if setup.request_id not in self._paid:
                    self._paid.add(setup.request_id)
                    self.got[setup.request_id[0]] += options.input_weight * setup.prompt_len
            for event in self.scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows))):
                self.got[event.request_id[0]] += options.output_weight
            final = sum(seq.max_fed + 1 for seq in self.scheduler._running)
            self.most_together = max(self.most_together, final)
            self.trail.append(dict(self.got))

    def _keep_waiting(self) -> None:
        waiting = collections.Counter(
            group.request.tenant for group in self.scheduler._groups.values() for s in group.live.values() if s.row < 0
        )
        for tenant, kinds in self.jobs.items():
            for _ in range(6 - waiting[tenant]):  # more than a step can admit: the backlog never ends inside of one
                prompt_len, max_tokens = kinds[self._number % len(kinds)]
                self._number += 1
                self.longest_prompt = max(self.longest_prompt, prompt_len)
                name = f"{tenant}{self._number}"
                prompt = [self._number, *range(1, prompt_len)]
                self.scheduler.add(make_request(name, prompt, max_tokens, tenant=tenant, arrival_s=self._number))

    def worst_lag(self) -> float:
        """The largest difference between what two tenants got in one stretch of time, over all stretches."""
        tenants = sorted(self.jobs)
        worst = 0.0
        for a in tenants:
            for b in tenants:
                lead = [at[a] - at[b] for at in self.trail]
                lowest = 0.0
                for value in lead:
                    worst = max(worst, value - lowest)
                    lowest = min(lowest, value)
        return worst


kinds = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 12)), min_size=1, max_size=3)


@settings(max_examples=60, derandomize=True)
@given(
    jobs=st.lists(kinds, min_size=2, max_size=3),
    input_weight=st.sampled_from([0.5, 1.0]),
    output_weight=st.sampled_from([1.0, 2.0, 4.0]),
    look_ahead=st.booleans(),
)
def test_nobody_lags_behind_by_more_than_the_bound(jobs, input_weight, output_weight, look_ahead):
    """|W_f - W_g| <= 2 max(w_p L_input, w_q M) over any stretch in which both wait (Theorem 4.4 of the paper)."""
    options = SchedulerOptions(
        prefix_caching=False,
        input_weight=input_weight,
        output_weight=output_weight,
        watermark=0.03 if look_ahead else 0.0,
        growth=0.5 if look_ahead else 0.0,
    )
    service = Service(make(options=options), dict(zip("fgh", jobs, strict=False)))
    service.run(120)
    bound = 2 * max(input_weight * service.longest_prompt, output_weight * service.most_together)
    assert service.worst_lag() <= bound


def test_first_come_breaks_the_bound_that_fair_keeps():
    """One tenant sends long jobs, three for each short one of the other: arrival alone serves it far more."""
    jobs = {"f": [(2, 4)], "g": [(10, 12)]}
    lags = {}
    for policy in ("fair", "fcfs"):
        service = Service(make(policy), jobs)
        service.run(600)
        bound = 2 * max(service.longest_prompt, 2 * service.most_together)
        lags[policy] = service.worst_lag() / bound
    assert lags["fair"] <= 0.5, lags
    assert lags["fcfs"] > 3, lags


def counters(scheduler: ContinuousScheduler, owner: str = "") -> dict[str, float]:
    """Of the tenants of an owner."""
    assert isinstance(scheduler.policy, FairPolicy)
    return scheduler.policy.tenants[owner].counters


def test_charges_are_weighted_tokens_as_they_are_served():
    scheduler = make()
    drive(scheduler, FakeRunner(LIMITS), [make_request("r", [1, 2, 3, 4, 5], 6, tenant="x")])
    assert counters(scheduler) == {"x": 5 * 1.0 + 6 * 2.0}


def test_a_dropped_token_costs_nothing():
    """The step in flight when a stop id is seen yields one token that nobody gets."""
    scheduler = make()
    runner = FakeRunner(LIMITS, forced={("r", 0): {2: 50}})
    out = drive(scheduler, runner, [make_request("r", [1, 2], 9, stop=[50], tenant="x")])
    assert len(out["r", 0].token_ids) == 3
    assert counters(scheduler) == {"x": 2 + 3 * 2}


def test_computing_again_and_cached_prompts_are_free():
    limits = make_limits(max_rows=3, num_pages=9, page_size=2, max_model_len=20)
    scheduler = make(limits=limits)
    jobs = [make_request(f"r{i}", [i, 1, 2], 12, arrival_s=i, tenant=f"t{i}") for i in range(3)]
    drive(scheduler, FakeRunner(limits), jobs)
    assert scheduler.num_preemptions > 0
    assert counters(scheduler) == {f"t{i}": 3 + 12 * 2 for i in range(3)}
    scheduler = make()
    runner = FakeRunner(LIMITS)
    for name in "ab":
        drive(scheduler, runner, [make_request(name, [1, 2, 3, 4, 5], 1, tenant=name)])
    assert counters(scheduler) == {"a": 5 + 2, "b": 7 + 1 + 2}, "b is lifted to a, and finds two pages of two tokens"


def test_who_comes_back_is_lifted_to_the_smallest_that_wait():
    scheduler = make(limits=make_limits(max_rows=1))
    for i in range(3):
        scheduler.add(make_request(f"x{i}", [1, 2, 3, 4], 4, tenant="x", arrival_s=i))
    for _ in range(4):
        plan = scheduler.schedule()
        scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows)))
    assert counters(scheduler)["x"] == 4 + 4 * 2
    scheduler.add(make_request("y0", [1], 4, tenant="y", arrival_s=9))
    assert counters(scheduler)["y"] == 12, "no credit for having been away"


def test_who_was_known_before_is_lifted_too() -> None:
    limits = make_limits(max_rows=1)
    scheduler, runner = make(limits=limits), FakeRunner(limits)
    drive(scheduler, runner, [make_request("y0", [1], 1, tenant="y")])
    assert counters(scheduler) == {"y": 3}
    drive(scheduler, runner, [make_request(f"x{i}", [2, i], 8, tenant="x", arrival_s=i) for i in range(4)])
    assert counters(scheduler)["x"] == 3 + 4 * (2 + 16)
    drive(scheduler, runner, [make_request("y1", [3], 1, tenant="y")])
    assert counters(scheduler)["y"] == 75 + 3, "x was the last to run"


def test_a_lone_tenant_is_served_by_arrival():
    limits = make_limits(max_rows=1)
    runner = FakeRunner(limits)
    jobs = [make_request(f"r{i}", [1, 2], 2, tenant="x", arrival_s=3 - i) for i in range(3)]
    drive(make(limits=limits), runner, jobs)
    assert [s.request_id for p in runner.plans for s in p.setups] == ["r2", "r1", "r0"]


@pytest.mark.parametrize("count", [5000])
def test_tenants_that_are_gone_are_forgotten(count: int):
    scheduler = make()
    for i in range(count):
        scheduler.add(make_request(f"r{i}", [1, 2], 2, tenant=f"t{i}"))
        scheduler.abort(f"r{i}")
    assert len(counters(scheduler)) < count
