"""From a checkpoint directory to a model whose arrays lie where they will be used.

Owns dtype choice, the abstract model, and filling it: from safetensors slice by slice, from Orbax, or at random.
Refuses to run the model and to build meshes.

Why `nnx.split` once: the state is a plain tree of arrays for the compiled step; Python-side flattening of modules
in a loop costs tens of milliseconds a step on large models.
"""

import dataclasses
import functools
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind, read_checkpoint
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, axis_sizes, find_family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.layout import Index, read_target
from jaxserve.models.orbax_store import restore_arrays
from jaxserve.models.safetensors_files import TensorSource, open_tensors
from jaxserve.models.sharding import TENSOR_PARALLEL, Rules, shardings_for, with_value
from jaxserve.models.weights import Path, Piece, check_names, plan_weights

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16")
_RANDOM_STD = 0.02  # the initial spread of most published checkpoints


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for `nnx.merge(graphdef, state)` inside a jit.

    Attributes:
      graphdef, state: of `nnx.split`; the leaves of `state` are arrays in their final shardings.
      shardings: a tree like `state` of shardings.
      config: what was built.
      checkpoint: where it came from.
      dtype: of weights and activations.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    shardings: nnx.State
    config: DecoderConfig
    checkpoint: Checkpoint
    dtype: np.dtype

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.state))

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights, over all devices, replicas not counted."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))


