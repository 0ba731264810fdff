"""Servers that compute prompts and answer them, and a router, each a process; they are killed and stopped.

Every state of a handoff that can be forced from outside is here; `test_handoff` has the others, and what strangers do.
"""

import contextlib
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from route_parts import server_process
from serve_parts import ONE_CALL, WAIT_S, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client
from jaxserve.serve.convert import sampling_to_proto
from jaxserve.serve.gen import handoff_pb2, handoff_pb2_grpc
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.status_details import is_draining

PROMPT = [3 + (i * 7) % 400 for i in range(180)]
HOT = SamplingParams(temperature=0.9, seed=7, max_tokens=16, ignore_eos=True)
LEASE_S = 6.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def command(secret: str, role: str, page_size: int, grpc_port: int, http_port: int, pages_port: int = 0) -> list[str]:
    settings = (
        "model.max_len=256", f"cache.page_size={page_size}", f"cache.num_pages={2048 // page_size}", "sched.max_rows=4",
        "sched.max_step_tokens=64", "runtime.token_buckets=[64]", "runtime.row_buckets=[4]",
        "cache.host_bytes=33554432",
        f"handoff.secret_file={secret}", f"handoff.role={role}", f"handoff.lease_s={LEASE_S}", "handoff.wait_s=2",
        "handoff.least_wait_s=2", f"handoff.port={pages_port}", f"serve.grpc.port={grpc_port}",
        f"serve.http.port={http_port}",
    )  # fmt: skip
    return [sys.executable, "-m", "jaxserve.run", *(part for one in settings for part in ("--set", one))]


def sample(port: int, name: str) -> float:
    """The sum of a metric's samples."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S).read().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"jaxserve:{name}"))


def message(tokens: list[int], ticket: bytes = b"") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=tokens), sampling=sampling_to_proto(HOT), request_id=f"r{time.monotonic_ns()}",
        ticket=ticket,
    )  # fmt: skip


def ticket_of(address: str, tokens: list[int]) -> bytes:
    with grpc.insecure_channel(address) as channel:
        stub: Any = handoff_pb2_grpc.HandoffStub(channel)
        return stub.Prefill(handoff_pb2.PrefillRequest(request=message(tokens)), timeout=WAIT_S).ticket


def tokens_of(address: str, tokens: list[int], ticket: bytes) -> list[int]:
    with grpc.insecure_channel(address) as channel:
        stub: Any = pb_grpc.InferenceStub(channel)
        return [t for reply in stub.Generate(message(tokens, ticket), timeout=WAIT_S) for t in reply.token_ids]


def refuses_as_draining(address: str, tokens: list[int]) -> bool:
    try:
        ticket_of(address, tokens)
    except grpc.RpcError as error:
        return is_draining(error)  # pyright: ignore[reportArgumentType]  # every such error is a call
    return False


@pytest.mark.slow
def test_kill_and_stop_of_either_side_in_every_state_that_can_be_forced(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef0123")
    secret = str(tmp_path / "secret")
    http = [free_port() for _ in range(3)]
    ports = [free_port(), free_port()]  # of the server that computes: to start it again at the same addresses
    lends = command(secret, "prefill", 16, ports[0], http[0], ports[1])
    with contextlib.ExitStack() as stack:
        _, answering = stack.enter_context(server_process(command(secret, "decode", 32, 0, http[1])))
        start = stack.enter_context(contextlib.ExitStack())
        computing, source = start.enter_context(server_process(lends))
        prompts = [PROMPT[number:] for number in range(8)]
        plain = [tokens_of(answering, one, b"") for one in prompts]
        # A second server that answers, whose cache is empty.
        doomed, fresh = stack.enter_context(server_process(command(secret, "decode", 32, 0, http[2])))

        def missed() -> float:
            return sample(http[2], "handoff_missed_tokens_total")

        # Nothing happens: pages are fetched.
        assert tokens_of(fresh, prompts[0], ticket_of(source, prompts[0])) == plain[0]
        assert sample(http[2], 'handoff_tokens_total{model_name="demo",way="pulled"}') == 160 and not missed()
        # Stopped between the ticket and the transfer: its pages are waited for, and computed.
        ticket = ticket_of(source, prompts[1])
        computing.send_signal(signal.SIGSTOP)
        assert tokens_of(fresh, prompts[1], ticket) == plain[1] and missed() == 160
        # It goes on; its lease has run out by then, or soon does.
        computing.send_signal(signal.SIGCONT)
        wait_until(lambda: sample(http[0], "handoff_lent_slots") == 0, "slots are given back")
        # The server that was to answer is gone: the lease holds the slots for its time and no longer.
        ticket = ticket_of(source, prompts[2])
        assert sample(http[0], "handoff_lent_slots") == 11
        begun_s = time.monotonic()
        wait_until(lambda: sample(http[0], "handoff_lent_slots") == 0, "the lease runs out")
        assert time.monotonic() - begun_s < LEASE_S + 1 + 10  # a scrape of a busy machine
        assert tokens_of(fresh, prompts[2], ticket) == plain[2] and missed() == 320
        # Killed between the ticket and the transfer, and started again at the same addresses.
        tickets = [ticket_of(source, prompts[number]) for number in (3, 4)]
        computing.kill()
        computing.wait()
        assert tokens_of(fresh, prompts[3], tickets[0]) == plain[3] and missed() == 480
        start.close()
        computing, source = start.enter_context(server_process(lends))
        assert tokens_of(fresh, prompts[4], tickets[1]) == plain[4] and missed() == 640
        # Through a router: the server that computes stops in the middle of a prompt; the one that answers is killed.
        router_command = [
            sys.executable, "-m", "jaxserve", "route", "--port", "0", "--to", source, "--to", answering, "--to", fresh,
            "--set", "route.prefill_above=16", "--set", "route.health_interval_s=0.2", "--set",
            "route.health_timeout_s=2",
        ]  # fmt: skip
        _, router = stack.enter_context(server_process(router_command))
        with Client(router, retries=ONE_CALL) as client:
            wait_until(lambda: client.is_serving(timeout_s=WAIT_S), "the router is green")
            for number, (process, how) in enumerate(((computing, signal.SIGSTOP), (doomed, signal.SIGKILL)), start=5):
                process.send_signal(how)
                found = client.complete(prompts[number], HOT, timeout_s=WAIT_S)
                assert list(found.outputs[0].token_ids) == plain[number]
                if how == signal.SIGSTOP:
                    process.send_signal(signal.SIGCONT)
        # Told to end with a ticket outside: it takes nothing new, serves the fetch, and ends before its lease would.
        ticket, fresh_prompt = ticket_of(source, PROMPT[9:]), PROMPT[10:]
        computing.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_as_draining(source, fresh_prompt), "the signal has arrived")
        num_pulled = sample(http[1], 'handoff_tokens_total{model_name="demo",way="pulled"}')
        assert tokens_of(answering, PROMPT[9:], ticket)
        assert sample(http[1], 'handoff_tokens_total{model_name="demo",way="pulled"}') == num_pulled + 160
        assert computing.wait(WAIT_S) == 0
