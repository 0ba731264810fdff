"""GGUF's element types as random bytes, with the numbers that they mean, element by element.

A loop over the elements says what each bit means, as llama.cpp describes its blocks: it shares no code with the loader.
"""

import dataclasses

import numpy as np
from gguf_files import Packed

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
# Elements and bytes of a block, and where its float16 numbers are.
SIZES = {
    "Q4_0": (32, 18, (0,)),
    "Q4_1": (32, 20, (0, 2)),
    "Q5_0": (32, 22, (0,)),
    "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)),
    "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)),
    "Q6_K": (256, 210, (208,)),
    "MXFP4": (32, 17, ()),
}
GROUPS = {"Q6_K": 16}  # elements of a scale; of all others 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One weight, and per element float32 [..., out, in]."""

    packed: Packed
    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        return self.codes * self.scales - self.offsets


def random_weight(rng: np.random.Generator, kind: str, shape: tuple[int, ...], spread: float = 0.01) -> Stored:
    """Any bytes, with scales of about `spread`, of both signs."""
    block, size, halves = SIZES[kind]
    octets = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for start in halves:
        scales = (rng.uniform(0.2, 1, octets.shape[:-1]) * rng.choice((-1, 1), octets.shape[:-1]) * spread).astype(
            "<f2"
        )
        octets[..., start : start + 2] = scales[..., None].view(np.uint8)
    if kind == "MXFP4":
        octets[..., 0] = rng.integers(118, 123, octets.shape[:-1])
    return described(kind, shape, octets.reshape(*shape[:-1], -1))


def described(kind: str, shape: tuple[int, ...], octets: np.ndarray) -> Stored:
    block, size, _ = SIZES[kind]
    out = np.zeros((3, *shape), np.float32)
    for row in np.ndindex(shape[:-1]):
        data = octets[row].tobytes()
        for k in range(shape[-1]):
            out[(slice(None), *row, k)] = element(kind, data[k // block * size :][:size], k % block)
    return Stored(packed=Packed(kind=kind, shape=shape, octets=octets), codes=out[0], scales=out[1], offsets=out[2])


def element(kind: str, block: bytes, i: int) -> tuple[float, float, float]:
    """Code, scale and offset of element i of a block."""
    if kind == "MXFP4":
        return FP4[nibble(block[1:], i)], 2.0 ** (block[0] - 127), 0.0
    if kind == "Q6_K":
        half, place = divmod(i, 128)
        low = block[64 * half + place % 64]
        low = low & 15 if place < 64 else low >> 4
        high = block[128 + 32 * half + place % 32] >> 2 * (place // 32) & 3
        scale = block[192 + i // 16]
        return (low | high << 4) - 32, f16(block, 208) * (scale - 256 if scale > 127 else scale), 0.0
    if kind in ("Q4_K", "Q5_K"):
        group, place = divmod(i, 32)
        byte = block[(16 if kind == "Q4_K" else 48) + 32 * (group // 2) + place]
        code = byte >> 4 if group % 2 else byte & 15
        if kind == "Q5_K":
            code += 16 * (block[16 + place] >> group & 1)
        scale, minimum = six_bits(block[4:16], group)
        return code, f16(block, 0) * scale, f16(block, 2) * minimum
    scale, rest = f16(block, 0), block[2:]
    if kind == "Q8_0":
        return rest[i] - 256 if rest[i] > 127 else rest[i], scale, 0.0
    offset = 0.0
    if kind.endswith("_1"):
        offset, rest = -f16(block, 2), rest[2:]
    fifth = 0
    if kind.startswith("Q5"):
        fifth, rest = rest[i // 8] >> i % 8 & 1, rest[4:]
    zero = 0 if kind.endswith("_1") else {"Q4_0": 8, "Q5_0": 16}[kind]
    return nibble(rest, i) + 16 * fifth - zero, scale, offset


def nibble(octets: bytes, i: int) -> int:
    """Byte j holds elements j and j + 16."""
    return octets[i] & 15 if i < 16 else octets[i - 16] >> 4


def f16(block: bytes, start: int) -> float:
    return float(np.frombuffer(block[start : start + 2], "<f2")[0])


def six_bits(octets: bytes, j: int) -> tuple[int, int]:
    """The scale and the minimum of group j of eight, in twelve bytes."""
    if j < 4:
        return octets[j] & 63, octets[j + 4] & 63
    return octets[j + 4] & 15 | octets[j - 4] >> 6 << 4, octets[j + 4] >> 4 | octets[j] >> 6 << 4
