"""Checks of sidecar tensors: element types and shapes before anything is read, values slice by slice.

A damaged scale would be a model that talks nonsense, so each error names the tensors, the value and its place.
"""

from typing import NoReturn

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.safetensors_files import TensorSource

REMEDY = (
    "the checkpoint is damaged, or of a tool that writes this format otherwise: fetch it again, or quantise it again"
)


def expect(
    tensor: TensorSource, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None, *, because: str = ""
) -> TensorSource:
    """`tensor`, of one of these element types and of this shape; None: of any.

    Raises CheckpointError; `because`: what the shape follows from.
    """
    if tensor.dtype not in dtypes:
        fail(tensor, f"its element type is {tensor.dtype}, but this format has {' or '.join(dtypes)}")
    if shape is not None and tensor.shape != shape:
        fail(tensor, f"its shape is {list(tensor.shape)}, but {because or 'this format'} needs {list(shape)}")
    return tensor


def fail(tensor: TensorSource, problem: str, remedy: str = REMEDY) -> NoReturn:
    raise CheckpointError(f"{tensor.file}: tensor {tensor.name}: {problem}; {remedy}")


def check_scales(scales: np.ndarray, tensor: TensorSource, of: str, origin: tuple[int, ...]) -> None:
    """Raises CheckpointError unless all scales are finite and at least 0.

    `of`: the tensor that they belong to; `origin`: where in `tensor` the slice begins.
    """
    bad = ~((scales >= 0) & (scales < np.inf))
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = [a + b for a, b in zip(place, origin, strict=True)]
        fail(
            tensor,
            f"{int(bad.sum())} scales of {of} are NaN, infinite or negative, the first is {float(scales[place])} at "
            f"{where}",
        )


def check_codes(codes: np.ndarray, tensor: TensorSource, origin: tuple[int, ...]) -> None:
    """Raises CheckpointError where a float8_e4m3fn code is NaN (0x7f, 0xff)."""
    bad = (codes.view(np.uint8) & 0x7F) == 0x7F
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        where = [a + b for a, b in zip(place, origin, strict=True)]
        fail(tensor, f"{int(bad.sum())} codes are NaN (0x7f or 0xff), the first at {where}")
