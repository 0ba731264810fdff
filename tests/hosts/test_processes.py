"""`python -m jaxserve.run` in several processes that are killed, stopped and damaged. All is real but the device."""

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hosts_parts import WAIT_S, Service, service

from jaxserve.api import SamplingParams, StructuredOutput
from jaxserve.client import Client, RequestFailed, Retries
from jaxserve.errors import Status
from jaxserve.sched.record import StepLog
from jaxserve.serve.gen import inference_pb2 as pb

LONG = SamplingParams(temperature=0.0, max_tokens=500)
SLOW = {"step_s": 0.05}  # 25 s for a long answer, which surely runs while a test acts
SHORTER = SamplingParams(temperature=0.0, max_tokens=150)  # for a test that waits for its end


@contextlib.contextmanager
def streaming(
    served: Service, sampling: SamplingParams = LONG
) -> Iterator[tuple[Client, list[pb.GenerateResponse], list[BaseException]]]:
    """A long answer that is being read on a thread: what has come, and how it ended."""
    replies: list[pb.GenerateResponse] = []
    ends: list[BaseException] = []
    with Client(served.address, retries=Retries(attempts=0)) as client:
        stream = client.generate("ab", sampling, timeout_s=WAIT_S)
        replies.append(next(stream))

        def read() -> None:
            try:
                replies.extend(stream)
            except RequestFailed as error:
                ends.append(error)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield client, replies, ends
        reader.join(WAIT_S)
        assert not reader.is_alive()


