"""From logical axis names to mesh axes: the one table that says how a model is spread over devices.

Owns the names of the mesh axes, the rules table, its application to parameters, and `Shards`: what a device does
together with the others that share its layers. Refuses to build a mesh (`runtime.mesh` does) and to know a model:
modules name the logical axes of each parameter, this file alone names mesh axes.

Why a table: another layout (experts, a second tensor axis) is another table, not a change in every model file. Why
the collectives are written out: the whole step runs under `shard_map`, so that every sum over devices stands in the
code where it happens, kernels see the arrays of one device, and no partitioner decides to gather a vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.kernels.packed_weight import PackedWeight

Axes = tuple[str | None, ...]
Rules = Mapping[str, str | None]  # logical axis -> mesh axis; None or absent: replicated

EXPERT_AXIS, SEQUENCE_AXIS, TENSOR_AXIS = "expert", "sequence", "model"
MESH_AXES = (EXPERT_AXIS, SEQUENCE_AXIS, TENSOR_AXIS)  # of one stage of one replica; the last varies fastest

# Megatron's layout (Shoeybi et al., 2019): heads and ffn columns on the first matmul of a block, rows on the second,
# one sum per block. "experts" and "context" are for models that have them: their rules stand, nothing uses them yet.
TENSOR_PARALLEL: Rules = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "experts": EXPERT_AXIS,
    "context": SEQUENCE_AXIS,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The devices that share a layer, seen by one of them, inside of a `shard_map`; `WHOLE` when there is but one."""

    count: int

    def sum(self, x: Array) -> Array:
        """Over all devices, on all devices."""
        return x if self.count == 1 else lax.psum(x, TENSOR_AXIS)

    def max(self, x: Array) -> Array:
        """Over all devices, on all devices."""
        return x if self.count == 1 else lax.pmax(x, TENSOR_AXIS)

    def gather(self, x: Array) -> Array:
        """[..., n] of each device as [..., count * n], in their order, on all devices."""
        return x if self.count == 1 else lax.all_gather(x, TENSOR_AXIS, axis=x.ndim - 1, tiled=True)

    def start(self, size: int) -> Int[Array, ""]:
        """Where this device's part begins of an axis of which each holds `size`."""
        return jnp.int32(0) if self.count == 1 else lax.axis_index(TENSOR_AXIS) * size

    def local_ids(self, ids: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Ids of a shared axis as indices into this device's `size` of them; `size` for those of others."""
        if self.count == 1:
            return ids
        local = ids - self.start(size)
        return jnp.where((local >= 0) & (local < size), local, size)


WHOLE = Shards(count=1)


def param(value: jax.Array, axes: Axes, num_in: int = 0) -> nnx.Param:
    """A parameter that carries its logical axes. They are ours: flax's own sharding metadata would act eagerly.

    `num_in`: of a weight that `layers.matmul` multiplies with, how many axes are multiplied away, the last ones.
    """
    assert value.ndim == len(axes), (value.shape, axes)
    return nnx.Param(value, logical_axes=axes, num_in=num_in)


def with_value(variable: nnx.Variable, value: Any) -> nnx.Variable:
    """The same variable, metadata included, around another value (an array, a shape, a sharding)."""
    return jax.tree.map(lambda _: value, variable)


def spec_for(axes: Axes, rules: Rules) -> PartitionSpec:
    """The partition of an array with these logical axes; axes that no rule names are replicated."""
    return PartitionSpec(*(rules.get(axis) if axis is not None else None for axis in axes))


def _spec_of(variable: nnx.Variable, rules: Rules) -> PartitionSpec:
    if isinstance(variable.get_raw_value(), PackedWeight):  # never cut
        return PartitionSpec()
    return spec_for(variable.get_metadata()["logical_axes"], rules)


def axes_tree(state: nnx.State) -> dict[tuple[Any, ...], Axes]:
    """Logical axes of each parameter of `nnx.split`'s state, keyed by its path."""
    return {path: variable.get_metadata()["logical_axes"] for path, variable in nnx.to_flat_state(state)}


def specs_for(state: nnx.State, rules: Rules = TENSOR_PARALLEL) -> nnx.State:
    """A tree like `state` (abstract or not) with a `PartitionSpec` at each leaf."""
    return nnx.map_state(lambda _, variable: with_value(variable, _spec_of(variable, rules)), state)


def shardings_for(state: nnx.State, mesh: Mesh, rules: Rules = TENSOR_PARALLEL) -> nnx.State:
    """A tree like `state` (abstract or not) with a sharding at each leaf. `Partition` has made all sizes divide."""

    def one(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        spec = _spec_of(variable, rules)
        for size, mesh_axis in zip(jax.tree.leaves(variable)[0].shape, spec, strict=False):
            assert mesh_axis is None or size % mesh.shape[mesh_axis] == 0, (path, spec, size, mesh.shape)
        return with_value(variable, NamedSharding(mesh, spec))

    return nnx.map_state(one, state)
