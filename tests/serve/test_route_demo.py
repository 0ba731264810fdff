"""Two servers with the demo model and a router, each a process of its own; one server and the router are killed.

`scripts/chaos.py` is the long form, with three servers, many more deaths and halts.
"""

import contextlib
import subprocess
import sys
import threading

import pytest
from chaos import result_of
from route_parts import server_process
from serve_parts import WAIT_S, wait_until

from jaxserve.api import SamplingParams, StructuredOutput
from jaxserve.client import Client, RequestFailed, Retries, collect_replies

PROMPT = "Once upon a time there was a little fox"

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"const": "add"},
        "arguments": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
_HOT = {"temperature": 1.0, "max_tokens": 48}
SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=1, ignore_eos=True, presence_penalty=0.5, repetition_penalty=1.2, **_HOT),
    SamplingParams(seed=2, n=2, stop=["the", "and a"], min_tokens=4, **_HOT),
    SamplingParams(seed=3, structured=StructuredOutput.from_dict({"json_schema": _TOOL}), **_HOT),
    SamplingParams(seed=4, logprobs=1, top_p=0.9, ignore_eos=True, **_HOT),
)
NUM_THREADS, NUM_EACH = 24, 5


def server_command() -> list[str]:
    sizes = (
        "model.max_len=256", "cache.num_pages=128", "sched.max_rows=4", "sched.max_step_tokens=64",
        "runtime.token_buckets=[64]", "runtime.row_buckets=[4]", "serve.grpc.port=0",
    )  # fmt: skip
    return [sys.executable, "-m", "jaxserve.run", *(part for size in sizes for part in ("--set", size))]


def router_command(*addresses: str) -> list[str]:
    to = [part for address in addresses for part in ("--to", address)]
    quick = ["--set", "route.health_interval_s=0.2"]
    return [sys.executable, "-m", "jaxserve", "route", *to, "--port", "0", "--policy", "least_load", *quick]


class Load:
    """Client threads and the ends of their requests. `right` and `wrong` are appended to by all threads."""

    def __init__(self, address: str, expected: list[list[tuple[object, ...]]]) -> None:
        self.right: list[int] = []
        self.wrong: list[object] = []
        self.num_begun = 0
        self._address = address
        self._expected = expected
        self._threads = [threading.Thread(target=self._ask, args=(k,), daemon=True) for k in range(NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a client waits for ever"

    def _ask(self, number: int) -> None:
        with Client(self._address, retries=Retries(attempts=20)) as client:
            for k in range(NUM_EACH):
                which = (number + k) % len(SAMPLINGS)
                try:
                    replies = []
                    for reply in client.generate(PROMPT, SAMPLINGS[which], timeout_s=WAIT_S):
                        replies.append(reply)
                        self.num_begun += len(replies) == 1
                    found = collect_replies(replies)
                    assert found.num_generated_tokens == sum(len(one.token_ids) for one in found.outputs)
                    same = result_of(found) == self._expected[which]
                    (self.right if same else self.wrong).append(which)
                except RequestFailed as error:
                    self.wrong.append(error)


@pytest.mark.slow
def test_sigkill_of_a_replica_and_of_the_router_under_load_loses_nothing() -> None:
    """The router moves the streams of the replica, the client library its own from one router to the next."""
    with contextlib.ExitStack() as stack:
        doomed, first = stack.enter_context(server_process(server_command()))
        _, second = stack.enter_context(server_process(server_command()))
        router, address = stack.enter_context(server_process(router_command(first, second)))
        with Client(second) as direct:
            expected = [result_of(direct.complete(PROMPT, one, timeout_s=WAIT_S)) for one in SAMPLINGS]
        with Client(address) as client:
            wait_until(lambda: client.is_serving(timeout_s=WAIT_S), "the router is green")
        load = Load(address, expected)
        wait_until(lambda: load.num_begun >= NUM_THREADS, "the load runs")
        doomed.kill()
        wait_until(lambda: load.num_begun >= 2 * NUM_THREADS, "the load goes on")
        router.kill()
        router.wait()
        again = [*router_command(second), "--port", address.rsplit(":", 1)[1]]
        router, _ = stack.enter_context(server_process(again))
        load.join()
        assert not load.wrong
        assert len(load.right) == NUM_THREADS * NUM_EACH, "lost requests"
        router.terminate()
        assert router.wait(WAIT_S) == 0


@pytest.mark.slow
def test_two_replicas_in_one_process_serve() -> None:
    """On two devices of one process: the same answers, and SIGTERM ends it with 0."""
    two = [*server_command(), "--set", "parallel.data=2", "--set", "route.policy=round_robin"]
    with server_process(two) as (process, address), Client(address) as client:
        answers = {client.complete("What is 3+4?", GREEDY, timeout_s=WAIT_S).text for _ in range(4)}
        assert len(answers) == 1
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_the_command_line_routes_and_ends_with_0() -> None:
    with server_process(router_command("127.0.0.1:1")) as (router, address), Client(address) as client:
        assert not client.is_serving(timeout_s=WAIT_S)
        router.terminate()
        assert router.wait(WAIT_S) == 0


def test_a_port_in_use_is_one_line() -> None:
    with server_process(router_command("127.0.0.1:1")) as (_, address):
        command = [*router_command("127.0.0.1:1"), "--port", address.rsplit(":", 1)[1]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("20")]  # the log's lines have a date
    assert line.startswith("error: cannot listen on 127.0.0.1:")
    assert "set serve.host or --port" in line
