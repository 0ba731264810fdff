"""Models: one decoder, and a module per family that says how to read its checkpoints.

    config.json --adapt--> DecoderConfig --nnx.eval_shape--> abstract Decoder --+
                                                                                |-- nnx.split --> graphdef, state
    *.safetensors --rules--> pieces --slices--> arrays in their shardings ------+

Why one decoder. Families differ by a bias, a norm, a window, an order of two blocks. As a class per family those
differences drown in copies of everything else, and a kernel or a sharding must be fixed as many times. Here a
difference is a field of `LayerSpec` or `DecoderConfig`, read in one place of `layers` or `decoder`, and a family, in
`families`, is an adapter of its config.json and a table of weight rules.

Why rules are strings. A parameter's logical axes say how it lies in memory and, by the names that `sharding` maps to
the mesh, how it is spread; `"embed (heads head_dim)"` says how the tensor lies on disk. The loader turns a device's
share into a slice of the file, so a device never reads more than it holds.

Why a model is cut by hand. A step runs under `shard_map`: modules see the arrays of one device and say where devices
add something up (`sharding.Shards`), and `partition` pads and copies what does not divide, so no cut changes a result
beyond the order of a sum.

The forward pass takes flat ragged batches and a paged cache: `kernels` defines both, `runtime` packs them and passes
the implementation of attention in.
"""

from jaxserve.config.model_path import resolve_model_path
from jaxserve.models.checkpoint import Checkpoint, check_described, configured_checkpoint, read_checkpoint
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import FAMILIES, Family
from jaxserve.models.loading import LoadedModel, PlannedModel, decoder_config, load_model, plan_model
from jaxserve.models.partition import Partition
from jaxserve.models.sharding import TENSOR_PARALLEL, spec_for
from jaxserve.models.trainable import TrainableDecoder, TrainableTower, load_trainable, load_trainable_tower
from jaxserve.models.weight_rules import Rule

__all__ = [
    "FAMILIES",
    "TENSOR_PARALLEL",
    "Checkpoint",
    "Decoder",
    "DecoderConfig",
    "Family",
    "LoadedModel",
    "Partition",
    "PlannedModel",
    "Rule",
    "TrainableDecoder",
    "TrainableTower",
    "check_described",
    "configured_checkpoint",
    "decoder_config",
    "load_model",
    "load_trainable",
    "load_trainable_tower",
    "plan_model",
    "read_checkpoint",
    "resolve_model_path",
    "spec_for",
]
