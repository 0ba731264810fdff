"""The fair policy between owners: shares by weight, tenants and priorities inside of an owner alone."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from sched_world import BLIND

from jaxserve.sched import ContinuousScheduler, Limits, SchedulerOptions, StepResult, create_scheduler
from jaxserve.sched.policies import FairPolicy
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

LIMITS = make_limits(max_rows=4, num_pages=400, page_size=2, max_model_len=200, token_buckets=(8, 64))


def make(limits: Limits = LIMITS, policy: str = "fair", options: SchedulerOptions = BLIND) -> ContinuousScheduler:
    made = create_scheduler(policy, limits, options=options, clock=ManualClock())
    assert isinstance(made, ContinuousScheduler)
    return made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """What an owner asks for: `backlog` sequences wait at all times."""

    backlog: int = 6
    weight: float = 1.0
    prompt_len: int = 4
    max_tokens: int = 10


def served(scheduler: ContinuousScheduler, owners: Mapping[str, Jobs], num_steps: int) -> collections.Counter[str]:
    """Runs so many steps. Returns the tokens that each owner got, of prompts and of answers."""
    got: collections.Counter[str] = collections.Counter(dict.fromkeys(owners, 0))
    numbers = itertools.count()
    paid: set[str] = set()
    for _ in range(num_steps):
        live = [seq for group in scheduler._groups.values() for seq in group.live.values()]
        waiting = collections.Counter(seq.request.owner for seq in live if seq.row < 0)
        for owner, jobs in owners.items():
            for number in itertools.islice(numbers, max(0, jobs.backlog - waiting[owner])):
                prompt = [number % 250, number // 250, *range(jobs.prompt_len - 2)]
                name = f"{owner}-{number}"
                asked = make_request(name, prompt, jobs.max_tokens, owner=owner, owner_weight=jobs.weight)
                scheduler.add(dataclasses.replace(asked, arrival_s=float(number)))
        plan = scheduler.schedule()
        assert plan is not None
        for setup in plan.setups:
            if setup.request_id not in paid:
                paid.add(setup.request_id)
                got[setup.request_id.split("-")[0]] += setup.prompt_len
        for event in scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows))):
            got[event.request_id.split("-")[0]] += 1
    return got


EQUAL = SchedulerOptions(watermark=0.0, growth=0.0, prefix_caching=False, input_weight=1.0, output_weight=1.0)


@pytest.mark.parametrize(
    ("modest", "greedy"),
    [
        (Jobs(), Jobs(backlog=100)),
        (Jobs(prompt_len=2, max_tokens=3), Jobs(backlog=100, prompt_len=20, max_tokens=150)),
        (Jobs(prompt_len=30, max_tokens=2), Jobs(backlog=100, max_tokens=100)),
        (Jobs(weight=4.0), Jobs(backlog=100)),
        (Jobs(weight=4.0, max_tokens=3), Jobs(backlog=100, max_tokens=100)),
        (Jobs(weight=0.5), Jobs(backlog=100, weight=2.0, max_tokens=40)),
    ],
)
def test_two_owners_get_their_shares_whatever_they_ask_for(modest: Jobs, greedy: Jobs) -> None:
    got = served(make(options=EQUAL), {"modest": modest, "greedy": greedy}, 2000)
    share = modest.weight / (modest.weight + greedy.weight)
    assert got["modest"] / got.total() == pytest.approx(share, abs=0.05), got


def test_by_arrival_the_greedy_one_gets_nearly_all() -> None:
    """What the shares above are worth."""
    got = served(make(policy="fcfs", options=EQUAL), {"modest": Jobs(), "greedy": Jobs(backlog=100)}, 2000)
    assert got["modest"] / got.total() < 0.1, got


def test_an_owner_alone_gets_everything() -> None:
    alone = served(make(options=EQUAL), {"alone": Jobs()}, 300)
    assert alone == served(make(policy="fcfs", options=EQUAL), {"alone": Jobs()}, 300)


def order_of_setups(requests, **limits) -> list[str]:
    made = make_limits(max_rows=1, **limits)
    runner = FakeRunner(made)
    drive(create_scheduler("fair", made), runner, requests)
    return [s.request_id for p in runner.plans for s in p.setups]


def test_many_tenants_make_no_larger_share() -> None:
    """The tenants of an owner share what it gets: to name a hundred is worth nothing."""
    many = [make_request(f"m{i}", [i], 4, owner="many", tenant=f"t{i}") for i in range(8)]
    one = [make_request(f"o{i}", [9, i], 4, owner="one", tenant="t0", arrival_s=1.0) for i in range(4)]
    order = order_of_setups([*many, *one])
    assert sorted(order[:8]) == ["m0", "m1", "m2", "m3", "o0", "o1", "o2", "o3"], order
    assert order[8:] == ["m4", "m5", "m6", "m7"]


def test_tenants_of_an_owner_share_as_those_of_nobody_do() -> None:
    def requests(owner: str):
        return [make_request(f"{t}{i}", [i], 4, owner=owner, tenant=t) for t in "ab" for i in range(3)]

    order = order_of_setups(requests("x"))
    assert order == order_of_setups(requests(""))
    assert {name[0] for name in order[:2]} == {name[0] for name in order[4:]} == {"a", "b"}


def test_a_priority_counts_within_its_tenant_alone() -> None:
    requests = [
        *(make_request(f"x{level}", [1], 4, priority=level, owner="x") for level in (2, 0, 1)),
        *(make_request(f"y{level}", [1], 4, priority=level, owner="y", tenant="t") for level in (-5, 7)),
        *(make_request(f"z{level}", [1], 4, priority=level, owner="y", tenant="u") for level in (0, 9)),
    ]
    order = order_of_setups(requests)
    assert order[0] == "x0", "the first owner to come, whatever the other's priorities"
    assert [name for name in order if name[0] == "x"] == ["x0", "x1", "x2"]
    assert [name for name in order if name[0] == "y"] == ["y-5", "y7"]
    assert [name for name in order if name[0] == "z"] == ["z0", "z9"]
    assert sum(name[0] == "x" for name in order[:4]) == 2


def test_age_is_worth_levels_within_a_tenant() -> None:
    requests = [make_request(n, [1], 2, priority=p, arrival_s=at) for n, p, at in (("old", 1, 0.0), ("new", 0, 11.0))]
    assert order_of_setups(requests) == ["old", "new"]


def test_an_owner_that_comes_back_has_no_credit() -> None:
    scheduler = make(make_limits(max_rows=1))
    drive(scheduler, FakeRunner(LIMITS), [make_request("y0", [1], 1, owner="y")])
    served(scheduler, {"x": Jobs()}, 30)
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    scheduler.add(make_request("y1", [1], 4, owner="y", arrival_s=1e6))
    assert policy.owners.counters["y"] == policy.owners.counters["x"] > 50


def test_owners_and_tenants_that_are_gone_are_forgotten() -> None:
    scheduler = make()
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    scheduler.add(make_request("stays", [1, 2], 2, owner="stays"))
    for i in range(9000):
        scheduler.add(make_request(f"r{i}", [1, 2], 2, owner=f"o{i % 5000 if i % 2 else 0}", tenant=f"t{i}"))
        scheduler.abort(f"r{i}")
        assert policy._num_idle <= 4098
    assert sum(len(tenants.counters) for tenants in policy.tenants.values()) <= 4100
    assert policy.owners.counters.keys() == policy.tenants.keys() >= {"stays"}
    assert policy._num_idle == sum(tenants.num_idle for tenants in policy.tenants.values())


# ---- rows that give way ---------------------------------------------------------------------------------------------


def step(scheduler: ContinuousScheduler, times: int = 1) -> list[str]:
    """Plans and commits. Returns who got a row."""
    names: list[str] = []
    for _ in range(times):
        plan = scheduler.schedule()
        assert plan is not None
        names += [setup.request_id for setup in plan.setups]
        scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows)))
    return names


def rows(scheduler: ContinuousScheduler) -> dict[str, int]:
    """Of each owner."""
    return dict(collections.Counter(seq.request.owner for seq in scheduler._running))


def long_answers(owner: str, count: int, prompt_len: int = 3, max_tokens: int = 180, weight: float = 1.0):
    return [
        make_request(f"{owner}{i}", [i, *range(1, prompt_len)], max_tokens, owner=owner, owner_weight=weight)
        for i in range(count)
    ]


def wait_for(scheduler: ContinuousScheduler, request_id: str, at_most: int) -> int:
    """Steps until it has a row."""
    for number in range(1, at_most + 1):
        if request_id in step(scheduler):
            return number
    raise AssertionError(f"{request_id} waits after {at_most} steps: {rows(scheduler)}")


LAG = dataclasses.replace(BLIND, preempt_lag=64.0, preempt_after=4)


@pytest.mark.parametrize("waiting", [0, 500])
def test_a_late_owner_is_served_long_before_the_rows_of_the_first_end(waiting: int) -> None:
    """Four rows are charged 8 a step: the newcomer lags 64 behind after eight steps."""
    scheduler = make(options=LAG)
    for request in long_answers("greedy", 4 + waiting):
        scheduler.add(request)
    step(scheduler, 20)
    assert rows(scheduler) == {"greedy": 4}
    scheduler.add(make_request("late0", [7, 7], 180, owner="late"))
    assert wait_for(scheduler, "late0", 10) >= 8
    assert rows(scheduler) == {"greedy": 3, "late": 1}
    assert scheduler.num_preemptions == 1


def test_without_a_late_owner_no_row_gives_way() -> None:
    scheduler = make(options=LAG)
    for request in long_answers("greedy", 40):
        scheduler.add(request)
    step(scheduler, 170)
    assert scheduler.num_preemptions == 0


def test_a_long_prompt_waits_until_it_is_worth_it() -> None:
    """Its prompt of 80 tokens is charged first, so it lags by 64 only when the others are 144 ahead."""
    scheduler = make(options=LAG)
    for request in long_answers("greedy", 4):
        scheduler.add(request)
    step(scheduler, 20)
    scheduler.add(make_request("late0", range(80), 10, owner="late"))
    assert wait_for(scheduler, "late0", 21) >= 18


def test_rows_move_until_both_have_equally_many_and_then_stay() -> None:
    scheduler = make(options=LAG)
    for request in [*long_answers("greedy", 4), *long_answers("late", 0)]:
        scheduler.add(request)
    step(scheduler, 20)
    for request in long_answers("late", 4):
        scheduler.add(request)
    step(scheduler, 12)
    assert rows(scheduler) == {"greedy": 2, "late": 2}
    step(scheduler, 120)
    assert scheduler.num_preemptions == 2, "equal rows are served equally: nobody gives way again"


def test_rows_move_by_weight() -> None:
    scheduler = make(make_limits(max_rows=10, num_pages=900, page_size=2, max_model_len=200), options=LAG)
    for request in long_answers("greedy", 20):
        scheduler.add(request)
    step(scheduler, 20)
    for request in long_answers("heavy", 20, weight=4.0):
        scheduler.add(request)
    step(scheduler, 20)
    assert rows(scheduler) == {"greedy": 2, "heavy": 8}


def test_two_owners_of_one_row_take_turns_that_are_long() -> None:
    """A turn ends when the other lags by 64, which is 32 tokens, after it has caught up."""
    limits = make_limits(max_rows=1, num_pages=300, page_size=2, max_model_len=260)
    scheduler = make(limits, options=LAG)
    for request in (make_request(owner, [1, 2], 250, owner=owner) for owner in "xy"):
        scheduler.add(request)
    turns = [name for _ in range(400) for name in step(scheduler)]
    assert turns == ["x", "y"] * (len(turns) // 2) + ["x"] * (len(turns) % 2)
    assert 5 <= len(turns) <= 9, turns


def test_who_has_just_got_a_row_keeps_it() -> None:
    """With no lag to speak of, each sequence generates `preempt_after` tokens at least in a turn."""
    options = dataclasses.replace(BLIND, preempt_lag=0.001, preempt_after=10, output_weight=1.0)
    limits = make_limits(max_rows=1, num_pages=300, page_size=2, max_model_len=260)
    scheduler = make(limits, options=options)
    for request in (make_request(owner, [1, 2], 100, owner=owner) for owner in "xy"):
        scheduler.add(request)
    turns = 0
    while scheduler.has_work():
        turns += len(step(scheduler))
    assert 10 <= turns <= 20


def test_the_worst_priority_of_the_owner_furthest_ahead_gives_way() -> None:
    scheduler = make(options=LAG)
    for name, owner, priority in (("b", "b", 0), ("x", "x", 0), ("x-late", "x", 9), ("x-soon", "x", -9)):
        scheduler.add(make_request(name, [1, 2], 180, owner=owner, priority=priority))
    step(scheduler, 30)
    scheduler.add(make_request("new", [7], 4, owner="new", priority=50))
    wait_for(scheduler, "new", 60)
    assert {seq.request_id for seq in scheduler._running} == {"b", "x", "x-soon", "new"}


def test_pages_give_way_as_rows_do() -> None:
    """There are rows, but the pages are all of one owner."""
    limits = make_limits(max_rows=8, num_pages=100, page_size=2, max_model_len=190, token_buckets=(8, 256))
    scheduler = make(limits, options=LAG)
    for request in long_answers("greedy", 3, prompt_len=60, max_tokens=100):
        scheduler.add(request)
    step(scheduler, 4)
    assert rows(scheduler) == {"greedy": 3} and scheduler.memory.pool.num_available < 10
    scheduler.add(make_request("late0", [9] * 40, 20, owner="late"))
    wait_for(scheduler, "late0", 30)
    assert rows(scheduler)["late"] == 1


def test_charges_are_made_once_however_often_a_sequence_gives_way() -> None:
    limits = make_limits(max_rows=1, num_pages=300, page_size=2, max_model_len=200)
    scheduler = make(limits, options=dataclasses.replace(LAG, preempt_lag=10.0, prefix_caching=False))
    requests = [*long_answers("x", 3), *long_answers("y", 2, max_tokens=90)]
    out = drive(scheduler, FakeRunner(limits), requests)
    assert scheduler.num_preemptions > 5
    assert isinstance(scheduler.policy, FairPolicy)
    counters = scheduler.policy.owners.counters
    assert counters["x"] == 3 * (3 + 2 * 180) and counters["y"] == 2 * (3 + 2 * 90)
    assert {key: len(one.token_ids) for key, one in out.items()} == {
        (request.request_id, 0): request.max_tokens for request in requests
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_who_gives_way_ends_with_the_same_tokens(overlap: bool) -> None:
    limits = make_limits(max_rows=3, num_pages=300, page_size=2, max_model_len=200)
    requests = [*long_answers("x", 4), *long_answers("y", 4), *long_answers("z", 1), *long_answers("w", 2)]
    tokens = {}
    for policy in ("fair", "fcfs"):
        scheduler = make(limits, policy, dataclasses.replace(LAG, preempt_lag=10.0))
        out = drive(scheduler, FakeRunner(limits, mode="context", vocab_size=200), requests, overlap=overlap)
        tokens[policy] = {key: one.token_ids for key, one in out.items()}
        assert (scheduler.num_preemptions > 5) == (policy == "fair")
    assert tokens["fair"] == tokens["fcfs"]


def test_a_step_without_a_lag_looks_at_no_owner() -> None:
    """Thousands wait: the owners are compared a few times while `preempt_lag` is charged, not in each step."""
    scheduler = make(options=dataclasses.replace(BLIND, preempt_lag=1e5))
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    for i in range(1000):
        scheduler.add(make_request(f"r{i}", [i % 250, i // 250], 180, owner=f"o{i}"))
    step(scheduler, 3)
    num_looks, look = 0, policy._leading

    def counting(owner: str, charged: float) -> dict[str, int]:
        nonlocal num_looks
        num_looks += 1
        return look(owner, charged)

    policy._leading = counting  # type: ignore[method-assign]
    step(scheduler, 150)
    assert num_looks <= 2, num_looks


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("num_steps", range(8))
def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(weight: float, num_steps: int) -> None:
    """In the step after it came, or the next one: by then its owner is behind the one that fills the steps."""
    scheduler = make(make_limits(max_rows=8, num_pages=800, page_size=2, max_model_len=300, token_buckets=(8, 32)))
    for number in range(6):
        scheduler.add(make_request(f"long-{number}", [number] * 200, 1, owner="greedy", owner_weight=weight))

    def step() -> list[str]:
        plan = scheduler.schedule()
        assert plan is not None
        events = scheduler.commit(plan, StepResult(token_ids=[99] * len(plan.sampled_rows)))
        return [event.request_id for event in events]

    for _ in range(num_steps):
        step()
    scheduler.add(make_request("short", [7] * 4, 1, owner="modest"))
    assert "short" in step() + step()


def test_two_long_prompts_of_two_owners_go_on_together_by_weight() -> None:
    scheduler = make(make_limits(max_rows=4, num_pages=800, page_size=2, max_model_len=300, token_buckets=(8, 32)))
    for owner, weight in (("one", 1.0), ("three", 3.0)):
        scheduler.add(make_request(owner, range(200), 1, owner=owner, owner_weight=weight))
    scheduler.schedule()
    plan = scheduler.schedule()
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [8, 24]


def test_what_the_owners_leave_of_a_step_is_not_kept_where_nobody_else_can_begin() -> None:
    """No row is free for the other, so the long prompt has the whole of each step."""
    scheduler = make(make_limits(max_rows=1, num_pages=800, page_size=2, max_model_len=300, token_buckets=(8, 32)))
    scheduler.add(make_request("long", range(200), 1, owner="one"))
    scheduler.schedule()
    scheduler.add(make_request("short", range(4), 1, owner="other"))
    plan = scheduler.schedule()
    assert plan is not None
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [32]
