"""Decoder and vision tower as differentiable functions of their parameters: what is trained, and what the engine runs.

There is one set of parameters for both. It is a flat dictionary of arrays in the sizes of the checkpoint, whatever the
number of devices that an engine is cut over, so that optax, Orbax and `jax.grad` take it as it is; an engine takes it
through `update_weights`. Attention is plain (`packed_attention`): no pages, whole sequences, one row each.

Under `jax.jit` the arrays may lie on any number of devices: XLA's partitioner cuts the computation as they are cut.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder import CachePlace, Decoder, PictureInputs
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, find_family
from jaxserve.models.layout import read_target, write_source
from jaxserve.models.loading import LoadedModel, choose_dtype, load_model, one_device_mesh
from jaxserve.models.packed_attention import packed_attention, packed_batch
from jaxserve.models.quantised.storing import Quantisation
from jaxserve.models.sharding import EXPERT_AXIS, WHOLE, Axes, Placement, Shards, arrays_of, axes_of, with_leaves
from jaxserve.models.tower_loading import plan_tower, tower_rules
from jaxserve.models.vision_tower import TowerConfig, VisionTower
from jaxserve.models.weights import Path, Piece, name_of, plan_weights

Params = dict[str, jax.Array]  # by the path of each parameter in its module, such as "layers.0.attention.qkv.kernel"


def whole_placement(model: LoadedModel) -> Placement:
    """As if one device had everything."""
    return dataclasses.replace(model.partition.placement, shards=WHOLE, experts=Shards(count=1, axis=EXPERT_AXIS))


def whole_graphdef(model: LoadedModel) -> nnx.GraphDef:
    """The structure of a decoder whose arrays have the sizes that they have over all devices."""
    config = model.partition.padded
    abstract = nnx.eval_shape(
        lambda: (config.module or Decoder)(config, np.dtype(model.dtype), placement=whole_placement(model))
    )
    return nnx.split(abstract)[0]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A module without its parameters, and what they are called in a Hugging Face checkpoint.

    Attributes:
      shapes: of every parameter, by its name.
    """

    shapes: Mapping[str, jax.ShapeDtypeStruct]
    _graphdef: nnx.GraphDef
    _state: nnx.State  # of shapes
    _plan: Mapping[Path, list[Piece]]

    def _merged(self, params: Mapping[str, Array]) -> Any:
        """The module with these parameters."""
        state = nnx.map_state(lambda path, variable: with_leaves(variable, [params[name_of(path)]]), self._state)
        return nnx.merge(self._graphdef, state)

    def to_hf(self, params: Mapping[str, Array]) -> dict[str, np.ndarray]:
        """The tensors of a Hugging Face checkpoint, by their names there, in the dtype of `params`."""
        tensors: dict[str, np.ndarray] = {}
        for path, pieces in self._plan.items():
            array = np.asarray(params[name_of(path)])
            for piece in pieces:
                share = write_source(array[tuple(slice(w.start, w.stop) for w in piece.window)], piece.pattern)
                if piece.source not in tensors:
                    tensors[piece.source] = np.empty(piece.source_shape, share.dtype)
                tensors[piece.source][piece.first : piece.first + len(share)] = share
        return tensors

    def from_hf(self, tensors: Mapping[str, np.ndarray]) -> Params:
        """The parameters of a Hugging Face checkpoint's tensors: the inverse of `to_hf`.

        Raises CheckpointError for tensors that are missing, unknown or of another shape; nothing is kept of them then.
        """
        pieces = [piece for found in self._plan.values() for piece in found]
        names = {piece.source for piece in pieces}
        if wrong := sorted(names ^ tensors.keys()):
            kinds = [f"{name} ({'missing' if name in names else 'unknown'})" for name in wrong]
            raise CheckpointError(
                f"{len(wrong)} of the tensors are not those of the model: {', '.join(kinds[:8])}; give each of the "
                f"{len(names)} that `to_hf` returns, and no other"
            )
        for piece in pieces:
            if tuple(tensors[piece.source].shape) != piece.source_shape:
                raise CheckpointError(
                    f"tensor {piece.source} has shape {list(tensors[piece.source].shape)}, and the model needs "
                    f"{list(piece.source_shape)}; are the tensors those of another model?"
                )
        params: Params = {}
        for path, found in self._plan.items():
            shape = self.shapes[name_of(path)]
            array = np.empty(shape.shape, shape.dtype)
            for piece in found:
                tensor = np.asarray(tensors[piece.source])[piece.first : piece.first + piece.pattern.source_shape[0]]
                whole = tuple(slice(0, len(w)) for w in piece.window)
                share = read_target(lambda index, tensor=tensor: tensor[index], piece.pattern, whole)
                array[tuple(slice(w.start, w.stop) for w in piece.window)] = share
            params[name_of(path)] = jnp.asarray(array)
        return params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainableDecoder(Trainable):
    """A decoder without its parameters. Made by `load_trainable`. `config`: as the checkpoint says."""

    config: DecoderConfig

    def hidden(
        self,
        params: Mapping[str, Array],
        tokens: Int[Array, "B L"],
        lengths: Int[Array, " B"] | None = None,
        pictures: PictureInputs | None = None,
    ) -> tuple[Decoder, Float[Array, "B*L D"]]:
        """The decoder with these parameters, and its final hidden states. Places from `lengths` on mean nothing.

        `pictures`: embeddings in the place of those of tokens, for T = B * L; a `TrainableTower` makes them.
        """
        num_rows, row_len = tokens.shape
        decoder: Decoder = self._merged(params)
        places = jnp.broadcast_to(jnp.arange(row_len), tokens.shape)
        rows = jnp.broadcast_to(jnp.arange(num_rows)[:, None], tokens.shape)
        if lengths is not None:
            rows = jnp.where(places < lengths[:, None], rows, num_rows)
        batch = packed_batch(rows.reshape(-1), places.reshape(-1), num_rows)
        layers = [CachePlace(group=0, slot=layer) for layer in range(len(decoder.layers))]
        nothing = (None,) * len(layers)
        out, _ = decoder(tokens.reshape(-1), nothing, (batch,), layers, packed_attention(row_len), None, pictures)
        return decoder, out

    def logits(
        self, params: Mapping[str, Array], tokens: Int[Array, "B L"], lengths: Int[Array, " B"] | None = None
    ) -> Float[Array, "B L V"]:
        """Unnormalised log-probabilities of the token after each place, float32. `lengths`: tokens of each row; None:
        all are."""
        decoder, hidden = self.hidden(params, tokens, lengths)
        return decoder.logits(hidden).reshape(*tokens.shape, -1)

    def log_probs(
        self, params: Mapping[str, Array], tokens: Int[Array, "B L"], lengths: Int[Array, " B"] | None = None
    ) -> Float[Array, "B L-1"]:
        """Natural logarithm of the probability of each token after the first, given those before it: what the engine
        calls `logprobs`, and `prompt_logprobs` of a prompt. 0 from `lengths` on."""
        logits = self.logits(params, tokens, lengths)[:, :-1]
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=2)[..., 0]
        found = chosen - jax.nn.logsumexp(logits, axis=2)
        if lengths is None:
            return found
        return jnp.where(jnp.arange(1, tokens.shape[1]) < lengths[:, None], found, 0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainableTower(Trainable):
    """A vision tower without its parameters. Made by `load_trainable_tower`. `config`: as the checkpoint says."""

    config: TowerConfig

    def embed(
        self, params: Mapping[str, Array], pixels: UInt8[Array, "N P V"], grid: tuple[int, int, int]
    ) -> Float[Array, "N M D"]:
        """Embeddings of N pictures of one grid: `Picture.pixels` of each, as P patches of V numbers."""
        tower: VisionTower = self._merged(params)
        num_patches = pixels.shape[1]
        padding = 0 if self.config.window is None else -num_patches % self.config.window_patches
        padded = jnp.pad(pixels, ((0, 0), (0, padding), (0, 0)))
        arrays = tower.inputs(self.config, grid, num_patches + padding)
        inputs = {name: jnp.asarray(value) for name, value in arrays.items()}
        return jax.vmap(lambda one: tower(one, inputs))(padded)[:, : self.config.num_tokens(num_patches)]


def load_trainable(source: str | FilePath, *, dtype: str = "auto") -> tuple[TrainableDecoder, Params]:
    """A model as a function, and its parameters, on the first local device.

    Args:
      source: Hugging Face or Orbax directory, or 'demo'.
      dtype: 'auto', 'float32' or 'bfloat16'; codes of a quantised checkpoint are widened to it.

    Raises CheckpointError.
    """
    checkpoint = read_checkpoint(source)
    model = load_model(checkpoint, dtype=dtype, quantisation=Quantisation(scheme="none"))
    family = find_family(checkpoint.config, checkpoint.config_file, checkpoint.family)
    arrays = arrays_of(model.state)
    shapes = {name_of(path): jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in arrays.items()}
    decoder = TrainableDecoder(
        config=model.config,
        shapes=shapes,
        _graphdef=whole_graphdef(model),
        _state=jax.eval_shape(lambda: model.state),
        _plan=_plan(family, model.config, arrays, axes_of(model.state)),
    )
    return decoder, {name_of(path): array for path, array in arrays.items()}


def _plan(
    family: Family, config: DecoderConfig, arrays: Mapping[Path, jax.Array], axes: Mapping[Path, Axes]
) -> dict[Path, list[Piece]]:
    return plan_weights(family, config, {path: array.shape for path, array in arrays.items()}, axes)


def load_trainable_tower(
    source: str | FilePath, *, mean: Sequence[float], std: Sequence[float], dtype: str = "auto"
) -> tuple[TrainableTower, Params]:
    """The vision tower of a model as a function, and its parameters, on the first local device.

    Args:
      source: Hugging Face directory.
      mean, std: of the channels of pixels, as its `PictureProcessor` has them.
      dtype: as for `load_trainable`.

    Raises CheckpointError, also for a model that takes text alone.
    """
    checkpoint = read_checkpoint(source)
    family = find_family(checkpoint.config, checkpoint.config_file, checkpoint.family)
    mesh = one_device_mesh(jax.local_devices()[0])
    chosen = choose_dtype(dtype, mesh.devices.flat[0].platform, checkpoint)
    planned = plan_tower(checkpoint, mean=mean, std=std, dtype=chosen, mesh=mesh)
    if planned is None:
        raise CheckpointError(f"{checkpoint.path} has no vision tower: its architecture takes text alone")
    arrays = arrays_of(planned.state)
    params = {name_of(path): array for path, array in zip(arrays, planned.fill(mesh), strict=True)}
    tower = TrainableTower(
        config=planned.config,
        shapes={name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in params.items()},
        _graphdef=planned.graphdef,
        _state=planned.state,
        _plan=tower_rules(family, planned.config, planned.state),
    )
    return tower, params
