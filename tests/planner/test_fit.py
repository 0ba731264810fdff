"""What fits, by arithmetic: nothing is compiled here."""

import io

import jax
import numpy as np
import pytest
import rich.console
from plan_parts import ROOT, SMALL, shipped, small_config, write_shape

from jaxserve.errors import CapacityError, CheckpointError, ConfigError
from jaxserve.kernels.composed_weight import SideBySide, WithOffsets
from jaxserve.kernels.packed_coded_experts import PackedCodedExperts
from jaxserve.kernels.packed_codes import packed_codes_shape
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.lab.planner import PlanOptions, make_plan
from jaxserve.lab.planner.make import _number_bytes
from jaxserve.lab.planner.show import make_console, show_plan
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.loading import load_model, one_device_mesh
from jaxserve.models.sharding import WeightParameter
from jaxserve.models.tower_loading import plan_tower
from jaxserve.runtime.mesh import make_meshes

QUICK = PlanOptions(compile=False)
# Every config that ships for a deployment, and where it is meant to run.
SHIPPED = {
    "llama3.1-8b-v5e-4": "v5e:2x2",
    "llama3.1-8b-int8-v5e-1": "v5e:1",
    "llama3.3-70b-int4-v5e-8": "v5e:2x4",
    "llama3.1-8b-v6e-1": "v6e:1",
    "llama3.1-8b-h200": "h200:1",
    "llama3.3-70b-v6e-8": "v6e:2x4",
    "llama3.3-70b-v5e-16": "v5e:4x4",
    "llama3.3-70b-h200-2": "h200:2",
    "qwen3-32b-v6e-4": "v6e:2x2",
    "mistral-7b-gpu": "h100:1",
    "falcon-7b-v6e-4": "v6e:2x2",
    "qwen3-0.6b-cpu": "cpu:1",
    "gemma-2-9b-v6e-1": "v6e:1",
    "mixtral-8x7b-v6e-4": "v6e:2x2",
    "qwen3-30b-a3b-v6e-4": "v6e:2x2",
    "qwen3-30b-a3b-h200": "h200:1",
    "gpt-oss-20b-h200": "h200:1",
    "gpt-oss-20b-mxfp4-v6e-1": "v6e:1",
}
# Bytes of a number of the layers with its share of scales, and how far norms and the scales of rows may lead from it.
CODED_SIZES = {"int8": (1.0, 0.001), "int4": (0.5 + 4 / 128, 0.005)}
# Parameters as published, in millions.
MILLIONS = {"llama3.1-8b": 8030, "llama3.3-70b": 70554, "qwen3-32b": 32762, "mistral-7b": 7248, "qwen3-0.6b": 596}
MILLIONS |= {"falcon-7b": 6922, "gemma-2-9b": 9242, "mixtral-8x7b": 46703, "qwen3-30b-a3b": 30532}
MILLIONS |= {"gpt-oss-20b": 20915}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_fits_where_it_is_meant_to_run(name):
    config = shipped(name)
    plan = make_plan(config, SHIPPED[name], QUICK)
    assert plan.fits and plan.problem is None and plan.suggestion is None
    assert plan.devices_used == plan.num_devices, "the name says how many devices it takes"
    assert plan.memory.kv_tokens > config.model.max_len, "one sequence can be as long as the config says"
    held = plan.memory.weight_bytes + plan.memory.kv_bytes + plan.memory.state_bytes + plan.memory.temporary_bytes
    assert plan.memory.headroom_bytes == plan.memory.total_bytes - held > 0
    # The shape is the published one. Key/value heads on several devices, and norms on all of them, add a little.
    (size,) = [millions for model, millions in MILLIONS.items() if name.startswith(model)]
    if config.model.quantization in CODED_SIZES:
        bits, floats = CODED_SIZES[config.model.quantization]
        table = 128256 * (4096 if size < 10_000 else 8192) / 1e6  # the embedding stays in bfloat16, the head has int8
        expected = (size - 2 * table) * bits + table * (2 + 1)
        assert plan.memory.weight_bytes * plan.tensor / 1e6 == pytest.approx(expected, rel=floats)
        assert plan.weights == f"bfloat16 and {config.model.quantization}" + " and int8" * (bits < 1)
        return
    if "mxfp4" in name:
        experts = 24 * 32 * 3 * 2880 * 2880 / 1e6  # four bits, and a float32 scale for each 32
        expected = 2 * (size - experts) + experts * (0.5 + 4 / 32)
        assert plan.memory.weight_bytes / 1e6 == pytest.approx(expected, rel=0.002)
        assert plan.weights == "bfloat16 and float4_e2m1fn"
        return
    whole = plan.memory.weight_bytes * plan.tensor / (4 if plan.dtype == "float32" else 2) / 1e6
    assert whole == pytest.approx(size, rel=0.03 if "v5e-16" in name or "falcon" in name else 0.002)


