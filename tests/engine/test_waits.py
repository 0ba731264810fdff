"""The loop while all work waits for something outside: it sleeps, and wakes for that, an abort, a deadline, the end."""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.engine import Engine, EngineGroup, ModelInfo, Update
from jaxserve.errors import DeadlineExceeded, EngineStopped, HostLost, PolicyError, UnsupportedOption
from jaxserve.lab import SimRequest, StepCost, VirtualClock, simulate
from jaxserve.lab.simulation.simulate import FixedCost
from jaxserve.offline.jobs import Job
from jaxserve.offline.loop import run_jobs
from jaxserve.routing import create_router
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, StepPlan, create_scheduler
from jaxserve.sched.policies import FcfsPolicy
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request

WAIT_S = 120.0
LIMITS = make_limits()
OPTIONS = SchedulerOptions()
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)


class Absent(FcfsPolicy):
    """Lets nobody in for whom something is still to come, from a disk, say."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.absent: set[str] = set()  # ids of requests
        self.held = False  # by the last plan

    def may_admit(self, seq, running) -> bool:
        self.held = seq.request_id in self.absent
        return not self.held


class Waiting(ContinuousScheduler):
    """Says that it waits when its policy held somebody back. `on_wait` is called when it says so."""

    def __init__(self, policy: Absent, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(LIMITS, policy, OPTIONS, clock)
        self.on_wait: Callable[[], None] = lambda: None
        self.says_so = True
        self.until_s = math.inf
        self.num_schedules = 0

    def schedule(self) -> StepPlan | None:
        self.num_schedules += 1
        return super().schedule()

    def waits(self) -> bool:
        assert isinstance(self.policy, Absent)
        held = self.policy.held
        self.on_wait()
        return held and self.says_so

    def waits_until_s(self) -> float:
        return self.until_s


class Parts:
    """An engine whose requests wait until `bring` is called, and what their clients were told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = Absent()
        self.scheduler = Waiting(self.policy, clock)
        self.waiting = threading.Event()
        self.scheduler.on_wait = self.waiting.set
        model = ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=())
        self.engine = Engine(
            runner=FakeRunner(LIMITS), scheduler=self.scheduler, tokenizer=None, model=model, clock=clock
        )
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def submit(self, *, absent: bool = True, deadline_s: float | None = None) -> str:
        request = self.engine.prepare([1, 2, 3], SAMPLING)
        if deadline_s is not None:
            request = dataclasses.replace(request, deadline_s=deadline_s)
        if absent:
            self.policy.absent.add(request.request_id)
        self.engine.submit(request, self.take)
        return request.request_id

    def take(self, update: Update) -> None:
        self.updates.append(update)
        if update.last:
            self.ended.set()

    def bring(self) -> None:
        """What was waited for is there."""
        self.policy.absent.clear()
        self.engine.wake()

    def check_served(self) -> None:
        assert [token for update in self.updates for token in update.token_ids] == [4, 5, 6, 7]
        assert self.updates[-1].finish_reason is FinishReason.LENGTH

    def check_ended(self, error: type[Exception] | None, reason: FinishReason) -> None:
        assert len(self.updates) == 1
        assert self.updates[0].last
        assert self.updates[0].finish_reason is reason
        assert self.updates[0].error is None if error is None else isinstance(self.updates[0].error, error)
        if self.engine.failure is None:
            assert not self.scheduler.has_work()


@pytest.fixture
def parts() -> Iterator[Parts]:
    """One whose loop has a thread."""
    found = Parts()
    found.engine.start()
    yield found
    found.engine.stop()


@pytest.fixture
def asleep(parts: Parts) -> Parts:
    """One whose loop waits with its only request."""
    parts.submit()
    assert parts.waiting.wait(WAIT_S)
    return parts


@pytest.fixture
def later() -> Iterator[Callable[[threading.Event, Callable[[], None]], None]]:
    """Calls a function on another thread once an event is set."""
    threads: list[threading.Thread] = []

    def call(event: threading.Event, function: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=lambda: event.wait(WAIT_S) and function(), daemon=True))
        threads[-1].start()

    yield call
    for thread in threads:
        thread.join(WAIT_S)


