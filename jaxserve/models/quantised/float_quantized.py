"""compressed-tensors' float-quantized: one float8 to a weight.

X.weight        float8_e4m3fn [out, in]
X.weight_scale  one number, [out, 1], or [ceil(out / 128), ceil(in / 128)] with blocks of that size
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.one_byte import Grid, OneByteTensor, open_one_byte
from jaxserve.models.quantised.scheme import Format, beside
from jaxserve.models.safetensors_files import TensorSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FloatQuantized(Format):
    """One weight. `grid`: outputs and inputs of one scale."""

    grid: Grid
    bits: int = 8

    @classmethod
    def read(cls, args: GroupArgs) -> "FloatQuantized":
        """Raises CheckpointError for settings that the format does not have."""
        args.require(type="float", bits=(8,), strategy=("tensor", "channel", "group", "block"))
        if not args.symmetric:
            args.fail("symmetric is false, but must be true")
        return cls(grid=args.grid)

    @property
    def storage(self) -> Storage | None:
        return Storage(code="float8_e4m3fn", group=self.grid[1])

    def required(self, name: str) -> tuple[str, ...]:
        return name, beside(name, "weight_scale")

    def optional(self, name: str) -> tuple[str, ...]:
        return (beside(name, "input_scale"),)

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> OneByteTensor:
        return open_one_byte(name, tensors, dtype="float8_e4m3fn", grid=self.grid, scale="weight_scale")
