"""The simulator against the engine's own loop, and its times against arithmetic done by hand."""

import collections
import dataclasses
import random

import pytest

from jaxserve.api import FinishReason, Pooling, Request, SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.lab.simulation.drafts import SimulatedDrafts
from jaxserve.lab.simulation.simulate import FixedCost, SimRequest, StepCost, VirtualClock, simulate
from jaxserve.sched import SCHEDULERS, Bucket, Limits, SchedulerOptions, StepPlan, create_scheduler
from jaxserve.sched.plan import HostSlots
from jaxserve.testing import FakeRunner, ManualClock, make_limits, with_shapes

STOP = 7
TURN = FixedCost(cost=StepCost(1.0, 0.0))  # a turn a second


def sim_request(
    number: int,
    prompt,
    output_len: int,
    arrival_s: float = 0.0,
    *,
    max_tokens: int = 16,
    n: int = 1,
    token: int | None = None,
    deadline_s: float = float("inf"),
    priority: int = 0,
    min_tokens: int = 0,
) -> SimRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, n=n, detokenize=False, min_tokens=min_tokens)
    request = Request(
        request_id=f"r{number}",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        seed=0,
        stop_token_ids=frozenset({STOP}),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        priority=priority,
        tenant=f"t{number % 3}",
        owner=f"o{number % 2}",
        owner_weight=1.0 + number % 2,
    )
    return SimRequest(request=request, arrival_s=arrival_s, output_len=output_len, output_token_id=token)


def random_trace(seed: int, count: int = 40) -> list[SimRequest]:
    rng = random.Random(seed)
    now, trace = 0.0, []
    for i in range(count):
        now += rng.choice([0.0, 0.0, rng.uniform(0, 6), rng.uniform(0, 60) if rng.random() < 0.1 else 1.0])
        shared = [100 + rng.randint(0, 2)] * rng.choice([0, 4, 9, 12])
        prompt = shared + [200 + i] * rng.randint(1, 9)
        n = rng.choice([1, 1, 1, 2, 3])
        request = sim_request(i, prompt, rng.randint(1, 20), now, n=n, token=1000 + i, priority=rng.randint(0, 3))
        trace.append(request)
    return trace


def engine_plans(
    policy: str, trace: list[SimRequest], limits: Limits, accept: SimulatedDrafts | None = None
) -> tuple[list[StepPlan], dict[str, list[int]]]:
    """The plans of the real loop on the fake runner, a turn a second, and the tokens of each request."""
    forced = {
        (t.request.request_id, index): {p: STOP if p == t.output_len - 1 else 1000 + i for p in range(40)}
        for i, t in enumerate(trace)
        for index in range(t.request.sampling.n)
    }
    clock = ManualClock()
    runner = FakeRunner(limits, forced=forced, clock=clock, step_s=1.0, accept=accept)
    model = ModelInfo(name="fake", vocab_size=2000, max_model_len=limits.max_model_len, eos_token_ids=(STOP,))
    scheduler = create_scheduler(policy, limits, clock=clock)
    engine = Engine(runner=runner, scheduler=scheduler, tokenizer=None, model=model, clock=clock)
    tokens: dict[str, list[int]] = {t.request.request_id: [] for t in trace}
    waiting = list(trace)
    while True:
        while waiting and waiting[0].arrival_s <= clock():
            request = waiting.pop(0).request
            engine.submit(request, lambda update, ids=tokens[request.request_id]: ids.extend(update.token_ids))
        if engine.step():
            continue
        if not waiting:
            return runner.plans, tokens
        clock.now_s = waiting[0].arrival_s


@pytest.mark.parametrize("policy", SCHEDULERS.names())
@pytest.mark.parametrize(("num_pages", "seed"), [(200, 0), (18, 1), (18, 2), (14, 3)])
def test_plans_are_those_of_the_engine(policy: str, num_pages: int, seed: int) -> None:
    limits = make_limits(max_rows=6, num_pages=num_pages, page_size=4, max_model_len=48)
    trace = random_trace(seed)
    expected, tokens = engine_plans(policy, trace, limits)
    found = simulate(policy, trace, TURN, limits, keep_plans=True, keep_token_times=True)
    assert list(found.plans) == expected
    assert found.num_steps == len(expected) > 50
    outcomes = {r.request_id: r for r in found.requests}
    assert {name: len(ids) for name, ids in tokens.items()} == {n: r.output_tokens for n, r in outcomes.items()}
    for outcome in outcomes.values():
        assert len(outcome.token_times_s) == outcome.output_tokens
        assert outcome.token_times_s[0] == outcome.first_token_s
        assert outcome.token_times_s[-1] == outcome.last_token_s
    assert num_pages > 14 or sum(r.preemptions for r in found.requests) > 0


