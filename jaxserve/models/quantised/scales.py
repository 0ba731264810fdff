"""`ScaleGrid`: scales as a grid over a weight [out, in]: one for all, for a row, a group of inputs or a block."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.models.quantised.bits import to_float32
from jaxserve.models.quantised.checks import check_scales, expect
from jaxserve.models.quantised.groups import group_range, groups_of
from jaxserve.models.safetensors_files import TensorSource

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGrid:
    """The scales of one weight.

    Attributes:
      tensor: [ceil(out / rows), ceil(in / columns)]; with one scale in all, of any shape with one element.
      of: name of the tensor of codes, for messages.
      rows, columns: outputs and inputs of one scale; the last of each may have fewer.
      decode: from what is stored to float32.
    """

    tensor: TensorSource
    of: str
    rows: int
    columns: int
    decode: Callable[[np.ndarray], np.ndarray] = to_float32

    @classmethod
    def open(
        cls,
        tensor: TensorSource,
        of: TensorSource,
        shape: tuple[int, ...],
        *,
        block: tuple[int | None, int | None],
        dtypes: tuple[str, ...] = FLOATS,
        decode: Callable[[np.ndarray], np.ndarray] = to_float32,
    ) -> "ScaleGrid":
        """For a weight of `shape` [out, in]. `block`: outputs and inputs of one scale; None: all of them.

        Raises CheckpointError when element type or shape are others.
        """
        rows, columns = (size if step is None else step for size, step in zip(shape, block, strict=True))
        grid = (-(-shape[0] // rows), -(-shape[1] // columns))
        if grid != (1, 1) or set(tensor.shape) - {1}:
            because = f"{of.name} of shape {list(shape)} with a scale for each {rows} x {columns}"
            expect(tensor, dtypes, grid, because=because)
        expect(tensor, dtypes)
        return cls(tensor=tensor, of=of.name, rows=rows, columns=columns, decode=decode)

    def read(self, outputs: slice, inputs: slice) -> tuple[np.ndarray, np.ndarray]:
        """float32 [outputs, groups] and int32 [inputs]: the scales, and the group of each input.

        Raises CheckpointError for scales that are negative or not finite.
        """
        return self.read_groups(outputs, group_range(inputs, self.columns)), groups_of(inputs, self.columns)

    def read_groups(self, outputs: slice, groups: slice) -> np.ndarray:
        """float32 [outputs, groups], with the same errors."""
        scales = self.decode(self._read(outputs, groups))
        check_scales(scales, self.tensor, self.of, (outputs.start // self.rows, groups.start))
        return self._by_output(scales, outputs)

    def read_stored(self, outputs: slice, groups: slice) -> np.ndarray:
        """[outputs, groups] as they are stored, for zeros that lie as scales do."""
        return self._by_output(self._read(outputs, groups), outputs)

    def _read(self, outputs: slice, groups: slice) -> np.ndarray:
        index = (group_range(outputs, self.rows), groups)
        whole = len(self.tensor.shape) != len(index)  # one scale, of shape [] or [1]
        stored = self.tensor.read(tuple(slice(0, size) for size in self.tensor.shape) if whole else index)
        return stored.reshape([cut.stop - cut.start for cut in index])

    def _by_output(self, values: np.ndarray, outputs: slice) -> np.ndarray:
        return values if self.rows == 1 else values[groups_of(outputs, self.rows)]
