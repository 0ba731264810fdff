"""Servers behind a router are shut down and started again one after the other, under load: nothing is lost.

Processes on fake devices; `scripts/chaos.py --upgrades 1` does it with the model. And one stream at the worst moments:
its server has closed its port while it streams, and a step is in flight when its server begins to bring pages to a
store.
"""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from route_parts import fake_server, routed
from serve_parts import ONE_CALL, WAIT_S, IdleStore, Served, serve_slowly, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.sched.plan import HostSlots
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc

NUM_TOKENS = 400  # of a stream, which takes longer than a drain


@pytest.mark.slow
def test_a_rolling_upgrade_loses_nothing() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    expected = [(97 + i) % 128 for i in range(1, NUM_TOKENS + 1)]
    answers: list[list[int]] = []
    errors: list[RequestFailed] = []
    over = threading.Event()

    def ask(client: Client) -> None:
        while not over.is_set():
            try:
                replies = [*client.generate([5, 97], sampling, timeout_s=4 * WAIT_S)]
            except RequestFailed as error:
                errors.append(error)
            else:
                answers.append([i for reply in replies for i in reply.token_ids])

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(fake_server(delay_s=0.004, drain_s=0.2)) for _ in range(2)]
        addresses = [address for _, address in servers]
        router = stack.enter_context(routed(*addresses, retries=0, wait_s=WAIT_S))
        client = stack.enter_context(Client(router.address, retries=ONE_CALL))
        wait_until(lambda: client.load().num_replicas == 2, "both are well")
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(12)]  # the servers have eight rows
        for thread in threads:
            thread.start()
        for process, address in servers:
            before = len(answers)
            wait_until(lambda before=before: len(answers) > before, "the load runs")
            process.terminate()
            assert process.wait(WAIT_S) == 0
            port = int(address.rsplit(":", 1)[1])
            stack.enter_context(fake_server(delay_s=0.004, drain_s=0.2, port=port))
            wait_until(lambda: client.load().num_replicas == 2, "the new one is well")
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert not errors
    assert len(answers) >= 12 and all(answer == expected for answer in answers)


class _TwoTokens(pb_grpc.InferenceServicer):
    """One token at once, and the last one when `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(request_id=request.request_id, token_ids=[1])
        assert self.go_on.wait(WAIT_S)
        yield pb.GenerateResponse(
            request_id=request.request_id, token_ids=[2], token_offset=1, finish_reason=pb.FINISH_REASON_LENGTH
        )


def test_a_server_that_has_closed_its_port_ends_its_streams_itself() -> None:
    health, tokens = HealthServicer(), _TwoTokens()
    health.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_InferenceServicer_to_server(tokens, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with (
            routed(f"127.0.0.1:{port}", retries=0) as router,
            Client(router.address, retries=ONE_CALL) as client,
        ):
            stream = client.generate([5], SamplingParams(temperature=0.0, max_tokens=2), timeout_s=2 * WAIT_S)
            assert [*next(stream).token_ids] == [1]
            server.stop(WAIT_S)
            wait_until(lambda: not router.is_healthy(), "the router finds no port")
            tokens.go_on.set()
            assert [[*reply.token_ids] for reply in stream] == [[2]]
    finally:
        tokens.go_on.set()
        server.stop(None)


def exports_slowly() -> Served:
    """Its tokens follow from all before them; its store takes no page, so an export lasts until it is cut short."""
    return serve_slowly(mode="context", slots=HostSlots(64, 16, 16), store=IdleStore())


def test_tokens_of_a_step_that_was_in_flight_when_an_export_began_are_sent_once() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, seed=5)
    prompt = [*range(40, 60)]
    received: list[int] = []
    with (
        served(exports_slowly()) as one,
        served(exports_slowly()) as two,
        routed(one.address, two.address, retries=0, wait_s=WAIT_S) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        wait_until(lambda: client.load().num_replicas == 2, "both are well")

        def read() -> None:
            for reply in client.generate(prompt, sampling, timeout_s=2 * WAIT_S):
                received.extend(reply.token_ids)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        wait_until(lambda: len(received) >= 5, "it streams")
        left, right = (one, two) if one.engine.num_live else (two, one)
        left.runner.hold()
        wait_until(lambda: left.runner.is_held, "a step is in flight")
        [sequence] = left.scheduler._running
        wait_until(lambda: len(received) == sequence.num_outputs, "all that was computed is there")
        num_before = len(received)
        asked, call = threading.Event(), left.engine.call

        def noted(work: Any) -> Any:
            done = call(work)
            asked.set()
            return done

        left.engine.call = noted  # the loop finds the order to export before it launches another step
        left.loop.call_soon_threadsafe(left.shutdown.drain_within, 0.0)
        assert asked.wait(WAIT_S)
        left.runner.release()
        wait_until(lambda: left.scheduler._export is not None, "the export has begun")
        wait_until(lambda: left.scheduler.waits() and not left.scheduler._flights, "nothing is in flight any more")
        computed = sequence.num_outputs
        assert computed > num_before, "a step has ended within the export"
        wait_until(lambda: len(received) == computed, "its tokens are sent meanwhile")
        assert left.scheduler._exported is not None and left.engine.num_live == 1, "the export goes on"
        for _ in range(2):
            left.request_shutdown()
        assert left.wait_for_exit() == 0
        reader.join(WAIT_S)
        with Client(right.address, retries=ONE_CALL) as direct:
            alone = direct.complete(prompt, sampling, timeout_s=2 * WAIT_S)
        assert received == list(alone.outputs[0].token_ids)
