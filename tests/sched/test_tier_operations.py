"""The host tier under a scheduler: budgets, pins, choices by cost, counts. Random and exhaustive worlds: elsewhere."""

import pytest

from jaxserve.api import SamplingParams
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, StepPlan, create_scheduler
from jaxserve.sched.counts import counts_of
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import HostSlots, PageLoad, PageSave
from jaxserve.sched.prefix import PrefixCache
from jaxserve.sched.refill import RefillCosts
from jaxserve.sched.slots import SlotPool
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request

OPTIONS = SchedulerOptions(watermark=0.0, growth=0.0, host_tier=TierOptions(admission="always"))
SLOTS = HostSlots(num_slots=12, max_draining=100, max_loads=2)


class Engine:
    """A scheduler on a fake runner, a turn at a time."""

    def __init__(self, slots: HostSlots = SLOTS, *, num_pages: int = 8, clock: ManualClock | None = None) -> None:
        limits = make_limits(num_pages=num_pages, page_size=2, slots=slots, token_buckets=(8, 32), max_model_len=40)
        self.clock = clock or ManualClock()
        scheduler = create_scheduler("fcfs", limits, options=OPTIONS, clock=self.clock)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler, self.memory = scheduler, scheduler.memory
        self.tier = scheduler.memory.tier
        self.runner = FakeRunner(limits, mode="context", vocab_size=50)

    def run(self, *requests) -> list[StepPlan]:
        """Runs them to their ends; returns the plans."""
        first = len(self.runner.plans)
        drive(self.scheduler, self.runner, requests)
        self.scheduler.check()
        return self.runner.plans[first:]


LONG = list(range(1, 14))  # six full pages and a token


def fill(engine: Engine, name: str = "filler") -> None:
    """A prompt that needs all eight pages of the device."""
    engine.run(make_request(name, [40 + len(engine.runner.plans) % 7] * 15, 2))


def test_a_prompt_alone_is_loaded_in_one_step_with_its_first_chunk() -> None:
    engine = Engine()
    engine.run(make_request("a", LONG, 1))
    fill(engine)
    [plan] = engine.run(make_request("b", LONG, 1))
    assert len(plan.loads) == 6 and plan.setups[0].token_ids == tuple(LONG[:12]) and len(plan.chunks[0].token_ids) == 1
    assert (engine.memory.num_loaded_tokens, engine.memory.num_hit_tokens) == (12, 12)
    counts = counts_of(engine.scheduler)
    assert counts is not None and counts.loaded_pages == 6 and counts.loaded_tokens == 12 and counts.slots == 12


def test_idle_pages_are_saved_ahead_so_that_a_burst_of_evictions_loses_none() -> None:
    """Two pages at most are on their way to slots, and a prompt takes all pages of the device at once."""
    engine = Engine(SLOTS._replace(max_draining=2))
    engine.run(make_request("a", LONG, 1))
    plans = engine.run(make_request("decodes", [30], 5))
    assert max(len(plan.saves) for plan in plans) == 2 and sum(len(plan.saves) for plan in plans) >= 4
    fill(engine)
    assert engine.tier is not None and engine.tier.num_saved >= 7
    [plan] = engine.run(make_request("b", LONG, 1))
    assert len(plan.loads) == 6


def test_beside_other_rows_loads_keep_to_the_budget_and_the_row_is_set_up_with_the_last() -> None:
    engine = Engine(SLOTS._replace(num_slots=40), num_pages=13)
    engine.run(make_request("a", LONG, 1))
    for name in ("x", "y"):
        engine.run(make_request(name, [40 + ord(name) % 5] * 25, 1))
    plans = engine.run(make_request("decodes", [30], 9), make_request("b", LONG, 1))
    loading = [plan for plan in plans if plan.loads]
    assert [len(plan.loads) for plan in loading] == [2, 2, 2]
    assert all(plan.decode_rows or plan.chunks for plan in loading)
    setups = [plan for plan in plans if any(setup.request_id == "b" for setup in plan.setups)]
    assert setups == [loading[-1]] and loading[-1].chunks[0].start == 12


def test_a_long_load_in_a_step_of_its_own_leaves_none_for_others_in_it() -> None:
    engine = Engine(SLOTS._replace(num_slots=40), num_pages=20)
    other = [token + 20 for token in LONG]
    for name, prompt in (("a", LONG), ("b", other), ("x", [45] * 39)):
        engine.run(make_request(name, prompt, 1))
    plans = engine.run(make_request("c", LONG, 9), make_request("d", other, 1))
    assert [len(plan.loads) for plan in plans][:4] == [6, 2, 2, 2]


