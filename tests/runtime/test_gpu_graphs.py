"""A step of one GPU is one CUDA graph: the host launches it, and waits for nothing within it.

`scripts/gpu_launches.py` has more cards, models and shapes.

The GPUs are not here; what the host would do is in the list that XLA makes when it compiles for them.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from jaxserve.config import load_config
from jaxserve.lab.compiled.ahead import place_ahead
from jaxserve.lab.compiled.launches import WAITS, count_launches
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.loading import decoder_config
from tests.kernels.gpu_compiler import needs_gpu_compiler

pytestmark = [pytest.mark.slow, needs_gpu_compiler]

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS, TOKENS = 32, 128
DECODE, MIXED = f"decode {ROWS}x{ROWS}", f"mixed {TOKENS}x{ROWS}"


def launches(name: str, topology: str, step: str, *, flags: bool = True) -> Counter[str]:
    """Of the first two layers of a shipped config; embedding and sampling are whole."""
    overrides = {
        "sched.max_rows": ROWS,
        "sched.max_step_tokens": TOKENS,
        "runtime.token_buckets": [TOKENS],
        "runtime.row_buckets": [ROWS],
        "model.max_len": 2048,
    }
    config = load_config(CONFIGS / f"{name}.yaml", overrides, environ={}).config
    model = decoder_config(configured_checkpoint(config.model))[1]
    absent = place_ahead(config, dataclasses.replace(model, layers=model.layers[:2]), topology=topology)
    return count_launches(absent, step, num_pages=512, flags=flags)


@pytest.mark.parametrize(
    ("name", "topology", "step"),
    [
        ("llama3.1-8b-h200", "h100:1", DECODE),
        ("llama3.1-8b-h200", "b200:1", MIXED),
        ("qwen3-30b-a3b-h200", "a100:1", MIXED),
        ("gpt-oss-20b-h200", "h200:1", DECODE),
    ],
)
def test_a_step_of_one_gpu_is_one_launch(name: str, topology: str, step: str) -> None:
    assert launches(name, topology, step) == {"kCommandBuffer": 1}


def test_without_the_flags_the_host_waits_and_the_count_sees_it() -> None:
    found = launches("llama3.1-8b-h200", "a100:1", DECODE, flags=False)
    assert sum(found[kind] for kind in WAITS) > 0, found
