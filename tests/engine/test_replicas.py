"""A group of engines on fake devices: where requests go, and what becomes of them when a replica dies."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from group_parts import GREEDY, LONG, WAIT_S, FragileRunner, Group

from jaxserve.api import FinishReason, RequestOptions, ResumeReason, SamplingParams
from jaxserve.assemble import Device
from jaxserve.assemble.live_weights import LiveWeights
from jaxserve.engine import AnyEngine, AsyncEngine, Engine
from jaxserve.engine.restarting import RestartOptions
from jaxserve.errors import CapacityError, Draining, EngineStopped, InvalidRequest, QueueFull
from jaxserve.sched import InFlight, StepPlan


@pytest.fixture
def threaded() -> Iterator[Group]:
    parts = Group()
    parts.group.start()
    yield parts
    for runner in parts.runners:
        runner.open.set()
    parts.group.stop()
    parts.check_idle()


def answers(count: int, policy: str = "round_robin") -> list[list[tuple[int, int]]]:
    parts = Group(count, policy=policy)
    sampling = SamplingParams(temperature=1.0, max_tokens=6, n=2)
    ids = [parts.submit("prompt " * (1 + i % 3), sampling) for i in range(12)]
    parts.group.run_until_idle()
    parts.check_idle()
    assert all(runner.num_steps for runner in parts.runners), "a replica had nothing to do"
    return [parts.tokens(i) for i in ids]


def test_answers_do_not_depend_on_the_number_of_replicas_or_the_policy() -> None:
    assert answers(1) == answers(2) == answers(3) == answers(2, "power_of_two")


def test_prompts_with_a_common_beginning_meet() -> None:
    parts = Group(policy="prefix")
    for number in range(3):
        for word in ("left", "right"):
            parts.submit(word * 6 + str(number))
        parts.group.run_until_idle()
    prompts = [{bytes(c.token_ids[1:5]) for p in r.plans for c in p.chunks if c.start == 0} for r in parts.runners]
    assert prompts == [{b"left"}, {b"righ"}]
    last = [u for updates in parts.updates.values() for u in updates if u.prompt is not None]
    assert sum(u.prompt.num_cached_tokens > 0 for u in last if u.prompt is not None) == 4


# ---- a replica dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
def test_requests_of_a_dead_replica_go_on_where_they_were(n: int, caplog: pytest.LogCaptureFixture) -> None:
    expected = Group(1)
    sampling = SamplingParams(temperature=1.0, max_tokens=12, n=n)
    ids = [expected.submit(f"prompt {i}", sampling) for i in range(16)]
    expected.group.run_until_idle()

    parts = Group(policy="round_robin")
    assert [parts.submit(f"prompt {i}", sampling) for i in range(16)] == ids
    for _ in range(4):
        assert parts.group.step()
    started = {i for i in ids if parts.updates[i]}
    finished = {i for i in started if parts.updates[i][-1].last}
    doomed = {i for i in started - finished if int(i.removeprefix("req-")) % 2 == 0}
    waiting = {i for i in ids if i not in started and int(i.removeprefix("req-")) % 2 == 0}
    assert doomed
    assert waiting
    parts.runners[0].broken = True
    parts.group.run_until_idle()
    for request_id in ids:
        end = parts.end(request_id)
        assert end.error is None
        assert parts.tokens(request_id) == expected.tokens(request_id)
        assert parts.texts(request_id) == expected.texts(request_id)
        prompts = [update.index for update in parts.updates[request_id] if update.prompt is not None]
        assert sorted(prompts) == list(range(n)), "each sequence tells of its prompt once"
    totals = parts.engines[1].stats[0].totals()
    assert totals.resumed[ResumeReason.DIED] == len(doomed)
    assert totals.known_tokens > 0
    assert parts.group.failure is None
    assert parts.group.accepting
    later = parts.submit("prompt 1", sampling)
    parts.group.run_until_idle()
    assert parts.end(later).error is None
    parts.check_idle()
    [record] = [r for r in caplog.records if "are left" in r.getMessage()]
    assert record.getMessage().startswith("replica 0 of 2 has died, 1 are left: RuntimeError('the device is lost'")


def test_the_group_has_failed_when_all_have() -> None:
    parts = Group(3, policy="round_robin", retries=5)
    ids = [parts.submit() for _ in range(6)]
    for runner in parts.runners:
        runner.broken = True
    with pytest.raises(EngineStopped, match="replica 0 has died: .*; replica 2 has died"):
        parts.group.run_until_idle()
    for request_id in ids:
        assert "no other takes the request" in str(parts.end(request_id).error)
    assert isinstance(parts.group.failure, EngineStopped)
    assert not parts.group.accepting
    with pytest.raises(EngineStopped, match="takes no more requests: replica 0 has died"):
        parts.submit()
    streams = AsyncEngine(parts.group)
    with pytest.raises(EngineStopped, match="takes no more requests: replica 0 has died"):
        asyncio.run(streams.run(lambda: parts.group.prepare("x", GREEDY)))
    streams.close()
    parts.check_idle()


def test_a_request_that_kills_is_not_handed_round_for_ever() -> None:
    class Poisoned(FragileRunner):
        def dispatch(self, plan: StepPlan) -> InFlight:
            self.broken |= any(setup.request_id == "poison" for setup in plan.setups)
            return super().dispatch(plan)

    parts = Group(4, retries=1)
    for engine, runner in zip(parts.engines, parts.runners, strict=True):
        runner.__class__ = Poisoned
        assert engine._runner is runner
    parts.submit(request_id="poison")
    parts.group.run_until_idle()
    assert "after 1 moves of this request" in str(parts.end("poison").error)
    assert sum(engine.failure is None for engine in parts.engines) == 2
    parts.check_idle()


def test_a_full_replica_takes_what_had_been_accepted() -> None:
    parts = Group(max_waiting=3, policy="round_robin")
    ids = [parts.submit() for _ in range(6)]
    with pytest.raises(QueueFull, match=r"sched\.max_waiting is 3"):
        parts.submit()
    parts.engines[1].fail(RuntimeError("dies before its first step"))
    assert parts.engines[0].num_unstarted == 6
    parts.group.run_until_idle()
    assert [parts.end(i).finish_reason for i in ids] == [FinishReason.LENGTH] * 6
    parts.check_idle()


def test_a_full_replica_is_passed_over() -> None:
    parts = Group(max_waiting=2, policy="prefix")
    for _ in range(4):
        parts.submit("the same beginning for all of them")
    assert [engine.num_unstarted for engine in parts.engines] == [2, 2]
    parts.group.run_until_idle()
    parts.check_idle()


# ---- one face --------------------------------------------------------------------------------------------------------


def test_an_id_that_is_live_is_refused_though_another_replica_would_take_it() -> None:
    parts = Group(policy="round_robin")
    parts.submit(request_id="mine")
    with pytest.raises(InvalidRequest, match="'mine' is live already"):
        parts.submit(request_id="mine")
    parts.group.run_until_idle()
    parts.submit(request_id="mine")
    parts.group.run_until_idle()
    parts.check_idle()


@pytest.mark.parametrize("by_id", [True, False])
def test_abort(by_id: bool) -> None:
    parts = Group(policy="round_robin")
    requests = [parts.group.prepare("abc", LONG) for _ in range(4)]
    for request in requests:
        parts.group.submit(request, parts.updates.setdefault(request.request_id, []).append)
    parts.group.step()
    parts.group.abort(requests[1].request_id if by_id else requests[1])
    parts.group.abort("nobody")
    parts.group.abort(
        parts.group.prepare("abc", LONG, RequestOptions(request_id=requests[0].request_id))
    )  # another of the same id
    parts.group.run_until_idle()
    ends = [parts.end(r.request_id).finish_reason for r in requests]
    assert ends == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]
    parts.check_idle()


def test_an_aborted_request_does_not_rise_elsewhere() -> None:
    parts = Group(policy="round_robin")
    request_id = parts.submit(sampling=SamplingParams(temperature=0.0, max_tokens=5, n=2))
    parts.runners[0].broken = True
    parts.group.step()  # launched, not read
    parts.group.abort(request_id)
    parts.engines[0].fail(RuntimeError("dies before it looks into its inbox"))
    assert [u.finish_reason for u in parts.updates[request_id]] == [FinishReason.ABORT] * 2
    assert parts.end(request_id).error is None
    assert parts.engines[1].num_unstarted == 0
    parts.check_idle()


def test_an_interrupt_fails_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives in the step of one replica; the requests of it do not move, since nobody drives the other."""
    parts = Group()
    ids = [parts.submit() for _ in range(2)]
    parts.group.step()

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.engines[1], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parts.group.run_until_idle()
    assert all("has died" in str(parts.end(i).error) for i in ids)
    assert not parts.group.accepting
    parts.check_idle()


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_many_threads_and_a_death_lose_nothing(threaded: Group) -> None:
    expected = Group(1)
    prompts = [f"prompt {i % 7}" for i in range(60)]
    for i, prompt in enumerate(prompts):
        expected.submit(prompt, request_id=f"r{i}")
    expected.group.run_until_idle()

    def client(number: int) -> None:
        for i in range(number, 60, 6):
            threaded.submit(prompts[i], request_id=f"r{i}")
            if i == 30:
                threaded.runners[1].broken = True
                time.sleep(0.01)

    clients = [threading.Thread(target=client, args=(k,)) for k in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join(WAIT_S)
    assert len(threaded.updates) == 60
    threaded.wait_until_ended()
    for i in range(60):
        assert threaded.end(f"r{i}").error is None
        assert threaded.tokens(f"r{i}") == expected.tokens(f"r{i}")
    assert threaded.group.failure is None


def test_streams_of_asyncio(threaded: Group) -> None:
    async def main() -> list[str]:
        streams = AsyncEngine(threaded.group)

        async def one(text: str) -> str:
            request = await streams.run(lambda: threaded.group.prepare(text, GREEDY))
            return "".join([str(u.token_ids) async for u in streams.stream(request)])

        try:
            return await asyncio.gather(*(one("abc") for _ in range(8)))
        finally:
            streams.close()

    assert len(set(asyncio.run(asyncio.wait_for(main(), WAIT_S)))) == 1


def test_a_call_is_not_too_large_while_every_replica_is_built_again() -> None:
    built = threading.Event()

    def rebuild(number: int, dead: Engine) -> Engine:
        assert built.wait(WAIT_S)
        raise RuntimeError("the test is over")

    parts = Group(deadline_s=WAIT_S, rebuild=rebuild, restarts=RestartOptions(backoff_s=0.001))
    parts.group.start()

    async def call() -> None:
        streams = AsyncEngine(parts.group)
        try:
            request = await streams.run(lambda: parts.group.prepare("abc", GREEDY), prompts=1)
            async for _ in streams.stream(request):
                raise AssertionError("nobody could answer")
        finally:
            streams.close()

    try:
        for engine in parts.engines:
            engine.interrupt(RuntimeError("the device is lost"))
        while any(engine.failure is None for engine in parts.engines):
            time.sleep(0.001)
        assert parts.group.failure is None, "they may come back"
        with pytest.raises(EngineStopped, match="one is being built again; try later"):
            asyncio.run(asyncio.wait_for(call(), WAIT_S))
    finally:
        built.set()
        parts.group.stop()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("weights", [None, "second"])
def test_a_replica_that_is_built_again_while_the_others_fall_asleep(weights: str | None, again: bool) -> None:
    """It is awake, and sleeps and wakes up with the others from then on."""

    def device(runner: FragileRunner) -> Device:
        make: Any = lambda source: source  # noqa: E731
        return Device(runner=runner, vocab_size=259, eos_token_ids=(257,), sampling_defaults={}, new_weights=make)

    def rebuild(number: int, dead: Engine) -> Engine:
        engine = parts.make_engine(number, dead)
        devices[number] = device(parts.runners[number])
        return engine

    parts = Group(deadline_s=WAIT_S, rebuild=rebuild, restarts=RestartOptions(backoff_s=0.001))
    devices = [device(runner) for runner in parts.runners]
    live = LiveWeights(parts.group, devices)
    failed: list[BaseException] = []

    def sleep() -> None:
        try:
            live.sleep(keep_weights=True)
        except EngineStopped as error:
            failed.append(error)

    parts.runners[0].open.clear()
    parts.group.start()
    [doomed, _] = parts.engines
    doomed.submit(doomed.prepare("abc", LONG), lambda update: None)
    falling = threading.Thread(target=sleep)
    falling.start()
    while not live.asleep:
        time.sleep(0.001)
    parts.runners[0].broken = True
    parts.runners[0].open.set()
    falling.join(WAIT_S)
    assert len(failed) == 1
    while parts.group.replicas[0] is doomed:
        time.sleep(0.001)
    assert live.asleep and [runner.sleeps for runner in parts.runners] == [False, True]
    if again:
        live.sleep(keep_weights=True)
        assert [runner.sleeps for runner in parts.runners] == [True, True] and not parts.group.accepting
    live.wake_up(weights, "" if weights is None else weights)  # type: ignore[arg-type]
    assert not live.asleep and [runner.sleeps for runner in parts.runners] == [False, False]
    assert [runner.weights for runner in parts.runners] == [weights or "first"] * 2
    for replica in parts.group.replicas:
        ended = threading.Event()
        replica.submit(replica.prepare("abc", GREEDY), lambda update, ended=ended: ended.set() if update.last else None)
        assert ended.wait(WAIT_S)
    parts.group.stop()
    parts.check_idle()


def _awake_pair(new_weights: Callable[[Any], Any]) -> tuple[Group, LiveWeights]:
    """Two replicas that run, with weights that are texts."""
    parts = Group()
    devices = [
        Device(runner=one, vocab_size=259, eos_token_ids=(257,), sampling_defaults={}, new_weights=new_weights)
        for one in parts.runners
    ]
    parts.group.start()
    return parts, LiveWeights(parts.group, devices)


def _full() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.")


def test_a_device_without_room_for_new_weights_says_so_and_goes_on() -> None:
    errors = [_full(), jax.errors.JaxRuntimeError("INTERNAL: a defect"), _full()]

    def new_weights(source: Any) -> Any:
        raise errors.pop(0)

    parts, live = _awake_pair(new_weights)
    with pytest.raises(CapacityError, match="no room for new weights beside the weights that it has; `sleep"):
        live.update("second", "second", "recompute")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
        live.update("second", "second", "recompute")
    live.sleep(keep_weights=True)
    with pytest.raises(CapacityError, match="the engine sleeps on; free memory"):
        live.wake_up("second", "second")
    assert live.asleep
    with pytest.raises(EngineStopped, match="the engine sleeps"):
        parts.submit()
    live.wake_up(None, "")
    assert [runner.weights for runner in parts.runners] == ["first"] * 2
    parts.group.stop()


def test_replicas_do_not_wake_up_with_the_kept_weights_beside_one_that_has_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(weights: Any) -> None:
        raise CapacityError("no room")

    parts, live = _awake_pair(lambda source: source)
    live.sleep(keep_weights=True)
    with monkeypatch.context() as patch:
        patch.setattr(parts.runners[1], "wake_up", refuses)
        with pytest.raises(CapacityError, match="no room"):
            live.wake_up("second", "second")
    assert live.asleep and [runner.sleeps for runner in parts.runners] == [False, True]
    with pytest.raises(InvalidRequest, match="another replica has others by now"):
        live.wake_up(None, "")
    live.wake_up("second", "second")
    assert not live.asleep and [runner.weights for runner in parts.runners] == ["second"] * 2
    parts.group.stop()


def test_a_drain_waits_for_what_moves(threaded: Group) -> None:
    for runner in threaded.runners:
        runner.open.clear()
    ids = [threaded.submit(sampling=LONG) for _ in range(12)]
    drained: list[bool] = []
    drain = threading.Thread(target=lambda: drained.append(threaded.group.drain(WAIT_S)))
    drain.start()
    while threaded.group.accepting:
        time.sleep(0.001)
    with pytest.raises(EngineStopped, match="shutting down"):
        threaded.submit()
    threaded.runners[0].broken = True
    threaded.runners[0].open.set()
    while threaded.engines[0].failure is None:
        time.sleep(0.001)
    threaded.runners[1].open.set()
    drain.join(WAIT_S)
    assert drained == [True]
    assert [threaded.end(i).finish_reason for i in ids] == [FinishReason.LENGTH] * 12


def test_a_drain_that_takes_too_long_says_so_and_stop_ends_the_rest(threaded: Group) -> None:
    for runner in threaded.runners:
        runner.open.clear()
    ids = [threaded.submit(sampling=LONG) for _ in range(3)]
    assert not threaded.group.drain(0.05)
    stop = threading.Thread(target=threaded.group.stop)
    stop.start()
    for runner in threaded.runners:
        runner.open.set()
    stop.join(WAIT_S)
    threaded.wait_until_ended()
    assert {threaded.end(i).finish_reason for i in ids} <= {FinishReason.ABORT, FinishReason.LENGTH}


def test_a_replica_that_is_stopped_hands_its_requests_over() -> None:
    parts = Group(retries=0)
    whole = parts.submit(sampling=LONG)
    parts.group.run_until_idle()
    ids = [parts.submit(sampling=LONG) for _ in range(4)]
    for _ in range(6):
        parts.group.step()
    parts.engines[0].stop(hand_over=True)
    parts.group.run_until_idle()
    assert [parts.tokens(i) for i in ids] == [parts.tokens(whole)] * 4
    assert parts.engines[1].stats[0].totals().resumed[ResumeReason.DRAINED] == 2
    parts.group.stop(hand_over=True)
    parts.check_idle()


def test_a_group_that_is_stopped_tells_who_reads_to_go_on_elsewhere(threaded: Group) -> None:
    for runner in threaded.runners:
        runner.open.clear()
    ids = [threaded.submit(sampling=LONG) for _ in range(3)]
    stop = threading.Thread(target=lambda: threaded.group.stop(hand_over=True))
    stop.start()
    while not all(engine._stop_now.is_set() for engine in threaded.engines):  # else one may be done before
        time.sleep(0.001)
    for runner in threaded.runners:
        runner.open.set()
    stop.join(WAIT_S)
    assert all(isinstance(threaded.end(i).error, Draining) for i in ids)


def test_both_kinds_keep_the_protocol() -> None:
    """For the type checker, and for the reader."""
    group: AnyEngine = Group().group
    engine: AnyEngine = Group().engines[0]
    assert group.model == engine.model
