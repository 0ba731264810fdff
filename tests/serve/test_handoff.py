"""Prompts computed on one server and answered on another: the states of a handoff, and what may go wrong in each.

Whatever happens, the tokens are those of one server alone, and no slot stays held.
"""

import contextlib
import random
import secrets
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from handoff_parts import TOKENS, Side, secret_file, server, sides
from route_parts import routed
from serve_parts import ONE_CALL, WAIT_S, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.errors import ConfigError, EngineStopped, InvalidRequest, QueueFull
from jaxserve.kv.gen import handoff_pb2 as pb
from jaxserve.kv.gen import handoff_pb2_grpc as pb_grpc
from jaxserve.kv.handoff import BadFrame, Frame, HandoffPeer, frame_from_proto, frame_to_proto
from jaxserve.kv.leases import LeaseName, Leases, OtherEpoch
from jaxserve.serve.convert import sampling_to_proto
from jaxserve.serve.gen import handoff_pb2 as route_pb
from jaxserve.serve.gen import handoff_pb2_grpc as route_grpc
from jaxserve.serve.gen import inference_pb2 as infer_pb
from jaxserve.serve.gen import inference_pb2_grpc as infer_grpc
from jaxserve.serve.handoff_receiver import Receipt
from jaxserve.serve.handoff_sender import prompt_of
from jaxserve.serve.status_details import is_draining
from jaxserve.testing import ManualClock, make_request

REQUEST = make_request("q", TOKENS, 12, seed=5)


def alone(folder: Path) -> list[int]:
    """The tokens of one engine."""
    with sides(folder, 8) as [one]:
        return one.answer(REQUEST)[0]


@pytest.mark.parametrize("sizes", [(8, 8), (8, 16), (16, 8), (6, 8)])
def test_pages_of_any_size_are_fetched_and_given_back(tmp_path: Path, sizes: tuple[int, int]) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, *sizes) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        assert sender.num_held() == 69 // sizes[0]
        tokens, found = receiver.fetch(REQUEST, ticket)
        assert tokens == expected and found == 69 // sizes[0] * sizes[0] // sizes[1] * sizes[1]
        wait_until(lambda: sender.num_held() == 0, "the lease is released")
        assert receiver.num_held() == 0 and not receiver.counts.missed
        assert receiver.counts.tokens == {"pulled": found, "cached": 0, "computed": 70 - found}
        # All is there now, so nothing is fetched.
        again = make_request("q2", TOKENS, 12, seed=5)
        tokens, found_again = receiver.fetch(again, sender.sender.lend(sender.sender.leases.reserve(), again)[0])
        assert tokens == expected and found_again >= found and receiver.counts.tokens["cached"] == found


def fetched_in_part(folder: Path, reason: str, happens: Any, **handoff: Any) -> None:
    """Fetches while something happens at a frame, and checks that the rest is computed and counted."""
    expected = alone(folder)
    with sides(folder, 8, 8, **handoff) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        over = threading.Event()
        sender.form.before_read = lambda number: happens(sender, number, over)
        receipt = Receipt()
        receiver.receiver.fetch(REQUEST, receiver.receiver.open(REQUEST, ticket), receipt)
        over.set()
        tokens, found = receiver.answer(REQUEST)
        receiver.receiver.release(receipt)
        assert tokens == expected and found < 64
        assert receiver.counts.missed == {reason: 64 - found}
        assert receiver.num_held() == 0
        sender.clock.advance(31.0)
        sender.sender.expire()
        wait_until(lambda: sender.num_held() == 0, "slots are given back")


def test_a_sender_that_dies_in_a_transfer(tmp_path: Path) -> None:
    def die(sender: Side, number: int, over: threading.Event) -> None:
        if number == 1:
            sender.sender.stop()
            over.wait(WAIT_S)

    fetched_in_part(tmp_path, "died", die)


def test_a_sender_that_stands_still(tmp_path: Path) -> None:
    fetched_in_part(tmp_path, "stalled", lambda sender, number, over: number == 1 and over.wait(WAIT_S), wait_s=0.5)


def test_a_lease_that_ends_in_a_transfer(tmp_path: Path) -> None:
    fetched_in_part(tmp_path, "expired", lambda sender, number, over: number == 2 and sender.clock.advance(31.0))


def test_pages_that_are_flushed_before_they_are_fetched(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8, 8) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        sender.parts.engine.call(lambda scheduler: scheduler.flush(None)).result()
        assert receiver.fetch(REQUEST, ticket) == (expected, 0) and receiver.counts.missed == {"flushed": 64}


