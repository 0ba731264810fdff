"""The small einops language of weight rules, and the mapping from slices of a parameter to slices of a tensor on disk.

The source is a callable that returns a slice, so nothing here knows files or devices. einops itself needs the whole
tensor, and the point is to read only what one device holds.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable

import numpy as np

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The layout of a tensor on disk and of the parameter it fills.

    Attributes:
      source: names of the axes of each axis on disk, several where one is a product.
      target: names of the parameter's axes.
      shape: of the part of the parameter that the tensor fills; 1 for axes that the source does not have.
    """

    source: tuple[tuple[str, ...], ...]
    target: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each axis."""
        return dict(zip(self.target, self.shape, strict=True))

    @property
    def source_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[name] for name in names) for names in self.source)


@functools.cache
def parse_axes(axes: str) -> tuple[tuple[str, ...], ...]:
    """'(heads head_dim) embed' as (('heads', 'head_dim'), ('embed',)); a malformed one is a bug in a weight table."""
    found = re.findall(r"\(([^()]*)\)|(\w+)", axes)
    parsed = tuple(tuple((product or single).split()) for product, single in found)
    flat = [name for names in parsed for name in names]
    assert flat and len(set(flat)) == len(flat), axes
    return parsed


def pattern_of(axes: str, target: tuple[str, ...], shape: tuple[int, ...]) -> Pattern:
    """The pattern of a rule for (a part of) a parameter with these axes and this shape."""
    source = parse_axes(axes)
    named = {name for names in source for name in names}
    assert named <= set(target), (axes, target)
    missing = [(name, size) for name, size in zip(target, shape, strict=True) if name not in named and size != 1]
    assert not missing, (axes, missing)
    return Pattern(source=source, target=target, shape=shape)


def read_target(read: Callable[[Index], np.ndarray], pattern: Pattern, target_index: Index) -> np.ndarray:
    """The slice `target_index` of the rearranged tensor, reading as little of the source as its layout allows."""
    source_index, arrange = plan_read(pattern, target_index)
    return arrange(read(source_index))


def plan_read(pattern: Pattern, target_index: Index) -> tuple[Index, Callable[[np.ndarray], np.ndarray]]:
    """What to read of the source for a slice of the rearranged tensor, and the function that makes it of that.

    Of a product axis the outermost factor is cut on disk; a cut of an inner factor is made after reading.
    """
    sizes = pattern.sizes
    wanted = {name: range(*cut.indices(sizes[name])) for name, cut in zip(pattern.target, target_index, strict=True)}
    source_index, elementary = [], []  # cuts on disk; shape of the result, product axes taken apart
    for names in pattern.source:
        outer, inner = wanted[names[0]], math.prod(sizes[name] for name in names[1:])
        source_index.append(slice(outer.start * inner, outer.stop * inner))
        elementary += [len(outer), *(sizes[name] for name in names[1:])]
    flat = [name for names in pattern.source for name in names]
    outermost = {names[0] for names in pattern.source}
    order = [flat.index(name) for name in pattern.target if name in flat]

    def arrange(block: np.ndarray) -> np.ndarray:
        block = block.reshape(elementary)
        block = block[tuple(slice(None) if n in outermost else slice(wanted[n].start, wanted[n].stop) for n in flat)]
        return block.transpose(order).reshape([len(wanted[name]) for name in pattern.target])

    return tuple(source_index), arrange


def write_source(block: np.ndarray, pattern: Pattern) -> np.ndarray:
    """The inverse for a whole tensor: a parameter's array, rearranged as the checkpoint stores it."""
    flat = [name for names in pattern.source for name in names]
    kept = [name for name in pattern.target if name in flat]
    block = block.reshape([pattern.sizes[name] for name in kept]).transpose([kept.index(name) for name in flat])
    return np.ascontiguousarray(block.reshape(pattern.source_shape))