def test_it_is_served_after_the_wake_and_the_loop_slept_until_then(asleep: Parts) -> None:
    asleep.bring()
    assert asleep.ended.wait(WAIT_S)
    asleep.check_served()
    assert asleep.scheduler.num_schedules < 10, "a loop that polls plans all the time"


def test_a_wake_for_nothing_changes_nothing(asleep: Parts) -> None:
    for _ in range(3):
        asleep.waiting.clear()
        asleep.engine.wake()
        assert asleep.waiting.wait(WAIT_S)
    assert not asleep.updates
    asleep.bring()
    assert asleep.ended.wait(WAIT_S)
    asleep.check_served()


def test_it_is_aborted_while_it_waits(asleep: Parts) -> None:
    asleep.engine.abort(next(iter(asleep.policy.absent)))
    assert asleep.ended.wait(WAIT_S)
    asleep.check_ended(None, FinishReason.ABORT)
    assert asleep.engine.drain(WAIT_S)


def test_its_deadline_passes_while_it_waits(parts: Parts) -> None:
    parts.submit(deadline_s=time.monotonic() + 0.05)
    assert parts.ended.wait(WAIT_S), "nobody wakes the loop but its own timeout"
    parts.check_ended(DeadlineExceeded, FinishReason.ERROR)
    assert parts.scheduler.num_schedules < 10


def test_the_loop_looks_again_when_the_scheduler_wants_it(parts: Parts) -> None:
    parts.scheduler.until_s = time.monotonic() + 0.05
    parts.scheduler.on_wait = parts.policy.absent.clear  # without a wake: what was waited for never comes
    parts.submit()
    assert parts.ended.wait(WAIT_S), "nobody wakes the loop but its own timeout"
    parts.check_served()
    assert parts.scheduler.num_schedules < 10


def test_a_drain_waits_for_it(asleep: Parts) -> None:
    assert not asleep.engine.drain(0.0)
    assert not asleep.updates
    asleep.bring()
    assert asleep.engine.drain(WAIT_S)
    asleep.check_served()


def test_a_stop_ends_it(asleep: Parts) -> None:
    asleep.engine.stop()
    asleep.check_ended(None, FinishReason.ABORT)
    assert not asleep.engine.waits


def test_an_interrupt_ends_the_loop_that_sleeps(asleep: Parts) -> None:
    asleep.engine.interrupt(HostLost("process 1 is lost"))
    assert asleep.ended.wait(WAIT_S)
    asleep.check_ended(HostLost, FinishReason.ERROR)
    assert isinstance(asleep.engine.failure, EngineStopped)


def test_others_run_while_it_waits(parts: Parts) -> None:
    parts.submit(absent=False)
    parts.submit()
    assert parts.ended.wait(WAIT_S)
    parts.check_served()
    assert parts.waiting.wait(WAIT_S), "and then it sleeps"


def test_waiting_is_no_hang() -> None:
    clock = ManualClock()
    parts = Parts(clock)
    parts.submit()
    parts.engine.start()
    assert parts.waiting.wait(WAIT_S)
    clock.advance(1000.0)
    assert parts.engine.stalled_s == 0.0
    parts.bring()
    assert parts.ended.wait(WAIT_S)
    parts.engine.stop()


def test_what_comes_between_plan_and_sleep_is_not_missed() -> None:
    parts = Parts()
    parts.scheduler.on_wait = parts.bring
    parts.submit()
    parts.engine.run_until_idle()
    parts.check_served()


def test_a_loop_driven_by_hand_sleeps_too(later) -> None:
    parts = Parts()
    parts.submit()
    later(parts.waiting, parts.bring)
    parts.engine.run_until_idle()
    parts.check_served()
    assert parts.scheduler.num_schedules < 10


