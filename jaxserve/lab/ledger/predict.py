"""The predicted time of one call of a kernel on one chip, beside the time that its bytes need."""

import dataclasses

from jaxserve.lab.ledger.bundles import Program
from jaxserve.lab.ledger.calls import KernelCall
from jaxserve.lab.ledger.walk import Rates, Walk, walk
from jaxserve.values.chips import Chip

# libtpu's names of the dtypes that a matrix unit multiplies, and those of `Chip.flops`.
_DTYPES = {"bf16": "bfloat16", "s8": "int8", "u8": "int8", "f8e4m3fn": "float8", "f8e4m3": "float8", "f8e5m2": "float8"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """One call, counted.

    Attributes:
      seconds: from its first bundle to its last.
      bundle_seconds: of its bundles and of the stalls of its products, without a wait for memory.
      byte_seconds: that its copies from and to the main memory need at the published bandwidth.
      walk: the count itself.
    """

    seconds: float
    bundle_seconds: float
    byte_seconds: float
    walk: Walk


def time_of_call(program: Program, call: KernelCall, chip: Chip, *, latency_s: float = 0.0) -> KernelTime:
    """The time of a call on one core of `chip`, which alone has the memory's whole bandwidth.

    `latency_s` is an assumption: from the start of a copy to its first byte. Raises UnknownSchedule.
    """
    done = walk(program, call.operands, rates_of(chip, latency_s))
    return KernelTime(
        seconds=done.cycles / chip.clock_hz,
        bundle_seconds=(done.bundles + done.stalled_cycles) / chip.clock_hz,
        byte_seconds=done.copied_bytes / chip.memory_bandwidth,
        walk=done,
    )


def rates_of(chip: Chip, latency_s: float = 0.0) -> Rates:
    """The rates of one core of a TPU."""
    cores = chip.tensor_cores
    assert cores is not None, f"{chip.name} is no TPU"
    base = chip.flops["bfloat16"]
    return Rates(
        bytes_per_cycle=chip.memory_bandwidth / chip.clock_hz,
        rows_per_cycle={
            name: cores.rows * chip.flops[dtype] / base for name, dtype in _DTYPES.items() if dtype in chip.flops
        },
        matrix_units=cores.units,
        delay_slots=cores.delay_slots,
        latency_cycles=latency_s * chip.clock_hz,
    )