def test_plans_with_host_slots_are_those_of_the_engine() -> None:
    """Whose saves arrive within their step, and whose loads take no time."""
    limits = make_limits(
        max_rows=6,
        num_pages=14,
        page_size=4,
        max_model_len=48,
        slots=HostSlots(num_slots=30, max_draining=9, max_loads=2),
    )
    trace = random_trace(3)
    expected, _ = engine_plans("fcfs", trace, limits)
    found = simulate("fcfs", trace, TURN, limits, keep_plans=True)
    assert list(found.plans) == expected
    assert found.loaded_pages == sum(len(plan.loads) for plan in expected) > 5
    assert found.saved_pages > found.loaded_pages


def test_pages_from_host_slots_take_their_time() -> None:
    """A prompt of four pages, evicted and asked for again: three pages are loaded, 500 ms each."""
    slots = HostSlots(num_slots=30, max_draining=9, max_loads=2, load_ms=500.0, save_ms=100.0)
    limits = make_limits(max_rows=2, num_pages=5, page_size=4, max_model_len=40, slots=slots)
    prompts = ([1] * 13, [2] * 17, [1] * 13)
    trace = [sim_request(i, prompt, 1, 100.0 * i, max_tokens=1) for i, prompt in enumerate(prompts)]
    cost = FixedCost(cost=StepCost(0.0, 1.0))
    with_slots = simulate("fcfs", trace, cost, limits)
    without = simulate("fcfs", trace, cost, dataclasses.replace(limits, slots=HostSlots()))
    assert (with_slots.loaded_pages, without.loaded_pages) == (3, 0)
    assert [r.cached_tokens for r in with_slots.requests] == [0, 0, 12]
    assert with_slots.device_s == pytest.approx(without.device_s + 1.5)


# Milliseconds of a round, by width and rounds: a turn takes 1000, so launches are the most of what a step costs.
STEP_MS = {(1, 1): 300.0, (2, 1): 330.0, (4, 1): 500.0, (1, 3): 310.0, (2, 2): 340.0}
SHAPES = (((2, 1), (4, 1)), ((1, 3),), ((2, 2), (4, 1)))


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("num_pages", "rates"), [(200, (0.9, 0.6)), (18, (0.5,)), (18, (1.0,)), (16, (0.0,))])
def test_plans_of_several_tokens_are_those_of_the_engine(
    num_pages: int, rates: tuple[float, ...], shapes: tuple[tuple[int, int], ...]
) -> None:
    limits = with_shapes(make_limits(max_rows=6, num_pages=num_pages, page_size=4, max_model_len=48), *shapes)
    times = {b: STEP_MS[b.width, b.rounds] for b in limits.buckets if b.decode_only}
    limits = limits.with_buckets(limits.buckets, times)
    trace, accept = random_trace(num_pages), SimulatedDrafts(rates=rates, seed=3)
    expected, tokens = engine_plans("preemptive", trace, limits, accept)
    found = simulate("preemptive", trace, TURN, limits, accept=accept, keep_plans=True, keep_token_times=True)
    assert list(found.plans) == expected
    assert {name: len(ids) for name, ids in tokens.items()} == {r.request_id: r.output_tokens for r in found.requests}
    assert all(len(r.token_times_s) == r.output_tokens for r in found.requests)
    used = {(plan.width, plan.rounds) for plan in expected}
    assert used & {*shapes}, used
    if rates == (0.0,) and (1, 3) not in shapes:
        assert used > {(1, 1)} and found.drafts.drafted > found.drafts.accepted == 0
    if rates == (1.0,):
        assert found.row_tokens > 1.5 * found.row_steps
        if (1, 3) not in shapes:
            assert found.drafts.rate > 0.9, "all, but for those that an end of a sequence cuts off"


def test_drafts_are_accepted_at_the_rates_of_their_places() -> None:
    accept = SimulatedDrafts(rates=(0.8, 0.5, 0.25), seed=1)

    def all_counts(accept: SimulatedDrafts) -> list[int]:
        return [accept(f"r{n}", n % 3, position, 4) for n in range(200) for position in range(0, 400, 4)]

    counts = all_counts(accept)
    for place, rate in enumerate((0.8, 0.5, 0.25, 0.25)):
        reached = [count for count in counts if count >= place]
        share = sum(count > place for count in reached) / len(reached)
        assert abs(share - rate) < 4 * (rate * (1 - rate) / len(reached)) ** 0.5, (place, share)
    assert counts == [accept(f"r{n}", n % 3, position, 4) for n in range(200) for position in range(0, 400, 4)]
    assert counts != [
        SimulatedDrafts(rates=(0.8, 0.5, 0.25))(f"r{n}", n % 3, p, 4) for n in range(200) for p in range(0, 400, 4)
    ]
    for rates in ((), (0.5, 1.2), (float("nan"),)):
        with pytest.raises(ConfigError, match="rate of acceptance is"):
            SimulatedDrafts(rates=rates)


