"""Products with codes as `PackedCodes` defines them, in NumPy: every step in the type that the definition names."""

import ml_dtypes
import numpy as np

from jaxserve.kernels.halves import FACTORS
from jaxserve.kernels.packed_codes import BLOCK, PackedCodes, pack_codes


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c in float32, rounded once.

    The product is exact in float64. Their sum is rounded there to the neighbour with an odd last bit, so that rounding
    it again gives what one rounding would (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    product, c = np.asarray(a, np.float64) * np.asarray(b, np.float64), np.asarray(c, np.float64)
    total = np.asarray(product + c)
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = total.view(np.int64) % 2 == 0
    other = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even, other, total).astype(np.float32)


def chain(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [T, in] times [out, in] as `PackedWeight` defines it: bfloat16 in pairs, of which the second comes first."""
    depth = x.shape[1]
    order = np.arange(depth) if weight.dtype == np.float32 else np.arange(depth + depth % 2) ^ 1
    x, wide = x.astype(weight.dtype).astype(np.float32), weight.astype(np.float32)
    out = np.zeros((len(x), len(weight)), np.float32)
    for k in order[order < depth]:
        out = fma(x[:, k, None], wide[None, :, k], out)
    return out


def rounded(x: np.ndarray, size: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """Codes int64 [T, in] and scales float32 [T, blocks] of rows [T, in], in blocks of `size`."""
    codes, scales = np.zeros(x.shape, np.int64), np.zeros((len(x), -(-x.shape[1] // size)), np.float32)
    for row, numbers in enumerate(x):
        for block in range(scales.shape[1]):
            piece = numbers[block * size : (block + 1) * size]
            top = np.abs(piece).max()
            if not np.isfinite(top):
                scales[row, block] = np.nan
            elif top >= np.float32(2.0**-119):
                scales[row, block] = top / np.float32(127)
                codes[row, block * size : (block + 1) * size] = np.rint(piece * (np.float32(127) / top))
    return codes, scales


def gated(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    """activation(gate) * up as `cpu.gating` defines it, float32. Numbers below the smallest normal one count as 0."""
    f = np.float32

    def flushed(numbers: np.ndarray) -> np.ndarray:
        return np.where(np.abs(numbers) < np.finfo(f).tiny, f(0), numbers)

    linear, cubic = (f(factor) for factor in FACTORS[activation])
    x = -(fma(cubic * gate, gate, linear) * gate)
    x = np.fmax(np.fmin(x, f(88.3)), f(-87.3))
    power = np.floor(fma(x, f(1.44269504), f(0.5)))
    rest = fma(power, f(2.12194440e-4), fma(power, f(-0.693359375), x))
    value = f(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        value = fma(value, rest, f(factor))
    value = (fma(value, rest * rest, rest) + f(1)) * np.ldexp(f(1), power.astype(int))
    return flushed(flushed(gate / (value + f(1))) * up)


def product(
    x: np.ndarray,
    codes: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    group: int | None,
    block: int | None,
) -> np.ndarray:
    """x [T, in] times (codes - zeros) * scales, codes [out, in], scales and zeros [out, groups]."""
    depth = x.shape[1]
    group_of = np.arange(depth) // (group or depth)
    weights = codes.astype(np.float64 if codes.dtype == ml_dtypes.float8_e4m3fn else np.int64)
    weights = weights - (0 if zeros is None else zeros[:, group_of])
    out = np.zeros((len(x), len(codes)), np.float32)
    if block is None:
        for begin in range(0, depth, group or depth):
            total = np.zeros_like(out)
            for k in range(begin, min(begin + (group or depth), depth)):
                total = fma(x[:, k, None], weights[None, :, k], total)
            out = fma(total, scales[None, :, group_of[begin]], out)
        return out
    x_codes, x_scales = rounded(x)
    run = int(np.gcd(group, BLOCK)) if group else BLOCK
    for begin in range(0, depth, run):
        total = x_codes[:, begin : begin + run] @ weights[:, begin : begin + run].T
        scale = x_scales[:, begin // BLOCK, None] * scales[None, :, group_of[begin]]
        out = fma(total.astype(np.float32), scale, out)
    return out


def blocks_product(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, minima: np.ndarray | None, group: int
) -> np.ndarray:
    """x [T, in] times codes * scales - minima as `PackedBlocks` defines it: codes [out, in] less their zero, scales
    [out, groups], minima [out, in / 32]."""
    x_codes, x_scales = rounded(x, 32)
    out = np.zeros((len(x), len(codes)), np.float32)
    for begin in range(0, x.shape[1], group):
        x_scale, run = x_scales[:, begin // 32, None], slice(begin, begin + group)
        total = (x_codes[:, run] @ codes[:, run].T.astype(np.int64)).astype(np.float32)
        out = fma(total, x_scale * scales[None, :, begin // group], out)
        if minima is not None:
            sums = x_codes[:, run].sum(axis=1, keepdims=True).astype(np.float32) * x_scale
            out = fma(sums, -minima[None, :, begin // 32], out)
    return out


class Given:
    """A random weight [out, in] and its packed form."""

    def __init__(
        self,
        num_out: int,
        depth: int,
        width: int,
        *,
        group: int | None = None,
        zeros: bool = False,
        block: int | None = BLOCK,
        code: str = "int8",
        out_shape: tuple[int, ...] | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        groups = 1 if group is None else -(-depth // group)
        self.group, self.block, self.depth = group, block, depth
        most = 8 if code == "int4" else 128
        self.codes = rng.integers(-most, most, (num_out, depth)).astype(np.int8)
        if code == "float8_e4m3fn":
            self.codes[self.codes & 0x7F == 0x7F] = 0  # are no numbers
            self.codes = self.codes.view(ml_dtypes.float8_e4m3fn)
        self.scales = rng.uniform(0.5, 2, (num_out, groups)).astype(np.float32)
        self.zeros = rng.integers(-most, most + 1, (num_out, groups)) if zeros else None
        shapes = (out_shape or (num_out,), (depth,), group, width)
        self.packed: PackedCodes = pack_codes(
            self.codes, self.scales, *shapes, code=code, zeros=self.zeros, block=block
        )

    def product(self, x: np.ndarray) -> np.ndarray:
        return product(x, self.codes, self.scales, self.zeros, self.group, self.block)

    def weight(self) -> np.ndarray:
        """The weight [out, in] in float64."""
        group_of = np.arange(self.depth) // (self.group or self.depth)
        codes = self.codes.astype(np.float64)
        return (codes if self.zeros is None else codes - self.zeros[:, group_of]) * self.scales[:, group_of]
