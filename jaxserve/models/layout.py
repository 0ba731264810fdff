"""The small einops language of weight rules, and the mapping from slices of a parameter to slices of a tensor on disk.

The source is a callable that returns a slice, so nothing here knows files or devices. einops itself needs the whole
tensor, and the point is to read only what one device holds.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A parsed `"(heads head_dim) embed -> embed heads head_dim"`: axis names per source axis, and target axes.

    A target axis called "1" is new and has one index.
    """

    source: tuple[tuple[str, ...], ...]
    target: tuple[str, ...]

    def source_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(math.prod(sizes[name] for name in names) for names in self.source)

    def target_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(1 if name == "1" else sizes[name] for name in self.target)


@functools.cache
def parse(pattern: str) -> Pattern:
    """Parses a rule's pattern; a malformed one is a bug in a weight table."""
    left, arrow, right = pattern.partition("->")
    axes = re.findall(r"\(([^()]*)\)|(\w+)", left)
    parsed = Pattern(
        source=tuple(tuple((product or single).split()) for product, single in axes), target=tuple(right.split())
    )
    flat = [name for names in parsed.source for name in names]
    assert arrow and sorted(flat) == sorted(n for n in parsed.target if n != "1"), pattern
    return parsed


def read_target(
    read: Callable[[Index], np.ndarray], pattern: Pattern, sizes: Mapping[str, int], target_index: Index
) -> np.ndarray:
    """The slice `target_index` of the rearranged tensor, reading as little of the source as its layout allows.

    Of a product axis the outermost factor is cut on disk; a cut of an inner factor is made after reading.
    """
    wanted = {
        name: range(*cut.indices(1 if name == "1" else sizes[name]))
        for name, cut in zip(pattern.target, target_index, strict=True)
    }
    source_index, elementary = [], []  # cuts on disk; shape of the result, product axes taken apart
    for names in pattern.source:
        outer, inner = wanted[names[0]], math.prod(sizes[name] for name in names[1:])
        source_index.append(slice(outer.start * inner, outer.stop * inner))
        elementary += [len(outer), *(sizes[name] for name in names[1:])]
    block = read(tuple(source_index)).reshape(elementary)
    flat = [name for names in pattern.source for name in names]
    outermost = {names[0] for names in pattern.source}
    block = block[tuple(slice(None) if n in outermost else slice(wanted[n].start, wanted[n].stop) for n in flat)]
    order = [flat.index(name) for name in pattern.target if name != "1"]
    return block.transpose(order).reshape([len(wanted[name]) for name in pattern.target])


def write_source(block: np.ndarray, pattern: Pattern, sizes: Mapping[str, int]) -> np.ndarray:
    """The inverse for a whole tensor: a parameter's array, rearranged as the checkpoint stores it."""
    flat = [name for names in pattern.source for name in names]
    kept = [name for name in pattern.target if name != "1"]
    block = block.reshape([sizes[name] for name in kept]).transpose([kept.index(name) for name in flat])
    return np.ascontiguousarray(block.reshape(pattern.source_shape(sizes)))
