"""What a scheduler does on each rung of the ladder, and that it takes everything back. No rung changes a token."""

import pytest
from test_store_fills import LONG, Engine, FakeStore, first_server

from jaxserve.sched import ContinuousScheduler, create_scheduler
from jaxserve.sched.base import Degrades, Scheduler
from jaxserve.sched.ladder import Rung
from jaxserve.testing import FakeRunner, ManualClock, drive, make_limits, make_request


def degraded(engine: Engine, rung: Rung) -> Engine:
    scheduler: Scheduler = engine.scheduler
    assert isinstance(scheduler, Degrades)
    scheduler.degrade(rung)
    assert engine.scheduler.cache_state.rung == rung.label
    return engine


def answers(engine: Engine) -> dict[str, list[int]]:
    """Of prompts that are more than the device holds, each of them twice."""
    found: dict[str, list[int]] = {}
    for round_ in range(2):
        for first in range(4):
            prompt = [first * 10 + k % 10 for k in range(9)]
            engine.scheduler.add(make_request(f"{round_}-{first}", prompt, 4))
            while engine.scheduler.has_work():
                plan = engine.scheduler.schedule()
                if plan is None:
                    engine.store.end_all()
                    continue
                for event in engine.scheduler.commit(plan, engine.runner.dispatch(plan).result()):
                    found.setdefault(event.request_id, []).append(event.token_id)
            engine.store.end_all()
    return found


def test_no_rung_changes_a_token() -> None:
    right = answers(Engine(FakeStore()))
    for rung in Rung:
        assert answers(degraded(Engine(FakeStore()), rung)) == right, rung


@pytest.mark.parametrize(("rung", "asks"), [(Rung.NONE, True), (Rung.NO_PREFETCH, False)])
def test_pages_of_those_further_back(rung: Rung, asks: bool) -> None:
    engine = Engine(first_server(), max_rows=1)
    degraded(engine, Rung.NO_PREFETCH)
    degraded(engine, rung)
    engine.scheduler.add(make_request("runs", [50], 20))
    assert engine.step()
    engine.scheduler.add(make_request("waits", LONG, 1))
    assert engine.step()
    assert bool(engine.store.prefetches) == asks
    engine.run()
    assert engine.scheduler.loader.num_filled == 6, "the first in the queue gets its pages on both"


def test_pages_that_the_device_gives_up() -> None:
    engine = degraded(Engine(FakeStore()), Rung.NO_SAVES)
    answers(engine)
    tier = engine.scheduler.memory.tier
    assert tier is not None and tier.num_saved == 0 and not engine.store.pages
    degraded(engine, Rung.NONE)
    engine.scheduler.add(make_request("again", LONG, 4))
    engine.run()
    engine.store.end_all()
    assert tier.num_saved > 0 and engine.store.pages


def test_a_store_that_is_left_alone() -> None:
    engine = degraded(Engine(first_server()), Rung.NO_STORE)
    engine.scheduler.add(make_request("b", LONG, 1))
    engine.run()
    assert engine.scheduler.loader.num_filled == 0 and not engine.store.fills
    assert engine.scheduler.cache_state.store, "no operator has switched it off"
    engine.scheduler.flush(None)
    degraded(engine, Rung.NO_SAVES)
    engine.scheduler.add(make_request("c", LONG, 1))
    engine.run()
    assert engine.scheduler.loader.num_filled == 6


def test_drafts_and_chunks() -> None:
    limits = make_limits(shapes=[(4, 1)], token_buckets=(32,), num_pages=64, max_model_len=64)
    limits = limits.with_buckets(limits.buckets, {b: 1.0 for b in limits.buckets if b.decode_only})
    runner = FakeRunner(limits, accept=lambda *args: args[-1])
    scheduler = create_scheduler("fcfs", limits, clock=ManualClock())
    assert isinstance(scheduler, ContinuousScheduler)
    for name, rung in (("all", Rung.NONE), ("less", Rung.NO_SPECULATION), ("all again", Rung.NONE)):
        scheduler.degrade(rung)
        first = len(runner.plans)
        drive(scheduler, runner, [make_request(name, [1, 2, 3], 20)])
        assert any(plan.width > 1 for plan in runner.plans[first:]) == (rung is Rung.NONE)
    scheduler.degrade(Rung.SMALL_CHUNKS)
    first = len(runner.plans)
    drive(scheduler, runner, [make_request("alone", [4] * 30, 20), make_request("beside", [5] * 30, 20)])
    chunks = [[len(chunk.token_ids) for chunk in plan.chunks] for plan in runner.plans[first:] if plan.chunks]
    assert chunks == [[30, 2], [8], [8], [8], [4]], "in the first step no row waits for a token"
