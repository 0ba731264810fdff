"""A weight of another form, known to this file alone: codes of eight bits and a scale per column, cut differently."""

import dataclasses
import functools

import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array, Float, Int, Int8

from jaxserve.config.schema import ParallelConfig
from jaxserve.kernels.matmul import Axes, Matmul, Weight
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.models import LoadedModel, load_model, plan_model
from jaxserve.models.sharding import MESH_AXES, WeightParameter, specs_for
from jaxserve.runtime.convert_weights import Forms, converted
from jaxserve.runtime.executables import device_bytes
from jaxserve.runtime.mesh import make_meshes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnWeight(Weight):
    """What codes [*out, *in] mean is codes * scales, with a scale for each output."""

    codes: Int8[Array, "..."]
    scales: Float[Array, "..."]
    num_in: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        dense = DenseWeight(array=self.codes.astype(x.dtype), num_in=self.num_in)
        return dense.multiply(x) * self.scales

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        codes, scales = (leaf.at[rows].get(mode="fill", fill_value=0) for leaf in (self.codes, self.scales))
        return codes * scales[:, None]

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        return axes, axes[: self.scales.ndim]


@jax.jit
def quantised(weight: DenseWeight) -> ColumnWeight:
    num_in = weight.num_in or 1  # a table has a scale for each of its rows
    axes = tuple(range(weight.array.ndim - num_in, weight.array.ndim))
    scales = jnp.maximum(jnp.abs(weight.array).max(axes) / 127, 1e-9)
    codes = jnp.round(weight.array / jnp.expand_dims(scales, axes)).astype(jnp.int8)
    return ColumnWeight(codes=codes, scales=scales, num_in=num_in)


COLUMNS = Matmul(
    name="columns",
    convert=quantised,
    shapes=functools.partial(jax.eval_shape, quantised),
    refuses=lambda use: None,
    rounding=0.02,
)


def load(name: str, devices: int) -> LoadedModel:
    mesh = make_meshes(ParallelConfig(tensor=devices), jax.devices())[0][0]
    return converted(plan_model(hf_oracle.FIXTURES / name, dtype="float32", mesh=mesh), Forms(matmul=COLUMNS)).load()


@pytest.mark.parametrize(
    ("name", "devices"), [("llama_mha_tied_bias", 1), ("qwen2", 8)], ids=["tied, one device", "eight devices"]
)
def test_a_weight_of_another_form_takes_the_place_of_a_dense_one(name: str, devices: int) -> None:
    """Nothing in models/ knows it: logits differ by what eight bits round."""
    model, truth = load(name, devices), hf_oracle.answers(name)[:2]
    driver = hf_oracle.Driver(model, num_rows=2, max_len=256, page_size=16)
    for answer, logits in zip(truth, driver.prefill([a.prompt for a in truth], [[], []]), strict=True):
        spread = np.std(answer.logits)
        assert 1e-5 * spread < np.abs(logits - answer.logits).max() < 0.2 * spread


def test_leaves_are_cut_each_by_itself() -> None:
    model = load("qwen2", 8)
    found, device = [], 0
    all_specs = dict(nnx.to_flat_state(specs_for(model.state)))
    for path, variable in nnx.to_flat_state(model.state):
        specs = jax.tree.leaves(all_specs[path])
        for leaf, spec in zip(jax.tree.leaves(variable), specs, strict=True):
            assert leaf.sharding.spec == spec, path
            device += leaf.addressable_shards[0].data.nbytes
        if isinstance(variable, WeightParameter):
            found.append((path[-2:], *(tuple(spec) for spec in specs)))
    assert (("down", "kernel"), (None, MESH_AXES), (None,)) in found, (
        "each device has a part of all sums, and all scales"
    )
    assert (("gate_up", "kernel"), (None, MESH_AXES, None), (None, MESH_AXES)) in found
    assert model.num_params == load_model(hf_oracle.FIXTURES / "qwen2", mesh=model.mesh).num_params, "scales are none"
    assert device_bytes(model.state, specs_for(model.state), model.mesh) == device
