"""Models: one decoder, and a module per family that says how to read its checkpoints.

    config.json --adapt--> DecoderConfig --nnx.eval_shape--> abstract Decoder --+
                                                                                |-- nnx.split --> graphdef, state
    *.safetensors --rules--> pieces --slices--> arrays in their shardings ------+

Why one decoder. Llama, Mistral and Qwen differ by a bias, a norm and a window. As a class per family those
differences drown in copies of everything else, and a kernel or a sharding must be fixed as many times. Here a
difference is a field of `DecoderConfig`, read in one place of `layers`, and a family is an adapter of its config.json
and a table of weight rules.

Why rules are strings. `"(heads head_dim) embed -> embed heads head_dim"` says how a tensor is laid out on disk, how
in memory, and (since the names are the logical axes that `sharding` maps to the mesh) how it is spread. The loader
turns a device's share into a slice of the file, so a device never reads more than it holds.

Why a model is cut by hand. A step runs under `shard_map`: modules see the arrays of one device and say where devices
add something up (`sharding.Shards`), and `partition` pads and copies what does not divide, so no cut changes a result
beyond the order of a sum.

The forward pass takes flat ragged batches and a paged cache: `kernels` defines both, `runtime` packs them and passes
the implementation of attention in.
"""

from jaxserve.models.checkpoint import Checkpoint, check_described, read_checkpoint, resolve_model_path
from jaxserve.models.decoder import Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import FAMILIES, Family, Rule
from jaxserve.models.loading import LoadedModel, PlannedModel, load_model, plan_model, read_decoder_config
from jaxserve.models.partition import Partition
from jaxserve.models.sharding import TENSOR_PARALLEL, spec_for

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
    "check_described",
    "load_model",
    "plan_model",
    "read_checkpoint",
    "read_decoder_config",
    "resolve_model_path",
    "spec_for",
]
