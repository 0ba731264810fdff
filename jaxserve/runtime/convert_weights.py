"""Weights in the form that the chosen products want: once, between reading and running.

Executables are compiled for the new shapes while the weights are still read. Each weight is freed when it is converted,
so that two copies of all of them never exist.
"""

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.composed_weight import mapped
from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmul
from jaxserve.kernels.matmul import Matmul, Weight
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.models.loading import PlannedModel
from jaxserve.models.sharding import WeightParameter, shardings_for
from jaxserve.models.tower_loading import PlannedTower
from jaxserve.models.weights import Path
from jaxserve.runtime.kept_weights import KeptWeights, Write


def converted(planned: PlannedModel, forms: "Forms", kept: KeptWeights | None = None) -> PlannedModel:
    """The same model, whose weights will have these forms, cut over devices as they say.

    `kept`: they are read from there where an earlier start has left them; None: they are packed anew.
    """
    state = nnx.map_state(lambda _, variable: forms.shapes(variable), planned.shapes.state)
    shapes = dataclasses.replace(planned.shapes, state=state)

    def fill() -> nnx.State:
        shardings = shardings_for(state, shapes.mesh)
        file = None if kept is None else kept.file_of(state, shardings, shapes.layers)
        if file is None:
            return _convert_all(planned.fill(), shardings, forms)
        if (found := file.load()) is not None:
            return found
        with file.writing() as write:
            return _convert_all(planned.fill(), shardings, forms, write)

    return PlannedModel(
        shapes=shapes,
        fill=fill,
        place=lambda params: _convert_all(planned.place(params), shardings_for(state, shapes.mesh), forms),
    )


def converted_tower(planned: PlannedTower, forms: "Forms") -> PlannedTower:
    """The same for a vision tower, of which every device has the whole."""
    state = nnx.map_state(lambda _, variable: forms.shapes(variable), planned.state)

    def fill(mesh: Mesh) -> tuple[jax.Array, ...]:
        found = jax.tree.unflatten(jax.tree.structure(planned.state), planned.fill(mesh))
        everywhere = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(lambda _: everywhere, state)
        return tuple(jax.tree.leaves(_convert_all(found, placed, forms)))

    return dataclasses.replace(planned, state=state, fill=fill)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """The implementations that say the form of each kind of weight; parameters that are no weights stay as they are.

    `grouped_matmul`: None: of a model that has no experts.
    """

    matmul: Matmul
    grouped_matmul: GroupedMatmul | None = None

    def convert(self, variable: nnx.Variable) -> nnx.Variable:
        """The variable around its weight in the form that is wanted."""
        return self._changed(variable, lambda form, weight: form.convert(weight))

    def shapes(self, variable: nnx.Variable) -> nnx.Variable:
        """What `convert` gives, with shapes in place of arrays, for a variable around such."""
        return self._changed(variable, lambda form, weight: form.shapes(weight))

    def _changed(self, variable: nnx.Variable, change: Callable[[Matmul | GroupedMatmul, Any], Any]) -> nnx.Variable:
        """The variable with `change` of each of the weights in it."""
        if not isinstance(variable, WeightParameter):
            return variable
        weight = variable.get_raw_value()
        new = mapped(weight, lambda inner: change(self._of(inner), inner), self.matmul.takes_whole)
        return variable if new is weight else variable.replace(new)

    def _of(self, weight: Weight | ExpertWeight) -> Matmul | GroupedMatmul:
        if not isinstance(weight, DenseExperts | CodedExperts):
            return self.matmul
        assert self.grouped_matmul is not None, "a model with experts, and no implementation of their products"
        return self.grouped_matmul


def _convert_all(
    state: nnx.State, shardings: nnx.State, forms: Forms, write: Write = lambda path, variable: None
) -> nnx.State:
    """Frees each weight when it is converted: one for each core is there twice. `shardings`: of the new weights.

    `write` is given each parameter as it is in the end.
    """
    placed = dict(nnx.to_flat_state(shardings))

    def one(item: tuple[Path, nnx.Variable]) -> tuple[Path, nnx.Variable]:
        path, old = item
        new = forms.convert(old)
        if new is old:
            write(path, old)
            return item
        kept = {id(leaf) for leaf in jax.tree.leaves(new)}
        new = jax.block_until_ready(jax.device_put(new, placed[path]))
        for leaf in jax.tree.leaves(old):
            if id(leaf) not in kept:
                leaf.delete()  # flax holds on to it, in a cycle, until the collector comes
        write(path, new)
        return path, new

    with ThreadPoolExecutor(
        os.cpu_count(), thread_name_prefix="jaxserve-convert"
    ) as pool:  # NumPy copies without the lock
        return nnx.from_flat_state(dict(pool.map(one, nnx.to_flat_state(state))))
