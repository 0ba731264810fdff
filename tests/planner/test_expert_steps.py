"""Steps of expert models on chips that are not here: each expert layer has its grouped products and reads no more than
the experts that its tokens hit.

The record has every bucket (`scripts/expert_steps.py`); some of them are compiled again here.
"""

import json

import expert_steps
import pytest
from plan_parts import shipped

from jaxserve.lab.compiled.ahead import compile_stage, place_ahead
from jaxserve.models.checkpoint import configured_checkpoint
from jaxserve.models.loading import decoder_config
from jaxserve.runtime.executables import step_name
from tests.kernels.gpu_compiler import needs_gpu_compiler

# Steps that move more than the limit; docs/planning.md says why.
_PROMPTS = {"mixed 128x96", "mixed 256x96", "mixed 512x96", "mixed 1024x96"}
OVER = {
    "qwen3-30b-a3b-v6e-4": {"mixed 1024x96"},
    "mixtral-8x7b-v6e-4": {"mixed 1024x64"},
    "qwen3-30b-a3b-h200": {"decode 96x96"} | _PROMPTS,
    "gpt-oss-20b-h200": {"decode 96x96"} | _PROMPTS,
}
RESULTS = json.loads(expert_steps.RECORD.read_text())["results"]


def check(result: dict) -> None:
    """What holds of every bucket, however many bytes it moves."""
    what, layers, on_tpu = (result["config"], result["step"]), result["layers"], result["topology"].startswith("v")
    assert result["products"] == layers * (3 if on_tpu else 2), what  # gate and up apart on TPUs
    assert not result["other_readers"], what
    assert (result["sums"], result["other_exchanges"]) == (2 * layers if on_tpu else 0, 0), what
    # Activations may stay in a TPU's fast memory, weights of experts cannot.
    assert result["moved_bytes"] > 0.98 * result["weight_bytes"], f"{what}: miscounted"


@pytest.mark.parametrize("name", expert_steps.CONFIGS)
def test_every_bucket_is_in_the_record_and_reads_weights_of_experts_once(name):
    config = shipped(name)
    model = decoder_config(configured_checkpoint(config.model))[1]
    absent = place_ahead(config, model, topology=expert_steps.CONFIGS[name], to_compile=False)
    found = {r["step"]: r for r in RESULTS if r["config"] == name}
    assert found.keys() == {step_name(bucket) for bucket in absent.sizes.buckets}
    for result in found.values():
        check(result)
    over = {step for step, r in found.items() if r["excess"] > expert_steps.LIMIT}
    assert over == OVER[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("qwen3-30b-a3b-v6e-4", "decode 1x1"),
        pytest.param("gpt-oss-20b-h200", "mixed 32x32", marks=needs_gpu_compiler),
    ],
)
def test_a_step_compiles_to_what_the_record_says(name, step):
    absent, num_pages = expert_steps.place(name)
    (bucket,) = (bucket for bucket in absent.sizes.buckets if step_name(bucket) == step)
    text = compile_stage(absent, num_pages=num_pages, only={step})[step].call.as_text()
    result = json.loads(json.dumps(expert_steps.result_of(name, absent, bucket, text)))
    check(result)
    assert result["excess"] <= expert_steps.LIMIT
    (recorded,) = (r for r in RESULTS if (r["config"], r["step"]) == (name, step))
    assert result == recorded | {"moved_bytes": result["moved_bytes"], "excess": result["excess"]}
    assert result["excess"] == pytest.approx(recorded["excess"], rel=0.01), "record it again"
