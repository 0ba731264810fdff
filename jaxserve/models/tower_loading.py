"""From a checkpoint directory to a vision tower whose arrays lie on all devices of a mesh, the same on each.

As `loading`, of which it is the small relative: nothing is cut, and no weight is kept as codes.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import CheckpointError
from jaxserve.kernels.storage import array_bytes
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind
from jaxserve.models.family import Family, find_family
from jaxserve.models.safetensors_files import TensorSource, describe_origin, open_tensors
from jaxserve.models.shard_reading import check_float, respelled, shard_reader
from jaxserve.models.sharding import arrays_of, axes_of
from jaxserve.models.vision_tower import TowerConfig, VisionTower
from jaxserve.models.weights import Path, Piece, check_found, plan_rules

_RANDOM_REACH = 0.02 * 3**0.5  # as `loading` draws weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTower:
    """A tower whose weights are still in their files.

    Attributes:
      graphdef, state: its structure, and shapes.
      mesh: where it will be; abstract where nothing is to be loaded.
      dtype: of weights and activations.
      fill: reads, or draws, the weights: arrays in the order of `jax.tree.leaves(state)`.
    """

    config: TowerConfig
    graphdef: nnx.GraphDef
    state: nnx.State
    mesh: Mesh | AbstractMesh
    dtype: np.dtype
    fill: Callable[[Mesh], tuple[jax.Array, ...]]

    @property
    def weights(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes with shardings."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return tuple(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere) for leaf in jax.tree.leaves(self.state)
        )

    @property
    def num_bytes(self) -> int:
        """Of all weights, on each device."""
        return sum(array_bytes(leaf.size, leaf.dtype) for leaf in jax.tree.leaves(self.state))


def plan_tower(
    checkpoint: Checkpoint,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: np.dtype,
    mesh: Mesh | AbstractMesh,
    random_weights: bool = False,
    seed: int = 0,
) -> PlannedTower | None:
    """The tower of a checkpoint for the devices of `mesh`; None for a family without one.

    `mean`, `std`: of the channels of pixels, as the processor has them. `dtype`: that of the decoder. `random_weights`
    reads config.json alone.

    Raises CheckpointError for anything wrong with its config, names or shapes.
    """
    family = find_family(checkpoint.config, checkpoint.config_file, checkpoint.family)
    config = family.tower_config(checkpoint.config, checkpoint.config_file)
    if config is None:
        return None
    assert family.tower is not None
    graphdef, state = nnx.split(nnx.eval_shape(lambda: config.module(config, mean, std, dtype)))

    def fill(mesh: Mesh) -> tuple[jax.Array, ...]:
        everywhere = NamedSharding(mesh, PartitionSpec())
        if random_weights:
            return _draw(state, everywhere, seed)
        return _read(checkpoint, family, config, state, everywhere)

    return PlannedTower(config=config, graphdef=graphdef, state=state, mesh=mesh, dtype=dtype, fill=fill)


def _read(
    checkpoint: Checkpoint, family: Family, config: TowerConfig, state: nnx.State, sharding: NamedSharding
) -> tuple[jax.Array, ...]:
    """All weights, a few at once. The order is that of the leaves: a parameter of a tower is one array."""
    tower = family.tower
    assert tower is not None
    if checkpoint.kind is not CheckpointKind.HUGGING_FACE:
        raise CheckpointError(
            f"{checkpoint.path}: the vision tower of {family.architecture} is read from safetensors alone; give the "
            "directory of the original checkpoint"
        )
    params, plan = arrays_of(state), tower_rules(family, config, state)
    pieces = [piece for found in plan.values() for piece in found]
    files = respelled(open_tensors(checkpoint.path), family.spellings)
    origin = describe_origin(checkpoint.path, [*files.values()])
    files = {name: tensor for name, tensor in files.items() if re.fullmatch(tower.owns, name)}
    what = f"the vision tower of {family.architecture}"
    check_found(what, files, origin, needed={p.source for p in pieces}, ignored=tower.ignored)
    tensors: dict[str, TensorSource] = {piece.source: check_float(files[piece.source]) for piece in pieces}
    for piece in pieces:
        found = tensors[piece.source].shape
        if found != piece.source_shape:
            raise CheckpointError(
                f"{tensors[piece.source].file}: {piece.source} has the shape {list(found)}, but "
                f"{checkpoint.config_file} says {list(piece.source_shape)}; do config.json and the weights belong "
                "together?"
            )

    def load(path: Path) -> jax.Array:
        param = params[path]
        return jax.make_array_from_callback(
            param.shape, sharding, shard_reader(plan[path], tensors, param.shape, param.dtype)
        )

    with ThreadPoolExecutor() as pool:
        return tuple(jax.block_until_ready([*pool.map(load, params)]))


def tower_rules(family: Family, config: TowerConfig, state: nnx.State) -> dict[Path, list[Piece]]:
    """The tensors of a checkpoint that fill each parameter."""
    assert family.tower is not None
    shapes = {path: param.shape for path, param in arrays_of(state).items()}
    return plan_rules(family.tower.weights, [None] * config.num_layers, shapes, axes_of(state))


def _draw(state: nnx.State, sharding: NamedSharding, seed: int) -> tuple[jax.Array, ...]:
    """Weights of a common spread, norms at one, biases at zero. Made on the host, whatever the mesh."""
    rng = np.random.default_rng(seed)

    def one(path: Path, param: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1] == "weight":
            value = np.ones(param.shape, np.float32)
        elif path[-1] == "bias":
            value = np.zeros(param.shape, np.float32)
        else:
            value = rng.uniform(-_RANDOM_REACH, _RANDOM_REACH, param.shape).astype(np.float32)
        return jax.device_put(value.astype(jnp.dtype(param.dtype)), sharding)

    return tuple(one(path, param) for path, param in arrays_of(state).items())


def tower_of(graphdef: nnx.GraphDef, state: nnx.State, leaves: Sequence[Any]) -> VisionTower:
    """The module around arrays, inside a compiled function."""
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