def test_offline_jobs_wait(later) -> None:
    parts = Parts()
    requests = [parts.engine.prepare([1, 2, 3], SAMPLING) for _ in range(2)]
    parts.policy.absent.update(request.request_id for request in requests)
    later(parts.waiting, parts.bring)
    ended: list[int] = []
    run_jobs(parts.engine, [Job(request=request) for request in requests], lambda index, result: ended.append(index))
    assert sorted(ended) == [0, 1]


def test_an_offline_run_that_ends_early_ends_what_waits() -> None:
    parts = Parts()
    request = parts.engine.prepare([1, 2, 3], SAMPLING)
    parts.policy.absent.add(request.request_id)

    def stop(counts) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(parts.engine, [Job(request=request)], lambda index, result: None, stop)
    assert not parts.scheduler.has_work()
    assert parts.engine.failure is None


def test_a_replica_that_waits_holds_up_no_other(later) -> None:
    sleeper, worker = Parts(), Parts()
    group = EngineGroup([sleeper.engine, worker.engine], create_router("round_robin"))
    updates: list[list[Update]] = [[], []]
    for place, told in enumerate(updates):
        request = group.prepare([1, 2, 3], SAMPLING)
        if place == 0:
            sleeper.policy.absent.add(request.request_id)
        group.submit(request, told.append)
    done = threading.Event()
    later(done, sleeper.bring)
    while group.step():
        if not done.is_set() and updates[1] and updates[1][-1].last:
            assert not updates[0]
            done.set()
        group.pause()
    assert updates[0][-1].last
    assert updates[0][-1].finish_reason is FinishReason.LENGTH


def test_a_replica_that_is_interrupted_in_its_sleep_dies_alone() -> None:
    sleeper, other = Parts(), Parts()
    group = EngineGroup([sleeper.engine, other.engine], create_router("round_robin"))
    request = group.prepare([1, 2, 3], SAMPLING)
    sleeper.policy.absent.add(request.request_id)
    updates: list[Update] = []
    group.submit(request, updates.append)
    assert group.step()
    sleeper.engine.interrupt(HostLost("process 1 is lost"))
    group.pause()
    assert group.step()
    assert isinstance(sleeper.engine.failure, HostLost)
    group.run_until_idle()
    assert updates[-1].finish_reason is FinishReason.LENGTH, "it moved"


@pytest.mark.parametrize("threaded", [False, True])
def test_who_neither_plans_nor_waits_is_a_defect(threaded: bool) -> None:
    parts = Parts()
    parts.scheduler.says_so = False
    parts.submit()
    if threaded:
        parts.engine.start()
        assert parts.ended.wait(WAIT_S)
        parts.engine.stop()
    else:
        with pytest.raises(AssertionError, match="neither plans nor waits"):
            parts.engine.run_until_idle()
    parts.check_ended(EngineStopped, FinishReason.ERROR)
    assert isinstance(parts.engine.failure, AssertionError)


def test_a_scheduler_that_cannot_say_so_does_not_wait() -> None:
    policy = Absent()
    engine = Engine(
        runner=FakeRunner(LIMITS),
        scheduler=create_scheduler(policy, LIMITS),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
    )
    request = engine.prepare([1], SAMPLING)
    policy.absent.add(request.request_id)
    engine.submit(request, lambda update: None)
    with pytest.raises(PolicyError, match="Absent breaks a rule of its method `may_admit`"):
        engine.run_until_idle()


@pytest.mark.parametrize("says_so", [True, False])
def test_in_a_simulation_nothing_comes_from_outside(says_so: bool) -> None:
    clock, policy = VirtualClock(), Absent()
    scheduler = Waiting(policy, clock)
    scheduler.says_so = says_so
    policy.absent.add("r")
    trace = [SimRequest(request=make_request("r", [1], 2, arrival_s=1.5), arrival_s=1.5, output_len=2)]
    expected, match = (UnsupportedOption, "Waiting waits .* at 1.5 s") if says_so else (AssertionError, "neither plans")
    with pytest.raises(expected, match=match):
        simulate(scheduler, trace, FixedCost(cost=StepCost(0.0, 1.0)), LIMITS, clock=clock)
