"""The group of each input of a slice: consecutive groups, or those that a checkpoint lists in `g_idx`."""

import numpy as np

from jaxserve.models.quantised.checks import fail
from jaxserve.models.safetensors_files import TensorSource


def group_range(inputs: slice, size: int) -> slice:
    """The groups of `size` inputs that a slice touches."""
    return slice(inputs.start // size, -(-inputs.stop // size))


def groups_of(inputs: slice, size: int) -> np.ndarray:
    """int32: the group of each input, counted from the first that the slice touches."""
    return np.arange(inputs.start, inputs.stop, dtype=np.int32) // size - np.int32(inputs.start // size)


def listed_groups(g_idx: TensorSource, inputs: slice, count: int, of: str) -> tuple[slice, np.ndarray]:
    """The groups that a slice touches, and those of each of its inputs, counted from the first.

    `count`: groups in all, as the tensor `of` has them. Raises CheckpointError for a group that does not exist.
    """
    stored = g_idx.read((inputs,))
    outside = np.flatnonzero((stored < 0) | (stored >= count))
    if len(outside):
        at = int(outside[0])
        fail(g_idx, f"input {inputs.start + at} is in group {stored[at]}, but {of} has {count} groups")
    first, last = int(stored.min(initial=count)), int(stored.max(initial=0))
    return slice(first, last + 1), stored - np.int32(first)