def test_slots_of_adapters_take_the_place_of_pages(tmp_path):
    """A [r, in] and B [out, r] of each projection, in bfloat16: four slots and one of zeros."""
    shape, rank, slots = write_shape(tmp_path), 16, 4
    plain = make_plan(small_config(shape), "v5e:1", QUICK)
    plan = make_plan(small_config(shape, **{"adapters.slots": slots, "adapters.max_rank": rank}), "v5e:1", QUICK)
    hidden, ffn, heads = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["num_attention_heads"] * 128
    kv = SMALL["num_key_value_heads"] * 128
    downs, ups = 3 * hidden + heads + 2 * hidden + ffn, heads + 2 * kv + hidden + 2 * ffn + hidden
    assert plan.memory.adapter_bytes == 8 * (slots + 1) * rank * (downs + ups) * 2
    assert plan.memory.state_bytes == plain.memory.state_bytes and plain.memory.adapter_bytes == 0
    spare = [one.memory.headroom_bytes + one.memory.kv_bytes for one in (plain, plan)]
    assert spare[0] - spare[1] == plan.memory.adapter_bytes
    shown = {one: io.StringIO() for one in ("plain", "plan")}
    for one, text in zip((plain, plan), shown.values(), strict=True):
        show_plan(one, rich.console.Console(file=text, width=120))
    assert "4 + 1 slots of LoRA adapters" in shown["plan"].getvalue()
    assert "slots of LoRA" not in shown["plain"].getvalue()


