"""compressed-tensors' nvfp4-pack-quantized: float4 codes, a float8 scale for each 16 inputs, one number for the weight.

X.weight_packed        uint8 [out, in / 2]
X.weight_scale         float8_e4m3fn [out, in / 16]
X.weight_global_scale  float32 [1], which divides the scales
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.quantised.bits import to_float32
from jaxserve.models.quantised.fp4 import Fp4Tensor, ScaleKind, open_fp4
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.scheme import Format, beside
from jaxserve.models.safetensors_files import TensorSource

_GROUP = 16
_SCALES = ScaleKind(dtypes=("float8_e4m3fn",), decode=to_float32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Packed(Format):
    """One weight."""

    bits: int = 4

    @classmethod
    def read(cls, args: GroupArgs) -> "Nvfp4Packed":
        """Raises CheckpointError for settings that the format does not have."""
        args.require(type="float", bits=(4,), strategy=("tensor_group",), group=_GROUP)
        return cls()

    @property
    def storage(self) -> Storage | None:
        return Storage(code="float4_e2m1fn", group=_GROUP)  # twice a float4 is a whole number

    def required(self, name: str) -> tuple[str, ...]:
        return tuple(beside(name, suffix) for suffix in ("weight_packed", "weight_scale", "weight_global_scale"))

    def optional(self, name: str) -> tuple[str, ...]:
        return (beside(name, "input_global_scale"),)

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> Fp4Tensor:
        return open_fp4(name, tensors, group=_GROUP, scales=_SCALES, shared="weight_global_scale")
