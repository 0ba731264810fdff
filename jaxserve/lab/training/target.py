"""The frozen target of a head in training: the decoder over all devices of a mesh, seen as one.

A step of the engine is cut by hand under `shard_map`. Here XLA's partitioner does it: the arrays are the engine's,
cut over the mesh, and the modules see them whole, padding included, since gradients must flow through the head alone.
"""

import dataclasses

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.models import configured_checkpoint, load_model
from jaxserve.models.decoder import Decoder
from jaxserve.models.loading import LoadedModel
from jaxserve.models.quantised.storing import Quantisation
from jaxserve.models.sharding import EXPERT_AXIS, WHOLE, Placement, Shards


def load_target(model: ModelConfig, mesh: Mesh) -> LoadedModel:
    """The model of a config, codes widened to floats. Raises CheckpointError, ConfigError."""
    if model.quantization not in ("auto", "none") or model.quantization_rules:
        raise ConfigError(
            f"model.quantization is {model.quantization!r}, but a head is trained beside floats; leave it out: the "
            "head fits the rounded model, too"
        )
    checkpoint = configured_checkpoint(model)
    return load_model(checkpoint, dtype=model.dtype, mesh=mesh, quantisation=Quantisation(scheme="none"))


def whole_placement(model: LoadedModel) -> Placement:
    """As if one device had everything."""
    return dataclasses.replace(model.partition.placement, shards=WHOLE, experts=Shards(count=1, axis=EXPERT_AXIS))


def whole_graphdef(model: LoadedModel) -> nnx.GraphDef:
    """The structure of the target whose arrays have the sizes that they have over all devices."""
    config = model.partition.padded
    abstract = nnx.eval_shape(
        lambda: (config.module or Decoder)(config, np.dtype(model.dtype), placement=whole_placement(model))
    )
    return nnx.split(abstract)[0]
