"""Stages of a pipeline in processes of their own: real processes of `jax.distributed` on this host."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosts_parts import COMPILE_S, service
from whole import UNEVEN

from jaxserve import LLM
from jaxserve.api import SamplingParams
from jaxserve.models import load_model
from jaxserve.sched.record import StepLog

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

SIZES: dict[str, Any] = {
    "model.random_weights": True,
    "model.skip_tokenizer": True,
    "model.max_len": 144,
    "sched.max_rows": 4,
    "sched.max_step_tokens": 72,  # a chunk of so many is cut into two parts
    "cache.page_size": 4,
    "cache.num_pages": 36,  # fewer than four sequences come to need
    "runtime.row_buckets": [4],
    "runtime.token_buckets": [72],
    "kernels.matmul": "xla",  # Numba would compile in each process
}
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 131, n)] for i, n in enumerate((100, 9, 21, 1, 13))]
# Chunks, all that the last stage alone has of a row, rows that are preempted, and a prompt whose pages are there.
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (PROMPTS[0], {"temperature": 0.0, "prompt_logprobs": 2}),
    (PROMPTS[1], {"temperature": 1.0, "seed": 5, "top_k": 40, "logprobs": 2}),
    (PROMPTS[2], {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {3: -1.0, 130: 0.2}}),
    (PROMPTS[3], {"temperature": 0.9, "seed": 7, "min_p": 0.02, "allowed_token_ids": [0, 17, 64, 65, 130]}),
    (PROMPTS[4], {"temperature": 0.0, "logprobs": 1}),
    (PROMPTS[4], {"temperature": 0.8, "seed": 9}),
    (PROMPTS[2] + PROMPTS[1], {"temperature": 0.0, "max_tokens": 3}),
    *[(PROMPTS[2] + PROMPTS[1], {"temperature": 0.0, "max_tokens": 20})] * 2,
]
EVERYWHERE = {"max_tokens": 40, "ignore_eos": True}
CUTS = {
    "2 stages": (2, 1, {"parallel.pipeline": 2}),
    "3 stages, 4 parts": (3, 1, {"parallel.pipeline": 3, "parallel.microbatches": 4}),
    "2 stages of 2 devices": (2, 2, {"parallel.pipeline": 2, "parallel.tensor": 2}),
    "2 stages of 2 processes": (4, 1, {"parallel.pipeline": 2, "parallel.tensor": 2}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("three-layers")
    (directory / "config.json").write_text(json.dumps(UNEVEN))
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The tokens of one process with one device."""
    alone = LLM.from_config(None, {**SIZES, "model.path": str(checkpoint)})
    sampling = [SamplingParams(**{**EVERYWHERE, **options}, detokenize=False) for _, options in REQUESTS]
    outputs = alone.generate([prompt for prompt, _ in REQUESTS], sampling, use_tqdm=False)
    return [[*output.outputs[0].token_ids] for output in outputs]


@pytest.mark.parametrize("cut", CUTS)
def test_tokens_are_those_of_one_device(cut: str, checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    num_processes, num_devices, parallel = CUTS[cut]
    source, log = tmp_path / "requests.jsonl", tmp_path / "steps"
    lines = [{"prompt_token_ids": prompt, **EVERYWHERE, **options} for prompt, options in REQUESTS]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {**SIZES, **parallel, "model.path": str(checkpoint), "runtime.compile_cache": None}
    settings["runtime.log_level"] = "info"  # with --input the log has warnings alone
    options = [item for name, value in settings.items() for item in ("--set", f"{name}={json.dumps(value)}")]
    with service(
        *[{"real": True}] * num_processes,
        arguments=(*options, "--input", str(source)),
        own_arguments={0: ("--set", f"runtime.step_log={log}")},
        environment={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)},
    ) as served:
        codes = [process.wait_for_exit(COMPILE_S) for process in served.processes]
        assert codes == [0] * num_processes, [process.log for process in served.processes]
        answers = [json.loads(line) for line in served.processes[0].out.splitlines() if line.startswith("{")]
        logs = [process.log for process in served.processes]
    assert [answer["token_ids"] for answer in answers] == expected
    assert len(answers[0]["prompt_logprobs"]) == len(PROMPTS[0])
    assert any(answer["usage"]["cached_tokens"] for answer in answers), "no pages of a prompt before were found"
    with StepLog(log) as records:
        setups = [setup for record in records for setup in record.plan.setups]
    assert any(setup.num_tokens > setup.prompt_len for setup in setups), "no sequence was preempted"
    num_stages = parallel["parallel.pipeline"]
    sizes: dict[int, int] = {}  # parameters that the processes of each stage have loaded
    for process_id, text in enumerate(logs):
        stage = 1 + process_id * num_stages // num_processes
        assert f"stage {stage} of {num_stages}" in text
        (size,) = re.findall(rf"([\d,]+) parameters, .* of 1 of {num_stages} stages", text)
        sizes[stage] = int(size.replace(",", ""))
    if "parallel.tensor" not in parallel:  # which pads heads
        assert sum(sizes.values()) == load_model(checkpoint, random_weights=True).num_params
