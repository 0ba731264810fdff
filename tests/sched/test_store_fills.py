"""Sequences that wait for a store: fills in any order, failures, deadlines, aborts, and writes behind."""

import collections
import random

import pytest
from sched_world import World, random_request

from jaxserve.errors import PolicyError
from jaxserve.sched import MayWait, SchedulerOptions, create_scheduler
from jaxserve.sched.counts import counts_of
from jaxserve.sched.loading import Filled, StoreCounts, StoreKey, Written
from jaxserve.sched.loading_scheduler import LoadingScheduler
from jaxserve.sched.plan import HostSlots
from jaxserve.sched.policies import FcfsPolicy
from jaxserve.sched.tier_policy import TierOptions
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request

LONG = list(range(1, 14))  # six full pages of two tokens, and a token
SLOTS = HostSlots(num_slots=16, max_draining=100, max_loads=4)


class FakeStore:
    """A `SlotStore` over a dict, whose events come when a test says so. `runner` has the slots."""

    def __init__(self, pages: dict[StoreKey, list[int]] | None = None) -> None:
        self.pages = {} if pages is None else pages
        self.runner: FakeRunner | None = None
        self.fills: dict[int, tuple[list[StoreKey], list[int]]] = {}
        self.writes: list[tuple[StoreKey, int]] = []
        self.cancelled: list[int] = []
        self.prefetches: dict[int, float] = {}  # ticket -> deadline, until it is settled
        self.max_prefetches = 100
        self.settled: list[int] = []  # pages that were used, of each prefetch
        self.refuses = False
        self._events: collections.deque[Filled | Written] = collections.deque()
        self._ticket = 0

    def fill(self, keys, slots, deadline_s):
        assert deadline_s > 0 and len(keys) == len(slots) > 0
        if self.refuses:
            return None
        self._ticket += 1
        self.fills[self._ticket] = (list(keys), list(slots))
        return self._ticket

    def prefetch(self, keys, slots, deadline_s):
        ticket = None if len(self.prefetches) == self.max_prefetches else self.fill(keys, slots, deadline_s)
        if ticket is not None:
            self.prefetches[ticket] = deadline_s
        return ticket

    def settle(self, ticket, num_used):
        assert ticket not in self.fills, "settled before it has ended"
        del self.prefetches[ticket]
        self.settled.append(num_used)

    def flush(self, salt):
        for key in [key for key in self.pages if salt is None or key.salt == salt]:
            del self.pages[key]

    @property
    def counts(self):
        return StoreCounts({"filled": 7}, 3)

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def write(self, key, slot):
        if self.refuses:
            return False
        self.writes.append((key, slot))
        return True

    def poll(self):
        events = list(self._events)
        self._events.clear()
        return events

    def end_fill(self, ticket: int, fails: bool = False) -> None:
        keys, slots = self.fills.pop(ticket)
        ok = [key in self.pages and not fails for key in keys]
        for key, slot, found in zip(keys, slots, ok, strict=True):
            if found:
                self.runner._slots[slot] = list(self.pages[key])
        self._events.append(Filled(ticket, tuple(ok)))

    def end_write(self, number: int = 0) -> None:
        key, slot = self.writes.pop(number)
        content = list(self.runner._slots[slot])
        assert self.pages.setdefault(key, content) == content, "equal keys mean equal pages"
        self._events.append(Written(slot))

    def end_all(self) -> None:
        while self.fills:
            self.end_fill(next(iter(self.fills)))
        while self.writes:
            self.end_write()


class Engine:
    """A scheduler with a store on a fake runner."""

    def __init__(self, store: FakeStore, slots: HostSlots = SLOTS, max_rows: int = 4) -> None:
        limits = make_limits(
            num_pages=12, page_size=2, slots=slots, token_buckets=(8, 32), max_model_len=40, max_rows=max_rows
        )
        self.clock, self.store = ManualClock(), store
        options = SchedulerOptions(watermark=0.0, growth=0.0, host_tier=TierOptions(admission="always"))
        self.runner = store.runner = FakeRunner(limits, mode="context", vocab_size=50)
        made = create_scheduler("fcfs", limits, options=options, clock=self.clock, store=store)
        assert isinstance(made, LoadingScheduler) and isinstance(made, MayWait)
        self.scheduler = made

    def step(self) -> bool:
        """A turn, committed. False when nothing is planned."""
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self.scheduler.commit(plan, self.runner.dispatch(plan).result())
        self.scheduler.check()
        return True

    def run(self) -> None:
        while self.scheduler.has_work():
            if not self.step():
                assert self.scheduler.waits()
                self.store.end_all()


def first_server() -> FakeStore:
    """A store that a server has written LONG to."""
    engine = Engine(FakeStore())
    engine.scheduler.add(make_request("a", LONG, 4))
    engine.run()
    engine.store.end_all()
    return FakeStore(engine.store.pages)


