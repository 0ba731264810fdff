"""Parameters that are codes: their shapes in an abstract model, and their arrays, each device's share by itself."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.storage import CODES, Arithmetic, Storage, array_bytes
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.models.layout import Index
from jaxserve.models.quantised.coding import read_parts
from jaxserve.models.quantised.storing import Kept
from jaxserve.models.sharding import TENSOR_PARALLEL, Axes, spec_for
from jaxserve.models.weights import Path


def source_path(path: Path, first_layer: int) -> Path:
    """The path of a stage's parameter in a decoder of all layers."""
    return ("layers", path[1] + first_layer, *path[2:]) if path[0] == "layers" else path


def with_codes(state: nnx.State, kept: Mapping[Path, Kept], first_layer: int, mesh: Mesh | AbstractMesh) -> nnx.State:
    """The abstract model `state` with codes in the place of the weights that are kept so."""

    def one(path: Path, variable: nnx.Variable) -> nnx.Variable:
        found = kept.get(source_path(path, first_layer))
        if found is None or found.storage is None:
            return variable
        dense = variable.get_raw_value()
        assert isinstance(dense, DenseWeight), path
        axes = variable.get_metadata()["logical_axes"]
        return variable.replace(_coded_shape(dense, axes, found.storage, found.arithmetic, mesh))

    return nnx.map_state(one, state)


def _coded_shape(
    dense: DenseWeight, axes: Axes, storage: Storage, arithmetic: Arithmetic, mesh: Mesh | AbstractMesh
) -> CodedWeight:
    shape, num_coded = dense.array.shape, max(1, dense.num_in)
    by_scale = (*shape[:-1], shape[-1] // storage.group) if storage.group else (*shape[:-num_coded], *(1,) * num_coded)
    cut_over = [
        name
        for entry in spec_for(axes[-num_coded:], TENSOR_PARALLEL)
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if name is not None and mesh.shape[name] > 1
    ]
    leaf: Any = jax.ShapeDtypeStruct
    return CodedWeight(
        codes=leaf(shape, storage.dtype(backend_of(mesh))),
        scales=leaf(by_scale, np.float32),
        zeros=leaf(by_scale, np.int16) if storage.zeros else None,
        num_in=dense.num_in,
        storage=storage,
        arithmetic=arithmetic,
        dtype=np.dtype(dense.array.dtype).name,
        cut_over=tuple(cut_over),
    )


def backend_of(mesh: Mesh | AbstractMesh) -> str:
    """'cpu', or what its devices are called; '' for a mesh without devices, which no CPU has."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""


def load_coded(
    variable: nnx.Variable, placed: nnx.Variable, read: Callable[[Index], np.ndarray], name: str
) -> list[jax.Array]:
    """The arrays of one parameter, in the order of its leaves.

    `variable` has their shapes, `placed` their shardings; `read` gives any slice of the whole as records
    (`quantised.coding`). A share is read once for all of its arrays. Raises CheckpointError.
    """
    shape, shardings = variable.get_raw_value(), jax.tree.leaves(placed)
    leaves = jax.tree.leaves(variable)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, cuts in shardings[0].addressable_devices_indices_map(leaves[0].shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(cuts, leaves[0].shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    shares: list[list[jax.Array]] = [[] for _ in leaves]
    for bounds, devices in devices_of.items():
        index = tuple(slice(*bound) for bound in bounds)
        parts = read_parts(read, index, max(1, shape.num_in), shape.storage, leaves[0].dtype, name)
        arrays = [parts.codes, parts.scales] + ([] if parts.zeros is None else [parts.zeros])
        for share, array in zip(shares, arrays, strict=True):
            share += [jax.device_put(array, device) for device in devices]
    return [
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, share)
        for leaf, sharding, share in zip(leaves, shardings, shares, strict=True)
    ]


def draw_scales(variable: nnx.Variable, placed: nnx.Variable, reach: float) -> tuple[float, list[jax.Array]]:
    """For codes at random: how far they reach, and scales (and zeros) with which the weights reach `reach`."""
    most = CODES[variable.get_raw_value().storage.code][1]
    _, *others = zip(jax.tree.leaves(variable), jax.tree.leaves(placed), strict=True)
    return most, [
        jnp.full(leaf.shape, reach / most if leaf.dtype == np.float32 else 0, leaf.dtype, device=sharding)
        for leaf, sharding in others
    ]


def share_bytes(variable: nnx.Variable, placed: nnx.Variable) -> int:
    """Bytes of the arrays of a parameter that the devices of this process hold."""
    return sum(
        array_bytes(math.prod(sharding.shard_shape(leaf.shape)), leaf.dtype) * len(sharding.addressable_devices)
        for leaf, sharding in zip(jax.tree.leaves(variable), jax.tree.leaves(placed), strict=True)
    )
