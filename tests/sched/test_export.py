"""The end of a server with a store: which pages go there, in a world of few slots, and what is left."""

import pytest
from test_store_fills import LONG, Engine, FakeStore

from jaxserve.sched import SchedulerOptions, create_scheduler
from jaxserve.sched.loading_scheduler import LoadingScheduler
from jaxserve.sched.plan import HostSlots
from jaxserve.sched.tier_policy import TierOptions
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request


class Small(Engine):
    """With fewer slots than a prompt has pages."""

    def __init__(self, admission: str = "always") -> None:
        self.clock, self.store = ManualClock(), FakeStore()
        slots = HostSlots(num_slots=3, max_draining=2, max_loads=4)
        limits = make_limits(
            num_pages=20, page_size=2, slots=slots, token_buckets=(8, 32), max_model_len=40, max_rows=4
        )
        options = SchedulerOptions(watermark=0.0, growth=0.0, host_tier=TierOptions(admission=admission))
        self.runner = self.store.runner = FakeRunner(limits, mode="context", vocab_size=50)
        made = create_scheduler("fcfs", limits, options=options, clock=self.clock, store=self.store)
        assert isinstance(made, LoadingScheduler)
        self.scheduler = made


def exported(engine: Engine) -> list[int]:
    """Exports until nothing is planned and the store has written all it took; what `done` was called with."""
    done: list[int] = []
    engine.scheduler.export(done.append)
    for _ in range(100):
        if not engine.step() and not done:
            assert engine.scheduler.has_work() and engine.scheduler.waits()
            engine.store.end_all()
        if done:
            break
    assert not engine.step(), "nothing is computed any more"
    return done


@pytest.mark.parametrize("admission", ["always", "second_sight"])
def test_an_export_brings_all_full_pages_to_the_store(admission: str) -> None:
    """Of a sequence in its middle, and of one that ended while the store took nothing."""
    engine = Small(admission)
    engine.store.refuses = True
    engine.scheduler.add(make_request("ended", [40, 41, 42, 43, 44], 4))
    engine.run()
    engine.scheduler.add(make_request("runs", LONG, 9))
    for _ in range(4):
        engine.step()
    assert not engine.store.pages
    engine.store.refuses = False
    assert exported(engine) == [0]
    # Six pages of the prompt and one of the tokens since; four of the other: its last token was never fed.
    assert len(engine.store.pages) == 11
    assert engine.scheduler.abort("runs") and not engine.scheduler.has_work()
    engine.scheduler.check()
    second = Engine(FakeStore(engine.store.pages))
    second.scheduler.add(make_request("again", LONG, 4))
    second.run()
    assert second.scheduler.loader.num_filled == 6


def test_an_export_of_what_is_there_already_is_over_at_once() -> None:
    engine = Engine(FakeStore())
    engine.scheduler.add(make_request("ended", LONG, 4))
    engine.run()
    exported(engine)
    num_pages, done = len(engine.store.pages), list[int]()
    engine.scheduler.export(done.append)
    assert engine.scheduler.schedule() is None, "no step, whose end would wake the loop"
    assert done == [0] and len(engine.store.pages) == num_pages > 0


def test_an_export_that_takes_too_long_says_what_is_left() -> None:
    engine = Small()
    engine.scheduler.add(make_request("runs", LONG, 9))
    for _ in range(3):
        engine.step()
    engine.store.refuses = True
    done: list[int] = []
    engine.scheduler.export(done.append)
    while engine.step():
        pass
    assert not done and engine.scheduler.waits_until_s() > engine.clock(), "it looks again by itself"
    engine.scheduler.end_export()
    assert done == [done[0]] and done[0] > 0
    engine.scheduler.end_export()
    assert len(done) == 1 and not engine.step()


def test_an_export_to_a_store_that_is_switched_off_is_over_at_once() -> None:
    engine = Engine(FakeStore())
    engine.scheduler.add(make_request("runs", LONG, 9))
    engine.step()
    engine.scheduler.use_tiers(store=False)
    assert exported(engine) == [0] and not engine.store.pages
