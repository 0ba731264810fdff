"""From logical axis names to mesh axes: the one table that says how a model is spread over devices.

`Shards` is here too: the operations of a device together with the others that share its layers. Meshes are built in
`runtime.mesh`. Modules name the logical axes of each parameter; this file alone names mesh axes.

Why a table: another layout (experts, a second tensor axis) is another table, not a change in every model file. Why
the collectives are written out: the whole step runs under `shard_map`, so that every sum over devices stands in the
code where it happens, kernels see the arrays of one device, and no partitioner decides to gather a vocabulary.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.kernels.xla_matmul import DenseWeight

# Logical axis -> mesh axis, or several, the first of which varies slowest; None or absent: replicated.
Rules = Mapping[str, str | tuple[str, ...] | None]

EXPERT_AXIS, TENSOR_AXIS = "expert", "model"
MESH_AXES = (EXPERT_AXIS, TENSOR_AXIS)  # of one stage of one replica, whose devices share each layer

# Megatron's layout (Shoeybi et al., 2019): heads and ffn columns on the first matmul of a block, rows on the second,
# one sum per block, over all devices. Experts are dealt out over some of them, and the columns of each cut over the
# others.
TENSOR_PARALLEL: Rules = {
    "vocab": MESH_AXES,
    "heads": MESH_AXES,
    "kv_heads": MESH_AXES,
    "mlp": MESH_AXES,
    "experts": EXPERT_AXIS,
    "expert_mlp": TENSOR_AXIS,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The devices along one axis of the mesh, seen by one of them inside a `shard_map`; `WHOLE` when there is but one.

    What is cut along several axes has one of these for each, or one over all of them, for sums.
    """

    count: int
    axis: str | tuple[str, ...]

    def sum(self, x: Array) -> Array:
        """Over all devices, on all devices."""
        return x if self.count == 1 else lax.psum(x, self.axis)

    def max(self, x: Array) -> Array:
        """Over all devices, on all devices."""
        return x if self.count == 1 else lax.pmax(x, self.axis)

    def gather(self, x: Array) -> Array:
        """[..., n] of each device as [..., count * n], in their order, on all devices."""
        return x if self.count == 1 else lax.all_gather(x, self.axis, axis=x.ndim - 1, tiled=True)

    def start(self, size: int) -> Int[Array, ""]:
        """Where this device's part begins of an axis of which each holds `size`."""
        return jnp.int32(0) if self.count == 1 else lax.axis_index(self.axis) * size

    def local_ids(self, ids: Int[Array, "..."], size: int) -> Int[Array, "..."]:
        """Ids of a shared axis as indices into this device's `size` of them; `size` for those of others."""
        if self.count == 1:
            return ids
        local = ids - self.start(size)
        return jnp.where((local >= 0) & (local < size), local, size)


