"""Meshes: the devices that a replica, a stage and a layer use, and the `shard_map` around every compiled function.

Which array is cut over which axis is decided in `models.sharding`.

The axes come in the order replica, stage, expert, sequence, model: neighbours in the list of devices have the fastest
links, and the model axis sums over them twice in every layer.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.models.sharding import MESH_AXES

STAGE_AXIS = "stage"  # of programs over several stages (`stage_links`)


def make_meshes(parallel: ParallelConfig, devices: Sequence[Any]) -> list[list[Mesh]]:
    """[replica][stage] meshes with the axes `MESH_AXES`, over the first devices of the list.

    Raises ConfigError when there are too few devices, or they cannot be dealt out so.
    """
    check_layout(parallel, len(devices), on_cpu=len(devices) > 0 and devices[0].platform == "cpu")
    needed = parallel.data * parallel.pipeline * parallel.tensor
    grid = np.asarray(devices[:needed]).reshape(
        parallel.data, parallel.pipeline, parallel.expert, parallel.tensor // parallel.expert
    )
    return [[Mesh(stage, MESH_AXES) for stage in replica] for replica in grid]


def abstract_meshes(parallel: ParallelConfig, num_devices: int) -> list[AbstractMesh]:
    """The meshes of one replica without devices: enough to count what each would hold. Raises as `make_meshes`."""
    check_layout(parallel, num_devices)
    shape = (parallel.expert, parallel.tensor // parallel.expert)
    return [AbstractMesh(shape, MESH_AXES)] * parallel.pipeline


def check_layout(parallel: ParallelConfig, num_devices: int, *, on_cpu: bool = False) -> None:
    """Raises ConfigError when there are too few devices, or they cannot be dealt out so."""
    if parallel.tensor % parallel.expert:
        divisors = [n for n in range(1, parallel.tensor + 1) if parallel.tensor % n == 0]
        raise ConfigError(
            f"parallel.expert is {parallel.expert}, but deals experts out over the parallel.tensor {parallel.tensor} "
            f"devices of a layer, and does not divide them; take one of {', '.join(map(str, divisors))}"
        )
    if parallel.microbatches is not None and parallel.pipeline == 1:
        raise ConfigError(
            f"parallel.microbatches is {parallel.microbatches}, but parallel.pipeline is 1: a step is cut only where "
            "there are stages; leave it out, or set parallel.pipeline"
        )
    per_replica = parallel.pipeline * parallel.tensor
    needed = parallel.data * per_replica
    if needed > num_devices:
        raise ConfigError(
            f"parallel.data x parallel.pipeline x parallel.tensor = {parallel.data} x {parallel.pipeline} x "
            f"{parallel.tensor} needs {needed} devices, but there are {num_devices}; lower one of them"
            + (f", or let this CPU stand for {needed}: runtime.cpu_devices" if on_cpu else "")
        )


def layer_ranges(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage, as even as they go; the first stages have one more. Raises ConfigError for empty ones."""
    if num_stages > num_layers:
        raise ConfigError(f"parallel.pipeline is {num_stages}, but the model has {num_layers} layers; lower it")
    size, more = divmod(num_layers, num_stages)
    starts = [i * size + min(i, more) for i in range(num_stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def joined(stages: Sequence[Mesh]) -> Mesh:
    """The devices of several stages as one mesh: the axis `STAGE_AXIS` comes before those of each."""
    return Mesh(np.stack([stage.devices for stage in stages]), (STAGE_AXIS, *MESH_AXES))


def is_here(mesh: Mesh) -> bool:
    """Whether this process has devices of the mesh, so that it takes part in what runs there."""
    return len(mesh.local_devices) > 0


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """The whole array on every device of `mesh`."""
    return NamedSharding(mesh, PartitionSpec())


def on_mesh(fn: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fn`, written for the arrays of one device, over the arrays of all devices of `mesh`.

    That outputs are replicated is the promise of `fn`: the check that JAX has for it cannot follow kernels.
    """
    if mesh.size == 1:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
