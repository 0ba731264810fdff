"""compressed-tensors' int-quantized: one int8 to a weight, as W8A8 checkpoints have it.

X.weight             int8 [out, in]
X.weight_scale       [out, 1], or one number
X.weight_zero_point  int8, of the same shape, where codes are not symmetric
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.one_byte import Grid, OneByteTensor, open_one_byte
from jaxserve.models.quantised.scheme import Format, beside
from jaxserve.models.safetensors_files import TensorSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IntQuantized(Format):
    """One weight. `grid`: outputs and inputs of one scale."""

    grid: Grid
    symmetric: bool
    bits: int = 8

    @classmethod
    def read(cls, args: GroupArgs) -> "IntQuantized":
        """Raises CheckpointError for settings that the format does not have."""
        args.require(type="int", bits=(8,), strategy=("tensor", "channel", "group"))
        return cls(grid=args.grid, symmetric=args.symmetric)

    @property
    def storage(self) -> Storage | None:
        return Storage(code="int8", group=self.grid[1], zeros=not self.symmetric)

    def required(self, name: str) -> tuple[str, ...]:
        return name, beside(name, "weight_scale"), *(() if self.symmetric else (beside(name, "weight_zero_point"),))

    def optional(self, name: str) -> tuple[str, ...]:
        suffixes = ("weight_zero_point", "input_scale", "input_zero_point")
        return tuple(beside(name, suffix) for suffix in suffixes)

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> OneByteTensor:
        return open_one_byte(
            name, tensors, dtype="int8", grid=self.grid, scale="weight_scale", zero="weight_zero_point"
        )
