"""The frozen target of a head in training: the decoder over all devices of a mesh, seen as one.

A step of the engine is cut by hand under `shard_map`. Here XLA's partitioner does it: the arrays are the engine's,
cut over the mesh, and the modules see them whole, padding included, since gradients must flow through the head alone.
"""

from jax.sharding import Mesh

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import ConfigError
from jaxserve.models import configured_checkpoint, load_model
from jaxserve.models.loading import LoadedModel
from jaxserve.models.quantised.storing import Quantisation


def load_target(model: ModelConfig, mesh: Mesh) -> LoadedModel:
    """The model of a config, codes widened to floats. Raises CheckpointError, ConfigError."""
    if model.quantization not in ("auto", "none") or model.quantization_rules:
        raise ConfigError(
            f"model.quantization is {model.quantization!r}, but a head is trained beside floats; leave it out: the "
            "head fits the rounded model, too"
        )
    checkpoint = configured_checkpoint(model)
    return load_model(checkpoint, dtype=model.dtype, mesh=mesh, quantisation=Quantisation(scheme="none"))
