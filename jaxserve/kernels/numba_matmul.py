"""Products of CPUs: with float weights in panels (`packed_weight`), and with integer codes in such (`packed_codes`, and
`packed_blocks` where those of a GGUF file are multiplied with rows of eight bits)."""

from typing import Any, TypeGuard

from jaxserve.kernels import packed_blocks, packed_codes
from jaxserve.kernels.block_codes import SPAN
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.composed_weight import WithOffsets
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Matmul, MatmulUse, Weight
from jaxserve.kernels.packed_weight import pack, packed_shape, panel_width
from jaxserve.kernels.storage import Arithmetic, Storage
from jaxserve.kernels.xla_matmul import DenseWeight


def make_matmul(device: Device) -> Matmul:
    """The implementation for a device; it refuses all that are no CPUs."""

    def refuses(use: MatmulUse) -> str | None:
        if device.backend != "cpu":
            return f"it runs on CPUs alone, and this is a {device.backend}"
        if use.num_devices > 1:
            return (
                f"{use.num_devices} devices share each weight, and packed ones are never cut; set parallel.tensor to 1"
            )
        if use.storage is not None and use.storage.code not in packed_codes.STORED:
            return f"it has no products with {use.storage.code}; model.quantization: none widens such weights"
        if use.storage is not None and (use.storage.group or 0) % packed_codes.LEAST_RUN:
            return (
                f"{use.storage.group} inputs share a scale, but groups must be a multiple of {packed_codes.LEAST_RUN}; "
                "model.quantization: none widens such weights"
            )
        if use.dtype not in machine_code.DTYPES:
            return f"weights are {use.dtype}, and can be read as {' or '.join(machine_code.DTYPES)} alone"
        return machine_code.missing()

    def convert(weight: DenseWeight | CodedWeight | WithOffsets) -> Weight:
        if in_blocks(weight):
            return packed_blocks.pack(weight, panel_width())
        assert not isinstance(weight, WithOffsets), "its parts are given one by one"
        if weight.num_in == 0:
            return weight
        if isinstance(weight, CodedWeight):
            return packed_codes.pack(weight, panel_width())
        return pack(weight.array, weight.num_in, panel_width())

    def shapes(weight: DenseWeight | CodedWeight | WithOffsets) -> Weight:
        if in_blocks(weight):
            return packed_blocks.shape_of(weight, panel_width())
        assert not isinstance(weight, WithOffsets), "its parts are given one by one"
        if weight.num_in == 0:
            return weight
        if isinstance(weight, CodedWeight):
            return packed_codes.shape_of(weight, panel_width())
        return packed_shape(weight.array, weight.num_in, panel_width())

    def prepare(use: MatmulUse) -> None:
        if use.storage is None:
            machine_code.provide("matmul", use.dtype)
            if use.adapters:
                machine_code.provide("matmul", f"adapted_{use.dtype}")
        elif _is_of_blocks(use.storage, use.arithmetic):
            packed_blocks.prepare(str(use.storage.blocks))
        else:
            packed_codes.prepare(code=use.storage.code, zeros=use.storage.zeros, block=use.arithmetic.block)

    return Matmul(
        name="numba_cpu",
        convert=convert,
        shapes=shapes,
        refuses=refuses,
        prepare=prepare,
        takes_whole=in_blocks,
        row_invariant=True,
    )


def in_blocks(weight: Any) -> TypeGuard[CodedWeight | WithOffsets]:
    """Whether a weight is packed as codes in blocks, its offsets included."""
    coded = weight.codes if isinstance(weight, WithOffsets) else weight
    return isinstance(coded, CodedWeight) and _is_of_blocks(coded.storage, coded.arithmetic)


def _is_of_blocks(storage: Storage, arithmetic: Arithmetic) -> bool:
    return storage.blocks is not None and arithmetic.block == SPAN
