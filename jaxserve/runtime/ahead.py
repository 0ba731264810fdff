"""A model's executables for a device that is not here, from its config.json alone.

Owns the way from a `DecoderConfig` and the name of a topology to compiled steps. Refuses to judge them: whether they
fit and how fast they would be is the planner's to say, what they move is counted by `traffic`.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config_schema import Config
from jaxserve.kernels import dispatch
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import abstract_decoder
from jaxserve.runtime.build import attention_uses, resolve_sizes
from jaxserve.runtime.compile import Compiled, compile_all
from jaxserve.runtime.executables import AbstractModel, make_jobs, placed
from jaxserve.runtime.topology import absent_devices, device_of_topology, single_device_mesh


def compile_ahead(
    config: Config, model: DecoderConfig, *, topology: str, num_pages: int, dtype: str = "bfloat16"
) -> Mapping[str, Compiled]:
    """Every executable that a server with `config` would build on one device of `topology`, by name.

    Raises ConfigError for a topology that cannot be compiled for here, and what resolving the config raises.
    """
    device = device_of_topology(topology)
    mesh = single_device_mesh(absent_devices(topology)[0])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights_dtype: np.dtype = jnp.dtype(dtype)
    sizes = resolve_sizes(config, model, weights_dtype, device.backend)
    attention = dispatch.resolve(
        device=device, choice=config.kernels.paged_attention, uses=attention_uses(model, sizes, weights_dtype)
    )
    graphdef, weights = nnx.split(abstract_decoder(model, weights_dtype))
    abstract = AbstractModel(graphdef=graphdef, weights=placed(weights, sharding), config=model)
    jobs = make_jobs(abstract, sizes, attention, num_pages, sharding)
    # libtpu crashes now and then when two threads compile for chips that are not there (segmentation faults, 0.0.42).
    threads = 1 if device.backend == "tpu" else config.runtime.compile_threads
    return compile_all(jobs, threads, lambda *_: None, mesh)
