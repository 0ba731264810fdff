"""Two servers with the demo model and a router, each a process of its own; one is killed under load."""

import contextlib
import subprocess
import sys
import threading

import pytest
from route_parts import server_process
from serve_parts import WAIT_S, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed

GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
NUM_THREADS, NUM_EACH = 24, 6
MAX_ROWS = 4


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
    """Client threads and the ends of their requests. `right` and `told` are appended to by all threads."""

    def __init__(self, address: str, expected: dict[str, tuple[int, ...]]) -> None:
        self.right: list[str] = []
        self.told: list[tuple[int, RequestFailed]] = []
        self.wrong: list[object] = []
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
        prompts = list(self._expected)
        with Client(self._address) as client:
            for k in range(NUM_EACH):
                prompt = prompts[(number + 5 * k) % len(prompts)]
                ids: list[int] = []
                try:
                    for reply in client.generate(prompt, GREEDY, timeout_s=WAIT_S):
                        ids += reply.token_ids
                    same = tuple(ids) == self._expected[prompt]
                    (self.right if same else self.wrong).append(prompt)
                except RequestFailed as error:
                    self.told.append((len(ids), error))


@pytest.mark.slow
def test_sigkill_of_a_replica_under_load_loses_nothing() -> None:
    with contextlib.ExitStack() as stack:
        doomed, first = stack.enter_context(server_process(server_command()))
        _, second = stack.enter_context(server_process(server_command()))
        router, address = stack.enter_context(server_process(router_command(first, second)))
        with Client(second) as direct:
            prompts = [f"What is {i}+{7 * i}?" for i in range(11)]
            expected = {p: direct.complete(p, GREEDY, timeout_s=WAIT_S).outputs[0].token_ids for p in prompts}
        with Client(address) as client:
            wait_until(lambda: client.is_serving(timeout_s=WAIT_S), "the router is green")
        load = Load(address, expected)
        wait_until(lambda: len(load.right) >= NUM_THREADS, "the load runs")
        doomed.kill()
        load.join()
        total = NUM_THREADS * NUM_EACH
        print(f"{total} requests: {len(load.right)} right, {len(load.told)} told, {len(load.wrong)} wrong")
        assert not load.wrong
        assert len(load.right) + len(load.told) == total, "lost requests"
        # What ran on the dead one, and what had just ended there with its last messages still on their way.
        assert len(load.told) <= 2 * MAX_ROWS
        for num_streamed, error in load.told:
            assert num_streamed > 0, f"it had streamed nothing and should have moved: {error}"
            assert f"replica {first} has died after {num_streamed} tokens had been streamed" in str(error)
        with Client(address) as client:
            assert client.complete(prompts[0], GREEDY, timeout_s=WAIT_S).outputs[0].token_ids == expected[prompts[0]]
            assert client.is_serving(timeout_s=WAIT_S)
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
