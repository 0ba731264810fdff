"""The table of codes in blocks: how the numbers of a weight lie beside their scales, at about the bytes of a GGUF file.

A kernel reads one stream of bytes. Each block of it has the scales of its inputs, then their codes, of the W outputs of
a panel side by side. Codes of five and six bits are half bytes beside planes of the bits above them.
"""

import dataclasses
from typing import Literal

SPAN = 32  # inputs whose codes lie together, and that share a scale of rounded rows
STEPS = 8  # of a span: four inputs each, a 32-bit word of each output


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockCode:
    """One code of the table: w = (u - zero) * scale, or that less a minimum, of unsigned codes u of `bits`.

    Attributes:
      bits: 4, 5, 6 or 8.
      group: inputs that share a scale, 16 or 32.
      scales: 'float16': of each group. 'int8': integers of each group times a float32 of 256 inputs.
      minima: groups of 32 have a number that is subtracted, kept as scales are.
    """

    bits: int
    group: int
    scales: Literal["float16", "int8"]
    minima: bool = False

    @property
    def inputs(self) -> int:
        """Of a block."""
        return SPAN if self.scales == "float16" else 256

    @property
    def header(self) -> int:
        """Bytes of an output at the front of a block: float16 or float32 scales, then minima."""
        return (2 if self.scales == "float16" else 4) * (1 + self.minima)

    @property
    def span_scales(self) -> int:
        """Bytes of an output at the front of a span: integer scales, then minima."""
        return 0 if self.scales == "float16" else SPAN // self.group + self.minima

    @property
    def span_bytes(self) -> int:
        """Of an output: its integer scales and its codes."""
        return self.span_scales + SPAN * self.bits // 8

    @property
    def block_bytes(self) -> int:
        """Of an output."""
        return self.header + self.inputs // SPAN * self.span_bytes


# By the names of GGUF's element types, of which each holds all numbers.
BLOCK_CODES = {
    "Q4_0": BlockCode(bits=4, group=32, scales="float16"),
    "Q4_1": BlockCode(bits=4, group=32, scales="float16", minima=True),
    "Q5_0": BlockCode(bits=5, group=32, scales="float16"),
    "Q5_1": BlockCode(bits=5, group=32, scales="float16", minima=True),
    "Q8_0": BlockCode(bits=8, group=32, scales="float16"),
    "Q4_K": BlockCode(bits=4, group=32, scales="int8", minima=True),
    "Q5_K": BlockCode(bits=5, group=32, scales="int8", minima=True),
    "Q6_K": BlockCode(bits=6, group=16, scales="int8"),
}
