"""Whole steps compiled for TPUs that are not here, and what they move through memory."""

import dataclasses

import pytest

from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.lab.compiled.ahead import compile_stage, place_ahead
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.lab.compiled.traffic import memory_traffic
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import find_family

LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
ROWS, CONTEXT, PAGE = 64, 2048, 128
GIGA = 1e9


def decoder_config(raw: dict, num_layers: int) -> DecoderConfig:
    raw = {**raw, "num_hidden_layers": num_layers}
    return find_family(raw, "config.json").decoder_config(raw, "config.json")


def small_llama() -> DecoderConfig:
    raw = {**LLAMA3_8B, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 512}
    model = decoder_config({**raw, "num_key_value_heads": 2}, 2)
    first, second = model.layers
    # Two groups of one layer: both write to the same array, one after the other.
    return dataclasses.replace(model, layers=(first, dataclasses.replace(second, window=512)))


def settings(**more):
    overrides = {
        "model.max_len": CONTEXT,
        "sched.max_rows": ROWS,
        "sched.max_step_tokens": 256,
        "runtime.token_buckets": [256],
        "runtime.row_buckets": [ROWS],
        "cache.page_size": PAGE,
        **more,
    }
    return load_config(None, overrides, environ={}).config


@pytest.mark.slow  # quick plans compile the decode step: tests/planner/test_whole_plans.py
@pytest.mark.parametrize(
    ("topology", "kernels"),
    [
        ("v5e:2x2", ("paged_kv_write", "paged_attention_decode", "paged_attention_prefill")),
        ("h200:1", ("mosaic_gpu",)),
    ],
)
def test_every_executable_of_a_small_model_compiles_with_the_kernels_inside(topology, kernels):
    compiled = compile_stage(place_ahead(settings(), small_llama(), topology=topology), num_pages=512)
    assert set(compiled) == {
        "decode 64x64",
        "mixed 256x64",
        "copy_pages",
        "write_tables",
        "configure_row",
        "write_masks",
    }
    mixed = compiled["mixed 256x64"].call.as_text()
    assert all(kernel in mixed for kernel in kernels)
    cache_bytes = 513 * 2 * PAGE * 2 * 128 * 2
    for name in ("decode 64x64", "mixed 256x64", "copy_pages"):
        memory = compiled[name].call.memory_analysis()
        assert memory.alias_size_in_bytes >= cache_bytes, f"{name} updates the cache in place"
        assert memory.temp_size_in_bytes < cache_bytes / 2, name


@pytest.mark.slow
def test_decode_of_llama3_8b_moves_little_more_than_it_must():
    """Batch 64 at context 2k: at most 1.10 times the weights, the live keys and values, and the activations.

    All 32 layers with their cache do not fit one chip, so two sizes tell what a layer moves and what the rest does.
    """
    topology, totals = "v5e:2x2", {}
    for num_layers in (1, 2):
        model = decoder_config(LLAMA3_8B, num_layers)
        config = settings(**{"sched.max_step_tokens": ROWS, "runtime.token_buckets": [ROWS]})
        absent = place_ahead(config, model, topology=topology)
        compiled = compile_stage(absent, num_pages=ROWS * CONTEXT // PAGE, only={"decode 64x64"})
        hlo = compiled["decode 64x64"].call.as_text()
        totals[num_layers] = sum(memory_traffic(hlo).values())
        assert f"bf16[{ROWS * CONTEXT // PAGE + 1},8," not in "".join(
            line for line in hlo.splitlines() if " copy(" in line or " copy-start(" in line
        )
    layer = totals[2] - totals[1]
    moved = totals[1] + 31 * layer
    hidden, ffn, vocab, kv = 4096, 14336, 128256, 8 * 128
    weights = 32 * (hidden * (hidden * 2 + kv * 2) + 3 * hidden * ffn) + vocab * hidden  # the table gives 64 rows only
    live = 32 * 2 * ROWS * CONTEXT * kv
    activations = 32 * ROWS * (8 * hidden + 4 * ffn) + 2 * ROWS * vocab
    floor = 2 * (weights + live + activations)
    print(f"{topology}: {moved / GIGA:.1f} GB moved, {moved / floor:.3f} of the floor")  # the figure in docs/kernels.md
    assert moved <= 1.10 * floor, f"{moved / GIGA:.2f} GB moved, {floor / GIGA:.2f} GB needed"
    assert moved >= 0.98 * floor, f"{moved / GIGA:.2f} GB moved, less than the {floor / GIGA:.2f} GB needed: miscounted"


@pytest.mark.parametrize(
    ("name", "message"),
    [("v99:2x2", "names look like v5e:2x2"), ("v5e", "no topology"), ("v5e:3x3", "of v5e there are v5e:1x1, v5e:2x2")],
)
def test_topologies_that_do_not_exist_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        absent_devices(name)


def test_devices_of_topologies():
    assert len(absent_devices("v5e:2x2")) == 4 and len(absent_devices("v6e:4x4")) == 16
    assert device_of_topology("v6e:4x4").kind == absent_devices("v6e:4x4")[0].device_kind == "TPU v6 lite"
    (h200,) = absent_devices("h200:1")
    assert device_of_topology("h200:1").kind == h200.device_kind
    assert h200.compute_capability == "9.0"
