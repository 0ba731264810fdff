"""The table of processors: how wide their vectors are, and how many stay in registers.

It is not measured: three families of processors differ by these numbers alone.
"""

import dataclasses

import llvmlite.binding as llvm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Attributes:
    lanes: float32 numbers of a vector.
    vectors: number of vectors that make the width of a block.
    row_steps: rows of a block, largest first; the last is 1. All sums of the largest, its columns and a scalar fit in
      the registers.
    dot_bfloat16: whether one instruction adds two products of bfloat16 numbers to each number of such a vector (x86's
      `vdpbf16ps`).
    dot_int8: whether one instruction adds four products of bytes to each 32-bit number of such a vector (x86's
      `vpdpbusd`).
    dot_pairs: whether one instruction adds two products of bytes to a number of 16 bits (x86's `vpmaddubsw`).
    """

    lanes: int
    vectors: int
    row_steps: tuple[int, ...]
    dot_bfloat16: bool = False
    dot_int8: bool = False
    dot_pairs: bool = False

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.lanes * self.vectors


def find_target() -> Target:
    """The target of the processor that runs this."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Target(
            lanes=16,
            vectors=2,
            row_steps=(8, 4, 2, 1),
            dot_bfloat16=bool(features.get("avx512bf16")),
            dot_int8=bool(features.get("avx512vnni")),
            dot_pairs=bool(features.get("avx512bw")),
        )
    if features.get("avx2"):
        return Target(
            lanes=8, vectors=2, row_steps=(6, 4, 2, 1), dot_int8=bool(features.get("avxvnni")), dot_pairs=True
        )
    return Target(lanes=4, vectors=4, row_steps=(6, 4, 2, 1))  # Arm: 32 registers of four