def test_layers_with_windows_leave_room_for_more_tokens():
    memory = make_plan(shipped("gemma-2-9b-v6e-1"), "v6e:1", QUICK).memory
    assert memory.page_groups == "2 groups of 21 layers, 1 of them with a window of 4096 tokens"
    assert memory.page_bytes == memory.page_size * 21 * 2 * 8 * 256 * 2
    pages = 64 + 33  # of a sequence of 8192 tokens: all, and those that 4096 positions in a row can lie in
    assert (memory.page_size, memory.kv_tokens) == (128, memory.num_pages * 8192 // pages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "wanted", "tensor"),
    [
        ("llama3.3-70b-v6e-8", "v5e:2x2", "v5e:4x4", 16),
        ("llama3.1-8b-v6e-1", "v5e:1", "v5e:2x2", 2),
    ],
)
def test_too_large_is_said_before_anything_compiles_with_the_smallest_that_fits(name, on, wanted, tensor):
    def compiles(line):
        raise AssertionError(f"should not compile: {line}")

    plan = make_plan(shipped(name), on, PlanOptions(tensor="auto"), compiles)
    assert not plan.fits and plan.problem and plan.memory.headroom_bytes < 0
    assert plan.predictions == () and plan.steps == ()
    assert plan.suggestion is not None
    assert (plan.suggestion.topology, plan.suggestion.tensor) == (wanted, tensor)
    assert not make_plan(shipped(name), wanted, PlanOptions(tensor=tensor // 2, compile=False)).fits


def test_nothing_of_a_chip_may_be_large_enough(tmp_path):
    path = write_shape(tmp_path / "vast", hidden_size=2**18, intermediate_size=2**20, num_hidden_layers=4)
    plan = make_plan(small_config(path), "h100:8", PlanOptions(tensor="auto", compile=False))
    assert not plan.fits and plan.suggestion is None


@pytest.mark.slow
def test_weights_are_those_that_a_server_loads(tmp_path):
    """8 devices share 4 key/value heads: two copies of each."""
    tensor, path = 8, write_shape(tmp_path / "small", num_hidden_layers=1)
    config = small_config(path, **{"parallel.tensor": tensor, "model.dtype": "float32"})
    plan = make_plan(config, f"cpu:{tensor}", QUICK)
    devices = jax.devices("cpu")[:tensor]
    ((mesh,),) = make_meshes(config.parallel, devices)
    loaded = load_model(path, dtype="float32", mesh=mesh, random_weights=True)
    first = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(loaded.state)
        for shard in leaf.addressable_shards
        if shard.device == devices[0]
    )
    assert plan.memory.weight_bytes == first


@pytest.mark.slow
def test_pages_follow_the_cache_section(tmp_path):
    path = write_shape(tmp_path / "small")
    asked = make_plan(small_config(path, **{"cache.num_pages": 100}), "v5e:1", QUICK)
    behind = {"cache.num_pages": 100, "cache.host_bytes": 1 << 34}
    moving = make_plan(small_config(path, **behind), "v5e:1", QUICK).memory
    assert moving.move_bytes == 4 * 16 * moving.page_bytes and asked.memory.move_bytes == 0
    assert asked.memory.headroom_bytes - moving.headroom_bytes == moving.move_bytes
    full = make_plan(small_config(path, **(behind | {"cache.num_pages": 1 << 30})), "v5e:1", QUICK).memory
    wide = make_plan(small_config(path, **{"cache.num_pages": 1 << 30}), "v5e:1", QUICK).memory
    assert wide.headroom_bytes - full.headroom_bytes == full.move_bytes, "also where the pages do not fit"
    assert asked.memory.num_pages == 100 and asked.memory.kv_bytes == 101 * asked.memory.page_bytes
    # 8 layers, keys and values of 4 heads of 128 numbers of 2 bytes
    assert asked.memory.page_bytes == 128 * 8 * 2 * 4 * 128 * 2
    more = make_plan(small_config(path, **{"cache.num_pages": 10**6}), "v5e:1", QUICK)
    assert not more.fits and "cache.num_pages = 1000000 needs" in more.problem


@pytest.mark.parametrize(
    ("topology", "options", "settings", "message"),
    [
        ("v5e:2x2", QUICK, {"parallel.tensor": 8}, "is 8, but v5e:2x2 has 4 devices"),
        ("v5e:2x2", PlanOptions(tensor="many"), {}, "--tensor is 'many'"),
        ("v5e:2x2", PlanOptions(tensor="auto"), {"parallel.data": 8}, "parallel.data is 8"),
        ("v5e:2x2", QUICK, {"parallel.pipeline": 2}, "plans are made for one stage"),
        ("v5e:2x2", PlanOptions(buckets=("decode 7x7",)), {}, "this config has decode 16x16, mixed 64x16"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(tmp_path, topology, options, settings, message):
    path = write_shape(tmp_path / "small")
    with pytest.raises(ConfigError, match=message):
        make_plan(small_config(path, **settings), topology, options)


def test_a_directory_without_config_json_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="config.json is missing"):
        make_plan(small_config(tmp_path), "v5e:1", QUICK)


def test_devices_that_stay_idle_are_told(tmp_path):
    path = write_shape(tmp_path / "small")
    plan = make_plan(small_config(path, **{"parallel.tensor": 2}), "v5e:2x4", QUICK)
    assert plan.devices_used == 2 and any("2 of the 8 devices are used" in note for note in plan.notes)


def test_what_the_kernels_of_a_gpu_refuse_is_planned_with_plain_xla(tmp_path):
    """Those of an H200 take bfloat16 alone."""
    path = write_shape(tmp_path / "small")
    plan = make_plan(small_config(path, **{"model.dtype": "float32"}), "h200:1", QUICK)
    assert plan.fits and plan.dtype == "float32"


@pytest.mark.parametrize(("dtype", "said"), [("float16", True), ("bfloat16", False)])
def test_a_plan_says_aloud_that_digits_are_lost(tmp_path, dtype, said):
    lines = []
    plan = make_plan(small_config(write_shape(tmp_path / "small", dtype=dtype)), "v5e:1", QUICK, lines.append)
    assert plan.dtype == "bfloat16"
    assert any(line.startswith("the checkpoint is float16") for line in lines) == said


@pytest.mark.parametrize(("code", "size"), [("int8", 1.0), ("int4", 0.5)])
def test_a_number_in_panels_of_cpus_has_the_bits_of_its_code(code, size):
    panels = packed_codes_shape((64,), (256,), 128, 32, code=code, zeros=True)
    found = _number_bytes([WeightParameter(panels, logical_axes=("mlp", "embed"))])
    assert found == size + (4 + 2) / 128
    # The same within weights that are made of others.
    offsets = DenseWeight(array=jax.ShapeDtypeStruct((64, 2), np.float32), num_in=1)
    pieces = SideBySide(parts=(WithOffsets(codes=panels, offsets=offsets, group=128), panels), axis=0)
    for whole, more in ((pieces, 4 / 128 / 2), (PackedCodedExperts(codes=panels), 0)):
        assert _number_bytes([WeightParameter(whole, logical_axes=("mlp", "embed"))]) == found + more


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_tower_and_its_pool_take_room_on_every_device(tensor):
    """The counts of a server: the tower that it loads, whole on each device; the pool's lines; and the activations."""
    directory = ROOT / "tests" / "fixtures" / "vision" / "qwen2_vl"
    settings = {"vision.max_pixels": 45 * 28 * 28, "vision.pool_tokens": 200, "model.dtype": "float32"}
    config = small_config(directory, **settings, **{"parallel.tensor": tensor})
    plan = make_plan(config, "cpu:4", QUICK)
    checkpoint = read_checkpoint(str(directory))
    mesh = one_device_mesh(jax.devices()[0])
    tower = plan_tower(checkpoint, mean=(0.5,) * 3, std=(0.5,) * 3, dtype=np.dtype("float32"), mesh=mesh)
    weights = load_model(directory, dtype="float32", mesh=make_meshes(config.parallel, jax.devices())[0][0]).num_bytes
    assert plan.fits and plan.tower is not None
    assert plan.tower.weight_bytes == tower.num_bytes == sum(array.nbytes for array in tower.fill(mesh))
    assert plan.memory.weight_bytes >= weights // tensor + tower.num_bytes
    assert plan.tower.pool_tokens == 256 and plan.tower.pool_bytes == (256 + 64) * 48 * 4
    assert plan.memory.state_bytes > plan.tower.pool_bytes
    smallest, largest = plan.tower.pictures[0], plan.tower.pictures[-1]
    assert smallest.patches == 256 and largest.patches >= 4 * 45 and largest.tokens * 4 == largest.patches
    assert largest.temporary_bytes == largest.patches * (8 * 32 + 3 * 64) * 4 <= plan.memory.temporary_bytes
    assert largest.seconds >= smallest.seconds > 0
    assert plan.as_json()["tower"]["pictures"][-1]["patches"] == largest.patches
    less = make_plan(small_config(directory, **{**settings, "vision.pool_tokens": 100}), "cpu:4", QUICK)
    assert less.memory.state_bytes < plan.memory.state_bytes
    with pytest.raises(CapacityError, match=r"vision\.pool_tokens is 2"):
        make_plan(small_config(directory, **{**settings, "vision.pool_tokens": 2}), "cpu:4", QUICK)
    table = make_console()
    with table.capture() as shown:
        show_plan(plan, table)
    words = " ".join(shown.get().split())
    assert "Pictures: tower of" in words and "pool of 256 embeddings" in words
