"""Which devices a replica, a stage and a layer use, and how a function runs on the devices of one stage.

Owns the cut of a flat list of devices into meshes, and the `shard_map` around everything that is compiled. Refuses
rules (`models.sharding`): a mesh knows names and sizes, not what lies on it.

Why the order replica, stage, expert, sequence, model: neighbours in the list of devices have the fastest links, and
the model axis sums over them twice in every layer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config_schema import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.models.sharding import MESH_AXES


def make_meshes(parallel: ParallelConfig, devices: Sequence[Any]) -> list[list[Mesh]]:
    """[replica][stage] meshes with the axes `MESH_AXES`, over the first devices of the list.

    Raises ConfigError when there are too few devices, or for an axis that no model here can use.
    """
    for name in ("expert", "sequence"):
        if getattr(parallel, name) != 1:
            raise ConfigError(
                f"parallel.{name} is {getattr(parallel, name)}, but no model of this version is cut along that axis; "
                "set it to 1 and use parallel.tensor"
            )
    if parallel.microbatches is not None and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.microbatches is {parallel.microbatches}, but parallel.pipeline is 1: a step is cut only where "
            "there are stages; leave it out, or set parallel.pipeline"
        )
    per_replica = parallel.pipeline * parallel.tensor
    needed = parallel.data * per_replica
    if needed > len(devices):
        raise ConfigError(
            f"parallel.data x parallel.pipeline x parallel.tensor = {parallel.data} x {parallel.pipeline} x "
            f"{parallel.tensor} needs {needed} devices, but there are {len(devices)}; lower one of them"
        )
    grid = np.asarray(devices[:needed]).reshape(
        parallel.data, parallel.pipeline, parallel.expert, parallel.sequence, parallel.tensor
    )
    return [[Mesh(stage, MESH_AXES) for stage in replica] for replica in grid]


def layer_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage, as even as they go; the first stages have one more. Raises ConfigError for empty ones."""
    if num_stages > num_layers:
        raise ConfigError(f"parallel.pipeline is {num_stages}, but the model has {num_layers} layers; lower it")
    size, more = divmod(num_layers, num_stages)
    starts = [i * size + min(i, more) for i in range(num_stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())


def on_mesh(fn: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn`, written for the arrays of one device, over the arrays of all devices of `mesh`.

    Replication of outputs is the word of `fn`: kernels cannot be followed by the check that JAX has for it.
    """
    if mesh.size == 1:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