def test_another_server_finds_the_pages() -> None:
    engine = Engine(first_server())
    engine.scheduler.add(make_request("b", LONG, 1))
    assert engine.scheduler.schedule() is None and engine.scheduler.waits()
    [(keys, slots)] = engine.store.fills.values()
    assert len(keys) == len(slots) == 6
    engine.store.end_all()
    assert engine.step() and not engine.scheduler.has_work()
    [plan] = engine.runner.plans
    assert len(plan.loads) == 6 and len(plan.chunks[0].token_ids) == 1
    assert engine.scheduler.loader.num_filled == 6 and engine.scheduler.memory.num_loaded_tokens == 12


@pytest.mark.parametrize("known", [0, 3])
def test_what_the_store_lacks_is_computed(known: int) -> None:
    store = first_server()
    keys = sorted(store.pages, key=lambda key: store.pages[key][0])  # in the order of the prompt
    store.pages = {key: store.pages[key] for key in keys[:known]}
    engine = Engine(store)
    engine.scheduler.add(make_request("b", LONG, 1))
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 2 * known
    assert engine.scheduler.loader.num_missed == 6 - known


def test_after_the_deadline_the_prompt_is_computed_and_a_late_fill_does_no_harm() -> None:
    engine = Engine(first_server())
    engine.scheduler.add(make_request("b", LONG, 9))
    assert engine.scheduler.schedule() is None and engine.scheduler.waits()
    assert engine.scheduler.waits_until_s() == engine.clock() + SchedulerOptions().store_wait_s
    engine.clock.advance(2.1)
    assert engine.scheduler.waits(), "the answer is about what `schedule` saw: it planned nothing"
    assert engine.step() and engine.scheduler.loader.num_late == 1
    assert len(engine.runner.plans[0].chunks[0].token_ids) == 8, "computed"
    counts = counts_of(engine.scheduler)
    assert (counts.store_pages, counts.store_breaks, counts.store_late) == ({"filled": 7}, 3, 1)
    engine.store.end_all()
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 0


def test_a_sequence_that_ends_calls_its_fill_off_unless_another_waits_for_it() -> None:
    engine = Engine(first_server())
    for name in ("b", "c"):
        engine.scheduler.add(make_request(name, LONG, 1))
    assert engine.scheduler.schedule() is None
    assert len(engine.store.fills) == 1, "the second waits for the fill of the first"
    engine.scheduler.abort("b")
    assert engine.store.cancelled == []
    engine.scheduler.abort("c")
    assert engine.store.cancelled == [1]
    engine.scheduler.check()
    engine.store.end_fill(1, fails=True)
    engine.scheduler.add(make_request("d", LONG, 1))
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 12, "it asks anew"


def test_a_store_that_takes_nothing_costs_nothing() -> None:
    store = first_server()
    store.refuses = True
    engine = Engine(store)
    engine.scheduler.add(make_request("b", LONG, 4))
    engine.run()
    assert engine.scheduler.memory.tier.num_saved > 0 and not store.writes


def test_salts_have_keys_of_their_own() -> None:
    engine = Engine(first_server())
    engine.scheduler.add(make_request("b", LONG, 1, salt="other"))
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 0


def test_a_slot_that_is_written_to_the_store_is_not_given_up() -> None:
    engine = Engine(FakeStore(), SLOTS._replace(num_slots=3))
    for number in range(6):
        engine.scheduler.add(make_request(f"r{number}", [10 * number + 1 + i for i in range(9)], 2))
        while engine.scheduler.has_work():
            engine.step() or engine.store.end_all()
    slots = [slot for _, slot in engine.store.writes]
    assert len(slots) == len(set(slots)) == 3
    engine.store.end_all()


def test_what_is_written_is_not_used_by_that() -> None:
    engine = Engine(FakeStore())
    used: list[bytes] = []
    engine.scheduler.memory.tier._policies[0].touch = used.append
    engine.scheduler.add(make_request("a", LONG, 4))
    engine.run()
    assert engine.store.writes and not used


def full(store: FakeStore) -> Engine:
    """An engine whose twelve slots have pages of other prompts."""
    engine = Engine(store, SLOTS._replace(num_slots=12))
    for number in range(4):
        engine.scheduler.add(make_request(f"r{number}", [20 + number] * 9, 2))
        engine.run()
    store.end_all()
    assert engine.step() is False and engine.scheduler.memory.tier.num_used == 12
    return engine


def test_fills_cost_few_pages_until_the_store_has_shown_that_it_has_any() -> None:
    engine = full(first_server())
    engine.scheduler.add(make_request("b", LONG, 1))
    assert engine.scheduler.schedule() is None
    assert [len(slots) for _, slots in engine.store.fills.values()] == [4]
    engine.store.end_all()
    assert engine.scheduler.schedule() is None and engine.scheduler.waits()
    assert [len(slots) for _, slots in engine.store.fills.values()] == [2]
    engine.store.end_all()
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 12
    unknown = full(FakeStore())
    missed = unknown.scheduler.loader.num_missed
    unknown.scheduler.add(make_request("b", LONG, 1))
    unknown.run()
    assert unknown.scheduler.loader.num_missed == missed + 4


