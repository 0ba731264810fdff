"""Loading puts the right bytes on the right device, reads no more than a device holds, and casts as asked."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import hf_oracle
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from jaxserve import assemble
from jaxserve.config import load_config
from jaxserve.config.schema import Config, ParallelConfig
from jaxserve.models import Partition, load_model, loading, orbax_io
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.safetensors_files import TensorSource
from jaxserve.models.sharding import arrays_of, axes_of, spec_for
from jaxserve.progress import Quiet
from jaxserve.runtime.mesh import make_meshes


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    return make_meshes(ParallelConfig(tensor=num_devices), jax.devices())[0][0]


def test_specs_follow_the_rules_table() -> None:
    rules = {"vocab": "model", "mlp": None}
    assert spec_for(("vocab", "embed"), rules) == P("model", None)
    assert spec_for(("embed", None, "mlp"), rules) == P(None, None, None)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama_mha_tied_bias", "gpt2", "mpt"])
def test_sharded_load_equals_the_whole_and_lies_as_declared(name: str) -> None:
    whole, spread = load_model(hf_oracle.FIXTURES / name), load_model(hf_oracle.FIXTURES / name, mesh=mesh_of(2))
    axes = axes_of(spread.state)
    for path, array in arrays_of(spread.state).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(arrays_of(whole.state)[path]))
        cut = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), ("expert", "model"))
        assert array.sharding.spec == spec_for(axes[path], cut)
        split = set(cut) & {a for a in axes[path] if a}
        assert len(array.addressable_shards) == 2
        assert array.addressable_shards[0].data.size * (2 if split else 1) == array.size, path
    assert whole.num_params == spread.num_params
    assert whole.num_bytes == whole.num_params * 4


def test_a_device_reads_only_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[str, int]] = []
    original = TensorSource.read

    def counting(self: TensorSource, index: tuple[slice, ...]) -> np.ndarray:
        block = original(self, index)
        sizes.append((self.name, block.size))
        return block

    monkeypatch.setattr(TensorSource, "read", counting)
    load_model(hf_oracle.FIXTURES / "llama_mha_tied_bias", mesh=mesh_of(4))
    projections = [(name, size) for name, size in sizes if name.endswith("q_proj.weight")]
    assert [size for _, size in projections] == [48 * 48 // 4] * 8, projections
    assert {size for name, size in sizes if "down_proj.weight" in name} == {48 * 80 // 4}
    assert {size for name, size in sizes if "embed_tokens" in name} == {128 * 48 // 4}


@pytest.mark.parametrize(
    ("devices", "heads_per_device"),
    [(3, (1, 2)), pytest.param(8, (1, 1), marks=pytest.mark.slow)],
)
def test_sharded_step_gives_the_same_logits(devices: int, heads_per_device: tuple[int, int]) -> None:
    """4 query and 2 key/value heads: padded (3 devices), copied and padded (8)."""
    truth = hf_oracle.answers("qwen2")[:2]
    model = load_model(hf_oracle.FIXTURES / "qwen2", mesh=mesh_of(devices))
    local = model.partition.local
    assert (local.num_kv_heads, local.group_size) == heads_per_device
    driver = hf_oracle.Driver(model, num_rows=2, max_len=256, page_size=16)
    for answer, logits in zip(truth, driver.prefill([a.prompt for a in truth], [[], []]), strict=True):
        assert np.abs(logits - answer.logits).max() < 1e-4


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "devices", "copies", "padded", "group"),
    [
        (32, 8, 1, 1, 8, 4),
        (32, 8, 8, 1, 8, 4),
        (64, 8, 16, 2, 16, 4),
        (64, 8, 32, 4, 32, 2),
        (32, 8, 64, 4, 64, 1),  # as many copies as there are query heads: more would do nothing
        (6, 3, 2, 1, 4, 2),
        (6, 3, 8, 2, 8, 1),
        (7, 1, 4, 4, 4, 2),
        (15, 5, 4, 1, 8, 3),
        (12, 12, 8, 1, 16, 1),
    ],
)
def test_partition_of_heads(
    query_heads: int, kv_heads: int, devices: int, copies: int, padded: int, group: int
) -> None:
    config = dataclasses.replace(
        load_model(hf_oracle.FIXTURES / "llama").config, num_query_heads=query_heads, num_kv_heads=kv_heads
    )
    partition = Partition.of(config, devices)
    assert (partition.copies, partition.kv_heads, partition.group) == (copies, padded, group)
    assert partition.kv_heads % devices == 0 and partition.vocab_size % devices == 0
    # Every query head of the checkpoint has one place, beside a copy of its own key/value head.
    places = {}
    for ((place, start, size),) in partition.blocks(("heads",), (query_heads,)):
        for i in range(size):
            places[start + i] = place + i
    assert sorted(places) == list(range(query_heads)) and len(set(places.values())) == query_heads
    keys = {}
    for heads, group_run in partition.blocks(("kv_heads", "slots"), (kv_heads, config.group_size + 2)):
        if group_run[1] + group_run[2] == config.group_size + 2:
            keys |= {heads[0] + i: heads[1] + i for i in range(heads[2])}
    assert all(keys[place // group] == head // config.group_size for head, place in places.items())


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_all_ways_of_loading_pad_and_copy_alike(devices: int, tmp_path) -> None:
    source = hf_oracle.FIXTURES / "qwen2"
    orbax_io.convert(source, tmp_path / "orbax")
    read, restored = (load_model(p, mesh=mesh_of(devices)) for p in (source, tmp_path / "orbax"))
    whole = arrays_of(load_model(source).state)
    for path, array in arrays_of(read.state).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(arrays_of(restored.state)[path]))
        assert np.abs(np.asarray(array)).sum() >= np.abs(np.asarray(whole[path])).sum() * (1 - 1e-6), path


@pytest.mark.parametrize("orbax", [False, True])
def test_a_stage_loads_its_layers_alone(orbax: bool, tmp_path) -> None:
    source = hf_oracle.FIXTURES / "llama"
    whole = arrays_of(load_model(source).state)
    if orbax:
        orbax_io.convert(source, tmp_path / "orbax")
        source = tmp_path / "orbax"
    first, last = (load_model(source, layers=layers) for layers in (range(1), range(1, 2)))
    assert set(first.state) == {"embedding", "layers"} and set(last.state) == {"layers", "final_norm", "lm_head"}
    for stage, offset in ((first, 0), (last, 1)):
        for path, array in arrays_of(stage.state).items():
            source_path = ("layers", path[1] + offset, *path[2:]) if path[0] == "layers" else path
            np.testing.assert_array_equal(np.asarray(array), np.asarray(whole[source_path]))
    drawn = load_model(source, layers=range(1, 2), random_weights=True, seed=3)
    same = load_model(source, random_weights=True, seed=3)
    kernel = ("mlp", "down", "kernel")
    np.testing.assert_array_equal(
        arrays_of(drawn.state)["layers", 0, *kernel], arrays_of(same.state)["layers", 1, *kernel]
    )


def test_dtype_auto_is_float32_on_cpu_and_casts_are_rounded() -> None:
    directory = hf_oracle.FIXTURES / "llama_llama3"
    stored = load_file(directory / "model.safetensors")
    assert stored["model.norm.weight"].dtype == "bfloat16"
    auto, half = load_model(directory), load_model(directory, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(auto.state)} == {np.dtype("float32")}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.state)} == {"bfloat16"}
    np.testing.assert_array_equal(
        np.asarray(arrays_of(auto.state)[("lm_head",)]), stored["lm_head.weight"].astype("float32")
    )
    checkpoint = auto.checkpoint
    assert loading.choose_dtype("auto", "tpu", checkpoint) == "bfloat16"
    assert loading.choose_dtype("float32", "tpu", checkpoint) == "float32"


@pytest.mark.parametrize(
    ("stated", "name", "chosen", "said"),
    [
        ("float16", "auto", "bfloat16", True),
        ("float16", "auto", "float32", False),
        ("float16", "bfloat16", "bfloat16", False),
        ("bfloat16", "auto", "bfloat16", False),
        ("float32", "auto", "float32", False),
    ],
)
def test_digits_that_are_lost_by_default_are_told(stated: str, name: str, chosen: str, said: bool, tmp_path) -> None:
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama_llama3", tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps({**config, "torch_dtype": stated}))
    checkpoint = read_checkpoint(source)
    assert loading.choose_dtype(name, "cpu" if chosen == "float32" else "tpu", checkpoint) == chosen
    told = loading.describe_rounding(name, np.dtype(chosen), checkpoint)
    assert (told is not None) == said
    if said:
        assert told.startswith("the checkpoint is float16, and model.dtype auto rounds its weights to bfloat16")


def test_a_start_warns_of_digits_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on an accelerator, where 'auto' is bfloat16; nothing is compiled."""
    source = Path(shutil.copytree(hf_oracle.FIXTURES / "llama", tmp_path / "hf"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    choose = loading.choose_dtype
    monkeypatch.setattr(loading, "choose_dtype", lambda name, _, checkpoint: choose(name, "tpu", checkpoint))

    def build_runners(config: Config, models: Sequence[loading.PlannedModel], **_: object) -> list[SimpleNamespace]:
        loaded = [model.load() for model in models]
        runner = SimpleNamespace(slots=None)
        built = SimpleNamespace(
            models=loaded,
            shapes=(),
            runner=runner,
            compile_report=(),
            seconds={},
            later=None,
            page_layout="",
            slot_form=None,
        )
        return [built]

    monkeypatch.setattr(assemble, "build_runners", build_runners)
    monkeypatch.setattr(logging.getLogger("jaxserve"), "propagate", True)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assemble.build_devices(load_config(None, {"model.path": str(source)}, environ={}).config, Quiet())
    assert f"{source}: the checkpoint is float16, and model.dtype auto rounds" in caplog.text


def test_a_checkpoint_of_the_base_model_leaves_a_prefix_out(tmp_path) -> None:
    """As Qwen3-Embedding does. The output projection is not in the base model, and has no prefix elsewhere."""
    source = hf_oracle.FIXTURES / "qwen3"
    shutil.copy(source / "config.json", tmp_path)
    tensors = load_file(source / "model.safetensors")
    assert any(name.startswith("model.layers.") for name in tensors)
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    expected = arrays_of(load_model(source, dtype="float32").state)
    for path, array in arrays_of(load_model(tmp_path, dtype="float32").state).items():
        np.testing.assert_array_equal(array, expected[path])


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_random_weights_need_only_a_config_and_repeat(name: str, tmp_path: Path) -> None:
    config = (hf_oracle.FIXTURES / name / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    one, same = (load_model(tmp_path, random_weights=True, seed=3) for _ in range(2))
    spread = load_model(tmp_path, random_weights=True, seed=3, mesh=mesh_of(2))
    other = load_model(tmp_path, random_weights=True, seed=4)
    for path, array in arrays_of(one.state).items():
        np.testing.assert_array_equal(array, arrays_of(same.state)[path])
        np.testing.assert_array_equal(array, np.asarray(arrays_of(spread.state)[path]))
    kernel = ("layers", 0, "mlp", "down", "kernel")
    assert np.std(arrays_of(one.state)[kernel]) == pytest.approx(0.02, rel=0.1)
    assert not np.array_equal(arrays_of(one.state)[kernel], arrays_of(other.state)[kernel])
    assert not np.array_equal(arrays_of(one.state)[kernel], arrays_of(one.state)["layers", 1, "mlp", "down", "kernel"])
    for path, array in arrays_of(one.state).items():
        if path[-1] in ("weight", "bias"):
            assert np.all(np.asarray(array) == (path[-1] == "weight")), path
        else:
            assert np.std(array) > 0, path
