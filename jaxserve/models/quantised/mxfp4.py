"""gpt-oss' MXFP4: `quant_method: mxfp4`, for the experts of a layer.

    X_blocks  uint8 [experts, out, in / 32, 16]   float4 codes, the first of two in the low half of a byte
    X_scales  uint8 [experts, out, in / 32]   the exponent of a power of two plus 127

X is `gate_up_proj` or `down_proj`. In bfloat16 files these are [experts, in, out]; here outputs are before inputs. Rows
of gate and up lie by turns in both.
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import unpack_fp4, words_of
from jaxserve.models.quantised.checks import check_scales, expect, fail
from jaxserve.models.quantised.fp4 import decode_exponents
from jaxserve.models.quantised.groups import group_range, groups_of
from jaxserve.models.quantised.matching import is_named
from jaxserve.models.quantised.scheme import Format, MethodConfig, Module, ModuleKind, Scheme
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

_GROUP = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4(Format):
    """The experts of one layer."""

    bits: int = 4
    in_major = True

    @property
    def storage(self) -> Storage | None:
        return Storage(code="float4_e2m1fn", group=_GROUP)

    def required(self, name: str) -> tuple[str, ...]:
        return f"{name}_blocks", f"{name}_scales"

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> "Mxfp4Tensor":
        blocks, scales = (tensors[found] for found in self.required(name))
        expect(blocks, ("uint8",))
        if len(blocks.shape) != 4 or blocks.shape[-1] != _GROUP // 2:
            fail(blocks, f"its shape is {list(blocks.shape)}, but blocks are [experts, out, in / 32, 16]")
        expect(scales, ("uint8", "float8_e8m0fnu"), blocks.shape[:-1], because=f"{blocks.name} {list(blocks.shape)}")
        experts, outputs, groups, _ = blocks.shape
        return Mxfp4Tensor(name=name, shape=(experts, outputs, groups * _GROUP), blocks=blocks, scales=scales)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Tensor:
    """A `QuantisedTensor`."""

    name: str
    shape: tuple[int, ...]
    blocks: TensorSource
    scales: TensorSource

    @property
    def outer_axis(self) -> int:
        return 1  # of an expert; all experts would be too much to hold at once

    def read(self, index: Index) -> QuantisedSlice:
        experts, outputs, inputs = index
        groups = group_range(inputs, _GROUP)
        _, kept = words_of(inputs, _GROUP)
        blocks = self.blocks.read((experts, outputs, groups, slice(0, _GROUP // 2)))
        octets = blocks.reshape(*blocks.shape[:2], blocks.shape[2] * blocks.shape[3])
        scales = decode_exponents(self.scales.read((experts, outputs, groups)))
        check_scales(scales, self.scales, self.blocks.name, (experts.start, outputs.start, groups.start))
        return QuantisedSlice(
            codes=unpack_fp4(octets)[..., kept], scales=scales, zeros=None, group_of=groups_of(inputs, _GROUP)
        )


class Mxfp4Scheme(Scheme):
    """All experts that `modules_to_not_convert` does not name."""

    def __init__(self, config: MethodConfig) -> None:
        self._skipped = config.strings("modules_to_not_convert")
        self._format = Mxfp4()
        config.check_all_read("MXFP4", ("quant_method", "dequantize"))
        super().__init__("MXFP4, codes of 4 bits, groups of 32")

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self._format,)

    def format_of(self, module: Module) -> Format | None:
        is_experts = module.kind is ModuleKind.EXPERTS
        return self._format if is_experts and not is_named(module.name, self._skipped) else None
