"""Two processes of `jax.distributed` on this host that share one model: everything is real."""

import contextlib
import itertools
import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hosts_parts import COMPILE_S, WAIT_S, Service, service

from jaxserve import LLM
from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed, Retries

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

MODEL = Path(__file__).parents[1] / "fixtures" / "llama"
SIZES: dict[str, Any] = {
    "model.path": str(MODEL),
    "model.skip_tokenizer": True,
    "sched.max_rows": 2,
    "sched.max_step_tokens": 16,
    "cache.page_size": 4,
    "cache.num_pages": 40,
    "model.max_len": 96,
    "runtime.row_buckets": [2],
    "runtime.token_buckets": [16],
}
REAL = {"real": True}
LONG = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, detokenize=False)
# Each of these takes its own way to the device: plain decoding, heavy row state, copied pages, chunks.
CASES = [
    ([3, 5, 7, 9], {"temperature": 0.0}),
    ([3, 5, 7, 9, 11], {"temperature": 1.0, "seed": 5}),
    ([8, 8, 8], {"temperature": 0.0, "repetition_penalty": 1.5, "logit_bias": {4: 2.0}, "min_tokens": 3}),
    (list(range(10, 33)), {"temperature": 0.8, "seed": 9, "n": 2, "top_k": 20}),
    (list(range(40, 90)), {"temperature": 0.0, "logprobs": 3}),
]
# Tokens of these prompts that are in full pages before the last token, and those of a prompt before.
FULL_PAGES = [0, 4, 0, 20, 48]
FOUND_ON_THE_DEVICE = [0, 4, 0, 0, 0]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled once for all of these tests, as far as JAX lets a process reuse it."""
    return tmp_path_factory.mktemp("compiled")


def sharded(
    compiled: Path,
    *behaviours: dict[str, Any],
    door: tuple[str, ...],
    own: Mapping[int, tuple[str, ...]] | None = None,
    cut: str = "tensor",
) -> Any:
    settings = {**SIZES, f"parallel.{cut}": len(behaviours), "runtime.compile_cache": str(compiled)}
    arguments = [item for name, value in settings.items() for item in ("--set", f"{name}={json.dumps(value)}")]
    return service(
        *behaviours,
        arguments=(*arguments, *door),
        own_arguments=own,
        environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
    )


@contextlib.contextmanager
def serving(compiled: Path, stores: Sequence[Path], cut: str) -> Iterator[tuple[Service, Client]]:
    """Two processes with directories of pages, once they serve."""
    settings = {
        "serve.grpc.port": 0,
        "cache.host_bytes": 1 << 22,
        "store.kind": "file",
        "store.max_bytes": 1 << 26,
        "store.wait_s": WAIT_S,
    }
    door = tuple(item for name, value in settings.items() for item in ("--set", f"{name}={value}"))
    own = {process_id: ("--set", f"store.location={json.dumps(str(path))}") for process_id, path in enumerate(stores)}
    with sharded(compiled, REAL, REAL, door=door, own=own, cut=cut) as served:
        served.processes[0].wait_for("serving gRPC on", COMPILE_S)
        with Client(served.address, retries=Retries(attempts=0)) as client:
            yield served, client


def ask(client: Client, prompt: list[int], options: dict[str, Any]) -> tuple[list[list[int]], int]:
    """Tokens of each sequence, and how many of the prompt were found."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **options)
    tokens: list[list[int]] = [[] for _ in range(sampling.n)]
    num_found = 0
    for reply in client.generate(prompt, sampling, timeout_s=WAIT_S):
        tokens[reply.index] += reply.token_ids
        num_found = max(num_found, reply.usage.num_cached_tokens)
    return tokens, num_found


def expected() -> list[list[list[int]]]:
    """The same of one process with one device."""
    alone = LLM.from_config(None, SIZES)
    answers = []
    for prompt, options in CASES:
        sampling = SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, **options)
        (output,) = alone.generate([prompt], sampling, use_tqdm=False)
        answers.append([list(one.token_ids) for one in output.outputs])
    return answers


def kill_while_streaming(served: Service, client: Client, victim: int) -> tuple[int, Exception | None]:
    """Exit code of the other process, and what the client was told."""
    stream = client.generate([1, 2, 3], LONG, timeout_s=WAIT_S)
    list(itertools.islice(stream, 5))
    served.processes[victim].popen.send_signal(signal.SIGKILL)
    told = None
    try:
        list(stream)
    except RequestFailed as error:
        told = error
    code = served.processes[1 - victim].wait_for_exit()
    return code, told


@pytest.mark.parametrize("cut", ["tensor", "pipeline"])
def test_two_processes_give_the_tokens_of_one_and_find_their_pages_again(
    cut: str, compiled: Path, tmp_path: Path
) -> None:
    """Three lives of a service with a directory of pages for each process, and the ends of it."""
    answers = expected()
    stores = [tmp_path / f"pages-{process_id}" for process_id in range(2)]
    with serving(compiled, stores, cut) as (served, client):
        assert [ask(client, *case) for case in CASES] == [*zip(answers, FOUND_ON_THE_DEVICE, strict=True)]
        served.processes[0].popen.send_signal(signal.SIGTERM)
        assert [process.wait_for_exit() for process in served.processes] == [0, 0], served.processes[0].log
    with serving(compiled, stores, cut) as (served, client):
        assert [ask(client, *case) for case in CASES] == [*zip(answers, FULL_PAGES, strict=True)]
        code, _ = kill_while_streaming(served, client, victim=0)
        # JAX itself may abort the process a moment after our line is written, before our exit.
        assert code in (1, -signal.SIGABRT)
        assert "process 0 (127.0.0.1, " in served.processes[1].log
    shutil.rmtree(stores[1] / "pages")
    with serving(compiled, stores, cut) as (served, client):
        # Process 0 has its parts of all pages, and not one page is whole.
        assert [ask(client, *case) for case in CASES] == [*zip(answers, FOUND_ON_THE_DEVICE, strict=True)]
        code, told = kill_while_streaming(served, client, victim=1)
        assert code == 1
        assert "process 1 (" in str(told)
        assert "is lost: its connection broke" in str(told)
        log = served.processes[0].log
        assert log.splitlines()[-1].startswith("error: process 1 ("), log
        assert "Traceback" not in log


def test_a_damaged_plan_is_caught_by_the_checksum(tmp_path: Path, compiled: Path) -> None:
    """Both processes draw the same wrong tokens, since they draw together; what they were fed differs."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [3, 5, 7, 9], "max_tokens": 40, "ignore_eos": True}))
    door = ("--input", str(prompts))
    with sharded(compiled, REAL, {**REAL, "corrupt_at": 0}, door=door) as served:
        assert [process.wait_for_exit(COMPILE_S) for process in served.processes] == [1, 1], served.processes[0].log
        last = served.processes[0].log.splitlines()[-1]
        assert last.startswith("error: process 1 (")
        assert "computed something else than process 0: their checksums differ after step" in last
