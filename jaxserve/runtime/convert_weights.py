"""Weights in the form that the chosen product wants: once, between reading and running.

Executables are compiled for the new shapes while the weights are still read. Each weight is freed when it is converted,
so that two copies of all of them never exist.
"""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import jax
from flax import nnx

from jaxserve.kernels.matmul import Matmul
from jaxserve.models.loading import LoadedModel, PlannedModel
from jaxserve.models.sharding import WeightParameter, shardings_for
from jaxserve.models.weights import Path


def converted(planned: PlannedModel, matmul: Matmul) -> PlannedModel:
    """The same model, whose weights will have the form of `matmul`, cut over devices as that form says."""

    def shape(_: Path, variable: nnx.Variable) -> nnx.Variable:
        is_weight = isinstance(variable, WeightParameter)
        return variable.replace(matmul.shapes(variable.get_raw_value())) if is_weight else variable

    shapes = dataclasses.replace(planned.shapes, state=nnx.map_state(shape, planned.shapes.state))
    return PlannedModel(shapes=shapes, fill=lambda: _convert_all(planned.fill(), shapes, matmul))


def _convert_all(state: nnx.State, shapes: LoadedModel, matmul: Matmul) -> nnx.State:
    """Frees each weight when it is converted: one for each core is there twice."""
    placed = dict(nnx.to_flat_state(shardings_for(shapes.state, shapes.mesh)))

    def one(item: tuple[Path, nnx.Variable]) -> tuple[Path, nnx.Variable]:
        path, old = item
        if not isinstance(old, WeightParameter):
            return item
        new = old.replace(matmul.convert(old.get_raw_value()))
        kept = {id(leaf) for leaf in jax.tree.leaves(new)}
        new = jax.block_until_ready(jax.device_put(new, placed[path]))
        for leaf in jax.tree.leaves(old):
            if id(leaf) not in kept:
                leaf.delete()  # flax holds on to it, in a cycle, until the collector comes
        return path, new

    with ThreadPoolExecutor(
        os.cpu_count(), thread_name_prefix="jaxserve-convert"
    ) as pool:  # NumPy copies without the lock
        return nnx.from_flat_state(dict(pool.map(one, nnx.to_flat_state(state))))