def test_steps_with_drafts_need_rates() -> None:
    with pytest.raises(ConfigError, match=r"nothing says how many of them are right; give SimulatedDrafts\(rates"):
        simulate("fcfs", [sim_request(0, [1, 2, 3], 3)], TURN, with_shapes(make_limits(), (2, 1)))


def test_rounds_that_a_step_does_not_need_take_no_time() -> None:
    class Counting:
        def __init__(self) -> None:
            self.rounds: list[int] = []

        def step_seconds(self, plan: StepPlan, bucket: Bucket) -> StepCost:
            self.rounds.append(plan.rounds)
            return StepCost(0.0, float(plan.rounds))

    cost = Counting()
    limits = with_shapes(make_limits(max_rows=1), (2, 4))
    found = simulate("fcfs", [sim_request(0, [1, 2, 3], 6)], cost, limits, accept=SimulatedDrafts(rates=(1.0,)))
    # The prompt's step draws one token. Two rounds of two follow, and the one whose first token ends it; the step in
    # flight meanwhile goes on behind the end, to the limit of 16 tokens: two rounds each, then one.
    assert cost.rounds[:2] == [1, 3]
    assert found.requests[0].output_tokens == 6


def test_times_of_one_request_by_hand() -> None:
    limits = make_limits()
    cost = FixedCost(cost=StepCost(0.25, 2.0, 0.5))
    found = simulate("fcfs", [sim_request(0, [1, 2, 3], 3, 10.0)], cost, limits, keep_steps=True, keep_token_times=True)
    # Launched at 10.25, done at 12.25, read by 12.75. The second step is launched at 10.5, runs from 12.25 to 14.25 and
    # is read by 14.75; the third, planned at 12.75, runs to 16.25 and is read by 16.75. A fourth is wasted. A token is
    # handed out when the next step has been launched, 0.25 later; behind the last one nothing is launched.
    (outcome,) = found.requests
    assert outcome.token_times_s == (13.0, 15.0, 16.75)
    assert (outcome.finish_reason, outcome.output_tokens) == (FinishReason.STOP, 3)
    assert [s.start_s for s in found.steps] == [10.0, 10.25, 12.75, 14.75]
    assert [s.device_start_s for s in found.steps] == [10.25, 12.25, 14.25, 16.25]
    assert found.device_s == 8.0


def test_a_slow_host_leaves_the_device_idle() -> None:
    cost = FixedCost(cost=StepCost(3.0, 1.0))
    found = simulate("fcfs", [sim_request(0, [1, 2, 3], 16)], cost, make_limits(), keep_token_times=True)
    gaps = {b - a for a, b in zip(found.requests[0].token_times_s, found.requests[0].token_times_s[1:], strict=False)}
    # The last token is read by a turn that launches nothing, when the one before it has just been handed out.
    assert gaps == {3.0, 1.0, 0.0}
    assert found.requests[0].finish_reason is FinishReason.LENGTH


def test_idle_time_is_skipped_and_not_counted_as_work() -> None:
    trace = [sim_request(0, [1, 2], 2), sim_request(1, [1, 2], 2, 1e6)]
    found = simulate("fcfs", trace, FixedCost(cost=StepCost(0.1, 0.2)), make_limits())
    assert found.num_steps == 6
    assert found.requests[1].first_token_s == pytest.approx(1e6 + 0.3)
    assert found.duration_s == pytest.approx(1e6 + 0.7)


def test_equal_beginnings_are_found_and_answers_too() -> None:
    beginning = [5] * 12
    trace = [
        sim_request(0, [*beginning, 1], 9, 0.0, token=42),
        sim_request(1, [*beginning, 2], 2, 100.0),
        sim_request(2, [*beginning, 1, *[42] * 8, 3], 2, 200.0),  # the next turn of the first one's talk
    ]
    found = simulate("fcfs", trace, TURN, make_limits())
    assert [r.cached_tokens for r in found.requests] == [0, 12, 20]


@pytest.mark.parametrize("num_pages", [14, 200])
def test_only_rows_beyond_one_a_sequence_are_preemptions(num_pages: int) -> None:
    trace = random_trace(3)
    found = simulate("fcfs", trace, TURN, make_limits(num_pages=num_pages), keep_plans=True)
    rows = collections.Counter(setup.request_id for plan in found.plans for setup in plan.setups)
    beyond = {t.request.request_id: rows[t.request.request_id] - t.request.sampling.n for t in trace}
    assert {r.request_id: r.preemptions for r in found.requests} == beyond
    assert any(beyond.values()) == (num_pages < 100)