def test_a_killed_process_ends_the_service_and_is_named() -> None:
    with (
        service(SLOW, SLOW, SLOW) as served,
        streaming(served) as (_, replies, ends),
        grpc.insecure_channel(served.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        served.processes[2].popen.send_signal(signal.SIGKILL)
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING, "before the end"
        codes = [process.wait_for_exit() for process in served.processes[:2]]
        assert codes == [1, 1]
        for process in served.processes[:2]:
            assert "process 2 (" in process.wait_for("is lost: its connection broke"), process.log
        assert "Traceback" not in served.processes[0].log
        assert served.processes[0].log.splitlines()[-1].startswith("error: process 2 (")
    (error,) = ends
    assert isinstance(error, RequestFailed)
    assert error.status is Status.UNAVAILABLE
    assert "process 2 (" in str(error), "the client is told, too"
    assert 1 <= len(replies) < 500


@pytest.mark.slow
def test_masks_reach_every_process() -> None:
    """A fake device without the mask of a row, or with one too many, ends its process."""
    bound = SamplingParams(temperature=0.0, max_tokens=20, structured=StructuredOutput(regex="[0-9]{3}[x-z]"))
    with service({}, {}) as served, Client(served.address) as client:
        for _ in range(2):
            text = "".join(reply.text for reply in client.generate("ab", bound, timeout_s=WAIT_S))
            assert re.fullmatch("[0-9]{3}[x-z]", text)


@pytest.mark.slow
def test_an_idle_service_notices_as_well() -> None:
    with service({}, {}) as served:
        assert served.address
        served.processes[1].popen.send_signal(signal.SIGKILL)
        assert served.processes[0].wait_for_exit() == 1


@pytest.mark.slow  # of the channel alone, quick: tests/hosts/test_channel.py
def test_a_stopped_process_is_noticed_by_its_silence() -> None:
    """A stopped process stands for a dead host: the kernel keeps the connection, and nobody answers."""
    with service(SLOW, SLOW, heartbeat_s=4.0) as served, streaming(served) as (_, _, ends):
        served.processes[1].popen.send_signal(signal.SIGSTOP)
        assert served.processes[0].wait_for_exit() == 1
        # Whichever is first: no heartbeat, or no answer to a ping of the connection.
        assert "process 1 (" in served.processes[0].wait_for("is lost: ")
    assert len(ends) == 1


@pytest.mark.slow
def test_a_device_that_hangs_with_a_lost_process_does_not_keep_the_service() -> None:
    with service({"hang_at": 30, **SLOW}, SLOW) as served, streaming(served) as (_, replies, ends):
        deadline_s = time.monotonic() + WAIT_S
        while len(replies) < 29:  # told when step 30, which never ends, is under way
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        served.processes[1].popen.send_signal(signal.SIGKILL)
        assert served.processes[0].wait_for_exit() == 1
    assert "process 1 (" in str(ends[0])


@pytest.mark.slow
def test_the_death_of_process_0_ends_the_others() -> None:
    with service(SLOW, {"hang_at": 30, **SLOW}) as served, streaming(served):
        served.processes[0].popen.send_signal(signal.SIGKILL)
        assert served.processes[1].wait_for_exit() == 1
        assert "process 0 (127.0.0.1, " in served.processes[1].wait_for("is lost: its connection broke")


@pytest.mark.slow
def test_process_0_falls_silent() -> None:
    with service(SLOW, SLOW, heartbeat_s=4.0) as served:
        assert served.address
        served.processes[0].popen.send_signal(signal.SIGSTOP)
        assert served.processes[1].wait_for_exit() == 1
        assert "process 0 (" in served.processes[1].wait_for("is lost: ")


@pytest.mark.slow
def test_a_damaged_plan_is_caught_although_all_tokens_are_the_same() -> None:
    with service({}, {"corrupt_at": 0}, arguments=("--prompt", "abc", "--max-tokens", "40")) as served:
        assert [process.wait_for_exit() for process in served.processes] == [1, 1]
        leader, other = served.processes
        assert leader.log.splitlines()[-1].startswith("error: process 1 ("), leader.log
        assert "has computed something else than process 0: their checksums differ after step" in leader.log
        assert "were equal after the start" in leader.log
        assert "has computed something else" in other.log


def test_prompts_are_answered_and_all_end_with_0(tmp_path: Path) -> None:
    arguments = ("--prompt", "a", "--prompt", "k", "--max-tokens", "5", "--json")
    logs = [tmp_path / f"steps{number}.jsonl" for number in range(2)]
    own = {number: ("--set", f"runtime.step_log={log}") for number, log in enumerate(logs)}
    with service({}, {}, arguments=arguments, own_arguments=own) as served:
        assert [process.wait_for_exit() for process in served.processes] == [0, 0], served.processes[0].log
        assert '"text": "bcdef"' in served.processes[0].out
        assert '"text": "lmnop"' in served.processes[0].out
        assert served.processes[1].out == ""
        assert "ERROR" not in served.processes[0].log + served.processes[1].log
    assert not logs[1].exists(), "the steps are those of process 0"
    with StepLog(logs[0]) as log:
        assert sum(len(record.token_ids) for record in log) == 10
        assert log.end is not None and log.end.dropped == 0


@pytest.mark.slow
def test_sigterm_to_all_drains() -> None:
    """What an orchestrator does: the others must live until process 0 has answered everything."""
    arguments = ("--set", "serve.grpc.port=0", "--set", f"serve.drain_s={WAIT_S}")
    with service(SLOW, SLOW, arguments=arguments) as served, streaming(served, SHORTER) as (_, replies, ends):
        for process in reversed(served.processes):
            process.popen.send_signal(signal.SIGTERM)
        served.processes[1].wait_for("SIGTERM: waiting for process 0 to end")
        assert [process.wait_for_exit() for process in served.processes] == [0, 0], served.processes[0].log
    assert ends == []
    assert replies[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert len(replies) == SHORTER.max_tokens


@pytest.mark.slow
def test_the_smallest_pool_is_that_of_all() -> None:
    with service({"num_pages": 40}, {"num_pages": 30}, arguments=("--prompt", "a" * 130)) as served:
        assert served.processes[0].wait_for_exit() == 2
        assert "30 pages" in served.processes[0].log or "121 tokens" in served.processes[0].log, served.processes[0].log
        assert served.processes[1].wait_for_exit() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviours", "own", "text"),
    [
        (({}, {}), {1: ("--set", "sched.max_rows=3")}, "sched.max_rows is null on process 0 and 3 on process 1 ("),
        (
            ({"facts": {"weights": "a"}}, {"facts": {"weights": "b"}}),
            {},
            "weights is a on process 0 and b on process 1",
        ),
    ],
)
def test_processes_that_differ_refuse_to_start(behaviours, own, text: str) -> None:
    with service(*behaviours, own_arguments=own) as served:
        assert [process.wait_for_exit() for process in served.processes] == [2, 2], served.processes[0].log
        for process in served.processes:
            assert text in process.log.splitlines()[-1]
            assert process.log.splitlines()[-1].startswith("error: ")


@pytest.mark.slow  # of the channel alone, quick: tests/hosts/test_strangers.py
def test_another_secret_ends_the_process_that_has_it(tmp_path: Path) -> None:
    other = tmp_path / "secret"
    other.write_text("the secret of another service")
    own = {0: ("--set", "hosts.join_s=10"), 1: ("--set", f"hosts.secret_file={other}")}
    # Process 0 waits for 10 s alone: the other must be there already, and ask again every second.
    with service({}, {}, own_arguments=own, leader_after="process 0 (127.0.0.1, 127.0.0.1:") as served:
        leader, stranger = served.processes
        assert stranger.wait_for_exit() == 2
        last = stranger.log.splitlines()[-1]
        assert last.startswith("error: process 0 (127.0.0.1, 127.0.0.1:"), last
        assert "does not know the secret of process 0: give all processes the same hosts.secret_file" in last
        leader.wait_for("process 1 (")
        assert leader.wait_for_exit() == 1
        assert "does not know the secret of process 0" in leader.log
        assert "process 1 of 2 did not come within 10 s" in leader.log.splitlines()[-1]


@pytest.mark.slow
def test_a_checkpoint_that_one_process_does_not_have() -> None:
    with service({}, {}, own_arguments={1: ("--set", "model.path=/nowhere")}) as served:
        assert [process.wait_for_exit() for process in served.processes] == [1, 2]
        assert "process 1 (" in served.processes[0].wait_for("has given up: CheckpointError: model directory /nowhere")
