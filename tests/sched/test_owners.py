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