WHOLE = Shards(count=1, axis=MESH_AXES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a device must know of the whole decoder, of which it has a part: that of all devices is `Partition`'s.

    Attributes:
      shards: the devices that share each layer.
      experts: those of them that have different experts.
      num_tokens: the vocabulary, padding not counted.
      query_heads: for each query head over all devices its number in the checkpoint; None: padding.
      num_kv_heads: key/value heads over all devices, each copy counted, padding not.
    """

    shards: Shards
    experts: Shards
    num_tokens: int
    query_heads: tuple[int | None, ...]
    num_kv_heads: int

    @property
    def num_query_heads(self) -> int:
        """Of the checkpoint."""
        return sum(head is not None for head in self.query_heads)

    def of_query_heads(self, values: Sequence[float]) -> np.ndarray:
        """A number for each query head of the checkpoint as one for each over all devices; 0 for padding. Float32."""
        return np.asarray([0.0 if head is None else values[head] for head in self.query_heads], np.float32)


class Parameter(nnx.Param):
    """An array that carries its logical axes. They are ours: flax's own sharding metadata would act eagerly."""

    def leaf_axes(self) -> tuple[Axes, ...]:
        """Logical axes of each array in it, in the order of `jax.tree.leaves`."""
        return (self.get_metadata()["logical_axes"],)


class WeightParameter(Parameter):
    """A `kernels.matmul.Weight` or `kernels.grouped_matmul.ExpertWeight`.

    `logical_axes` are those of the whole; the weight knows which its leaves have.
    """

    def leaf_axes(self) -> tuple[Axes, ...]:
        """See `Parameter`."""
        return self.get_raw_value().leaf_axes(self.get_metadata()["logical_axes"])


def param(value: jax.Array, axes: Axes) -> Parameter:
    """A parameter that is no weight: of a norm, or a bias."""
    assert value.ndim == len(axes), (value.shape, axes)
    return Parameter(value, logical_axes=axes)


def weight(value: jax.Array, axes: Axes, num_in: int, *, tied: bool = False) -> WeightParameter:
    """A dense weight [*out, *in]. A product sums over its last `num_in` axes; 0: it is only looked up. `tied`: rows are
    looked up in it beside products."""
    assert value.ndim == len(axes), (value.shape, axes)
    return WeightParameter(DenseWeight(array=value, num_in=num_in, tied=tied), logical_axes=axes)


def expert_weight(value: jax.Array, axes: Axes) -> WeightParameter:
    """Dense matrices of experts, [E, *out, in]."""
    assert value.ndim == len(axes), (value.shape, axes)
    return WeightParameter(DenseExperts(array=value), logical_axes=axes)


def with_leaves(variable: nnx.Variable, leaves: Sequence[Any]) -> nnx.Variable:
    """The same variable, metadata included, around other leaves (arrays, shapes, shardings)."""
    return jax.tree.unflatten(jax.tree.structure(variable), leaves)


def arrays_of(state: nnx.State) -> dict[tuple[Any, ...], Any]:
    """The array (or shape, or sharding) of each parameter of a model as it is loaded, by its path: one each."""
    arrays = {}
    for path, variable in nnx.to_flat_state(state):
        (arrays[path],) = jax.tree.leaves(variable)
    return arrays


def axes_of(state: nnx.State) -> dict[tuple[Any, ...], Axes]:
    """Logical axes of each of `arrays_of`."""
    axes = {}
    for path, variable in nnx.to_flat_state(state):
        (axes[path],) = variable.leaf_axes()
    return axes


def spec_for(axes: Axes, rules: Rules) -> PartitionSpec:
    """The partition of an array with these logical axes; axes that no rule names are replicated."""
    return PartitionSpec(*(rules.get(axis) if axis is not None else None for axis in axes))


def specs_for(state: nnx.State, rules: Rules = TENSOR_PARALLEL) -> nnx.State:
    """A tree like `state` (abstract or not) with a `PartitionSpec` at each leaf."""
    return nnx.map_state(
        lambda _, variable: with_leaves(variable, [spec_for(axes, rules) for axes in variable.leaf_axes()]), state
    )


def shardings_for(state: nnx.State, mesh: Mesh | AbstractMesh, rules: Rules = TENSOR_PARALLEL) -> nnx.State:
    """A tree like `state` (abstract or not) with a sharding at each leaf. `Partition` has made all sizes divide."""

    def one(path: tuple[Any, ...], variable: Parameter) -> nnx.Variable:
        specs = [spec_for(axes, rules) for axes in variable.leaf_axes()]
        for leaf, spec in zip(jax.tree.leaves(variable), specs, strict=True):
            for size, named in zip(leaf.shape, spec, strict=True):
                axes = named if isinstance(named, tuple) else () if named is None else (named,)
                parts = math.prod(mesh.shape[axis] for axis in axes)
                assert size % parts == 0, (path, spec, leaf.shape, mesh.shape)
        return with_leaves(variable, [NamedSharding(mesh, spec) for spec in specs])

    return nnx.map_state(one, state)
