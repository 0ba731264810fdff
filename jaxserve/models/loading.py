"""From a checkpoint directory to a model whose arrays lie where they will be used.

Owns dtype choice, the abstract model, and filling it: from safetensors slice by slice, from Orbax, or at random.
Refuses to run the model, to build meshes, and to know how a model is cut (`partition`).

Why slice by slice: a host must never hold more than the share of its own devices, and little beside it.

Why `nnx.split` once: the state is a plain tree of arrays for the compiled step; Python-side flattening of modules
in a loop costs tens of milliseconds a step on large models.
"""

import dataclasses
import functools
import logging
import math
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import CheckpointError
from jaxserve.models.byte_budget import ByteBudget
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind, read_checkpoint
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, axis_sizes, find_family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.partition import Block, Partition, spread
from jaxserve.models.shard_reading import block_reader, checked_tensors, shard_reader
from jaxserve.models.sharding import MESH_AXES, TENSOR_AXIS, Axes, shardings_for, with_value
from jaxserve.models.weights import Path, plan_weights

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")
_IN_FLIGHT = 0.05  # part of a process's share that may be on its way from the files to the devices
_RANDOM_STD = 0.02  # the initial spread of most published checkpoints


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, or a stage of one, ready for `nnx.merge(graphdef, state)` inside a `shard_map` over `mesh`.

    Attributes:
      graphdef: of `nnx.split`, with the sizes that one device sees.
      state: arrays in their final shardings; over all devices they have the sizes of `partition.padded`.
      config: as the checkpoint says.
      partition: how it is cut over the model axis of `mesh`.
      layers: those of this stage; all of them without a pipeline.
      mesh: axes `sharding.MESH_AXES`.
      checkpoint: where it came from.
      dtype: of weights and activations.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    config: DecoderConfig
    partition: Partition
    layers: range
    mesh: Mesh
    checkpoint: Checkpoint
    dtype: np.dtype

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, over all devices, replicas not counted."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model, or a stage of one, whose weights are still in their files.

    Attributes:
      shapes: the model, with shapes as its `state`: enough to compile for.
      fill: reads, or draws, the weights.
    """

    shapes: LoadedModel
    fill: Callable[[], nnx.State]

    def load(self) -> LoadedModel:
        """Returns when the weights are on their devices. Raises CheckpointError."""
        return dataclasses.replace(self.shapes, state=self.fill())


def load_model(
    path: str | FilePath,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    layers: range | None = None,
    random_weights: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """`plan_model`, then its weights."""
    planned = plan_model(path, dtype=dtype, mesh=mesh, layers=layers, random_weights=random_weights, seed=seed)
    return planned.load()


def plan_model(
    path: str | FilePath,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    layers: range | None = None,
    random_weights: bool = False,
    seed: int = 0,
) -> PlannedModel:
    """A Hugging Face or Orbax directory (or 'demo') for the devices of `mesh` (None: the first local device).

    `dtype`: 'auto' is float32 on CPU and what the checkpoint states elsewhere. `layers`: those of one stage of a
    pipeline; None loads all. `random_weights` reads config.json alone and draws weights that depend on `seed` and the
    sizes, not on the mesh.

    Raises CheckpointError for anything wrong with the directory that can be seen without reading weights.
    """
    checkpoint = read_checkpoint(path)
    family, config = decoder_config(checkpoint)
    mesh = one_device_mesh(jax.local_devices()[0]) if mesh is None else mesh
    chosen = choose_dtype(dtype, mesh.devices.flat[0].platform, checkpoint)
    partition = Partition.of(config, mesh.shape[TENSOR_AXIS])
    graphdef, abstract = split_abstract(partition, chosen, layers)
    filler = _Filler(
        checkpoint=checkpoint,
        family=family,
        partition=partition,
        first_layer=0 if layers is None else layers.start,
        abstract=abstract,
        shardings=shardings_for(abstract, mesh),
        is_whole=layers is None and partition == Partition.of(config, 1),
    )
    if random_weights:
        fill = functools.partial(filler.draw, seed)
    elif checkpoint.kind is CheckpointKind.ORBAX:
        fill = filler.restore
    else:
        fill = filler.reader()
    shapes = LoadedModel(
        graphdef=graphdef,
        state=abstract,
        config=config,
        partition=partition,
        layers=range(config.num_layers) if layers is None else layers,
        mesh=mesh,
        checkpoint=checkpoint,
        dtype=chosen,
    )
    return PlannedModel(shapes=shapes, fill=fill)


def one_device_mesh(device: Any) -> Mesh:
    """A mesh of one device, here or not, with all axes."""
    return Mesh(np.array([device]).reshape((1,) * len(MESH_AXES)), MESH_AXES)


def read_decoder_config(path: str | FilePath) -> DecoderConfig:
    """What the config.json of a directory describes; weights need not be there. Raises CheckpointError."""
    return decoder_config(read_checkpoint(path))[1]


def split_abstract(partition: Partition, dtype: np.dtype, layers: range | None) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure as one device sees it, and the shapes as they are over all devices. Nothing is allocated."""
    graphdef, state = nnx.split(abstract_decoder(partition, dtype, layers, local=True))
    if partition.local != partition.padded:
        _, state = nnx.split(abstract_decoder(partition, dtype, layers, local=False))
    return graphdef, state


