"""What an operator does to the cache of a scheduler that runs: flushes, smaller pools, tiers that are switched off."""

import pytest
from test_store_fills import LONG, SLOTS, Engine, FakeStore, first_server

from jaxserve.errors import InvalidRequest, RequestRejected
from jaxserve.sched import SchedulerOptions, create_scheduler
from jaxserve.sched.base import Flushed, Operable
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.testing import FakeRunner, make_limits, make_request


class Plain:
    """A scheduler without tiers, of twelve pages, on a fake runner."""

    def __init__(self) -> None:
        limits = make_limits(num_pages=12, page_size=2, token_buckets=(8, 32), max_model_len=40)
        self.runner = FakeRunner(limits, mode="context", vocab_size=50)
        options = SchedulerOptions(watermark=0.0, growth=0.0)
        made = create_scheduler("fcfs", limits, options=options)
        assert isinstance(made, ContinuousScheduler) and isinstance(made, Operable)
        self.scheduler = made

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.scheduler.commit(plan, self.runner.dispatch(plan).result())
        self.scheduler.check()


def three_that_run() -> Plain:
    """Each has a prompt of three tokens, and two pages."""
    engine = Plain()
    for number in range(3):
        engine.scheduler.add(make_request(f"r{number}", [number, 7, 8], 5))
    engine.step()
    assert engine.scheduler.cache_state[:3] == (12, 12, 6)
    return engine


def test_a_pool_that_preempts_is_small_with_the_next_step() -> None:
    engine = three_that_run()
    engine.scheduler.resize_pool(4, preempt=True)
    assert engine.scheduler.cache_state[:3] == (12, 4, 6)
    engine.step()
    assert engine.scheduler.num_running < 3 and engine.scheduler.num_held_pages <= 4
    while engine.scheduler.has_work():
        engine.step()
    assert engine.scheduler.memory.pool.num_withheld == 8


def test_a_pool_that_waits_takes_pages_as_they_are_given_up() -> None:
    engine = three_that_run()
    engine.scheduler.resize_pool(5, preempt=False)
    engine.scheduler.abort("r0")
    assert engine.scheduler.cache_state[:3] == (12, 5, 4) and engine.scheduler.num_running == 2
    assert engine.scheduler.memory.pool.num_withheld == 7
    engine.scheduler.add(make_request("r3", [1, 2, 3, 4], 1))
    engine.step()
    assert engine.scheduler.num_waiting == 1, "there is no room for it now"
    engine.scheduler.resize_pool(12, preempt=False)
    engine.step()
    assert engine.scheduler.num_waiting == 0


def test_sizes_that_leave_no_room_for_a_live_request_are_refused() -> None:
    engine = three_that_run()
    for size, match in ((0, "from 1 to 12"), (13, "from 1 to 12"), (3, "'r0' can need 4")):
        with pytest.raises(InvalidRequest, match=match):
            engine.scheduler.resize_pool(size, preempt=True)
    engine.scheduler.resize_pool(4, preempt=False)
    with pytest.raises(RequestRejected, match="gives out 4 pages of 2 tokens, of 12"):
        engine.scheduler.add(make_request("r4", [1, 2, 3], 8))


def test_a_sequence_that_runs_publishes_nothing_after_a_flush() -> None:
    engine = Plain()
    engine.scheduler.add(make_request("a", LONG[:5], 6, salt="x"))
    engine.scheduler.add(make_request("b", LONG[:5], 6, salt="y"))
    engine.step()
    assert engine.scheduler.flush("x") == Flushed(2, 0)
    assert engine.scheduler.flush("z") == Flushed(0, 0)
    while engine.scheduler.has_work():
        engine.step()
    prefix = engine.scheduler.memory.prefix
    assert prefix is not None and {prefix.salt_of(entry) for entry in prefix._by_key.values()} == {"y"}
    assert engine.scheduler.flush(None) == Flushed(5, 0) and engine.scheduler.memory.pool.num_available == 12