def test_an_abort_between_loads_gives_all_back() -> None:
    engine = Engine(SLOTS._replace(num_slots=40), num_pages=13)
    engine.run(make_request("a", LONG, 1))
    for name in ("x", "y"):
        engine.run(make_request(name, [40 + ord(name) % 5] * 25, 1))
    scheduler, runner = engine.scheduler, engine.runner
    scheduler.add(make_request("decodes", [30], 9))
    scheduler.add(make_request("b", LONG, 1))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.loads) == 2
    scheduler.commit(plan, runner.dispatch(plan).result())
    scheduler.check()
    assert scheduler.abort("b")
    scheduler.check()
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None and plan.freed_rows == (), "the device never heard of the row"
        scheduler.commit(plan, runner.dispatch(plan).result())
    # What was loaded is on the device, and the rest still in slots.
    found = engine.memory.prefix.match("", engine.memory.prefix.blocks("", LONG))
    assert len(found) == 6 and sum(bool(entry.page_ids[0]) for entry in found) == 2


@pytest.mark.parametrize(("num_slots", "found"), [(1, 1), (3, 3), (12, 6)])
def test_fewer_slots_than_a_sequence_keep_its_beginning(num_slots: int, found: int) -> None:
    """The last pages are evicted first, so later ones replace them."""
    engine = Engine(SLOTS._replace(num_slots=num_slots))
    engine.run(make_request("a", LONG, 1))
    # One page after the other, each committed, so that a slot may be taken again.
    pool = engine.memory.pool
    for _ in range(2 + 6):
        pool.allocate()
        engine.tier.commit(StepPlan(step_id=0, saves=engine.tier.take_saves()), 0)
    entries = engine.memory.prefix.match("", engine.memory.prefix.blocks("", LONG))
    assert len(entries) == found and all(entry.slots[0] >= 0 for entry in entries)


def test_too_many_pages_on_their_way_are_skipped_and_counted() -> None:
    engine = Engine(SLOTS._replace(max_draining=2))
    engine.run(make_request("a", LONG, 1))
    fill(engine)
    assert (engine.tier.num_saved, engine.tier.num_skipped) == (2, 4)


def test_a_slot_that_is_being_filled_is_no_hit() -> None:
    """The same content comes again while its save is under way: it is computed, and the page and the slot agree."""
    engine = Engine()
    engine.run(make_request("a", LONG, 1))
    scheduler, runner = engine.scheduler, engine.runner
    scheduler.add(make_request("filler", [40] * 15, 1))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.saves) == 6
    handle = runner.dispatch(plan)
    assert not engine.memory.prefix.match("", engine.memory.prefix.blocks("", LONG))
    scheduler.commit(plan, handle.result())
    assert len(engine.memory.prefix.match("", engine.memory.prefix.blocks("", LONG))) == 6


def test_prompts_that_must_be_computed_whole_load_nothing() -> None:
    engine = Engine()
    engine.run(make_request("a", LONG, 1))
    fill(engine)
    plans = engine.run(make_request("b", LONG, 1, sampling=SamplingParams(max_tokens=1, prompt_logprobs=1)))
    assert not any(plan.loads for plan in plans)


def test_salts_are_kept_apart() -> None:
    engine = Engine()
    engine.run(make_request("a", LONG, 1, salt="x"))
    fill(engine)
    plans = engine.run(make_request("b", LONG, 1, salt="y"), make_request("c", LONG, 1))
    assert not any(plan.loads for plan in plans)


# ---- the choice ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("load_ms", "loaded"), [(1.0, 6), (1.9, 6), (2.1, 0), (50.0, 0)])
def test_the_choice_flips_at_the_break_even(load_ms: float, loaded: int) -> None:
    """A page has two tokens of a millisecond each."""
    engine = Engine(SLOTS._replace(load_ms=load_ms))
    engine.run(make_request("a", LONG, 1))
    fill(engine)
    engine.memory.costs._token_s, engine.memory.costs._tokens = 0.1, 100.0
    engine.memory.costs.note_commit = lambda *args: None
    plans = engine.run(make_request("b", LONG, 1))
    assert sum(len(plan.loads) for plan in plans) == loaded
    assert engine.memory.num_refused_tokens == (0 if loaded else 12)


def test_pages_on_the_device_are_used_even_where_loading_loses() -> None:
    """Of six blocks the first two are on the device: those are shared, and the rest is computed."""
    engine = Engine(SLOTS._replace(load_ms=50.0, num_slots=40))
    engine.run(make_request("a", LONG, 1))
    fill(engine)
    engine.run(make_request("short", LONG[:5], 1))
    engine.memory.costs._token_s, engine.memory.costs._tokens = 0.1, 100.0
    on_device = engine.memory.place(_sequence(engine, LONG), None)
    assert on_device.start == 4 and on_device.num_refused == 8


def _sequence(engine: Engine, tokens: list[int]):
    engine.scheduler.add(make_request("probe", tokens, 1))
    return next(iter(engine.scheduler._groups["probe"].live.values()))


