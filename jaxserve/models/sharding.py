"""From logical axis names to mesh axes: the one table that says how a model is spread over devices.

Owns the rules table and its application to parameters and arrays. Refuses to build a mesh (`runtime` does) and to
know a model: modules name the logical axes of each parameter, this file alone names mesh axes.

Why a table: another layout (experts, a second tensor axis) is another table, not a change in every model file.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import CapacityError

Axes = tuple[str | None, ...]
Rules = Mapping[str, str | None]  # logical axis -> mesh axis; None or absent: replicated

TENSOR_AXIS = "model"

# Megatron's layout: heads and ffn columns on the first matmul of a block, rows on the second, one sum per block.
TENSOR_PARALLEL: Rules = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
}


def param(value: jax.Array, axes: Axes) -> nnx.Param:
    """A parameter that carries its logical axes. They are ours: flax's own sharding metadata would act eagerly."""
    assert value.ndim == len(axes), (value.shape, axes)
    return nnx.Param(value, logical_axes=axes)


def with_value(variable: nnx.Variable, value: Any) -> nnx.Variable:
    """The same variable, metadata included, around another value (an array, a shape, a sharding)."""
    return jax.tree.map(lambda _: value, variable)


def spec_for(axes: Axes, rules: Rules) -> PartitionSpec:
    """The partition of an array with these logical axes; axes that no rule names are replicated."""
    return PartitionSpec(*(rules.get(axis) if axis is not None else None for axis in axes))


def axes_tree(state: nnx.State) -> dict[tuple[Any, ...], Axes]:
    """Logical axes of each parameter of `nnx.split`'s state, keyed by its path."""
    return {path: variable.get_metadata()["logical_axes"] for path, variable in nnx.to_flat_state(state)}


def shardings_for(state: nnx.State, mesh: Mesh | None, rules: Rules = TENSOR_PARALLEL) -> nnx.State:
    """A tree like `state` (abstract or not) with a sharding at each leaf.

    Without a mesh everything goes to the first local device.
    Raises CapacityError when a dimension does not divide by its mesh axis.
    """

    def one(path: tuple[Any, ...], variable: nnx.Variable) -> nnx.Variable:
        if mesh is None:
            return with_value(variable, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))
        axes = variable.get_metadata()["logical_axes"]
        spec = spec_for(axes, rules)
        for size, axis, mesh_axis in zip(variable.shape, axes, spec, strict=True):
            if mesh_axis is not None and size % mesh.shape[mesh_axis]:
                raise CapacityError(
                    f"{'.'.join(map(str, path))} has {size} {axis}, which do not divide over the "
                    f"{mesh.shape[mesh_axis]} devices of mesh axis {mesh_axis!r}; use fewer devices, a "
                    f"number that divides {size}"
                )
        return with_value(variable, NamedSharding(mesh, spec))

    return nnx.map_state(one, state)
