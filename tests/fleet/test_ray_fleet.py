"""A fleet on a real Ray cluster: the same client, the same answers, affinity, and replicas killed under load.

The second test deploys replicas that compute prompts for others on the cluster of the first, since starting one costs
more than either.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from ray_fleet import ROOT, WAIT_S, Fleet, environment, run_fleet, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed
from jaxserve.errors import Status
from jaxserve.serve.convert import request_to_proto
from jaxserve.serve.gen import inference_pb2_grpc as pb_grpc
from jaxserve.serve.status import status_of_grpc

pytestmark = pytest.mark.slow

MAX_ROWS = 1  # of each replica: nearly all of many calls wait, and the engine is not ahead of Ray's delivery by seconds
MID_ANSWER = 40  # messages of 160: a call that has had so many is neither new nor about to end
OVERRIDES = {"sched.max_rows": MAX_ROWS, "runtime.token_buckets": [64], "runtime.row_buckets": [MAX_ROWS]}
OVERRIDES |= {"sched.max_step_tokens": 64}
CONFIG = ROOT / "configs/ray-demo.yaml"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
FEW = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
PROMPTS = [f"Story number {i}. Once upon a time there was" for i in range(16)]
LONG = [f"Story {i}. " + "The fox went into the wood and met a bird. " * 4 for i in range(4)]


class Answer(NamedTuple):
    text: str
    replica: str
    attempt: int


class Outcome(NamedTuple):
    """How one call ended. `status` None: `answer` is whole."""

    prompt: str
    num_messages: int
    answer: Answer | None = None
    status: Status | None = None
    details: str = ""


@pytest.fixture(scope="module")
def env() -> dict[str, str]:
    return environment()


@pytest.fixture(scope="module")
def expected(env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The engine's own answers, without Ray. Fills the compile cache too."""
    folder = tmp_path_factory.mktemp("own")
    prompts = [*PROMPTS, *LONG]
    lines = [json.dumps({"prompt": p, "temperature": 0.0, "max_tokens": 160, "ignore_eos": True}) for p in prompts]
    (folder / "in.jsonl").write_text("\n".join(lines))
    command = [sys.executable, "-m", "jaxserve.run", "--config", str(CONFIG), "--input", str(folder / "in.jsonl")]
    command += ["--output", str(folder / "out.jsonl")]
    for name, value in OVERRIDES.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    subprocess.run(command, env=env, check=True, timeout=WAIT_S, capture_output=True)
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return {p: r["text"] for p, r in zip(prompts, results, strict=True)}