def test_estimates_follow_the_times_of_steps() -> None:
    costs = RefillCosts(load_ms=0.0)
    assert costs.page_s == costs.token_s == 0.0
    now = 10.0
    costs.note_commit(now, 0, 1, 0, True)
    for _ in range(200):
        now += 0.010
        costs.note_commit(now, 90, 100, 0, True)
    assert costs.token_s == pytest.approx(1e-4)
    for _ in range(200):
        now += 0.010 + 4 * 0.002
        costs.note_commit(now, 90, 100, 4, True)
    assert costs.page_s == pytest.approx(0.002)
    costs.note_commit(now + 0.010, 90, 100, 0, False)  # nothing follows: idle for a while
    costs.note_commit(now + 100.0, 90, 100, 0, True)
    assert costs.token_s == pytest.approx(1e-4)


def test_the_time_of_weights_is_not_that_of_loads() -> None:
    """Rounds that decode take 5 ms, a page takes 2; a step that decodes and loads says nothing."""
    costs = RefillCosts(load_ms=0.0)
    now = 10.0
    costs.note_commit(now, 0, 1, 0, True)

    def step(ms: float, *counts: int) -> None:
        nonlocal now
        now += ms / 1000
        costs.note_commit(now, *counts[:3], True, *counts[3:])

    for _ in range(50):
        step(10.0, 90, 100, 0)
        step(4 * 5.0, 0, 3, 0, 4)
        step(5.0 + 3 * 2.0, 0, 3, 3)
    assert costs.page_s == 0.0
    for _ in range(50):
        step(5.0 + 4 * 2.0, 1, 3, 4)
    assert costs.page_s == pytest.approx(0.002) and costs.token_s == pytest.approx(1e-4)


def test_a_slow_load_is_forgiven() -> None:
    costs = RefillCosts(load_ms=1.0)
    costs.note_commit(0.0, 1, 1, 0, True)
    costs.note_commit(0.001, 1, 1, 0, True)
    costs.note_commit(5.0, 1, 1, 1, True)
    assert costs.page_s > 0.1
    for _ in range(400):
        costs.note_refusal()
    assert costs.page_s == pytest.approx(0.001, rel=0.2)


# ---- slots ---------------------------------------------------------------------------------------------------------


def test_states_of_slots() -> None:
    pool = SlotPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert (first, second) == (0, 1) and pool.allocate() is None and pool.num_used == 2
    with pytest.raises(AssertionError, match="before it is filled"):
        pool.pin(0)
    pool.ready(0)
    pool.pin(0)
    with pytest.raises(AssertionError, match="something reads"):
        pool.free(0)
    pool.unpin(0)
    pool.free(0)
    pool.check({1}, {})
    with pytest.raises(AssertionError, match="has no reader"):
        pool.unpin(1)


def test_the_fake_runner_sees_what_a_plan_must_not_do() -> None:
    limits = make_limits(slots=SLOTS, page_size=2)
    runner = FakeRunner(limits)
    with pytest.raises(AssertionError, match="nothing was saved"):
        runner._move(_plan(loads=[(0, 1)]))
    runner._pages[1] = [5, 6]
    runner._move(_plan(saves=[(1, 0)]))
    with pytest.raises(AssertionError, match="before the step that fills it"):
        runner._move(_plan(loads=[(0, 2)]))
    runner._read(_plan(saves=[(1, 0)]))
    runner._move(_plan(loads=[(0, 2)]))
    assert runner._pages[2] == [5, 6]
    with pytest.raises(AssertionError, match="writes a slot in use"):
        runner._move(_plan(saves=[(1, 0)]))


def _plan(saves=(), loads=()) -> StepPlan:
    return StepPlan(
        step_id=0, saves=tuple(PageSave(*one) for one in saves), loads=tuple(PageLoad(*one) for one in loads)
    )


def test_an_entry_that_gets_the_slot_of_its_own_last_child_stays() -> None:
    tier = HostTier(HostSlots(num_slots=1, max_draining=1, max_loads=1), create_tier_policy("lru"))
    prefix = PrefixCache(PagePool(4), 2, tier=tier)
    root = prefix.root("")
    blocks = prefix.blocks("", [1, 2, 3, 4, 5])
    first = prefix.expect(root, blocks, 0)
    assert first is not None
    second = prefix.expect(first, blocks, 1)
    assert second is not None and tier.begin_fill(second, 0, True)
    tier.end_fill(second.slots[0], True)
    assert tier.begin_fill(first, 0, True)  # what it lacks itself takes the only slot
    assert first.alive and not second.alive
    prefix.check()


def test_a_strict_policy_is_not_offered_a_page_ahead_of_its_eviction() -> None:
    policy = create_tier_policy("lru", TierOptions())
    policy._admission.strict = True
    tier, pool = HostTier(SLOTS, policy), PagePool(4)
    prefix = PrefixCache(pool, 2, tier=tier)
    entry = prefix.expect(prefix.root(""), prefix.blocks("", [1, 2, 3]), 0)
    assert entry is not None and tier.has_free_slot
    prefix.keep(entry, 0, pool.allocate())
    tier.offer(entry, 0)
    assert not tier.take_saves() and tier.num_declined == 0
    tier.save(entry, 0, entry.page_ids[0])
    assert not tier.take_saves() and tier.num_declined == 1, "seen for the first time"