def load_model(
    path: str | FilePath,
    *,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    rules: Rules = TENSOR_PARALLEL,
    random_weights: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """Loads a Hugging Face or Orbax directory (or 'demo') onto the devices of `mesh` (None: the first local device).

    `dtype`: 'auto' is float32 on CPU and what the checkpoint states elsewhere. `random_weights` reads config.json
    alone and draws weights that depend on `seed` and the sizes, not on the mesh.

    Raises CheckpointError for anything wrong with the directory, CapacityError for a mesh that does not divide it.
    """
    checkpoint = read_checkpoint(path)
    family, config = decoder_config(checkpoint)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    chosen = choose_dtype(dtype, platform, checkpoint)
    graphdef, abstract = nnx.split(abstract_decoder(config, chosen))
    shardings = shardings_for(abstract, mesh, rules)
    if random_weights:
        state = _random_state(abstract, shardings, seed)
    elif checkpoint.kind is CheckpointKind.ORBAX:
        state = _restore_state(checkpoint, abstract, shardings)
    else:
        state = _read_state(checkpoint, family, config, abstract, shardings)
    return LoadedModel(
        graphdef=graphdef, state=state, shardings=shardings, config=config, checkpoint=checkpoint, dtype=chosen
    )


def decoder_config(checkpoint: Checkpoint) -> tuple[Family, DecoderConfig]:
    """The family and the config of a checkpoint. Raises CheckpointError when it is not one we run."""
    family = find_family(checkpoint.config, checkpoint.config_file)
    return family, family.adapt(HfConfig(checkpoint.config, checkpoint.config_file))


def abstract_decoder(config: DecoderConfig, dtype: np.dtype) -> Decoder:
    """A decoder of shapes alone; nothing is allocated."""
    return nnx.eval_shape(lambda: Decoder(config, dtype))


def choose_dtype(name: str, platform: str, checkpoint: Checkpoint) -> np.dtype:
    """The dtype that 'auto', 'float32' or 'bfloat16' means for this checkpoint on this platform."""
    if name not in DTYPES:
        raise CheckpointError(f"dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    if name == "auto":
        # XLA computes bfloat16 on CPUs up to 17 times slower than float32.
        stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"
        name = "float32" if platform == "cpu" or stated == "float32" else "bfloat16"
    return jnp.dtype(name)


def _read_state(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig, abstract: nnx.State, shardings: nnx.State
) -> nnx.State:
    """Every parameter from safetensors, a few at a time, each device's share read by itself."""
    params = dict(nnx.to_flat_state(abstract))
    plan = plan_weights(family, config, {path: param.shape for path, param in params.items()})
    tensors = checked_tensors(checkpoint, family, config, plan)
    sizes = axis_sizes(config)
    placed = dict(nnx.to_flat_state(shardings))

    def load(path: Path) -> jax.Array:
        param = params[path]
        reader = shard_reader(plan[path], tensors, sizes, param.shape, param.dtype)
        return jax.make_array_from_callback(param.shape, placed[path].get_raw_value(), reader)

    # Copies and transpositions release the interpreter lock, so threads keep all cores and the disk busy.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        arrays = dict(zip(params, pool.map(load, params), strict=True))
    return nnx.map_state(lambda path, param: with_value(param, arrays[path]), abstract)


def _restore_state(checkpoint: Checkpoint, abstract: nnx.State, shardings: nnx.State) -> nnx.State:
    """Every parameter from Orbax, straight into its sharding."""
    placed = dict(nnx.to_flat_state(shardings))
    wanted = {
        path: jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=placed[path].get_raw_value())
        for path, param in nnx.to_flat_state(abstract)
    }
    arrays = restore_arrays(checkpoint.path, wanted)
    return nnx.map_state(lambda path, param: with_value(param, arrays[path]), abstract)


def checked_tensors(
    checkpoint: Checkpoint, family: Family, config: DecoderConfig, plan: Mapping[Path, list[Piece]]
) -> dict[str, TensorSource]:
    """The open tensors of a Hugging Face directory, all there and of the right shapes, still unread.

    Raises CheckpointError with every missing and unknown name, or every wrong shape.
    """
    tensors, sizes = open_tensors(checkpoint.path), axis_sizes(config)
    check_names(family, config, plan, tensors, str(checkpoint.path))
    wrong = []
    for piece in (piece for pieces in plan.values() for piece in pieces):
        tensor, expected = tensors[piece.source], piece.pattern.source_shape(sizes)
        if tensor.shape != expected:
            wrong.append(f"{tensor.name} in {tensor.file} is {list(tensor.shape)}, not {list(expected)}")
    if wrong:
        raise CheckpointError(f"shapes disagree with config.json: {'; '.join(wrong)}")
    return tensors


def shard_reader(
    pieces: list[Piece],
    tensors: Mapping[str, TensorSource],
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> Callable[[Index | None], np.ndarray]:
    """A callback of `make_array_from_callback`: one shard's share of one parameter, from all pieces it overlaps."""

    def read_shard(index: Index | None) -> np.ndarray:
        assert index is not None, shape
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, shape, strict=True)]
        out = np.empty([len(b) for b in bounds], dtype)
        for piece in pieces:
            cuts = [slice(b.start, b.stop) for b in bounds]
            into: list[slice] = [slice(None)] * len(shape)
            if piece.part is not None:
                axis, want = piece.part.axis, bounds[piece.part.axis]
                start, stop = max(want.start, piece.part.start), min(want.stop, piece.part.stop)
                if start >= stop:
                    continue
                cuts[axis] = slice(start - piece.part.start, stop - piece.part.start)
                into[axis] = slice(start - want.start, stop - want.start)
            out[tuple(into)] = read_target(tensors[piece.source].read, piece.pattern, sizes, tuple(cuts))
        return out

    return read_shard


def _random_state(abstract: nnx.State, shardings: nnx.State, seed: int) -> nnx.State:
    """Weights of a common spread, norms at one, biases at zero. One key per parameter name."""
    placed = dict(nnx.to_flat_state(shardings))

    def draw(path: Path, param: nnx.Variable) -> nnx.Variable:
        kind, sharding = path[-1], placed[path].get_raw_value()
        if kind == "weight":
            array = jnp.ones(param.shape, param.dtype, device=sharding)
        elif kind == "bias":
            array = jnp.zeros(param.shape, param.dtype, device=sharding)
        else:
            key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(".".join(map(str, path)).encode()))
            array = _drawer(param.shape, param.dtype, sharding)(key)
        return with_value(param, array)

    return nnx.map_state(draw, abstract)


@functools.cache
def _drawer(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding
) -> Callable[[jax.Array], jax.Array]:
    """Draws where the array will live, so that no device holds more than its share; one compilation per shape."""

    def draw(key: jax.Array) -> jax.Array:
        # Uniform with that spread: the normal distribution costs several times as much on CPUs and shows nothing more.
        reach = _RANDOM_STD * 3**0.5
        return jax.random.uniform(key, shape, jnp.float32, -reach, reach).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