@pytest.fixture(scope="module")
def fleet(env: dict[str, str], expected: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    args = {"overrides": OVERRIDES, "min_replicas": 2, "max_replicas": 2}
    with run_fleet(args, env, tmp_path_factory.mktemp("ray") / "log.txt") as fleet:
        yield fleet


def test_a_fleet_serves_survives_a_kill_and_is_whole_again(fleet: Fleet, expected: dict[str, str]) -> None:
    """One test, since starting Ray is most of the time it takes."""
    with grpc.insecure_channel(fleet.address) as channel:
        _check_the_client(fleet, expected)
        found: set[str] = set()  # the application is there when one replica is, and an ingress hears of the other later
        wait_until(lambda: len(found.update(_replicas_of_new_prompts(channel)) or found) == 2, "both replicas answer")
        replicas = _check_affinity(channel)
        killed = _check_a_kill_under_load(fleet, channel, expected)
        wait_until(lambda: len(fleet.pids() - {killed}) == 2, "Ray starts another replica")
        wait_until(lambda: bool(_replicas_of_new_prompts(channel) - replicas), "it answers")
        _check_that_one_may_leave(fleet, channel, expected)


def test_prompts_are_computed_by_some_replicas_for_others(
    fleet: Fleet, expected: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("0123456789abcdef0123")
    apart = {"cache.host_bytes": 2**26, "handoff.secret_file": str(tmp_path / "secret"), "route.prefill_above": 16}
    few = {"min_replicas": 1, "max_replicas": 1, "cpus_per_replica": 0.5}
    fleet.deploy({"config": str(CONFIG), "overrides": {**OVERRIDES, **apart}, **few, "prefill": few})
    with Client(fleet.address) as client:
        number = itertools.count()  # each prompt is a new one, so that only a handoff can have put it into a cache
        wait_until(
            lambda: (
                client.complete(f"{next(number)}: {LONG[0]}", FEW, timeout_s=WAIT_S).num_cached_tokens > 0
                and (len(fleet.pids()), len(fleet.pids("Prefill"))) == (1, 1)
            ),
            "pages are fetched, and the replicas of before are gone",
        )
        answer = client.complete(LONG[0], SAMPLING, timeout_s=WAIT_S)
        assert (answer.text, answer.num_cached_tokens > 0) == (expected[LONG[0]], True), "its pages were fetched"
        (computing,) = fleet.pids("Prefill")
        os.kill(computing, signal.SIGKILL)
        assert client.complete(LONG[1], SAMPLING, timeout_s=WAIT_S).text == expected[LONG[1]]
        (answering,), (routing,) = fleet.pids(), fleet.pids("Ingress")
        for victim in (answering, routing):
            texts = []
            for reply in client.generate(LONG[2], SAMPLING, timeout_s=WAIT_S):
                texts.append(reply.text)
                if len(texts) == MID_ANSWER:
                    os.kill(victim, signal.SIGKILL)
            assert "".join(texts) == expected[LONG[2]]
        wait_until(lambda: len(fleet.pids("Prefill") - {computing}) == 1, "Ray starts another one")
        assert client.complete(LONG[3], SAMPLING, timeout_s=WAIT_S).text == expected[LONG[3]]


def _check_the_client(fleet: Fleet, expected: dict[str, str]) -> None:
    with Client(fleet.address) as client:
        ids = client.tokenize("a fox", timeout_s=WAIT_S)
        assert "a fox" in client.detokenize(ids, timeout_s=WAIT_S)
        assert client.model(timeout_s=WAIT_S).max_model_len > 0
        with pytest.raises(RequestFailed, match="does not answer GetLoad"):
            client.load(timeout_s=WAIT_S)
        replies = list(client.generate(PROMPTS[0], SAMPLING, timeout_s=WAIT_S))
        assert len(replies) > 100, "streamed, and not sent at the end"
        assert "".join(r.text for r in replies) == expected[PROMPTS[0]]
        assert replies[-1].usage.num_generated_tokens == 160
        with pytest.raises(RequestFailed, match="take a model of longer context") as caught:
            client.complete("x" * 5000, SAMPLING, timeout_s=WAIT_S)
        assert caught.value.status is Status.INVALID
        with pytest.raises(RequestFailed) as caught:
            client.complete("x", SamplingParams(max_tokens=900, ignore_eos=True), timeout_s=0.3)
        assert caught.value.status is Status.DEADLINE


def _check_affinity(channel: grpc.Channel) -> set[str]:
    """Returns the names of the replicas."""
    replicas = set()
    for topic in ("rivers", "ships", "clocks", "bridges", "lamps", "gardens"):
        beginning = f"You answer questions about {topic}, and about nothing else, in one short sentence. " * 2
        named = {_ask(channel, f"{beginning}Question {i}", SamplingParams(max_tokens=4)).replica for i in range(4)}
        assert len(named) == 1, f"prompts with one beginning went to {named}"
        replicas |= named
    assert len(replicas) == 2, "different beginnings are spread"
    return replicas


def _check_a_kill_under_load(fleet: Fleet, channel: grpc.Channel, expected: dict[str, str]) -> int:
    """Returns the process that was killed."""
    pids = fleet.pids()
    assert len(pids) == 2
    killed = min(pids)
    num_streaming = threading.Semaphore(0)
    outcomes: list[Outcome] = []

    def work(prompt: str) -> None:
        outcomes.append(_call(channel, prompt, num_streaming))

    # All at once: 30 of 32 wait, so that some do at either replica, however the ingress spreads them.
    threads = [threading.Thread(target=work, args=(prompt,), daemon=True) for prompt in PROMPTS * 2]
    for thread in threads:
        thread.start()
    for _ in range(2):  # both replicas are in the middle of an answer
        assert num_streaming.acquire(timeout=WAIT_S)
    os.kill(killed, signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) == 2 * len(PROMPTS), "every call has ended"
    whole = [o for o in outcomes if o.answer is not None]
    broken = [o for o in outcomes if o.answer is None]
    assert [o for o in whole if o.answer and o.answer.text != expected[o.prompt]] == []
    assert [o for o in whole if o.answer and o.answer.attempt > 1], "the killed replica was in the middle of answers"
    assert not broken, [o.details for o in broken]
    return killed


def _check_that_one_may_leave(fleet: Fleet, channel: grpc.Channel, expected: dict[str, str]) -> None:
    """Scaling down under load costs no request: the replica that leaves ends what it has."""
    done = threading.Event()
    outcomes: list[Outcome] = []

    def work(prompt: str) -> None:
        while not done.is_set():
            outcomes.append(_call(channel, prompt, threading.Semaphore(0)))

    threads = [threading.Thread(target=work, args=(prompt,), daemon=True) for prompt in PROMPTS[:6]]
    for thread in threads:
        thread.start()
    try:
        fleet.scale(1)
        wait_until(lambda: len(fleet.pids()) == 1, "one has left")
    finally:
        done.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) >= len(threads)
    assert [o for o in outcomes if o.answer is None or o.answer.text != expected[o.prompt]] == []


def _call(channel: grpc.Channel, prompt: str, num_streaming: threading.Semaphore) -> Outcome:
    texts: list[str] = []
    call = pb_grpc.InferenceStub(channel).Generate(request_to_proto(prompt, SAMPLING), timeout=WAIT_S)
    try:
        for reply in call:
            texts.append(reply.text)
            if len(texts) == MID_ANSWER:
                num_streaming.release()
    except grpc.RpcError:
        return Outcome(prompt, len(texts), status=status_of_grpc(call.code()), details=call.details())
    return Outcome(prompt, len(texts), _answer(texts, call))


def _ask(channel: grpc.Channel, prompt: str, sampling: SamplingParams) -> Answer:
    call = pb_grpc.InferenceStub(channel).Generate(request_to_proto(prompt, sampling), timeout=WAIT_S)
    return _answer([reply.text for reply in call], call)


def _answer(texts: list[str], call: grpc.Call) -> Answer:
    trailers = dict(call.trailing_metadata())
    return Answer("".join(texts), str(trailers["jaxserve-replica"]), int(trailers["jaxserve-attempt"]))


def _replicas_of_new_prompts(channel: grpc.Channel) -> set[str]:
    return {_ask(channel, f"Is there life on planet {i}?", SamplingParams(max_tokens=2)).replica for i in range(8)}
