"""Loading puts the right bytes on the right device, reads no more than a device holds, and casts as asked."""

import hf_oracle
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxserve.errors import CapacityError
from jaxserve.models import load_model, loading
from jaxserve.models.safetensors_files import TensorSource
from jaxserve.models.sharding import axes_tree, spec_for


def flat(state: nnx.State) -> dict:
    return {path: variable.get_raw_value() for path, variable in nnx.to_flat_state(state)}


def mesh_of(num_devices: int) -> jax.sharding.Mesh:
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((num_devices,), ("model",), devices=jax.devices()[:num_devices], axis_types=automatic)


def test_specs_follow_the_rules_table() -> None:
    rules = {"vocab": "model", "mlp": None}
    assert spec_for(("vocab", "embed"), rules) == P("model", None)
    assert spec_for(("embed", None, "mlp"), rules) == P(None, None, None)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama_mha_tied_bias"])
def test_sharded_load_equals_the_whole_and_lies_as_declared(name: str) -> None:
    whole, spread = load_model(hf_oracle.FIXTURES / name), load_model(hf_oracle.FIXTURES / name, mesh=mesh_of(2))
    assert jax.tree.structure(spread.state) == jax.tree.structure(spread.shardings)
    axes = axes_tree(spread.state)
    for path, array in flat(spread.state).items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(flat(whole.state)[path]))
        assert array.sharding.spec == spec_for(
            axes[path], {"vocab": "model", "heads": "model", "kv_heads": "model", "mlp": "model"}
        )
        split = {"vocab", "heads", "kv_heads", "mlp"} & {a for a in axes[path] if a}
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


def test_sharded_step_gives_the_same_logits() -> None:
    truth = hf_oracle.answers("llama")[:2]
    model = load_model(hf_oracle.FIXTURES / "llama", mesh=mesh_of(2))
    driver = hf_oracle.Driver(model, num_rows=2, max_len=256, page_size=16)
    for answer, logits in zip(truth, driver.prefill([a.prompt for a in truth], [[], []]), strict=True):
        assert np.abs(logits - answer.logits).max() < 1e-4


def test_a_mesh_that_does_not_divide_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"4 heads.*8 devices.*use fewer devices"):
        load_model(hf_oracle.FIXTURES / "llama", mesh=mesh_of(8))


def test_dtype_auto_is_float32_on_cpu_and_casts_are_rounded() -> None:
    directory = hf_oracle.FIXTURES / "llama_llama3"
    stored = load_file(directory / "model.safetensors")
    assert stored["model.norm.weight"].dtype == "bfloat16"
    auto, half = load_model(directory), load_model(directory, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(auto.state)} == {np.dtype("float32")}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half.state)} == {"bfloat16"}
    np.testing.assert_array_equal(np.asarray(auto.state["lm_head"][...]), stored["lm_head.weight"].T.astype("float32"))
    checkpoint = auto.checkpoint
    assert loading.choose_dtype("auto", "tpu", checkpoint) == "bfloat16"
    assert loading.choose_dtype("float32", "tpu", checkpoint) == "float32"


def test_random_weights_need_only_a_config_and_repeat(tmp_path) -> None:
    config = (hf_oracle.FIXTURES / "qwen3" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    one, same = (load_model(tmp_path, random_weights=True, seed=3) for _ in range(2))
    spread = load_model(tmp_path, random_weights=True, seed=3, mesh=mesh_of(2))
    other = load_model(tmp_path, random_weights=True, seed=4)
    for path, array in flat(one.state).items():
        np.testing.assert_array_equal(array, flat(same.state)[path])
        np.testing.assert_array_equal(array, np.asarray(flat(spread.state)[path]))
    kernel = ("layers", 0, "mlp", "down", "kernel")
    assert np.std(flat(one.state)[kernel]) == pytest.approx(0.02, rel=0.1)
    assert not np.array_equal(flat(one.state)[kernel], flat(other.state)[kernel])
    assert not np.array_equal(flat(one.state)[kernel], flat(one.state)["layers", 1, "mlp", "down", "kernel"])
    assert np.all(np.asarray(flat(one.state)["final_norm", "weight"]) == 1)