def test_a_sender_that_was_started_again_knows_no_lease_from_before(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8) as [receiver]:
        first = Side(secret_file(tmp_path))
        ticket = first.lend(REQUEST)
        first.close()
        second = Side(secret_file(tmp_path), port=int(first.address.rsplit(":", 1)[1]))
        assert receiver.fetch(REQUEST, ticket) == (expected, 0)
        assert receiver.counts.missed == {"restarted": 64}
        second.close()


def test_frames_of_another_secret_are_not_used_and_their_sender_is_left_alone(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8, 8) as [sender, receiver]:
        tickets = [sender.lend(make_request(f"r{n}", TOKENS, 12, seed=5)) for n in range(4)]
        sender.sender._secret = b"another secret, as of a stranger"
        for number, ticket in enumerate(tickets):
            request = make_request(f"r{number}", TOKENS, 12, seed=5)
            receiver.parts.engine.call(lambda scheduler: scheduler.flush(None)).result()
            assert receiver.fetch(request, ticket) == (expected, 0)
        assert receiver.counts.missed == {"damaged": 3 * 64, "quarantined": 64}


@pytest.mark.parametrize(
    ("lease", "changes"),
    [
        ({"transfer_id": bytes(16)}, {}),
        ({"epoch": bytes(16)}, {}),
        ({}, {"first_token": 1}),
        ({}, {"end_token": 9}),
        ({}, {"starts": (0, 5)}),
        ({}, {"data": b"other"}),
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_a_frame_belongs_to_its_lease_and_place(lease: dict[str, bytes], changes: dict[str, Any]) -> None:
    secret, name = b"s" * 32, LeaseName(b"t" * 16, b"e" * 16)
    frame = Frame(first_token=0, end_token=8, starts=(0, 4), data=b"pages")
    message = frame_to_proto(secret, name, frame)
    assert frame_from_proto(secret, name, message) == frame
    message.MergeFrom(pb.PageFrame(**{key: value for key, value in changes.items() if key != "starts"}))
    message.starts[:] = changes.get("starts", frame.starts)
    with pytest.raises(BadFrame, match="this secret and lease"):
        frame_from_proto(secret, name._replace(**lease), message)


def test_tickets_of_strangers_and_of_other_prompts_are_refused(tmp_path: Path) -> None:
    with sides(tmp_path, 8, 8) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        for other in (
            make_request("q", TOKENS[:-1], 12, seed=5),
            make_request("q", TOKENS, 12, seed=6),
            make_request("q", TOKENS, 12, seed=5, salt="x"),
        ):
            with pytest.raises(InvalidRequest, match="another prompt"):
                receiver.receiver.open(other, ticket)
        for number in range(0, len(ticket), 7):
            wrong = bytearray(ticket)
            wrong[number] ^= 1
            with pytest.raises(InvalidRequest, match="cannot be used"):
                receiver.receiver.open(REQUEST, bytes(wrong))
        with pytest.raises(InvalidRequest, match="cannot be used"):
            receiver.receiver.open(REQUEST, secrets.token_bytes(5000))


def test_pages_of_another_model_are_not_used(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8, 8) as [sender, receiver]:
        sender.form.describe = "pages of another"
        assert receiver.fetch(REQUEST, sender.lend(REQUEST)) == (expected, 0)
        assert receiver.counts.missed == {"mismatch": 64}


def test_pages_of_weights_that_a_server_had_before_are_not_used(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8, 8) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        receiver.form.describe = "pages of other weights"
        assert receiver.fetch(REQUEST, ticket) == (expected, 0)
        assert receiver.counts.missed == {"mismatch": 64}


def test_an_engine_that_dies_while_it_saves_pages_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(plan: object) -> None:
        raise RuntimeError("the device is lost")

    with sides(tmp_path, 8) as [sender]:
        sender.answer(REQUEST)
        monkeypatch.setattr(sender.parts.engine._runner, "dispatch", breaks)
        with pytest.raises(EngineStopped, match="the device is lost"):
            sender.exchanger.lend(b"name", prompt_of(REQUEST), 3600.0)


def test_a_receiver_with_few_slots_computes_the_rest(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    with sides(tmp_path, 8) as [sender]:
        receiver = Side(secret_file(tmp_path), num_slots=6)
        tokens, found = receiver.fetch(REQUEST, sender.lend(REQUEST))
        assert tokens == expected and 0 < found < 64 and receiver.counts.missed == {"no_slot": 64 - found}
        receiver.close()


def test_leases_have_their_time_and_their_number() -> None:
    clock = ManualClock()
    leases: Leases[str] = Leases(30.0, 2, clock)
    first, second = leases.reserve(), leases.reserve()
    with pytest.raises(QueueFull):
        leases.reserve()
    leases.lend(first, "a")
    leases.give_up()
    clock.advance(29.0)
    assert leases.renew(first) == "a" and not leases.take_expired()
    clock.advance(29.0)
    assert leases.live() == ["a"]
    clock.advance(1.0)
    with pytest.raises(Exception, match="run out"):
        leases.renew(first)
    assert leases.take_expired() == ["a"] and not leases.live()
    assert leases.release(first) is None
    third = leases.reserve()
    leases.lend(third, "b")
    with pytest.raises(OtherEpoch):
        leases.renew(LeaseName(third.transfer_id, second.transfer_id))
    assert leases.release(LeaseName(third.transfer_id, first.transfer_id)) is None
    assert leases.release(third) == "b" and leases.counts == {"expired": 1, "released": 1}


def test_strangers_read_nothing_and_stay_bounded(tmp_path: Path) -> None:
    with sides(tmp_path, 8, max_pulls=2) as [sender]:
        sender.lend(REQUEST)
        [lending] = sender.sender.leases.live()
        good = pb.LeaseName(transfer_id=lending.name, epoch=sender.sender.leases.epoch)
        with grpc.insecure_channel(sender.address) as channel:
            stub: Any = pb_grpc.HandoffsStub(channel)

            def code(request: pb.PullRequest) -> str:
                with pytest.raises(grpc.RpcError) as caught:
                    list(stub.Pull(request, timeout=WAIT_S))
                return caught.value.code().name

            wrong = pb.LeaseName(transfer_id=secrets.token_bytes(16), epoch=good.epoch)
            assert code(pb.PullRequest(lease=wrong, page_tokens=8, max_frame_bytes=99)) == "NOT_FOUND"
            assert code(pb.PullRequest(page_tokens=8)) == "INVALID_ARGUMENT"
            assert code(pb.PullRequest(lease=good)) == "INVALID_ARGUMENT"
            assert code(pb.PullRequest(lease=good, page_tokens=2**31)) == "INVALID_ARGUMENT"
            long = pb.LeaseName(transfer_id=b"x" * 10_000, epoch=good.epoch)
            assert code(pb.PullRequest(lease=long)) == "RESOURCE_EXHAUSTED"  # a message of that size
            with pytest.raises(grpc.RpcError) as undecoded:
                list(channel.unary_stream(f"/{pb.DESCRIPTOR.services_by_name['Handoffs'].full_name}/Pull")(b"\xff"))
            assert undecoded.value.code().name == "INVALID_ARGUMENT", "it is no defect of the server"
            random_ = random.Random(1)
            for number in range(150):  # noise, and requests that noise has changed
                method = ("Pull", "Renew", "Release")[number % 3]
                lease = pb.LeaseName(transfer_id=random_.randbytes(16), epoch=good.epoch)
                whole = pb.PullRequest(lease=lease, page_tokens=8) if method == "Pull" else lease
                body = bytearray(whole.SerializeToString())
                body[random_.randrange(len(body))] = random_.randrange(256)
                if random_.random() < 0.3:
                    body = bytearray(random_.randbytes(random_.randrange(200)))
                kind = channel.unary_stream if method == "Pull" else channel.unary_unary
                call = kind(f"/jaxserve.kv.v1.Handoffs/{method}")
                with contextlib.suppress(grpc.RpcError):
                    answer = call(bytes(body), timeout=WAIT_S)
                    assert method == "Release" or not list(answer), "a stranger has got something"
            # One peer has half of the pulls.
            held = threading.Event()
            sender.form.before_read = lambda number: held.wait(WAIT_S)
            first = stub.Pull(pb.PullRequest(lease=good, page_tokens=8, max_frame_bytes=128), timeout=WAIT_S)
            wait_until(lambda: sender.sender._pulls.total() == 1, "the first pull runs")
            request = pb.PullRequest(lease=good, page_tokens=8, max_frame_bytes=128)
            assert code(request) == "RESOURCE_EXHAUSTED"
            held.set()
            assert sum(frame.end_token - frame.first_token for frame in first) == 64


def test_other_machines_need_a_certificate_of_the_fleet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the other servers must show a certificate"):
        Side(secret_file(tmp_path), host="0.0.0.0")
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    mine, stranger = ours.issue("mine"), others.issue("stranger")
    tls = {"tls_cert": mine.certificate, "tls_key": mine.key, "tls_ca": ours.path}
    expected = alone(tmp_path)
    with sides(tmp_path, 8, 8, **tls) as [sender, receiver]:
        ticket = sender.lend(REQUEST)
        name = receiver.receiver.open(REQUEST, ticket).name
        for credentials in (
            None,
            grpc.ssl_channel_credentials(Path(ours.path).read_bytes()),
            grpc.ssl_channel_credentials(
                Path(ours.path).read_bytes(), Path(stranger.key).read_bytes(), Path(stranger.certificate).read_bytes()
            ),
        ):
            peer = HandoffPeer(sender.address, credentials, None, 1 << 20)
            with pytest.raises(grpc.RpcError) as caught:
                list(peer.pull(name, 0, 8, 20.0))
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            peer.close()
        assert receiver.fetch(REQUEST, ticket) == (expected, 64)


# ---- through a router ------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, seed=5)
APART = {"prefill_above": 16}


def ask(address: str, tokens: tuple[int, ...] = TOKENS) -> tuple[list[int], int]:
    with Client(address, retries=ONE_CALL) as client:
        answer = client.complete(list(tokens), GREEDY, timeout_s=WAIT_S)
        return list(answer.outputs[0].token_ids), answer.num_cached_tokens


def test_a_router_pairs_a_server_that_computes_with_one_that_answers(tmp_path: Path) -> None:
    secret, expected = secret_file(tmp_path), alone(tmp_path)
    with (
        server("prefill", secret) as (first, _),
        server("decode", secret, 16) as (second, _),
        routed(first.address, second.address, policy="prefix", access=APART) as router,
    ):
        wait_until(lambda: has_roles(router, 2), "both have said their roles")
        assert ask(router.address) == (expected, 64)
        # Short prompts, and those that were computed before, need no transfer.
        assert ask(router.address, TOKENS[:10])[1] == 0
        assert ask(router.address) == (expected, 64)
        wait_until(lambda: Exchanged(first).num_held() == 0, "leases are released")
        wait_until(lambda: second.engine.stats[0].totals().new_tokens == 36, "the last step is counted")
        totals = first.engine.stats[0].totals()
        assert totals.new_tokens == 0 and totals.prompt_tokens == 64


def test_a_ticket_of_another_secret_is_asked_for_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(tmp_path)
    with (
        server("prefill", secret_file(tmp_path)) as (first, _),
        server("decode", secret_file(tmp_path, "other")) as (second, _),
        routed(first.address, second.address, access=APART) as router,
    ):
        wait_until(lambda: has_roles(router, 2), "both have said their roles")
        assert ask(router.address) == (expected, 0)
    assert caplog.text.count("does not take a ticket") == 1


def prefill(address: str, tokens: tuple[int, ...] = TOKENS) -> route_pb.PrefillResponse:
    with grpc.insecure_channel(address) as channel:
        stub: Any = route_grpc.HandoffStub(channel)
        message = infer_pb.GenerateRequest(token_ids=infer_pb.TokenIds(ids=tokens))
        message.sampling.seed = 5
        return stub.Prefill(route_pb.PrefillRequest(request=message), timeout=WAIT_S)


def fetched(address: str, ticket: bytes, tokens: tuple[int, ...] = TOKENS) -> list[int]:
    """The tokens of a request that comes with a ticket."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = infer_grpc.InferenceStub(channel)
        message = infer_pb.GenerateRequest(
            token_ids=infer_pb.TokenIds(ids=tokens), sampling=sampling_to_proto(GREEDY), ticket=ticket
        )
        return [token for reply in stub.Generate(message, timeout=WAIT_S) for token in reply.token_ids]


@pytest.mark.parametrize("end", ["fetched", "expired", "time over"])
def test_a_server_that_is_shut_down_keeps_what_it_has_promised(tmp_path: Path, end: str) -> None:
    """It computes nothing new, and ends with its last lease, or when the time of its drain is over."""
    secret, expected = secret_file(tmp_path), alone(tmp_path)
    lease_s = 1.0 if end == "expired" else 600.0  # else longer than the test waits for the exit
    with (
        server("prefill", secret, handoff_lease_s=lease_s) as (first, form),
        server("decode", secret, 16) as (second, _),
        server("prefill", secret) as (third, _),
        routed(first.address, second.address, third.address, access=APART) as router,
    ):
        wait_until(lambda: has_roles(router, 3), "all have said their roles")
        ticket = prefill(first.address).ticket
        first.request_shutdown()
        wait_until(lambda: not first.engine.accepting, "it drains")
        for tokens in (TOKENS, TOKENS[1:]):  # what is here is lent no more, and what is not is not computed
            if end == "expired":
                break  # it may be gone by now
            with pytest.raises(grpc.RpcError) as caught:
                prefill(first.address, tokens)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and is_draining(caught.value)
        assert ask(router.address, TOKENS[2:])[1] == 64  # by the other server that computes
        assert third.engine.stats[0].totals().prompt_tokens == 64
        if end == "fetched":
            assert fetched(second.address, ticket) == expected and form.num_frames > 0
        elif end == "time over":
            first.loop.call_soon_threadsafe(first.shutdown.drain_within, 0.0)
        assert first.wait_for_exit() == 0
        assert third.engine.accepting


def has_roles(router: Any, count: int) -> bool:
    """Roles are asked for before a replica is well."""
    with grpc.insecure_channel(router.address) as channel:
        stub: Any = infer_grpc.InferenceStub(channel)
        return stub.GetLoad(infer_pb.GetLoadRequest(), timeout=WAIT_S).num_replicas == count


class Exchanged:
    """The exchange of a running server."""

    def __init__(self, parts: Any) -> None:
        self._engine = parts.engine

    def num_held(self) -> int:
        return self._engine.call(lambda scheduler: scheduler.exchange.num_held).result()


def test_whatever_fails_the_server_that_answers_computes(tmp_path: Path) -> None:
    secret, expected = secret_file(tmp_path), alone(tmp_path)
    with server("decode", secret, max_waiting=8, handoff_max_offers=1) as (second, _):
        with (
            server("prefill", secret, handoff_max_leases=1) as (first, _),
            routed(first.address, second.address, access=APART) as router,
        ):
            wait_until(lambda: has_roles(router, 2), "both have said their roles")
            # No lease is left.
            held = prefill(first.address)
            assert held.num_lent_tokens == 64 and held.ticket
            with pytest.raises(grpc.RpcError) as caught:
                prefill(first.address)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with grpc.insecure_channel(first.address) as channel:
                stub: Any = route_grpc.HandoffStub(channel)
                assert stub.GetRole(route_pb.GetRoleRequest()).role == route_pb.ROLE_PREFILL
            assert ask(router.address) == (expected, 0)
            # Its offer has ended with its arrival, although it came without a ticket.
            assert ask(router.address, TOKENS[3:])[1] == 0
            # One that answers and is full is asked for nothing, and so nobody computes for it.
            num_before = first.engine.stats[0].totals().prompt_tokens
            second.runner.hold()
            with Client(second.address, retries=ONE_CALL) as client:

                def fill() -> None:
                    with contextlib.suppress(RequestFailed):
                        client.complete(list(TOKENS), GREEDY, timeout_s=WAIT_S)

                threads = [threading.Thread(target=fill, daemon=True) for _ in range(12)]
                for thread in threads:
                    thread.start()
                wait_until(lambda: second.engine.num_unstarted >= 8, "its queue is full")
                with pytest.raises(RequestFailed, match="RESOURCE_EXHAUSTED|max_waiting"):
                    ask(router.address, TOKENS[1:])
                second.runner.release()
                for thread in threads:
                    thread.join(WAIT_S)
            assert first.engine.stats[0].totals().prompt_tokens == num_before
            # The server that computes is lost: nothing changes but who computes.
            first.runner.broken = True
            assert ask(router.address, TOKENS[2:])[1] == 0
        # A ticket of a lease that is gone with its server.
        with Client(second.address, retries=ONE_CALL) as client:
            message = infer_pb.GenerateRequest(token_ids=infer_pb.TokenIds(ids=TOKENS), ticket=b"x" * 99)
            message.sampling.seed = 5
            with grpc.insecure_channel(second.address) as channel:
                inference: Any = infer_grpc.InferenceStub(channel)
                with pytest.raises(grpc.RpcError) as caught:
                    list(inference.Generate(message, timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert client.complete(list(TOKENS), GREEDY, timeout_s=WAIT_S).outputs[0].token_ids == tuple(expected)
