"""Whoever reaches the plan port without being a process of the service: gets nothing, blocks nobody, soon ends."""

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from channel_parts import TRUST, WAIT_S, Stream, follower, in_thread, joined, leading, wait_until

from jaxserve.errors import HostLost, HostMismatch, PlanCorrupt
from jaxserve.hosts import Leader, Tls, Trust
from jaxserve.hosts.frames import MAX_GREETING_BYTES, MAX_REPORT_BYTES, Frame, Kind, decode, encode, make_frame
from jaxserve.hosts.handshake import PROTOCOL, Answering, Asking, Strangers
from jaxserve.hosts.link import MAX_STRANGERS

SECRET = TRUST.secret


@contextlib.contextmanager
def reaching(leader: Leader) -> Iterator[Stream]:
    """A connection that has not said anything yet."""
    with grpc.insecure_channel(
        f"127.0.0.1:{leader.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:  # fmt: skip
        stream = Stream(channel)
        try:
            yield stream
        finally:
            stream.close()


def assert_it_still_starts(leader: Leader) -> None:
    """The processes of the service meet, whoever else is there."""
    with joined(leader) as link:
        met = in_thread(lambda: link.meet("join", {}, {"pages": 1}))
        assert leader.meet("join", {}, {"pages": 2}, WAIT_S) == {"pages": 1}
        assert met.result(WAIT_S) == {"pages": 1}
        assert leader.failure is None


def asking(**changes: Any) -> Asking:
    return Asking(**{"secret": SECRET, "process_id": 1, "num_processes": 2, "host": "b", **changes})


# ---- the secret ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", [b"", b"the secret of somebody else"])
def test_another_secret_is_told_to_both_sides(secret: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with leading() as leader:
        with pytest.raises(HostMismatch, match=r"process 1 \(a, .*\) does not know the secret .* hosts\.secret_file"):
            follower(f"127.0.0.1:{leader.port}", trust=Trust(secret))
        assert "does not know the secret of process 0" in caplog.text
        assert_it_still_starts(leader)


def test_many_strangers_do_not_fill_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("jaxserve.hosts.leader._QUIET_S", WAIT_S)

    def ask() -> list[str]:
        with pytest.raises(HostMismatch):
            follower(f"127.0.0.1:{leader.port}", trust=Trust())
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    with leading() as leader:
        for _ in range(20):
            assert len(ask()) == 1, "one in that time"
        leader._quiet_until_s = 0.0  # the time is over
        assert "(and 19 more since the last such line)" in ask()[1]


def test_a_process_0_that_does_not_know_the_secret_is_told_nothing() -> None:
    """Whoever takes the address of process 0 can ask, but gets the proof alone."""
    mine = asking()
    other = Answering(b"the secret of somebody else", mine.hello)
    proof = mine.prove(other.challenge)
    assert not other.check(proof)
    with pytest.raises(HostMismatch, match="it does not know the secret of this process"):
        mine.check(other.admitted)


@pytest.mark.parametrize(("process_id", "change"), [(2, {}), (1, {"processes": 3}), (1, {"host": "c"})])
def test_every_field_of_the_greeting_is_proved(process_id: int, change: dict[str, Any]) -> None:
    """Whoever changes one on its way changes what is proved."""
    mine = asking()
    fields = {**json.loads(decode(mine.hello).payload), **change}
    answering = Answering(SECRET, encode(make_frame(Kind.HELLO, fields, process_id)))
    assert not answering.check(mine.prove(answering.challenge))


def test_a_recorded_conversation_is_worth_nothing() -> None:
    mine = asking()
    first = Answering(SECRET, mine.hello)
    proof = mine.prove(first.challenge)
    assert first.check(proof)
    assert not Answering(SECRET, mine.hello).check(proof), "the challenge is another one"


def test_a_frame_counts_once_in_its_place_and_direction() -> None:
    mine = asking()
    answering = Answering(SECRET, mine.hello)
    assert answering.check(mine.prove(answering.challenge))
    here, there = answering.session, mine.check(answering.admitted)
    frames = [here.seal(Frame(Kind.PLAN, seq, b"a plan")) for seq in range(3)]
    assert there.open(frames[0]) == Frame(Kind.PLAN, 0, b"a plan")
    for wrong in (
        frames[0],
        frames[2],
        there.seal(Frame(Kind.BEAT)),
        frames[1][:-1],
        frames[1] + b"x",
        b"",
        frames[1][:31],
    ):
        with pytest.raises(PlanCorrupt, match="frame 1 of the connection"):
            there.open(wrong)
    assert there.open(frames[1]).seq == 1
    for bit in range(8 * len(frames[2])):
        broken = bytearray(frames[2])
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PlanCorrupt, match="damaged"):
            there.open(bytes(broken))


def test_another_size_or_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with leading() as leader:
        with pytest.raises(HostMismatch, match=r"process 1 .* of 5 wants to join, but hosts\.num_processes is 2"):
            follower(f"127.0.0.1:{leader.port}", num_processes=5)
        with reaching(leader) as stream:
            monkeypatch.setattr("jaxserve.hosts.handshake.PROTOCOL", 7)
            stream.say_raw(asking().hello)
            monkeypatch.undo()
            assert "speaks version 7 of the protocol" in decode(next(stream.replies)).text


# ---- silence and numbers ---------------------------------------------------------------------------------------------


def test_silent_connections_do_not_keep_a_service_from_starting() -> None:
    with leading(greeting_s=WAIT_S) as leader, contextlib.ExitStack() as stack:
        for _ in range(2 * MAX_STRANGERS):
            stack.enter_context(reaching(leader))
        wait_until(lambda: len(leader._strangers._ends) == MAX_STRANGERS, "as many as are let in wait")
        assert_it_still_starts(leader)


def test_a_silent_connection_ends() -> None:
    with leading(greeting_s=WAIT_S) as leader, reaching(leader) as silent, reaching(leader) as half:
        half.say_raw(asking().hello)
        assert decode(next(half.replies)).kind is Kind.CHALLENGE
        wait_until(lambda: len(leader._strangers._ends) == 2, "both are known")
        for timer in list(leader._strangers._timers.values()):  # fired by hand: a short time might end it too early
            assert timer.interval == WAIT_S
            timer.function(*timer.args)
        for stream in (silent, half):
            with pytest.raises(grpc.RpcError) as caught:
                next(stream.replies)
            assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert leader._members == {}
        assert_it_still_starts(leader)


def test_the_time_of_a_stranger_ends_by_itself() -> None:
    ended = threading.Event()
    strangers = Strangers(limit=2, patience_s=0.01)
    strangers.begin(ended.set)
    assert ended.wait(WAIT_S)
    assert strangers._ends == strangers._timers == {}


def test_bytes_that_are_no_http_block_nobody() -> None:
    with leading() as leader, contextlib.ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            for _ in range(20):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", leader.port)))
                one.sendall(said)
        assert_it_still_starts(leader)


def test_the_oldest_stranger_gives_way() -> None:
    ended: list[str] = []
    strangers = Strangers(limit=2, patience_s=WAIT_S)
    first = strangers.begin(lambda: ended.append("a"))
    strangers.begin(lambda: ended.append("b"))
    strangers.finish(first)
    strangers.begin(lambda: ended.append("c"))
    assert ended == []
    last = [strangers.begin(lambda: ended.append("d")), strangers.begin(lambda: ended.append("e"))]
    assert ended == ["b", "c"]
    for number in (first, *last, *last):
        strangers.finish(number)


def test_whoever_is_sent_away_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the service that was the oldest of too many strangers still joins."""
    with leading() as leader:
        away = iter([True, True])
        answer = leader._admit

        def busy(*arguments: Any) -> Any:
            if next(away, False):
                raise grpc.RpcError
            return answer(*arguments)

        monkeypatch.setattr(leader, "_admit", busy)
        assert_it_still_starts(leader)
        assert next(away, None) is None


# ---- what is no frame ------------------------------------------------------------------------------------------------


def greetings() -> list[bytes]:
    hello = asking().hello
    return [
        b"",
        b"GET / HTTP/1.1",
        hello[:-1],
        hello + b" " * MAX_GREETING_BYTES,
        encode(Frame(Kind.HELLO, 1, b"[1]")),
        encode(Frame(Kind.HELLO, 1, b"[" * 400)),
        encode(make_frame(Kind.HELLO, {"host": "b"}, 1)),
        encode(make_frame(Kind.HELLO, {"version": PROTOCOL, "processes": True, "host": "b", "nonce": "0" * 64}, 1)),
        encode(make_frame(Kind.HELLO, {"version": PROTOCOL, "processes": 2, "host": "b\n", "nonce": "0" * 64}, 1)),
        encode(make_frame(Kind.HELLO, {"version": PROTOCOL, "processes": 2, "host": "b", "nonce": "0"}, 1)),
        *(encode(Frame(kind, 1)) for kind in Kind if kind is not Kind.HELLO),
    ]


def test_a_greeting_that_is_none_is_refused() -> None:
    with leading() as leader:
        for raw in greetings():
            with reaching(leader) as stream:
                stream.say_raw(raw)
                assert [decode(reply).kind for reply in stream.replies] == [Kind.REFUSED], raw
        assert leader.failure is None
        assert_it_still_starts(leader)


def test_no_greeting_of_random_bytes_gets_in() -> None:
    seeded = random.Random(5)
    with leading() as leader:
        with joined(leader) as link:  # the real one is there, and stays
            for _ in range(150):
                mine = asking()
                with reaching(leader) as stream:
                    stream.say_raw(mutated(seeded, mine.hello))
                    with contextlib.suppress(grpc.RpcError, StopIteration, HostMismatch, PlanCorrupt):
                        stream.say_raw(mutated(seeded, mine.prove(next(stream.replies))))
                        assert decode(next(stream.replies)).kind in (Kind.REFUSED, Kind.CHALLENGE)
            assert list(leader._members) == [1]
            met = in_thread(lambda: link.meet("join", {}, {}))
            leader.meet("join", {}, {}, WAIT_S)
            met.result(WAIT_S)
        wait_until(lambda: leader._strangers._ends == {}, "none is left")


def mutated(seeded: random.Random, raw: bytes) -> bytes:
    """Never `raw` itself."""
    choice = seeded.randrange(4)
    if choice == 0:
        return seeded.randbytes(seeded.randrange(2 * MAX_GREETING_BYTES))
    if choice == 1:
        return raw[: seeded.randrange(len(raw))]
    if choice == 2:
        return raw + seeded.randbytes(1 + seeded.randrange(20))
    place = seeded.randrange(len(raw))
    return raw[:place] + bytes([raw[place] ^ 1 << seeded.randrange(8)]) + raw[place + 1 :]


def test_a_long_message_ends_its_connection_before_it_is_taken() -> None:
    with leading() as leader:
        with reaching(leader) as stream:
            stream.say_raw(b"x" * (MAX_REPORT_BYTES + 1))
            with pytest.raises(grpc.RpcError, match="larger than max"):
                next(stream.replies)
        assert_it_still_starts(leader)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (Frame(99), "frame 0 arrived with kind 99"),  # pyright: ignore[reportArgumentType]
        (Frame(Kind.PLAN), "kind PLAN arrived, which only process 0 sends"),
        (Frame(Kind.REPORT, 7, b"digest"), "a digest of step 7 arrived, and 0 plans were sent"),
        (Frame(Kind.MEET, 0, b"\xff"), "kind MEET holds no JSON"),
        (make_frame(Kind.MEET, {"stage": [], "facts": {}, "numbers": {}}), "kind MEET has no 'stage' of type str"),
        (make_frame(Kind.MEET, {"stage": "join"}), "kind MEET has no 'facts'"),
        (make_frame(Kind.OUTCOME, {"ok": []}, 7), "an outcome of order 7 arrived, and none was given"),
        (Frame(Kind.ORDER), "kind ORDER arrived, which only process 0 sends"),
    ],
)
def test_a_frame_of_a_process_that_makes_no_sense_ends_the_service_with_a_word(frame: Frame, text: str) -> None:
    with leading() as leader, reaching(leader) as stream:
        stream.join()
        failed = in_thread(lambda: leader.meet("join", {}, {}, WAIT_S))
        stream.say(frame)
        with pytest.raises(PlanCorrupt, match=rf"process 1 \(b, .*{text}"):
            failed.result(WAIT_S)
        assert "process 1" in stream.session.open(next(stream.replies)).text, "the other one is told, too"


def test_a_frame_injected_into_a_connection_ends_the_service_with_a_word() -> None:
    with leading() as leader, reaching(leader) as stream:
        stream.join()
        failed = in_thread(lambda: leader.meet("join", {}, {}, WAIT_S))
        stream.say_raw(encode(make_frame(Kind.MEET, {"stage": "join", "facts": {}, "numbers": {}})))
        with pytest.raises(PlanCorrupt, match="its MAC is wrong"):
            failed.result(WAIT_S)


def test_a_plan_that_is_too_long_is_not_sent() -> None:
    with leading(max_plan_bytes=100) as leader, joined(leader) as link:
        with pytest.raises(Exception, match=r"101 bytes, more than hosts\.max_plan_bytes = 100; raise that") as caught:
            leader.broadcast(b"x" * 101)
        assert caught.value is leader.failure
        with pytest.raises(HostLost, match=r"hosts\.max_plan_bytes"):
            list(link.frames())


# ---- TLS -------------------------------------------------------------------------------------------------------------


def with_tls(authority: Authority, trusted: Authority, name: str) -> Trust:
    pair = authority.issue(name)
    certificate, key, authorities = (Path(path).read_bytes() for path in (*pair, trusted.path))
    return Trust(SECRET, Tls(certificate, key, authorities))


@pytest.mark.slow
def test_tls_on_both_sides(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    with leading(trust=with_tls(ours, ours, "process-0")) as leader:
        address = f"127.0.0.1:{leader.port}"
        wrong = (TRUST, with_tls(theirs, ours, "a-stranger"), with_tls(ours, theirs, "astray"))
        # At once, since each takes all of its time: enough for one attempt of a busy machine.
        attempts = [in_thread(lambda trust=trust: follower(address, trust=trust, join_s=5.0)) for trust in wrong]
        for attempt in attempts:
            with pytest.raises(HostLost, match="does not answer within 5 s .*UNAVAILABLE"):
                attempt.result(WAIT_S)
        with joined(leader, trust=with_tls(ours, ours, "process-1")) as link:
            met = in_thread(lambda: link.meet("join", {}, {}))
            leader.meet("join", {}, {}, WAIT_S)
            met.result(WAIT_S)
