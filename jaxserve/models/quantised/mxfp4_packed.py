"""compressed-tensors' mxfp4-pack-quantized: float4 codes, and a power of two for each 32 inputs.

X.weight_packed  uint8 [out, in / 2]
X.weight_scale   uint8 [out, in / 32], the exponent plus 127
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.quantised.fp4 import Fp4Tensor, ScaleKind, decode_exponents, open_fp4
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.scheme import Format, beside
from jaxserve.models.safetensors_files import TensorSource

_GROUP = 32
_SCALES = ScaleKind(dtypes=("uint8", "float8_e8m0fnu"), decode=decode_exponents)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Packed(Format):
    """One weight."""

    bits: int = 4

    @classmethod
    def read(cls, args: GroupArgs) -> "Mxfp4Packed":
        """Raises CheckpointError for settings that the format does not have."""
        args.require(type="float", bits=(4,), strategy=("group",), group=_GROUP)
        return cls()

    @property
    def storage(self) -> Storage | None:
        return Storage(code="float4_e2m1fn", group=_GROUP)  # twice a float4 is a whole number

    def required(self, name: str) -> tuple[str, ...]:
        return tuple(beside(name, suffix) for suffix in ("weight_packed", "weight_scale"))

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> Fp4Tensor:
        return open_fp4(name, tensors, group=_GROUP, scales=_SCALES)
