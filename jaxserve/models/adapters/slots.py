"""The form of a slot for an adapter: which projections of a model it changes, with shapes and their cut over devices.

It follows from the decoder's own parameters. A projection of [*out, *in] has A [P, r, *in] and, for each of its P
parts, B [*out of the part, r]. A is cut over devices as the inputs are, and B as the outputs: so a device adds its part
of the product to its part of the sum that the projection makes over devices anyway.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from jaxserve.kernels.low_rank import LowRank, SlotArrays
from jaxserve.models.loading import split_abstract
from jaxserve.models.partition import Partition
from jaxserve.models.sharding import TENSOR_PARALLEL, Axes, arrays_of, axes_of, spec_for
from jaxserve.models.weight_rules import PARTS, Part
from jaxserve.models.weights import Path

_NUM_IN = {"qkv": 1, "out": 2, "gate_up": 1, "up": 1, "down": 1}  # axes that a product sums over, the last ones
_PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionForm:
    """A projection that adapters can change.

    Attributes:
      layer, name: where it is, "qkv" of layer 3 say.
      path: of its kernel in the decoder.
      axes: of the kernel.
      shape: of the kernel over all devices, padding included.
    """

    layer: int
    name: str
    path: Path
    axes: Axes
    shape: tuple[int, ...]

    @property
    def num_in(self) -> int:
        """How many of the axes a product sums over, the last ones."""
        return _NUM_IN[self.name]

    @property
    def in_axes(self) -> Axes:
        return self.axes[-self.num_in :]

    @property
    def out_axes(self) -> Axes:
        return self.axes[: -self.num_in]

    @property
    def in_shape(self) -> tuple[int, ...]:
        return self.shape[-self.num_in :]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.shape[: -self.num_in]

    @property
    def parts(self) -> tuple[Part | None, ...]:
        """Slices of its outputs that have an A each; one that is None is all of them."""
        return tuple(PARTS[name] for name in _PARTS[self.name]) if self.name in _PARTS else (None,)

    @property
    def part_axis(self) -> int:
        """Which of the output axes is cut into parts."""
        first = self.parts[0]
        return 0 if first is None else self.out_axes.index(first.axis)

    def windows(self) -> Iterator[tuple[slice, ...]]:
        """Of each part, its indices of the outputs."""
        for part in self.parts:
            index = [slice(0, size) for size in self.out_shape]
            if part is not None:
                bounds = part.bounds(self.out_shape[self.part_axis])
                index[self.part_axis] = slice(bounds.start, bounds.stop)
            yield tuple(index)

    def shapes(self, rank: int, dtype: np.dtype) -> LowRank:
        """Of one adapter, over all devices."""
        ups = [tuple(cut.stop - cut.start for cut in window) for window in self.windows()]
        return LowRank(
            down=jax.ShapeDtypeStruct((len(ups), rank, *self.in_shape), dtype),
            up=tuple(jax.ShapeDtypeStruct((*shape, rank), dtype) for shape in ups),
            axis=self.part_axis,
        )

    def specs(self) -> LowRank:
        """The cut of `shapes`."""
        up = spec_for((*self.out_axes, None), TENSOR_PARALLEL)
        return LowRank(
            down=spec_for((None, None, *self.in_axes), TENSOR_PARALLEL), up=(up,) * len(self.parts), axis=self.part_axis
        )


def projection_forms(partition: Partition) -> tuple[ProjectionForm, ...]:
    """Those of a whole decoder in the order of its layers. Experts and routers have none."""
    state = split_abstract(partition, np.dtype(np.float32), None)[1]
    axes, forms = axes_of(state), []
    for path, array in arrays_of(state).items():
        if len(path) == 5 and path[0] == "layers" and path[4] == "kernel" and path[3] in _NUM_IN:
            forms.append(
                ProjectionForm(layer=path[1], name=path[3], path=path, axes=axes[path], shape=tuple(array.shape))
            )
    return tuple(sorted(forms, key=lambda form: (form.layer, form.name)))


V = TypeVar("V")
ByLayer = tuple[dict[str, V], ...]  # of each layer, its projections by name
Slot = ByLayer[LowRank]
Slots = ByLayer[SlotArrays]


def by_layer(forms: Sequence[ProjectionForm], values: Sequence[V]) -> ByLayer[V]:
    """A value for each of the forms, as the decoder takes them."""
    layers: list[dict[str, V]] = [{} for _ in range(forms[-1].layer + 1)]
    for form, value in zip(forms, values, strict=True):
        layers[form.layer][form.name] = value
    return tuple(layers)


def slot_shapes(forms: Sequence[ProjectionForm], rank: int, dtype: np.dtype) -> Slot:
    """The arrays of one adapter, over all devices."""
    return by_layer(forms, [form.shapes(rank, dtype) for form in forms])


def slot_specs(forms: Sequence[ProjectionForm]) -> Slot:
    """The cut of `slot_shapes`."""
    return by_layer(forms, [form.specs() for form in forms])
