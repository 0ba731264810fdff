"""Whole steps compiled for TPUs that are not here, and what they move through memory."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from jaxserve.config import load_config
from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.lab.compiled.ahead import compile_stage, place_ahead
from jaxserve.lab.compiled.collectives import count_collectives
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.lab.compiled.traffic import memory_traffic
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import find_family
from jaxserve.models.tower_loading import plan_tower
from jaxserve.runtime.compile import compile_all
from jaxserve.runtime.hlo import parse_hlo
from jaxserve.runtime.mesh import make_meshes
from jaxserve.runtime.tower_building import TowerPlan, tower_jobs

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
    names = {"mixed 256x64", "copy_pages", "write_tables", "configure_row", "write_masks"}
    names |= {"decode 64x64"} if topology.startswith("h") else set()  # of TPUs: tests/planner/test_whole_plans.py
    compiled = compile_stage(place_ahead(settings(), small_llama(), topology=topology), num_pages=512, only=names)
    assert set(compiled) == names
    mixed = compiled["mixed 256x64"].call.as_text()
    assert all(kernel in mixed for kernel in kernels)
    cache_bytes = 513 * 2 * PAGE * 2 * 128 * 2
    for name in names & {"decode 64x64", "mixed 256x64", "copy_pages"}:
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


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "most"), [("v5e:2x2", 1.2), ("h200:1", 2.3)])
def test_a_vision_tower_moves_little_more_than_it_must(topology, most, tmp_path):
    """Qwen2-VL-2B's tower, whole on each of the devices, for 1,024 patches in bfloat16: no collective, and per block at
    most `most` times its weights, activations, and scores of attention in float32, written once and read once.

    As above, two sizes tell what a block moves.
    """
    patches, heads, width, ffn = 1024, 16, 1280, 5120
    devices = absent_devices(topology)
    [mesh], *_ = make_meshes(ParallelConfig(tensor=len(devices)), devices)
    totals = {}
    for depth in (1, 2):
        vision = {"depth": depth, "embed_dim": width, "num_heads": heads, "mlp_ratio": 4, "hidden_size": 1536}
        text = {"num_hidden_layers": 1, "num_attention_heads": 12, "vocab_size": 512, "hidden_size": 1536}
        rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
        config = {"architectures": ["Qwen2VLForConditionalGeneration"], "vision_config": vision, "rope_scaling": rope}
        (tmp_path / "config.json").write_text(json.dumps(config | text | {"intermediate_size": 8960}))
        planned = plan_tower(
            read_checkpoint(str(tmp_path)), mean=(0.5,) * 3, std=(0.25,) * 3, dtype=jnp.dtype("bfloat16"), mesh=mesh
        )
        assert planned is not None
        tower = TowerPlan(planned=planned, max_patches=patches, max_tokens=patches // 4, positions=None)
        jobs = [job for job in tower_jobs(tower, mesh, device_of_topology(topology).backend) if "1024" in job.name]
        found = compile_all(jobs, 1, lambda *_: None, mesh)["tower 1024"].call
        module = parse_hlo(found.as_text())
        assert not count_collectives(module, len(devices))
        totals[depth] = sum(memory_traffic(module).values())
        assert found.memory_analysis().temp_size_in_bytes < tower.temporary_bytes(patches, 4) + 64 * 2**20
    block = totals[2] - totals[1]
    weights = 2 * (4 * width * width + 2 * width * ffn)
    floor = weights + 2 * patches * (8 * width + 4 * ffn) + 2 * 4 * heads * patches**2
    print(f"{topology}: {block / 2**20:.0f} MiB a block, {block / floor:.2f} of the floor")  # in docs/towers.md
    assert 0.5 * floor < block <= most * floor, f"{block / GIGA:.3f} GB moved, {floor / GIGA:.3f} GB needed"


def test_devices_of_topologies():
    assert len(absent_devices("v5e:2x2")) == 4 and len(absent_devices("v6e:4x4")) == 16
    assert device_of_topology("v6e:4x4").kind == absent_devices("v6e:4x4")[0].device_kind == "TPU v6 lite"
    (h200,) = absent_devices("h200:1")
    assert device_of_topology("h200:1").kind == h200.device_kind
    assert h200.compute_capability == "9.0"
