"""Both ends of the plan channel over real sockets, in one process."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from channel_parts import (
    TRUST,
    WAIT_S,
    Observed,
    Pair,
    Slots,
    Stream,
    follower,
    in_thread,
    joined,
    leading,
    page_store,
    ping_seldom,
    wait_until,
)

from jaxserve.errors import ConfigError, EngineStopped, HostLost, HostMismatch, HostsDiverged, PlanCorrupt, StepStalled
from jaxserve.hosts import Follower, StepDigest, StorePart, follow
from jaxserve.hosts.frames import Frame, Kind, make_frame
from jaxserve.hosts.handshake import Answering
from jaxserve.hosts.link import METHOD
from jaxserve.sched import StepPlan

# ---- the start -------------------------------------------------------------------------------------------------------


def test_all_meet_and_agree_on_the_least() -> None:
    with leading(3) as leader, joined(leader, 1) as a, joined(leader, 2) as b:
        facts = {"version": "1"}
        others = [
            in_thread(lambda link=link, pages=pages: link.meet("join", facts, {"pages": pages}))
            for link, pages in ((a, 90), (b, 70))
        ]
        assert leader.meet("join", facts, {"pages": 80}, WAIT_S) == {"pages": 70}
        assert [other.result(WAIT_S) for other in others] == [{"pages": 70}] * 2


def test_a_difference_is_told_to_both_sides() -> None:
    with leading(3) as leader, joined(leader, 1) as a, joined(leader, 2) as b:
        good = in_thread(lambda: a.meet("join", {"jax": "0.10", "max_rows": "8"}, {}))
        bad = in_thread(lambda: b.meet("join", {"jax": "0.11", "max_rows": "8"}, {}))
        text = r"jax is 0\.10 on process 0 and 0\.11 on process 2 \(host-2, ipv4:127\.0\.0\.1:\d+\)$"
        with pytest.raises(HostMismatch, match=text):
            leader.meet("join", {"jax": "0.10", "max_rows": "8"}, {}, WAIT_S)
        for other in (good, bad):
            with pytest.raises(HostMismatch, match=text):
                other.result(WAIT_S)


@pytest.mark.parametrize(("process_id", "text"), [(1, "process 1 .* has that number"), (5, "numbers go from 1 to 1")])
def test_a_wrong_number_is_refused_and_harms_nobody(process_id: int, text: str) -> None:
    with leading() as leader, joined(leader) as right:
        wait_until(lambda: 1 in leader._members, "the first has joined")
        with (
            pytest.raises(HostMismatch, match=f"process 0 .* refuses this process: .*{text}"),
            joined(leader, process_id),
        ):
            pass
        met = in_thread(lambda: right.meet("join", {}, {"a": 1}))
        assert leader.meet("join", {}, {"a": 2}, WAIT_S) == {"a": 1}
        met.result(WAIT_S)


def test_whoever_does_not_come_is_named() -> None:
    with leading(3) as leader, joined(leader, 2) as link:
        met = in_thread(lambda: link.meet("join", {}, {}))
        wait_until(lambda: 2 in leader._members, "it has joined")
        with pytest.raises(HostLost, match="process 1 of 3 did not come within 0.1 s"):
            leader.meet("join", {}, {}, 0.1)
        with pytest.raises(HostLost, match="process 1 of 3"):
            met.result(WAIT_S)


@pytest.mark.slow
def test_nobody_answers() -> None:
    with pytest.raises(HostLost, match=r"does not answer within 3 s \(UNAVAILABLE: .*\); is it running"):
        follower("127.0.0.1:9", join_s=3.0)


def test_an_attempt_that_the_end_cuts_short_does_not_hide_why_the_one_before_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[float] = []

    def greet(self: Follower, asking: object, greeting_s: float) -> grpc.Call:
        attempts.append(greeting_s)
        if len(attempts) == 1:
            raise grpc.RpcError("connection refused")
        time.sleep(greeting_s)
        raise grpc.RpcError("cancelled by its own timer")

    monkeypatch.setattr(Follower, "_greet", greet)
    with pytest.raises(HostLost, match="connection refused"):
        follower("127.0.0.1:9", join_s=2.0)


def test_a_port_in_use_is_a_config_error() -> None:
    with (
        leading() as leader,
        pytest.raises(ConfigError, match=r"cannot listen on .*hosts\.plan_port"),
        leading(address=f"127.0.0.1:{leader.port}"),
    ):
        pass


def test_a_process_that_gives_up_while_it_loads_ends_all() -> None:
    with leading(3) as leader, joined(leader, 1) as a, joined(leader, 2) as b:
        b.give_up(ConfigError("no such checkpoint"))
        with pytest.raises(HostLost, match=r"process 2 \(host-2.* has given up: ConfigError: no such checkpoint"):
            leader.meet("ready", {}, {}, WAIT_S)
        with pytest.raises(HostLost, match="process 2"):
            a.meet("ready", {}, {})


def test_process_0_gives_up_while_it_loads() -> None:
    with leading() as leader, joined(leader) as link:
        wait_until(lambda: 1 in leader._members, "it has joined")
        leader.give_up(ConfigError("no such checkpoint"))
        with pytest.raises(HostLost, match=r"process 0 .*ConfigError\('no such checkpoint'\)"):
            link.meet("ready", {}, {})
        with pytest.raises(HostMismatch, match="came too late"), joined(leader):
            pass


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_the_other_process_runs_the_same_plans_and_ends() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.run()
        assert len(pair.here.inner.plans) > 16
        assert pair.runner.close(WAIT_S)
        pair.leader.finish(WAIT_S)
        assert not pair.followed.done(), "it waits for the verdict"
        pair.leader.close()
        assert pair.followed.result(WAIT_S) is None
        assert pair.there.inner.plans == pair.here.inner.plans
        assert pair.leader._book.agreed == len(pair.here.inner.plans) - 1
        assert pair.leader.failure is None


def test_the_last_step_is_checked_while_nothing_more_comes() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.run(max_tokens=3)
        last = len(pair.here.inner.plans) - 1
        assert last % 4 != 3, "the test is of a step that no check is due for"
        wait_until(lambda: pair.leader._book.agreed == last, "all is confirmed")


def test_process_0_does_not_wait_for_the_other() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.there.open.clear()
        pair.run()
        assert pair.leader._book.confirmed == -1


def test_it_waits_before_it_is_too_far_ahead() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.leader._max_ahead = 10
        pair.there.open.clear()
        ran = in_thread(pair.run)
        wait_until(lambda: len(pair.here.inner.plans) == 10, "it has gone as far as it may")
        time.sleep(0.05)
        assert len(pair.here.inner.plans) == 10
        pair.there.open.set()
        ran.result(WAIT_S)


def test_another_token_is_caught() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, wrong_token_at=9)
        with pytest.raises(
            HostsDiverged, match=r"process 1 \(host-1.*differ after step (9|1\d) and were equal after step"
        ):
            pair.run_to_the_end()
        with pytest.raises(HostLost, match="computed something else"):
            pair.followed.result(WAIT_S)


def test_a_failure_after_the_last_plan_is_told_at_once() -> None:
    """Whoever waits for the verdict hears of a failure while the connection still stands."""
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.run(max_tokens=3)
        pair.runner.close(WAIT_S)
        pair.leader.finish(WAIT_S)
        assert not pair.followed.done(), "it waits for the verdict"
        pair.leader.give_up(RuntimeError("while all say goodbye"))
        with pytest.raises(HostLost, match="while all say goodbye"):
            pair.followed.result(WAIT_S / 3)


def test_a_lost_process_ends_a_step_that_would_hang() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.here.open.clear()
        ran = in_thread(pair.run)
        wait_until(lambda: len(pair.here.inner.plans) == 2, "two steps are under way")
        pair.link.close()
        with pytest.raises(
            HostLost, match=r"process 1 \(host-1.*\) is lost: its connection broke, \d+\.\d s after .* log on host-1"
        ):
            ran.result(WAIT_S)
        with pytest.raises(HostLost):
            pair.runner.dispatch(StepPlan(step_id=99))


def test_what_a_device_says_waits_for_what_the_channel_knows() -> None:
    """A lost process breaks the connections of devices as well, often before it is known to be lost."""
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        pair.here.inner._fail_at = (2, "result")
        ran = in_thread(pair.run)
        wait_until(lambda: len(pair.here.inner.plans) > 2, "the device has failed")
        pair.link.close()
        with pytest.raises(HostLost):
            ran.result(WAIT_S)


def test_what_a_device_says_alone_is_told_in_the_end() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, patience_s=0.1)
        pair.here.inner._fail_at = (2, "result")
        with pytest.raises(RuntimeError, match="injected failure of step 2"):
            pair.run()


def test_a_device_of_the_other_process_fails() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, patience_s=0.1)
        pair.there.inner._fail_at = (2, "dispatch")
        with pytest.raises(EngineStopped, match="this process has failed"):
            pair.run(), pair.followed.result(WAIT_S)
        wait_until(lambda: pair.leader.failure is not None, "process 0 has heard")
        with pytest.raises(HostLost, match="process 1 .* has given up: RuntimeError: injected failure of step 2"):
            pair.leader.finish(WAIT_S)


def test_a_step_that_hangs_while_all_answer() -> None:
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, stall_s=0.2)
        pair.here.open.clear()
        with pytest.raises(StepStalled, match=r"step 0 has not ended within hosts\.stall_s = 0\.2 s"):
            pair.run()


# ---- damage and silence ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving_frames(
    frames: list[Frame], *, then_silent: bool = False, damage: Callable[[bytes], bytes] = bytes
) -> Iterator[str]:
    """A process 0 that admits whoever asks and says just this; the last frame is damaged on its way.

    `then_silent`: the connection stays until the other end closes it.
    """

    def attend(incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        answering = Answering(TRUST.secret, next(incoming))
        yield answering.challenge
        assert answering.check(next(incoming))
        yield answering.admitted
        session = answering.session
        sealed = [session.seal(frame) for frame in frames]
        yield from [*sealed[:-1], *map(damage, sealed[-1:])]
        if then_silent:
            for _ in incoming:
                pass

    server = grpc.server(ThreadPoolExecutor(2))
    handler = grpc.method_handlers_generic_handler(
        METHOD.split("/")[1], {METHOD.split("/")[2]: grpc.stream_stream_rpc_method_handler(attend)}
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(WAIT_S)


def plan_frame(seq: int) -> Frame:
    return Frame(Kind.PLAN, seq, StepPlan(step_id=seq).to_json().encode())


def flipped(raw: bytes) -> bytes:
    return raw[:-3] + bytes([raw[-3] ^ 4]) + raw[-2:]


@pytest.mark.parametrize(
    ("frames", "damage", "error", "text"),
    [
        ([plan_frame(0), plan_frame(1)], flipped, PlanCorrupt, "frame 1 of the connection arrived damaged"),
        ([plan_frame(0), plan_frame(1)], lambda raw: b"", PlanCorrupt, "frame 1 of the connection arrived damaged"),
        ([plan_frame(0), plan_frame(2)], bytes, PlanCorrupt, "plan 2 arrived, but 1 was due"),
        ([plan_frame(0), plan_frame(0)], bytes, PlanCorrupt, "plan 0 arrived, but 1 was due"),
        ([plan_frame(0)], bytes, HostLost, "process 0 .* is lost: its connection was closed"),
        ([plan_frame(0), make_frame(Kind.FAILED, "a reason")], bytes, HostLost, "has ended the service: a reason"),
        ([Frame(99)], bytes, PlanCorrupt, "frame 0 arrived with kind 99, which this version does not know"),  # pyright: ignore[reportArgumentType]
        ([Frame(Kind.REPORT)], bytes, PlanCorrupt, "kind REPORT arrived, which process 0 does not send"),
        ([make_frame(Kind.WELCOME, {})], bytes, PlanCorrupt, "kind WELCOME arrived where PLAN was due"),
        ([Frame(Kind.PLAN, 0, bytes(2**20 + 100))], bytes, HostLost, "RESOURCE_EXHAUSTED: .* larger than max"),
    ],
)
def test_what_ends_a_follower(
    frames: list[Frame], damage: Callable[[bytes], bytes], error: type[Exception], text: str
) -> None:
    # A connection that closes may be noticed before its last frame is read.
    with serving_frames(frames, damage=damage, then_silent="was closed" not in text) as address:
        link = follower(address)
        with contextlib.closing(link), pytest.raises(error, match=text):
            list(link.frames())


FILL = {"do": "fill", "pages": [{"salt": "a secret", "content": "0" * 64}], "slots": [1], "deadline_s": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frame", "has_store", "text"),
    [
        (Frame(Kind.PLAN, 0, b'{"decode_rows": []}'), True, "plan 0 cannot be read: TypeError"),
        (make_frame(Kind.ORDER, FILL, 7), False, "order 7 for a store arrived, and this process has none"),
        (Frame(Kind.ORDER, 7, b"\xff"), True, "order 7 cannot be read: Invalid JSON"),
        (make_frame(Kind.ORDER, {"do": "sell"}, 7), True, "order 7 cannot be read: .*'do'"),
        (make_frame(Kind.ORDER, {**FILL, "slots": [1, 2]}), True, "1 pages are for 2 slots"),
        (make_frame(Kind.ORDER, {**FILL, "slots": [-1]}), True, r"fill\.slots\.0: .*greater than or equal to 0"),
        (make_frame(Kind.ORDER, {**FILL, "slots": ["1"]}), True, r"fill\.slots\.0: .*valid integer"),
        (make_frame(Kind.ORDER, {**FILL, "deadline_s": float("inf")}), True, r"deadline_s: .*finite"),
        (make_frame(Kind.ORDER, {**FILL, "pages": [{"salt": "a secret", "content": "0"}]}), True, "content: "),
        (make_frame(Kind.ORDER, {**FILL, "num_used": 1}), True, "num_used: Extra inputs"),
    ],
)
def test_a_plan_or_an_order_that_is_none(frame: Frame, has_store: bool, text: str) -> None:
    with serving_frames([frame], then_silent=True) as address:
        link = follower(address)
        part = StorePart(page_store(Slots(), 1), link.answer) if has_store else None
        digest = StepDigest()
        with contextlib.closing(link), pytest.raises(PlanCorrupt, match=text) as caught:
            follow(Observed(digest), link, digest, heartbeat_s=WAIT_S, check_every=4, finish_s=WAIT_S, store=part)
        assert "a secret" not in str(caught.value)


def test_a_silent_process_0_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ping_seldom(monkeypatch)
    with serving_frames([], then_silent=True) as address:
        link = follower(address, heartbeat_s=1.0)
        with contextlib.closing(link):
            link.start_serving()
            with pytest.raises(HostLost, match=r"process 0 .* no sign of life for .* hosts\.heartbeat_s = 1;"):
                list(link.frames())


def test_a_silent_process_is_noticed_once_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent is who sends nothing although its connection lives: a Python that hangs."""
    ping_seldom(monkeypatch)
    with leading(heartbeat_s=1.0) as leader, grpc.insecure_channel(f"127.0.0.1:{leader.port}") as channel:
        stream = Stream(channel)
        try:
            stream.join()
            stream.say(make_frame(Kind.MEET, {"stage": "load", "facts": {}, "numbers": {}}))
            leader.meet("load", {}, {}, WAIT_S)
            time.sleep(2.0)
            assert leader.failure is None, "loading may keep Python busy for longer than a heartbeat"
            stream.say(make_frame(Kind.MEET, {"stage": "ready", "facts": {}, "numbers": {}}))
            leader.meet("ready", {}, {}, WAIT_S)
            wait_until(lambda: leader.failure is not None, "the silence is noticed")
            with pytest.raises(HostLost, match=r"process 1 \(b, .*no sign of life for"):
                leader.broadcast(b"")
        finally:
            stream.close()
