"""Weights of a CPU in the order that its own product reads: once, between reading and running.

Owns which weights are packed, and that two copies of all of them never exist. Refuses layouts (`PackedWeight` has
them) and whether to (`resolve.packing_width`).
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flax import nnx

from jaxserve.kernels.packed_weight import PackedWeight, pack, packed_shape
from jaxserve.models.loading import PlannedModel
from jaxserve.models.sharding import with_value
from jaxserve.models.weights import Path


def packed(planned: PlannedModel, width: int) -> PlannedModel:
    """The same model, whose weights will be packed in panels of `width` columns."""

    def shape(variable: nnx.Variable) -> nnx.Variable:
        return _map_weight(variable, functools.partial(packed_shape, width=width))

    shapes = {path: shape(variable) for path, variable in nnx.to_flat_state(planned.shapes.state)}
    return PlannedModel(
        shapes=dataclasses.replace(planned.shapes, state=nnx.from_flat_state(shapes)),
        fill=lambda: _pack_all(dict(nnx.to_flat_state(planned.fill())), width),
    )


def _pack_all(flat: dict[Path, nnx.Variable], width: int) -> nnx.State:
    """Frees each weight when it is packed: one for each core is there twice."""

    def one(path: Path) -> tuple[Path, nnx.Variable]:
        variable = flat[path]
        new = _map_weight(variable, functools.partial(pack, width=width))
        if new is not variable:
            variable.get_raw_value().delete()  # flax holds on to it, in a cycle, until the collector comes
        return path, new

    with ThreadPoolExecutor(
        os.cpu_count(), thread_name_prefix="jaxserve-pack"
    ) as pool:  # NumPy copies without the lock
        return nnx.from_flat_state(dict(pool.map(one, list(flat))))


def _map_weight(variable: nnx.Variable, fn: Callable[..., PackedWeight]) -> nnx.Variable:
    """The variable with `fn` of its weight, if it is one that is multiplied with."""
    num_in = variable.get_metadata()["num_in"]
    return with_value(variable, fn(variable.get_raw_value(), num_in)) if num_in else variable
