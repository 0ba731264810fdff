"""Parameters that are codes: their shapes in an abstract model, and their arrays, each device's share by itself."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.composed_weight import ExpertsWithOffsets, Reordered, SideBySide, WithOffsets
from jaxserve.kernels.storage import CODES, Arithmetic, Storage, array_bytes
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.models.layout import Index
from jaxserve.models.partition import Block
from jaxserve.models.quantised.coding import parts_of, read_parts
from jaxserve.models.quantised.storing import Kept
from jaxserve.models.shard_reading import GroupReader
from jaxserve.models.sharding import TENSOR_PARALLEL, Axes, spec_for
from jaxserve.models.weights import Path

_MOST_FLOAT4 = 7.0  # the code of the largest number


def source_path(path: Path, first_layer: int) -> Path:
    """The path of a stage's parameter in a decoder of all layers."""
    return ("layers", path[1] + first_layer, *path[2:]) if path[0] == "layers" else path


def with_codes(state: nnx.State, kept: Mapping[Path, Kept], first_layer: int, mesh: Mesh | AbstractMesh) -> nnx.State:
    """The abstract model `state` with codes in the place of the weights that are kept so."""

    def one(path: Path, variable: nnx.Variable) -> nnx.Variable:
        found = kept.get(source_path(path, first_layer))
        if found is None:
            return variable
        dense = variable.get_raw_value()
        assert isinstance(dense, DenseWeight | DenseExperts), path
        return variable.replace(_kept_shape(dense, variable.get_metadata()["logical_axes"], found, mesh))

    return nnx.map_state(one, state)


def _kept_shape(dense: DenseWeight | DenseExperts, axes: Axes, kept: Kept | None, mesh: Mesh | AbstractMesh) -> Any:
    """What a weight of shapes is kept as, of shapes."""
    leaf: Any = jax.ShapeDtypeStruct
    shape = dense.array.shape
    if kept is None:
        return dense
    if kept.parts:
        axis = axes.index(kept.parts[0].window.axis)
        parts = []
        for part in kept.parts:
            length = len(part.window.bounds(shape[axis]))
            own = leaf((*shape[:axis], length, *shape[axis + 1 :]), dense.array.dtype)
            parts.append(_kept_shape(dataclasses.replace(dense, array=own), axes, part.kept, mesh))
        return SideBySide(parts=tuple(parts), axis=axis)
    storage = kept.storage
    if storage is None:
        return dense
    coded = _coded_shape(dense, axes, storage.of_codes, kept.arithmetic, mesh)
    made: Any = coded
    if storage.offsets:
        assert storage.group is not None, storage
        array = leaf(coded.scales.shape, np.float32)
        if isinstance(coded, CodedExperts):
            made = ExpertsWithOffsets(codes=coded, offsets=DenseExperts(array=array), group=storage.group)
        else:
            offsets = DenseWeight(array=array, num_in=coded.num_in)
            made = WithOffsets(codes=coded, offsets=offsets, group=storage.group)
    if storage.ordered:
        order = leaf(shape[len(shape) - coded.num_in :], np.int32)
        made = Reordered(weight=made, order=order, cut_over=coded.cut_over)
    return made