def decoder_config(checkpoint: Checkpoint) -> tuple[Family, DecoderConfig]:
    """The family and the config of a checkpoint. Raises CheckpointError when it is not one we run."""
    family = find_family(checkpoint.config, checkpoint.config_file)
    return family, family.adapt(HfConfig(checkpoint.config, checkpoint.config_file))


def abstract_decoder(partition: Partition, dtype: np.dtype, layers: range | None, *, local: bool) -> Decoder:
    """A decoder of shapes alone, of one device (`local`) or over all of them; nothing is allocated."""
    config = partition.local if local else partition.padded
    return nnx.eval_shape(
        lambda: Decoder(config, dtype, layers=layers, shards=partition.shards, num_tokens=partition.model.vocab_size)
    )


def choose_dtype(name: str, platform: str, checkpoint: Checkpoint) -> np.dtype:
    """The dtype that 'auto', 'float32' or 'bfloat16' means for this checkpoint on this platform."""
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    if name == "auto":
        # XLA computes bfloat16 on CPUs up to 17 times slower than float32.
        stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
        name = "float32" if platform == "cpu" or stated == "float32" else "bfloat16"
    return jnp.dtype(name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Filler:
    """What the three ways of filling an abstract model share. Methods return its state with arrays in it.

    `is_whole`: `abstract` has the shapes of the checkpoint, and all its layers.
    """

    checkpoint: Checkpoint
    family: Family
    partition: Partition
    first_layer: int
    abstract: nnx.State
    shardings: nnx.State
    is_whole: bool

    def reader(self) -> Callable[[], nnx.State]:
        """Checks the names and shapes of safetensors. What it returns reads every parameter: a few at a time, each
        device's share by itself."""
        config = self.partition.model
        params = dict(nnx.to_flat_state(self.abstract))
        shapes = self._checkpoint_shapes()
        plan = plan_weights(self.family, config, shapes)
        tensors = checked_tensors(self.checkpoint, self.family, config, plan)
        sizes, placed = axis_sizes(config), dict(nnx.to_flat_state(self.shardings))

        share = {path: _share_bytes(param, placed[path].get_raw_value()) for path, param in params.items()}
        budget = ByteBudget(int(sum(share.values()) * _IN_FLIGHT))

        def load(path: Path) -> jax.Array:
            param, source = params[path], self._source_path(path)
            reader = shard_reader(plan[source], tensors, sizes, shapes[source], param.dtype)
            if param.shape != shapes[source]:
                reader = block_reader(reader, self._blocks(path, shapes[source]), param.shape, param.dtype)
            with budget.of(share[path]):
                array = jax.make_array_from_callback(param.shape, placed[path].get_raw_value(), reader)
                return jax.block_until_ready(array)  # until then the host's copy is held

        # What is on its way comes on top of what is there.
        largest_first = sorted(params, key=lambda path: -share[path])

        def read() -> nnx.State:
            # Copies and transpositions release the interpreter lock, so threads keep all cores and the disk busy.
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                arrays = dict(zip(largest_first, pool.map(load, largest_first), strict=True))
            return nnx.map_state(lambda path, param: with_value(param, arrays[path]), self.abstract)

        return read

    def restore(self) -> nnx.State:
        """Every parameter from Orbax, straight into its sharding; one that is padded or copied, whole and then cut."""
        shapes, placed = self._checkpoint_shapes(), dict(nnx.to_flat_state(self.shardings))
        wanted = {}
        for path, param in nnx.to_flat_state(self.abstract):
            source, sharding = self._source_path(path), placed[path].get_raw_value()
            if shapes[source] != param.shape:
                sharding = NamedSharding(sharding.mesh, PartitionSpec())
            wanted[source] = jax.ShapeDtypeStruct(shapes[source], param.dtype, sharding=sharding)
        from jaxserve.models.orbax_store import restore_arrays  # Orbax takes a quarter of a second to import

        arrays = restore_arrays(self.checkpoint.path, wanted, known=set(shapes))

        def fill(path: Path, param: nnx.Variable) -> nnx.Variable:
            array = arrays.pop(self._source_path(path))
            return with_value(param, self._spread(path, param, placed[path].get_raw_value())(array))

        return nnx.map_state(fill, self.abstract)

    def draw(self, seed: int) -> nnx.State:
        """Weights of a common spread, norms at one, biases at zero. One key per parameter name."""
        shapes, placed = self._checkpoint_shapes(), dict(nnx.to_flat_state(self.shardings))

        def fill(path: Path, param: nnx.Variable) -> nnx.Variable:
            source, sharding = self._source_path(path), placed[path].get_raw_value()
            if path[-1] == "weight":
                return with_value(param, jnp.ones(param.shape, param.dtype, device=sharding))
            if path[-1] == "bias":
                return with_value(param, jnp.zeros(param.shape, param.dtype, device=sharding))
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(map(str, source)).encode()))
            blocks = tuple(self._blocks(path, shapes[source]))
            return with_value(param, _drawer(shapes[source], blocks, param.shape, param.dtype, sharding)(key))

        return nnx.map_state(fill, self.abstract)

    def _source_path(self, path: Path) -> Path:
        """The same parameter in a decoder of all layers."""
        return ("layers", path[1] + self.first_layer, *path[2:]) if path[0] == "layers" else path

    def _checkpoint_shapes(self) -> dict[Path, tuple[int, ...]]:
        """Shapes before padding and copying, of all layers: names are checked against the whole checkpoint."""
        state = self.abstract
        if not self.is_whole:
            _, state = split_abstract(Partition.of(self.partition.model, 1), np.dtype("float32"), None)
        return {path: tuple(param.shape) for path, param in nnx.to_flat_state(state)}

    def _blocks(self, path: Path, shape: tuple[int, ...]) -> list[Block]:
        axes: Axes = dict(nnx.to_flat_state(self.abstract))[path].get_metadata()["logical_axes"]
        return self.partition.blocks(axes, shape)

    def _spread(
        self, path: Path, param: nnx.Variable, sharding: jax.sharding.Sharding
    ) -> Callable[[jax.Array], jax.Array]:
        def cut(array: jax.Array) -> jax.Array:
            if array.shape == param.shape:
                return array
            blocks = self._blocks(path, array.shape)
            return jax.jit(functools.partial(spread, blocks=blocks, shape=param.shape), out_shardings=sharding)(array)

        return cut


def _share_bytes(param: nnx.Variable, sharding: jax.sharding.Sharding) -> int:
    """Bytes of a parameter that the devices of this process hold."""
    shard = math.prod(sharding.shard_shape(tuple(param.shape))) * np.dtype(param.dtype).itemsize
    return shard * len(sharding.addressable_devices)


@functools.cache
def _drawer(
    shape: tuple[int, ...],
    blocks: tuple[Block, ...],
    padded: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> Callable[[jax.Array], jax.Array]:
    """Draws where the array will live, so that no device holds more than its share; one compilation per shape."""

    def draw(key: jax.Array) -> jax.Array:
        # Uniform with that spread: the normal distribution costs several times as much on CPUs and shows nothing more.
        reach = _RANDOM_STD * 3**0.5
        drawn = jax.random.uniform(key, shape, jnp.float32, -reach, reach).astype(dtype)
        return spread(drawn, list(blocks), padded)

    return jax.jit(draw, out_shardings=sharding)