@pytest.mark.parametrize(("num_refusals", "waits"), [(0, False), (70, False), (80, True)])
def test_nothing_is_asked_of_a_store_that_is_slower_than_computing_until_that_is_long_ago(
    num_refusals: int, waits: bool
) -> None:
    """13 tokens take 13 ms, and their six pages took 60; each refusal takes two parts in a hundred from that."""
    engine = Engine(first_server())
    computing, fills = engine.scheduler.memory.costs, engine.scheduler.loader.costs
    computing._token_s, computing._tokens = 0.001, 1.0
    fills.note_fill(0.06, 6, late=False)
    for _ in range(num_refusals):
        fills.note_refusal()
    engine.scheduler.add(make_request("b", LONG, 1))
    assert (engine.scheduler.schedule() is None) == engine.scheduler.waits() == bool(engine.store.fills) == waits
    assert fills.page_s == pytest.approx(0.01 * 0.98 ** (num_refusals + (not waits)))


def test_fills_do_not_drive_out_the_beginning_of_their_own_prompt() -> None:
    engine = Engine(first_server(), SLOTS._replace(num_slots=2))
    engine.scheduler.add(make_request("a", LONG[:5], 2))
    engine.run()
    engine.store.end_all()
    assert engine.step() is False and engine.scheduler.memory.tier.num_used == 2
    engine.scheduler.add(make_request("b", LONG, 1))
    assert engine.scheduler.schedule() is not None, "it waits for nothing"
    assert not engine.store.fills, "both slots hold pages of its own"


def test_early_saves_take_free_slots_alone_while_the_admission_is_strict() -> None:
    for strict in (False, True):
        engine = Engine(FakeStore(), SLOTS._replace(num_slots=3))
        tier = engine.scheduler.memory.tier
        tier._policies[0]._admission.strict = strict
        engine.scheduler.use_tiers(store=False)  # no fill takes a slot
        for number in range(2):
            engine.scheduler.add(make_request(f"r{number}", [20 + number] * 7, 2))
            engine.run()
            engine.store.end_all()
        assert len(tier._owners) == 3 and (tier.num_saved == 3) == strict


def test_a_policy_that_refuses_all_has_broken_its_rule_with_a_store_too() -> None:
    class Refuses(FcfsPolicy):
        def may_admit(self, seq, running) -> bool:
            return False

    limits = make_limits(slots=SLOTS, page_size=2)
    scheduler = create_scheduler(Refuses, limits, store=FakeStore())
    scheduler.add(make_request("a", [1, 2], 1))
    with pytest.raises(PolicyError, match="may_admit"):
        scheduler.schedule()


def test_random_worlds_with_a_store() -> None:
    """Fills that end in any order, late, or not at all; the tokens are those of the naive model."""
    found = collections.Counter[str]()
    for seed in range(25):
        found += run_worlds(seed)
    assert min(found[name] for name in ("filled", "missed", "late", "loads")) > 10, found


def run_worlds(seed: int) -> collections.Counter[str]:
    """Two servers with one store, one after the other."""
    found = collections.Counter[str]()
    rng = random.Random(seed)
    shared: dict[StoreKey, list[int]] = {}
    for _ in range(2):  # the second server finds what the first has written
        world = World(_limits(rng), store=FakeStore(shared))
        store = world.store
        assert store is not None
        for number in range(150):
            move = rng.choice(
                ("add", "abort", "schedule", "schedule", "commit", "commit", "fill", "write", "clock", "op")
            )
            if move == "add" and len(world.live()) < 12:
                world.add(random_request(rng, number, world.clock()))
            elif move == "abort" and world.live() and rng.random() < 0.3:
                request_id, index = rng.choice(world.live())
                world.abort(request_id, rng.choice([None, index]))
            elif move == "schedule":
                world.schedule()
            elif move == "commit":
                world.commit()
            elif move == "fill" and store.fills:
                store.end_fill(rng.choice([*store.fills]), fails=rng.random() < 0.2)
            elif move == "write" and store.writes:
                store.end_write(rng.randrange(len(store.writes)))
            elif move == "op" and rng.random() < 0.3:
                world.operate(rng)
            elif move == "clock":
                world.clock.advance(rng.choice([0.1, 3.0]))
            world.check()
        world.finish()
        store.end_all()
        loader = world.scheduler.loader
        found += collections.Counter(
            filled=loader.num_filled, missed=loader.num_missed, late=loader.num_late, loads=world.runner.num_loads
        )
    return found


def _limits(rng: random.Random):
    windows = rng.choice([(None,), (None,), (None, 5), (4,), (1, 3)])
    slots = HostSlots(rng.choice([2, 8, 40]), rng.choice([2, 16]), rng.choice([1, 4]))
    return make_limits(
        max_rows=4,
        num_pages=rng.randint(12, 20) * len(windows),
        page_size=2,
        windows=windows,
        max_model_len=24,
        token_buckets=(4, 16),
        slots=slots,
    )
