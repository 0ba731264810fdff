"""What a config leaves open, decided for devices that are not here."""

import types

import numpy as np
import pytest

from jaxserve.config import load_config
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.models.family import find_family
from jaxserve.runtime.resolve import attention_uses, choose, describe, resolve_sizes

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("platform", "kind", "capability", "described"),
    [
        ("tpu", "TPU v5p", None, Device(backend="tpu", kind="TPU v5")),
        ("tpu", "TPU v5 lite", None, Device(backend="tpu", kind="TPU v5 lite")),
        ("cuda", "NVIDIA H200", "9.0", Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0))),
        ("cpu", "cpu", None, Device(backend="cpu", kind="cpu")),
    ],
)
def test_a_device_has_the_name_that_tables_use(platform, kind, capability, described):
    device = types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)
    assert describe(device) == described  # pyright: ignore[reportArgumentType]


def test_a_start_on_a_gpu_without_kernels_of_its_own_takes_the_batched_loops():
    gpu = types.SimpleNamespace(platform="cuda", device_kind="NVIDIA A100-SXM4-40GB", compute_capability="8.0")
    model = find_family(MODEL, "config.json").decoder_config(MODEL, "config.json")
    dtype = np.dtype("float32")

    config = load_config(None, {"kernels.self_check": False}, environ={}).config
    uses = attention_uses(model, resolve_sizes(config, model, dtype, "gpu"), dtype)
    assert choose(PAGED_ATTENTION, config, uses, gpu).name == "xla_batched"  # pyright: ignore[reportArgumentType]
