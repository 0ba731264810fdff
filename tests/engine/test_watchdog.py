"""Loops whose device hangs: deadlines, the watchdog, the fence, and replicas that are built again."""

import threading
import time
from collections.abc import Callable

import pytest
from group_parts import GREEDY, LONG, WAIT_S, Group

from jaxserve.api import FinishReason
from jaxserve.engine import Engine, Update
from jaxserve.engine.restarting import Rebuilder, RestartOptions, Restarts
from jaxserve.engine.step_deadlines import StepDeadlines
from jaxserve.engine.watchdog import Watchdog
from jaxserve.errors import Draining, EngineStopped, StepStalled
from jaxserve.sched import Chunk, InFlight, StepPlan
from jaxserve.testing import ManualClock

DEADLINE_S = 10.0


class Watched(Group):
    """Replicas with threads, whose watchdog looks when a test says so."""

    def __init__(self, **options) -> None:
        self.clock = ManualClock()
        super().__init__(deadline_s=DEADLINE_S, clock=self.clock, **options)
        group = self.group
        for replica in group.replicas:
            replica.start_loop()
        self.watchdog = Watchdog(lambda: group.replicas, on_death=group._see_death, clock=self.clock)
        group._watchdog = self.watchdog

    def hang(self, number: int) -> str:
        """One request, whose replica hangs in the middle of it."""
        self.runners[number].open.clear()
        request_id = self.submit(sampling=LONG)
        wait_until(lambda: self.engines[number].turn is not None and self.engines[number].num_live == 1)
        self.watchdog.look()
        return request_id

    def let_pass(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.watchdog.look()

    def end_all(self) -> None:
        for runner in self.runners:
            runner.open.set()
        self.group.stop()


def wait_until(condition: Callable[[], bool]) -> None:
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < WAIT_S, "in vain"
        time.sleep(0.002)


def tokens_of(request_id: str, sampling=LONG) -> list[tuple[int, int]]:
    alone = Group(1)
    alone.submit(sampling=sampling, request_id=request_id)
    alone.group.run_until_idle()
    return alone.tokens(request_id)


# ---- deadlines -------------------------------------------------------------------------------------------------------


def _step(num_tokens: int, rounds: int = 1) -> StepPlan:
    if rounds > 1:
        return StepPlan(step_id=0, decode_rows=tuple(range(num_tokens)), rounds=rounds)
    return StepPlan(step_id=0, chunks=(Chunk(row=0, start=0, token_ids=(1,) * num_tokens, sample=True),))


def test_the_deadline_is_a_multiple_of_the_predicted_time() -> None:
    deadlines = StepDeadlines(floor_s=20.0, factor=10.0)
    assert deadlines.predict_s(_step(64)) == 0.0, "nothing was measured"
    assert deadlines.allowed_s(None, None) == deadlines.allowed_s(_step(64), None) == 20.0
    deadlines.learn(_step(64), 3.0)
    assert deadlines.predict_s(_step(33)) == 3.0, "as large as its shape"
    assert deadlines.allowed_s(_step(64), None) == deadlines.allowed_s(None, _step(64)) == 30.0
    assert deadlines.predict_s(_step(256)) == 12.0, "four times as many tokens"
    assert deadlines.predict_s(_step(64, rounds=4)) == 12.0, "as many rounds after one another"
    assert deadlines.predict_s(_step(8)) == 3.0, "a smaller step takes no longer"
    deadlines.learn(_step(256), 5.0)
    assert deadlines.predict_s(_step(256)) == 5.0


def test_an_estimate_rises_at_once_and_falls_slowly() -> None:
    deadlines = StepDeadlines(floor_s=1.0, factor=2.0)
    for seconds in (1.0, 9.0, 1.0):
        deadlines.learn(_step(8), seconds)
    assert 8.0 < deadlines.predict_s(_step(8)) < 9.0
    for _ in range(200):
        deadlines.learn(_step(8), 1.0)
    assert deadlines.predict_s(_step(8)) < 1.1


def test_a_slow_step_has_its_own_deadline() -> None:
    parts = Watched()
    parts.deadlines[0].learn(_step(4), 30.0)  # the size of the prompt
    parts.hang(0)
    assert parts.engines[0].allowed_s == 30.0
    parts.let_pass(29)
    assert not parts.engines[0].red
    parts.let_pass(1)
    assert parts.engines[0].red
    parts.end_all()


def test_the_time_of_a_change_does_not_count_for_the_step_behind_it() -> None:
    """Weights take as long as they take; the first step after that begins in the same turn."""
    parts = Watched()
    engine, runner = parts.engines[0], parts.runners[0]
    request_id, dispatch = parts.hang(0), runner.dispatch

    def dispatch_and_look(plan: StepPlan) -> InFlight:
        parts.watchdog.look()
        return dispatch(plan)

    def work(*_: object) -> None:
        runner.dispatch = dispatch_and_look
        parts.let_pass(100)

    change = engine.change(work, after_running=False)
    runner.open.set()
    change.result(WAIT_S)
    wait_until(lambda: bool(parts.updates[request_id]) and parts.updates[request_id][-1].last)
    assert engine.failure is None and not engine.red and engine.stats[0].num_fences == 0
    parts.end_all()


# ---- the fence -------------------------------------------------------------------------------------------------------


def test_a_replica_that_hangs_turns_red_alone_and_is_fenced(caplog: pytest.LogCaptureFixture) -> None:
    parts = Watched()
    hanging, other = parts.engines
    hung = parts.hang(0)
    parts.let_pass(9)
    assert hanging.ready
    assert not caplog.records
    parts.let_pass(1)
    assert not hanging.ready
    assert hanging.accepting, "the step may end yet"
    assert parts.group.ready
    assert "in result\n" in caplog.text, "the stack of the thread that hangs"
    later = [parts.submit() for _ in range(3)]
    wait_until(lambda: all(u and u[-1].last for i in later if (u := parts.updates[i]) is not None))
    assert other.stats[0].totals().steps > 0 and not parts.updates[hung], "new work went to the other"
    wait_until(lambda: other.turn is None)
    parts.let_pass(9)
    assert hanging.failure is None
    assert caplog.text.count("Traceback") == 0 and caplog.text.count("within its deadline") == 1, "told once"
    parts.let_pass(1)
    assert isinstance(hanging.failure, StepStalled)
    assert hanging.stats[0].num_fences == 1
    wait_until(lambda: bool(parts.updates[hung]) and parts.updates[hung][-1].last)
    assert parts.end(hung).error is None
    assert parts.tokens(hung) == tokens_of(hung)
    assert parts.group.failure is None
    before = len(parts.updates[hung])
    thread = hanging._thread
    assert thread is not None and thread.is_alive(), "it is left to its device"
    parts.runners[0].open.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(parts.updates[hung]) == before, "what came late was dropped"
    parts.end_all()
    parts.check_idle()


def test_tokens_that_had_been_streamed_are_not_repeated() -> None:
    """The hang comes after some steps, with a step in flight behind it."""
    parts = Watched()
    runner = parts.runners[0]
    request_id = parts.submit(sampling=LONG)
    wait_until(lambda: sum(len(u.token_ids) for u in parts.updates[request_id].copy()) >= 5)
    runner.open.clear()
    steps = -1
    while steps != runner.num_steps:  # the step that hangs is the last one
        steps = runner.num_steps
        time.sleep(0.02)
    if not parts.updates[request_id][-1].last:  # else the machine was too fast for the test to matter
        parts.watchdog.look()
        parts.let_pass(20)
        assert isinstance(parts.engines[0].failure, StepStalled)
        wait_until(lambda: parts.updates[request_id][-1].last)
    assert parts.tokens(request_id) == tokens_of(request_id)
    parts.end_all()


def test_a_loop_that_comes_round_is_ready_again(caplog: pytest.LogCaptureFixture) -> None:
    parts = Watched()
    hung = parts.hang(0)
    parts.let_pass(12)
    assert parts.engines[0].red
    parts.runners[0].open.set()
    wait_until(lambda: bool(parts.updates[hung]) and parts.updates[hung][-1].last)
    wait_until(lambda: parts.engines[0].turn is None)
    parts.let_pass(1)
    assert not parts.engines[0].red
    assert "come round again" in caplog.text
    parts.let_pass(30)
    assert parts.engines[0].failure is None
    assert parts.tokens(hung) == tokens_of(hung)
    parts.end_all()


def test_a_halt_of_the_whole_process_is_no_hang() -> None:
    parts = Watched()
    parts.hang(0)
    parts.clock.advance(3600.0)
    parts.watchdog.look()
    assert not parts.engines[0].red
    parts.end_all()


def test_a_turn_that_has_just_ended_is_not_fenced() -> None:
    parts = Watched(count=1)
    parts.hang(0)
    turn = parts.engines[0].turn
    assert turn is not None
    assert not parts.engines[0].fence(turn - 1, StepStalled("too late"))
    assert parts.engines[0].failure is None
    parts.end_all()


def test_a_loop_that_hangs_where_it_tells_clients_ends_the_group() -> None:
    """Its requests cannot be moved, since nobody knows what their clients have been told."""
    parts = Watched()
    release = threading.Event()
    request = parts.group.prepare("abc", GREEDY)

    def take(update: Update) -> None:
        release.wait(WAIT_S)

    parts.group.submit(request, take)
    wait_until(lambda: parts.engines[0]._telling.locked())
    parts.watchdog.look()
    turn = parts.engines[0].turn
    wait_until(lambda: parts.engines[0].turn == turn)
    parts.let_pass(20)
    assert parts.engines[0].lost
    assert isinstance(parts.group.failure, StepStalled)
    release.set()
    parts.end_all()


def test_a_group_whose_replicas_all_hang_says_so() -> None:
    parts = Watched()
    ids = [parts.hang(number) for number in range(2)]
    parts.let_pass(22)
    assert isinstance(parts.group.failure, StepStalled)
    for request_id in ids:
        assert "no other takes the request" in str(parts.end(request_id).error)
    parts.end_all()


# ---- replicas that come back -----------------------------------------------------------------------------------------


def test_a_fenced_replica_is_built_again_and_its_counts_go_on() -> None:
    def rebuild(number: int, dead: Engine) -> Engine:
        return parts.make_engine(number, dead)

    parts = Watched(rebuild=rebuild, restarts=RestartOptions(backoff_s=0.0))
    delivered = threading.Event()
    parts.group.watch_deliveries(delivered.set)
    hung, old, dead = parts.hang(0), parts.runners[0], parts.engines[0]
    parts.let_pass(21)
    wait_until(lambda: parts.group.replicas[0] is not dead)
    back = parts.group.replicas[0]
    assert back.ready
    assert back.stats[0] is dead.stats[0]
    assert back.stats[0].num_restarts == back.stats[0].num_fences == 1
    assert back.stats[0].alive
    wait_until(lambda: bool(parts.updates[hung]) and parts.updates[hung][-1].last)
    delivered.clear()
    ids = [parts.submit() for _ in range(6)]
    assert len({*ids, hung}) == 7, "numbers of requests go on"
    wait_until(lambda: all(parts.updates[i] and parts.updates[i][-1].last for i in ids))
    assert parts.runners[0] is not old
    assert parts.runners[0].num_steps > 0
    assert delivered.is_set()
    old.open.set()
    parts.end_all()
    parts.check_idle()


def test_who_saw_the_former_replica_dead_does_not_end_its_successor() -> None:
    """The watchdog looks at replicas as they were, and one may have been built again before it says what it saw."""
    built: list[int] = []

    def rebuild(number: int, dead: Engine) -> Engine:
        built.append(number)
        return parts.make_engine(number, dead)

    parts = Watched(rebuild=rebuild, restarts=RestartOptions(backoff_s=0.0))
    parts.group.replicas[1].interrupt(RuntimeError("the device has gone"))
    wait_until(lambda: parts.group.replicas[1].failure is not None)
    parts.watchdog.look()
    wait_until(lambda: parts.group.replicas[1].failure is None)
    wait_until(lambda: not any(thread.name == "jaxserve-restart-1" for thread in threading.enumerate()))
    parts.group._see_death(1)
    wait_until(lambda: not any(thread.name == "jaxserve-restart-1" for thread in threading.enumerate()))
    assert built == [1] and parts.group.replicas[1].accepting
    parts.end_all()


def test_a_replica_that_cannot_be_built_stays_down() -> None:
    tries: list[int] = []

    def rebuild(number: int, dead: Engine) -> Engine:
        tries.append(number)
        raise RuntimeError("the device is lost")

    parts = Watched(rebuild=rebuild, restarts=RestartOptions(most=3, backoff_s=0.0))
    for number in range(2):
        parts.runners[number].broken = True
    ids = [parts.submit() for _ in range(4)]
    wait_until(lambda: all(engine.failure is not None for engine in parts.engines))
    assert parts.group.failure is None, "they may come back"
    assert not parts.group.ready
    with pytest.raises(EngineStopped, match="is being built again; try later"):
        parts.submit()
    parts.watchdog.look()
    wait_until(lambda: parts.group.failure is not None)
    assert sorted(tries) == [0, 0, 0, 1, 1, 1]
    assert "stays down: 3 restarts within 600 s" in str(parts.group.failure)
    parts.watchdog.look()
    assert all("no replica came back" in str(parts.end(i).error) for i in ids)
    assert len(tries) == 6
    parts.end_all()


class Stranded(Watched):
    """Both replicas die with a stream each, and none is built again before `may_build`."""

    def __init__(self) -> None:
        self.may_build = threading.Event()

        def rebuild(number: int, dead: Engine) -> Engine:
            assert self.may_build.wait(WAIT_S)
            return self.make_engine(number, dead)

        super().__init__(rebuild=rebuild, restarts=RestartOptions(backoff_s=0.0, wait_s=30.0))
        for runner in self.runners:
            runner.open.clear()
        self.ids = [self.submit(sampling=LONG) for _ in range(2)]
        wait_until(lambda: all(engine.num_live == 1 for engine in self.engines))
        for runner in self.runners:
            runner.broken = True
            runner.open.set()
        wait_until(lambda: all(engine.failure is not None for engine in self.engines))
        wait_until(lambda: self.group.num_live == 2)
        self.watchdog.look()

    def end_all(self) -> None:
        self.may_build.set()
        super().end_all()


def test_requests_wait_for_a_replica_when_all_have_died() -> None:
    parts = Stranded()
    parts.let_pass(29)
    assert not any(update.last for i in parts.ids for update in parts.updates[i])
    with pytest.raises(EngineStopped, match="is being built again; try later"):
        parts.submit()
    parts.may_build.set()
    wait_until(lambda: all(parts.updates[i] and parts.updates[i][-1].last for i in parts.ids))
    for request_id in parts.ids:
        assert parts.end(request_id).error is None
        assert parts.tokens(request_id) == tokens_of(request_id)
    wait_until(lambda: all(engine.failure is None for engine in parts.group.replicas))
    parts.end_all()
    parts.check_idle()


def test_the_wait_for_a_replica_ends() -> None:
    late, left, drained = Stranded(), Stranded(), Stranded()
    told = threading.Event()
    late.group.watch_deliveries(told.set)
    late.let_pass(30)
    for request_id in late.ids:
        assert "none was built again within 30 s (watchdog.wait_s)" in str(late.end(request_id).error)
    assert told.is_set(), "whoever waits for updates is woken"
    left.group.abort(left.ids[0])
    left.group.stop()
    assert [left.end(i).finish_reason for i in left.ids] == [FinishReason.ABORT] * 2
    drained.group.drain(WAIT_S)
    assert all(isinstance(drained.end(i).error, Draining) for i in drained.ids), "they go on at another server"
    for parts in (late, left, drained):
        parts.end_all()
        assert parts.group.num_live == 0 and not parts.group._routed


def test_the_watch_goes_on_while_pages_are_exported() -> None:
    group = Group(2, deadline_s=DEADLINE_S).group
    group.start()
    group.drain(0.0)
    group.export(0.0)
    assert group._watchdog is not None and not group._watchdog._stopped.is_set()
    group.stop()
    assert group._watchdog._stopped.is_set()


def test_restarts_are_counted_in_a_window_and_wait_longer_each_time() -> None:
    clock = ManualClock()
    restarts = Restarts(RestartOptions(most=3, window_s=600.0, backoff_s=2.0), clock)
    assert [restarts.next_wait_s() for _ in range(4)] == [2.0, 4.0, 8.0, None]
    clock.advance(600.0)
    assert restarts.next_wait_s() == 2.0


def test_a_try_that_hangs_is_left_alone() -> None:
    parts = Group(1)
    release = threading.Event()
    adopted: list[int] = []

    def rebuild(number: int, dead: Engine) -> Engine:
        release.wait(WAIT_S)
        return parts.make_engine(number)

    options = RestartOptions(most=1, backoff_s=0.0)
    rebuilder = Rebuilder(1, rebuild, options, lambda number, engine: adopted.append(number), build_s=0.01)
    rebuilder.begin(0, parts.engines[0])
    wait_until(lambda: not rebuilder.hopes(0))
    closed = threading.Event()
    parts._options["on_close"] = closed.set
    release.set()
    assert closed.wait(WAIT_S), "an engine that comes too late gives its device back"
    assert not adopted
