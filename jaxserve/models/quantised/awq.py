"""AWQ, as AutoAWQ writes it: `quant_method: awq`, version gemm, 4 bits with zeros.

    X.qweight  int32 [in, out / 8]   packed along outputs
    X.qzeros   int32 [groups, out / 8]
    X.scales   float16 [groups, out]

The nibbles of a word hold its eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7. The versions gemv, gemv_fast and that
of llm-awq lie otherwise, and are refused.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.kernels.storage import Storage
from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import to_float32, words_of
from jaxserve.models.quantised.checks import check_scales, expect, fail
from jaxserve.models.quantised.groups import group_range, groups_of
from jaxserve.models.quantised.matching import is_named
from jaxserve.models.quantised.scales import FLOATS
from jaxserve.models.quantised.scheme import Format, MethodConfig, Module, ModuleKind, Scheme, beside
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

_PER_WORD = 8
_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # of each output of a word
_INERT = ("quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Format):
    """`group`: inputs of a scale; None: all."""

    group: int | None
    bits: int = 4

    @property
    def storage(self) -> Storage | None:
        return Storage(code="int4", group=self.group, zeros=True)

    def required(self, name: str) -> tuple[str, ...]:
        return tuple(beside(name, suffix) for suffix in ("qweight", "qzeros", "scales"))

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> "AwqTensor":
        qweight = expect(tensors[beside(name, "qweight")], ("int32",))
        if len(qweight.shape) != 2:
            fail(qweight, f"its shape is {list(qweight.shape)}, but packed codes have two axes")
        inputs, words = qweight.shape
        group = self.group or inputs
        groups, because = -(-inputs // group), f"{qweight.name} {list(qweight.shape)} with groups of {group}"
        qzeros, scales = tensors[beside(name, "qzeros")], tensors[beside(name, "scales")]
        return AwqTensor(
            name=name,
            shape=(words * _PER_WORD, inputs),
            group=group,
            qweight=qweight,
            qzeros=expect(qzeros, ("int32",), (groups, words), because=because),
            scales=expect(scales, FLOATS, (groups, words * _PER_WORD), because=because),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AwqTensor:
    """A `QuantisedTensor`."""

    name: str
    shape: tuple[int, ...]
    group: int
    qweight: TensorSource
    qzeros: TensorSource
    scales: TensorSource

    @property
    def outer_axis(self) -> int:
        return 1

    def read(self, index: Index) -> QuantisedSlice:
        outputs, inputs = index
        groups = group_range(inputs, self.group)
        scales = to_float32(self.scales.read((groups, outputs)).T)
        check_scales(scales, self.scales, self.qweight.name, (outputs.start, groups.start))
        return QuantisedSlice(
            codes=_unpack(self.qweight, inputs, outputs),
            scales=scales,
            zeros=_unpack(self.qzeros, groups, outputs).astype(np.int16),
            group_of=groups_of(inputs, self.group),
        )


def _unpack(tensor: TensorSource, rows: slice, outputs: slice) -> np.ndarray:
    """uint8 [outputs, rows]."""
    words, kept = words_of(outputs, _PER_WORD)
    octets = np.ascontiguousarray(tensor.read((rows, words)).T).astype("<i4", copy=False).view(np.uint8)
    octets = octets.reshape(words.stop - words.start, rows.stop - rows.start, 4)
    codes = np.empty((len(octets), _PER_WORD, octets.shape[1]), np.uint8)
    for output, nibble in enumerate(_NIBBLE_OF):
        codes[:, output] = octets[:, :, nibble // 2] >> 4 * (nibble % 2) & 15
    return codes.reshape(-1, octets.shape[1])[kept]


class AwqScheme(Scheme):
    """One format for all linear maps of the layers that `modules_to_not_convert` does not name."""

    def __init__(self, config: MethodConfig) -> None:
        version = config.get(config.spelled("version", "format"), "gemm")
        if str(version).lower() != "gemm":
            config.fail(
                f"version is {version!r}, which is not supported; known: gemm. Take the checkpoint that AutoAWQ writes "
                "with version gemm"
            )
        config.one_of("backend", "auto", "auto", "autoawq")
        if config.integer(config.spelled("bits", "w_bit")) != 4:
            config.fail(f"bits is {config.get(config.spelled('bits', 'w_bit'))}, which is not supported; known: 4")
        if not config.flag("zero_point", True):
            config.fail("zero_point is false, which is not supported (only true)")
        group = config.group_size(config.spelled("group_size", "q_group_size"), 128)
        self._skipped = config.strings("modules_to_not_convert")
        self._format = Awq(group=group)
        config.check_all_read("AWQ", _INERT)
        super().__init__(f"AWQ, codes of 4 bits, {f'groups of {group}' if group else 'one group for all inputs'}")

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self._format,)

    def format_of(self, module: Module) -> Format | None:
        in_layers = module.kind in (ModuleKind.LAYER, ModuleKind.ROUTER)
        return self._format if in_layers and not is_named(module.name, self._skipped) else None
