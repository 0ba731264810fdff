"""Order, ageing, and that a policy is a small class that somebody else can write."""

import dataclasses
import math

import pytest
from sched_world import BLIND, POLICIES

from jaxserve.api import Known, Resume, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.errors import ConfigError, PolicyError
from jaxserve.sched import SCHEDULERS, ContinuousScheduler, Limits, Policy, SchedulerOptions, Sequence, create_scheduler
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request


def order_of_setups(policy, requests, **limits) -> list[str]:
    made = make_limits(max_rows=1, **limits)
    runner = FakeRunner(made)
    drive(create_scheduler(policy, made), runner, requests)
    return [s.request_id for p in runner.plans for s in p.setups]


def test_fcfs_is_by_arrival_then_by_order_of_adding():
    requests = [make_request(n, [1], 2, arrival_s=t) for n, t in [("late", 2), ("x", 1), ("y", 1), ("early", 0)]]
    assert order_of_setups("fcfs", requests) == ["early", "x", "y", "late"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stream_that_moves_here_keeps_its_place(policy: str):
    known = Resume(sequences=(Known((5,)),), age_s=20.0)
    moved = dataclasses.replace(make_request("moved", [1], 4, arrival_s=13.0), resume=known)
    requests = [make_request(f"r{t}", [1], 4, arrival_s=t) for t in (10.0, 11.0)]
    assert order_of_setups(policy, [*requests, moved]) == ["moved", "r10.0", "r11.0"]


def test_nobody_waits_without_end_for_requests_that_say_they_are_old():
    known = Resume(sequences=(Known((5,)),), age_s=math.inf)
    assert dataclasses.replace(make_request("old", [1], arrival_s=700.0), resume=known).order_s == 100.0


def test_fcfs_never_lets_a_small_one_overtake_a_large_one():
    limits = make_limits(max_rows=3, num_pages=8, page_size=2, max_model_len=16)
    runner = FakeRunner(limits)
    requests = [make_request(f"r{i}", [i] * n, 3, arrival_s=i) for i, n in enumerate((9, 12, 1))]
    drive(create_scheduler("fcfs", limits), runner, requests)
    assert [s.request_id for p in runner.plans for s in p.setups] == ["r0", "r1", "r2"]


def test_priority_runs_smaller_numbers_first():
    requests = [make_request(f"p{p}", [1], 2, priority=p) for p in (3, -1, 2, 0)]
    assert order_of_setups("priority", requests) == ["p-1", "p0", "p2", "p3"]


def test_waiting_is_worth_levels():
    """ageing_s is 10: a request of level 1 goes before one of level 0 that comes more than 10 s later."""
    limits = make_limits(max_rows=1)
    for later, expected in ((9.0, ["new", "old"]), (11.0, ["old", "new"])):
        runner = FakeRunner(limits)
        requests = [
            make_request("old", [1], 2, priority=1, arrival_s=0),
            make_request("new", [1], 2, priority=0, arrival_s=later),
        ]
        drive(create_scheduler("priority", limits, options=SchedulerOptions(ageing_s=10.0)), runner, requests)
        assert [s.request_id for p in runner.plans for s in p.setups] == expected


@pytest.mark.parametrize(("ageing_s", "bound"), [(5.0, True), (1e9, False)])
def test_nothing_starves_under_a_flood(ageing_s: float, bound: bool):
    """One row; urgent requests arrive as fast as they are served. Without ageing the patient one would never run."""
    clock = ManualClock()
    limits = make_limits(max_rows=1)
    scheduler = create_scheduler("priority", limits, options=SchedulerOptions(ageing_s=ageing_s), clock=clock)
    runner = FakeRunner(limits, clock=clock, step_s=1.0)
    scheduler.add(make_request("urgent-0", [1], 2, priority=0, arrival_s=clock()))
    scheduler.add(make_request("patient", [1], 2, priority=10, arrival_s=clock()))
    number, served_at = 0, None
    for _ in range(400):
        if scheduler.num_waiting < 3:
            number += 1
            scheduler.add(make_request(f"urgent-{number}", [1], 2, priority=0, arrival_s=clock()))
        plan = scheduler.schedule()
        if any(s.request_id == "patient" for s in plan.setups):
            served_at = clock() if served_at is None else served_at
        scheduler.commit(plan, runner.dispatch(plan).result())
    if bound:
        assert served_at is not None
        # 10 levels of 5 s, and then those that were in the queue before it: three of two steps each.
        assert 40 < served_at <= 10 * ageing_s + 3 * 2 + 2
    else:
        assert served_at is None, "the flood must be one that starves without ageing"


def test_priority_chooses_victims_too():
    limits = make_limits(max_rows=3, num_pages=9, page_size=2, max_model_len=20)
    scheduler = create_scheduler("priority", limits, options=dataclasses.replace(BLIND, prefix_caching=False))
    runner = FakeRunner(limits)
    requests = [make_request(f"p{p}", [p, 1, 2], 12, priority=p) for p in (2, 1, 0)]
    drive(scheduler, runner, requests)
    setups = [s.request_id for p in runner.plans for s in p.setups]
    assert scheduler.num_preemptions > 0
    assert setups.count("p0") == 1
    assert setups.count("p2") > 1


class ShortestFirst(Policy):
    """The least work left first: what a notebook would write."""

    def key(self, seq: Sequence, now_s: float) -> float:
        return len(seq.request.prompt_token_ids) + seq.request.max_tokens


class Deadline(Policy):
    """An order that changes with time: those that waited over 5 s first, then the last to come."""

    dynamic_order = True

    def key(self, seq: Sequence, now_s: float) -> tuple[float, ...]:
        waited = now_s - seq.request.arrival_s
        return (0.0, -waited) if waited > 5 else (1.0, waited)


class Preemptive(Policy):
    """The urgent take the row of the less urgent."""

    preemptive = True

    def key(self, seq: Sequence, now_s: float) -> float:
        return seq.request.priority

    def victim_for_admission(self, seq, running):
        return running[-1] if running[-1].request.priority > seq.request.priority else None


class OneAtATime(Policy):
    """An admission hook, and a meter."""

    def __init__(self, options: SchedulerOptions) -> None:
        super().__init__(options)
        self.decoded = self.prefilled = 0

    def key(self, seq: Sequence, now_s: float) -> float:
        return 0.0

    def may_admit(self, seq, running) -> bool:
        return not running

    def observe(self, decoding, prefills) -> None:
        self.decoded += len(decoding)
        self.prefilled += sum(length for _, length in prefills)


def test_a_policy_is_a_small_class():
    requests = [make_request(f"r{n}", [1] * n, 2) for n in (5, 2, 9)]
    assert order_of_setups(ShortestFirst, requests) == ["r2", "r5", "r9"]
    assert order_of_setups(ShortestFirst(SchedulerOptions()), requests) == ["r2", "r5", "r9"]
    assert order_of_setups("test_policies:ShortestFirst", requests) == ["r2", "r5", "r9"]


def test_a_dynamic_order_is_computed_again():
    clock = ManualClock()
    limits = make_limits(max_rows=1)
    scheduler = create_scheduler(Deadline, limits, clock=clock)
    runner = FakeRunner(limits, clock=clock, step_s=1.0)
    for i in range(3):
        scheduler.add(make_request(f"r{i}", [1], 3, arrival_s=i / 10))
    seen = []
    while scheduler.has_work():
        plan = scheduler.schedule()
        seen += [s.request_id for s in plan.setups]
        scheduler.commit(plan, runner.dispatch(plan).result())
    assert seen == ["r2", "r1", "r0"], "at 0 s the last to come"
    for i in range(3):
        scheduler.add(make_request(f"s{i}", [1], 3, arrival_s=clock() - 10 + i))
    plan = scheduler.schedule()
    assert plan.setups[0].request_id == "s0", "after 10 s the first"


@pytest.mark.parametrize("overlap", [True, False])
def test_a_preemptive_policy_takes_rows(overlap: bool):
    limits = make_limits(max_rows=2, num_pages=40)
    scheduler, runner = create_scheduler(Preemptive, limits), FakeRunner(limits, mode="context")
    requests = [make_request(f"r{i}", [i, 2, 3], 12, priority=p) for i, p in enumerate((5, 6, 1, 0))]
    later = list(requests[2:])

    def arrive(turn: int) -> None:
        scheduler.check()
        if turn in (3, 7):
            scheduler.add(later.pop(0))

    outputs = {}
    expected = {}
    for request in requests:
        alone = drive(create_scheduler("fcfs", limits), FakeRunner(limits, mode="context"), [request])
        expected[request.request_id] = alone[request.request_id, 0].token_ids
        outputs[request.request_id] = []
    for request in requests[:2]:
        scheduler.add(request)
    flights, turn = [], 0
    while scheduler.has_work() or flights:
        plan = scheduler.schedule()
        if plan is not None:
            flights.append((plan, runner.dispatch(plan)))
        if plan is None or not overlap or len(flights) == 2:
            done, handle = flights.pop(0)
            for event in scheduler.commit(done, handle.result()):
                outputs[event.request_id].append(event.token_id)
        turn += 1
        arrive(turn)
    assert outputs == expected
    assert scheduler.num_preemptions == 2
    setups = [s.request_id for p in runner.plans for s in p.setups]
    assert setups[:4] == ["r0", "r1", "r2", "r3"]


def test_hooks_of_admission_and_metering():
    limits = make_limits(max_rows=4)
    policy = OneAtATime(SchedulerOptions())
    runner = FakeRunner(limits)
    drive(create_scheduler(policy, limits), runner, [make_request(f"r{i}", [1, 2, 3], 4) for i in range(3)])
    assert max(p.num_rows for p in runner.plans) == 1
    assert (policy.prefilled, policy.decoded) == (9, 9)


def test_names_errors_and_whole_schedulers():
    limits = make_limits()
    assert SCHEDULERS.names()[:2] == ["fcfs", "priority"]
    with pytest.raises(ConfigError, match=r"no scheduler is called 'fcsf'.*known: fcfs, priority.*mean 'fcfs'"):
        create_scheduler("fcsf", limits)
    with pytest.raises(ConfigError, match="ageing_s is 0"):
        SchedulerOptions(ageing_s=0)

    class Mine(ContinuousScheduler):
        def __init__(self, limits: Limits, options: SchedulerOptions) -> None:
            super().__init__(limits, ShortestFirst(options), options)

    made = create_scheduler(Mine, limits, options=SchedulerOptions(chunked_prefill=False))
    assert isinstance(made, Mine)
    assert create_scheduler(made, limits) is made


# ---- policies that break a rule --------------------------------------------------------------------------------------


class NeverAdmits(Policy):
    def key(self, seq: Sequence, now_s: float) -> float:
        return 0.0

    def may_admit(self, seq: Sequence, running) -> bool:
        return False


class NoBudget(NeverAdmits):
    def may_admit(self, seq: Sequence, running) -> bool:
        return True

    def prefill_budget(self, decoding) -> int:
        return 0


class NoVictim(NoBudget):
    def prefill_budget(self, decoding) -> int | None:
        return None

    def victim_for_page(self, seq: Sequence, behind) -> Sequence | None:
        return None


class VictimOfItsOwn(NoVictim):
    def victim_for_page(self, seq: Sequence, behind) -> Sequence:
        return seq


class Shortest(NoVictim):
    """The fewest tokens first; whoever comes takes the row of the longest, of itself, or of the first."""

    preemptive = True

    def key(self, seq: Sequence, now_s: float) -> float:
        return seq.prompt_len

    def victim_for_admission(self, seq: Sequence, running) -> Sequence | None:
        return running[0]


class Itself(Shortest):
    def victim_for_admission(self, seq: Sequence, running) -> Sequence | None:
        return seq


@pytest.mark.parametrize(
    ("policy", "method", "rule", "limits"),
    [
        (NeverAdmits, "may_admit", "it refuses 'r0' while nothing runs", {}),
        (NoBudget, "prefill_budget", "0 tokens of prompts are none", {}),
        (NoVictim, "victim_for_page", "it gives None while nothing is in flight", {"num_pages": 8, "page_size": 1}),
        (VictimOfItsOwn, "victim_for_page", "is none of those behind", {"num_pages": 8, "page_size": 1}),
        (Shortest, "victim_for_admission", "'r0' stands before 'r1' in the order", {"max_rows": 1}),
        (Itself, "victim_for_admission", "is none of those that it may choose from", {"max_rows": 1}),
    ],
)
def test_a_decision_against_a_rule_names_policy_method_and_rule(policy, method, rule, limits) -> None:
    made = make_limits(max_model_len=8, **limits)
    scheduler = create_scheduler(policy, made, options=BLIND)
    requests = [make_request(f"r{i}", [i] * (i + 1), 7 - i) for i in range(3)]
    with pytest.raises(PolicyError) as caught:
        drive(scheduler, FakeRunner(made), requests)
    assert str(caught.value).startswith(f"the policy {policy.__name__} breaks a rule of its method `{method}`: ")
    assert rule in str(caught.value)


def test_an_engine_that_ends_by_its_policy_says_which() -> None:
    made = make_limits()
    model = ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=())
    engine = Engine(runner=FakeRunner(made), scheduler=create_scheduler(NeverAdmits, made), tokenizer=None, model=model)
    updates: list[Update] = []
    engine.submit(engine.prepare([1], SamplingParams(detokenize=False)), updates.append)
    engine.start()
    engine.drain(30.0)
    engine.stop()
    assert isinstance(engine.failure, PolicyError)
    assert "NeverAdmits" in str(updates[-1].error) and "may_admit" in str(updates[-1].error)