@pytest.mark.parametrize("what", ["flush", "switch"])
def test_slots_that_are_filled_written_or_loaded_are_free_once_that_has_ended(what: str) -> None:
    def operate() -> None:
        if what == "flush":
            assert engine.scheduler.flush("").slots == 6
        else:
            engine.scheduler.use_tiers(host=False)
        assert tier.num_used == 6 and not tier._owners
        engine.scheduler.check()

    engine = Engine(first_server())
    tier = engine.scheduler.memory.tier
    engine.scheduler.add(make_request("b", LONG, 2))
    assert engine.scheduler.schedule() is None, "its pages are being filled"
    operate()
    engine.store.end_all()
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 0, "what came afterwards is not found"
    assert tier.num_used == len(tier._owners) == (6 if what == "flush" else 0), "pages that were computed since"

    engine = Engine(first_server())
    tier = engine.scheduler.memory.tier
    engine.scheduler.add(make_request("b", LONG, 2))
    engine.scheduler.schedule()
    engine.store.end_all()
    plan = engine.scheduler.schedule()
    assert plan is not None and len(plan.loads) == 6
    operate()
    engine.scheduler.commit(plan, engine.runner.dispatch(plan).result())
    engine.scheduler.check()
    assert tier.num_used == 0, "a load in flight ends, and its slot is free"
    engine.run()

    engine = Engine(FakeStore())
    tier = engine.scheduler.memory.tier
    engine.scheduler.add(make_request("a", LONG, 1))
    engine.run()
    engine.scheduler.add(make_request("c", [30, 31], 1))
    engine.run()
    assert len(engine.store.writes) == 6
    operate()
    engine.store.end_all()
    assert not engine.step() and tier.num_used == 0


def test_a_store_that_is_off_is_asked_nothing_and_gets_nothing() -> None:
    engine = Engine(first_server())
    engine.scheduler.use_tiers(store=False)
    assert engine.scheduler.cache_state[3:5] == (True, False)
    engine.scheduler.add(make_request("b", LONG, 4))
    engine.run()
    assert not engine.store.writes and engine.scheduler.loader.num_filled == 0
    engine.scheduler.flush(None)
    engine.scheduler.use_tiers(store=True)
    engine.scheduler.add(make_request("c", LONG, 4))
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 12


def test_prefetches_of_those_that_wait_are_used_late_and_wasted() -> None:
    """A row for one: while it runs, the pages of the few behind it are brought."""
    engine = Engine(first_server(), SLOTS._replace(num_slots=64), max_rows=1)
    scheduler, store = engine.scheduler, engine.store
    scheduler.add(make_request("first", [40, 41], 6))
    engine.step()
    for number in range(6):
        scheduler.add(make_request(f"r{number}", [*LONG[:5], 30 + number, 9, 9, 9], 1))
    engine.step()
    deadlines = [*store.prefetches.values()]
    assert deadlines == [2.0, 4.0, 6.0, 8.0], "the further back, the more time; and no more than four"
    assert [len(keys) for keys, _ in store.fills.values()] == [4, 2, 2, 2], "what one asks for no other does"
    store.end_fill(1)
    scheduler.abort("r1")  # in vain: it had asked for two pages, which the store lacks
    engine.step()
    assert store.cancelled == [2]
    while scheduler.num_running:
        engine.step()
    engine.run()
    assert scheduler.loader.num_filled == 2 and not store.prefetches
    assert store.settled[0] == 2 and set(store.settled[1:]) == {0}


def test_a_prefetch_that_is_refused_is_asked_again_when_something_has_ended() -> None:
    engine = Engine(first_server(), SLOTS._replace(num_slots=64), max_rows=1)
    engine.store.max_prefetches = 0
    engine.scheduler.add(make_request("first", [40, 41], 4))
    engine.step()
    engine.scheduler.add(make_request("b", LONG, 1))
    engine.step()
    assert not engine.store.fills
    engine.store.max_prefetches = 1
    engine.store.end_all()
    engine.step()
    assert [len(keys) for keys, _ in engine.store.fills.values()] == [6]
    engine.run()
    assert engine.scheduler.memory.num_loaded_tokens == 12 and engine.store.settled == [6]


@pytest.mark.parametrize("recompute", [False, True])
def test_sequences_that_begin_anew(recompute: bool) -> None:
    """What was computed before is found by nobody afterwards; who runs keeps it, or computes it again."""
    engine = three_that_run()
    engine.scheduler.add(make_request("later", [0, 7, 8], 2))
    engine.scheduler.begin_anew("other weights", recompute=recompute)
    engine.scheduler.check()
    assert engine.scheduler.num_running == (0 if recompute else 3)
    assert engine.scheduler.num_preemptions == (3 if recompute else 0)
    while engine.scheduler.has_work():
        engine.step()
    assert engine.scheduler.memory.num_hit_tokens == 0
    before = engine.scheduler.memory.num_hit_tokens
    engine.scheduler.add(make_request("again", [0, 7, 8], 2))
    while engine.scheduler.has_work():
        engine.step()
    assert engine.scheduler.memory.num_hit_tokens > before, "what came afterwards is found"