def test_answers_of_equal_prompts_are_not_shared() -> None:
    limits = make_limits()
    trace = [sim_request(i, [5] * 8, 14, 50.0 * i) for i in range(2)]
    trace.append(sim_request(2, [5] * 8 + [2**40] * 12, 2, 500.0))
    found = simulate("fcfs", trace, TURN, limits)
    assert found.requests[1].cached_tokens == 4  # its own prompt's full pages, less the last token's
    mine = simulate("fcfs", trace, TURN, limits, keep_plans=True)
    setups = [s for plan in mine.plans for s in plan.setups]
    assert len({s.request_id for s in setups}) == 3


def test_refused_and_late_requests_are_in_the_result() -> None:
    trace = [
        sim_request(0, range(100), 2),
        sim_request(1, [1, 2], 16, deadline_s=5.0),
        sim_request(2, [1, 2], 3),
    ]
    found = {r.request_id: r for r in simulate("fcfs", trace, TURN, make_limits()).requests}
    assert found["r0"].finish_reason is FinishReason.ERROR and "100 tokens" in found["r0"].error
    assert found["r1"].finish_reason is FinishReason.ERROR and "5.0 s" in found["r1"].error
    assert found["r1"].first_token_s is not None and found["r1"].last_token_s is None
    assert found["r2"].finish_reason is FinishReason.STOP and found["r2"].output_tokens == 3


def test_a_trace_is_read_as_time_goes_on() -> None:
    clock = VirtualClock()
    read: list[float] = []

    def trace():
        for i in range(50):
            read.append(clock())
            yield sim_request(i, [1, 2, 3], 2, 10.0 * i)

    simulate("fcfs", trace(), TURN, make_limits(), clock=clock)
    assert read[10] >= 80.0


def test_a_finished_scheduler_and_a_class_do() -> None:
    limits, clock = make_limits(), VirtualClock()
    scheduler = create_scheduler("fcfs", limits, clock=clock)
    trace = random_trace(4)
    found = simulate(scheduler, trace, TURN, limits, clock=clock)
    assert not scheduler.has_work()
    assert found.requests == simulate("fcfs", trace, TURN, limits).requests


class Somebody:
    """A scheduler of somebody else's: all that is known of it is the protocol."""

    def __init__(self, limits: Limits, options: SchedulerOptions) -> None:
        inner = create_scheduler("fcfs", limits, options=options)
        self.add, self.abort, self.has_work = inner.add, inner.abort, inner.has_work
        self.schedule, self.commit = inner.schedule, inner.commit


def test_any_scheduler_that_keeps_the_protocol_does() -> None:
    limits = make_limits(max_rows=6, num_pages=18, page_size=4, max_model_len=48)
    trace = random_trace(6)
    mine = simulate("fcfs", trace, TURN, limits, keep_steps=True)
    other = simulate(Somebody, trace, TURN, limits, keep_steps=True)
    assert other.requests == mine.requests
    assert {s.held_pages for s in other.steps} == {-1}
    assert max(s.held_pages for s in mine.steps) > 10


def test_prompts_that_only_pool_end_with_their_prompt() -> None:
    request = Request(
        request_id="p",
        prompt_token_ids=tuple(range(20)),
        sampling=SamplingParams(),
        max_tokens=0,
        seed=0,
        pooling=Pooling.MEAN,
    )
    limits = make_limits(token_buckets=(8,))
    (outcome,) = simulate("fcfs", [SimRequest(request=request, arrival_s=0.0, output_len=0)], TURN, limits).requests
    assert (outcome.output_tokens, outcome.finish_reason) == (0, FinishReason.STOP)
    assert outcome.first_token_s == outcome.last_token_s == 3.0  # three pieces, a turn each


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"output_len": 0}, "generates 0 tokens"),
        ({"output_len": 3, "min_tokens": 4}, "min_tokens is 4"),
        ({"output_len": 3, "token": STOP}, "one of its stop ids"),
    ],
)
def test_contradictions_are_refused(fields, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        sim_request(0, [1], **fields)


def test_a_trace_must_be_sorted_and_can_end_only_with_a_stop_id() -> None:
    trace = [sim_request(0, [1], 2, 5.0), sim_request(1, [1], 2, 4.0)]
    with pytest.raises(InvalidRequest, match="sort the trace"):
        simulate("fcfs", trace, TURN, make_limits())
    bare = Request(request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), max_tokens=9, seed=0)
    with pytest.raises(InvalidRequest, match="no stop id"):
        SimRequest(request=bare, arrival_s=0.0, output_len=3)
    assert SimRequest(request=bare, arrival_s=0.0, output_len=9).output_len == 9
    with pytest.raises(InvalidRequest, match="arrives at 1"):
        SimRequest(request=bare, arrival_s=1.0, output_len=9)