def _coded_shape(
    dense: DenseWeight | DenseExperts,
    axes: Axes,
    storage: Storage,
    arithmetic: Arithmetic,
    mesh: Mesh | AbstractMesh,
) -> CodedWeight | CodedExperts:
    num_in = dense.num_in if isinstance(dense, DenseWeight) else 1
    shape, num_coded = dense.array.shape, max(1, num_in)
    by_scale = (*shape[:-1], shape[-1] // storage.group) if storage.group else (*shape[:-num_coded], *(1,) * num_coded)
    cut_over = [
        name
        for entry in spec_for(axes[-num_coded:], TENSOR_PARALLEL)
        for name in (entry if isinstance(entry, tuple) else (entry,))
        if name is not None and mesh.shape[name] > 1
    ]
    leaf: Any = jax.ShapeDtypeStruct
    codes, scales = leaf(shape, storage.dtype(backend_of(mesh))), leaf(by_scale, np.float32)
    zeros = leaf(by_scale, np.int16) if storage.zeros else None
    dtype, cut = np.dtype(dense.array.dtype).name, tuple(cut_over)
    if isinstance(dense, DenseExperts):
        return CodedExperts(
            codes=codes,
            scales=scales,
            zeros=zeros,
            storage=storage,
            arithmetic=arithmetic,
            dtype=dtype,
            cut_over=cut,
        )
    return CodedWeight(
        codes=codes,
        scales=scales,
        zeros=zeros,
        num_in=num_in,
        storage=storage,
        arithmetic=arithmetic,
        dtype=dtype,
        cut_over=cut,
        tied=dense.tied,
    )


def backend_of(mesh: Mesh | AbstractMesh) -> str:
    """'cpu', or what its devices are called; '' for a mesh without devices, which no CPU has."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""


def load_coded(
    weight: Any,
    placed: Any,
    read: Callable[[Index], np.ndarray],
    read_groups: GroupReader | None,
    order: Callable[[], np.ndarray] | None,
    storage: Storage,
    name: str,
) -> list[jax.Array]:
    """The arrays of one weight of codes, with offsets and an order where it has them, in the order of its leaves.

    `weight` has their shapes, `placed` their shardings; `read` gives any slice of the whole as records
    (`quantised.coding`), `read_groups` one that cuts no group as codes and groups, in less time, `order` all of the
    order. A share is read once for all of its arrays. Raises CheckpointError.
    """
    leaves, shardings = jax.tree.leaves(weight), jax.tree.leaves(placed)
    num_in = codes_of(weight).num_in
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, cuts in shardings[0].addressable_devices_indices_map(leaves[0].shape).items():
        bounds = tuple(cut.indices(size)[:2] for cut, size in zip(cuts, leaves[0].shape, strict=True))
        devices_of.setdefault(bounds, []).append(device)
    of_codes = len(leaves) - storage.ordered
    shares: list[list[jax.Array]] = [[] for _ in range(of_codes)]
    for bounds, devices in devices_of.items():
        index = tuple(slice(*bound) for bound in bounds)
        if read_groups is None:
            parts = read_parts(read, index, max(1, num_in), storage, leaves[0].dtype, name)
        else:
            parts = parts_of(*read_groups(index), storage, leaves[0].dtype)
        arrays = [array for array in (parts.codes, parts.scales, parts.zeros, parts.offsets) if array is not None]
        for share, array in zip(shares, arrays, strict=True):
            share += [jax.device_put(array, device) for device in devices]
    made: list[jax.Array] = [
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, share)
        for leaf, sharding, share in zip(leaves[:of_codes], shardings[:of_codes], shares, strict=True)
    ]
    if order is not None:
        whole = order()
        made.append(jax.make_array_from_callback(leaves[-1].shape, shardings[-1], lambda index: whole[index]))
    return made


def codes_of(weight: Any) -> CodedWeight | CodedExperts:
    """The codes inside of a weight that has offsets or an order."""
    if isinstance(weight, Reordered):
        return codes_of(weight.weight)
    return weight.codes if isinstance(weight, WithOffsets | ExpertsWithOffsets) else weight


def padded_order(
    order: np.ndarray, in_shape: tuple[int, ...], padded: tuple[int, ...], blocks: Iterable[Block]
) -> np.ndarray:
    """An order of the inputs of a checkpoint's weight as int32 [*in] of the padded one; padding stays in its place.

    `blocks`: of the parameter, which end with its inputs.
    """
    grid = np.arange(math.prod(padded), dtype=np.int32).reshape(padded)
    places = np.zeros(in_shape, np.int32)
    for block in blocks:
        runs = block[len(block) - len(in_shape) :]
        to = tuple(slice(to, to + size) for to, _, size in runs)
        places[tuple(slice(start, start + size) for _, start, size in runs)] = grid[to]
    flat, found = places.reshape(-1), grid.reshape(-1).copy()
    found[flat] = flat[order]
    return found.reshape(padded)


def draw_others(weight: Any, placed: Any, reach: float) -> tuple[float, list[jax.Array]]:
    """For codes at random: how far they reach, and scales with which the weights reach `reach`, zeros and offsets of 0,
    and inputs in their order."""
    code = codes_of(weight).storage.code
    most = CODES[code][1]
    _, scales, *others = zip(jax.tree.leaves(weight), jax.tree.leaves(placed), strict=True)
    made: list[jax.Array] = [jnp.full(scales[0].shape, reach / most, scales[0].dtype, device=scales[1])]
    for leaf, sharding in others:
        if isinstance(weight, Reordered) and leaf is weight.order:
            order = np.arange(math.prod(leaf.shape), dtype=np.int32).reshape(leaf.shape)
            made.append(jax.make_array_from_callback(leaf.shape, sharding, lambda index, order=order: order[index]))
        else:
            made.append(jnp.zeros(leaf.shape, leaf.dtype, device=sharding))
    return _MOST_FLOAT4 if code == "float4_e2m1fn" else most, made


def share_bytes(variable: nnx.Variable, placed: nnx.Variable) -> int:
    """Bytes of the arrays of a parameter that the devices of this process hold."""
    return sum(
        array_bytes(math.prod(sharding.shard_shape(leaf.shape)), leaf.dtype) * len(sharding.addressable_devices)
        for leaf, sharding in zip(jax.tree.leaves(variable), jax.tree.leaves(placed), strict=True)
    )
