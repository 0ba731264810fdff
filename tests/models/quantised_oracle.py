"""Quantised weights as files store them, with the numbers that they mean, element by element.

Stored tensors are random bits, and a loop over the elements says what each means, by the layouts that the formats'
authors describe: it shares no code with the loader.
"""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # column of nibble i
Element = Callable[[int, int], tuple[float, float, float]]  # from output and input to code, scale and zero


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """One weight: sidecars by suffix, and per element float32 [out, in]."""

    tensors: dict[str, np.ndarray]
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        return (self.codes - self.zeros) * self.scales

    def named(self, module: str) -> dict[str, np.ndarray]:
        return {f"{module}.{suffix}": array for suffix, array in self.tensors.items()}


def described(tensors: dict[str, np.ndarray], shape: tuple[int, int], element: Element) -> Stored:
    out = np.zeros((3, *shape), np.float32)
    for n in range(shape[0]):
        for k in range(shape[1]):
            out[:, n, k] = element(n, k)
    return Stored(tensors=tensors, codes=out[0], scales=out[1], zeros=out[2])


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def field(word: int, place: int, bits: int) -> int:
    return ((word & 0xFFFFFFFF) >> (bits * place)) & (2**bits - 1)


def some_scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: object = np.float16) -> np.ndarray:
    return np.asarray(rng.uniform(0.002, 0.01, shape), dtype)


def fp8_value(byte: int) -> float:
    """e4m3: one sign, four bits of exponent with bias 7, three of fraction, no infinities."""
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    assert byte & 0x7F != 0x7F, byte
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def fp4_value(code: int) -> float:
    return -FP4[code - 8] if code >= 8 else FP4[code]


def some_fp8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Bytes that are numbers."""
    octets = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(octets & 0x7F == 0x7F, 0, octets).astype(np.uint8)


def gptq(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int = 32,
    less: int = 1,
    sym_word: int | None = None,
    g_idx: np.ndarray | None = None,
    with_g_idx: bool = True,
) -> Stored:
    """`group` -1: one. `less`: what stored zeros lack. `sym_word`: of which all zeros consist."""
    num_out, num_in = shape
    group = num_in if group == -1 else group
    per, groups = 32 // bits, -(-num_in // group)
    qweight, qzeros = words(rng, num_in // per, num_out), words(rng, groups, num_out // per)
    if sym_word is not None:
        qzeros = np.full_like(qzeros, np.uint32(sym_word).astype(np.int32))
    scales = some_scales(rng, (groups, num_out))
    index = np.arange(num_in, dtype=np.int32) // group if g_idx is None else g_idx.astype(np.int32)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    if with_g_idx:
        tensors["g_idx"] = index
    weight_words, zero_words = qweight.tolist(), qzeros.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        g = int(index[k])
        zero = field(zero_words[g][n // per], n % per, bits) + less
        return field(weight_words[k // per][n], k % per, bits), float(scales[g, n]), zero

    return described(tensors, shape, element)


def awq(rng: np.random.Generator, shape: tuple[int, int], *, group: int = 32) -> Stored:
    num_out, num_in = shape
    group = num_in if group == -1 else group
    groups = -(-num_in // group)
    qweight, qzeros = words(rng, num_in, num_out // 8), words(rng, groups, num_out // 8)
    scales = some_scales(rng, (groups, num_out))
    place = {column: nibble for nibble, column in enumerate(AWQ_ORDER)}
    weight_words, zero_words = qweight.tolist(), qzeros.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        code = field(weight_words[k][n // 8], place[n % 8], 4)
        zero = field(zero_words[k // group][n // 8], place[n % 8], 4)
        return code, float(scales[k // group, n]), zero

    return described({"qweight": qweight, "qzeros": qzeros, "scales": scales}, shape, element)


def pack_quantized(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    bits: int = 4,
    group: int | None = 32,
    asymmetric: bool = False,
    g_idx: np.ndarray | None = None,
    one_scale: bool = False,
) -> Stored:
    """`group` None: a scale for each output."""
    num_out, num_in = shape
    group = group or num_in
    per, groups, half = 32 // bits, -(-num_in // group), 2 ** (bits - 1)
    packed = words(rng, num_out, -(-num_in // per))
    scale = some_scales(rng, (1,) if one_scale else (num_out, groups), ml_dtypes.bfloat16)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_shape": np.array(shape, np.int64)}
    zero_words = [[0]]
    if asymmetric:
        tensors["weight_zero_point"] = words(rng, -(-num_out // per), groups)
        zero_words = tensors["weight_zero_point"].tolist()
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx.astype(np.int32)
    weight_words = packed.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        g = k // group if g_idx is None else int(g_idx[k])
        zero = field(zero_words[n // per][g], n % per, bits) - half if asymmetric else 0
        return (
            field(weight_words[n][k // per], k % per, bits) - half,
            float(scale[0] if one_scale else scale[n, g]),
            zero,
        )

    return described(tensors, shape, element)


def int_quantized(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    scale_shape: tuple[int, ...] | None = None,
    asymmetric: bool = False,
) -> Stored:
    weight = rng.integers(-128, 128, shape).astype(np.int8)
    weight[0] = 0
    scale = np.asarray(some_scales(rng, (shape[0], 1) if scale_shape is None else scale_shape, np.float32) / 16)
    scale.reshape(-1)[-1] = 1e-38
    tensors = {"weight": weight, "weight_scale": scale}
    if asymmetric:
        tensors["weight_zero_point"] = rng.integers(-128, 128, scale.shape).astype(np.int8)
    zeros = tensors.get("weight_zero_point")
    one = scale.size == 1

    def element(n: int, k: int) -> tuple[float, float, float]:
        at = 0 if one else n
        return int(weight[n, k]), float(scale.reshape(-1)[at]), 0 if zeros is None else int(zeros.reshape(-1)[at])

    return described(tensors, shape, element)


def float8(
    rng: np.random.Generator,
    shape: tuple[int, int],
    *,
    suffix: str = "weight_scale",
    grid: tuple[int, int] | None = None,
    scale_shape: tuple[int, ...] | None = None,
    dtype: object = np.float32,
) -> Stored:
    """`grid`: outputs and inputs of a scale, with `scale_shape` one; neither: a scale for each output."""
    weight = some_fp8(rng, *shape)
    rows, columns = (1, shape[1]) if grid is None else grid
    if scale_shape is None:
        scale_shape = (-(-shape[0] // rows), -(-shape[1] // columns))
    else:
        rows, columns = shape
    scale = np.asarray(some_scales(rng, scale_shape, dtype) / 64, dtype)
    table = np.array(scale, np.float32).reshape(-(-shape[0] // rows), -(-shape[1] // columns))
    octets = weight.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        return fp8_value(octets[n][k]), float(table[n // rows, k // columns]), 0

    return described({"weight": weight.view(ml_dtypes.float8_e4m3fn), suffix: scale}, shape, element)


def mxfp4_packed(rng: np.random.Generator, shape: tuple[int, int], *, extremes: bool = False) -> Stored:
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8)
    scale = rng.integers(118, 122, (shape[0], shape[1] // 32)).astype(np.uint8)
    if extremes:  # with 2^127, codes below 2 alone are numbers of float32
        scale[0], scale[1] = 0, 254
        packed[1] &= 0xBB
    octets, exponents = packed.tolist(), scale.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        return fp4_value(octets[n][k // 2] >> 4 * (k % 2) & 15), 2.0 ** (exponents[n][k // 32] - 127), 0

    return described({"weight_packed": packed, "weight_scale": scale}, shape, element)


def nvfp4_packed(rng: np.random.Generator, shape: tuple[int, int]) -> Stored:
    packed = rng.integers(0, 256, (shape[0], shape[1] // 2)).astype(np.uint8)
    scale = rng.integers(0, 0x7E, (shape[0], shape[1] // 16)).astype(np.uint8)
    shared = np.array([rng.uniform(3000, 9000)], np.float32)
    octets, scales = packed.tolist(), scale.tolist()

    def element(n: int, k: int) -> tuple[float, float, float]:
        return (
            fp4_value(octets[n][k // 2] >> 4 * (k % 2) & 15),
            np.float32(fp8_value(scales[n][k // 16])) / shared[0],
            0,
        )

    tensors = {
        "weight_packed": packed,
        "weight_scale": scale.view(ml_dtypes.float8_e4m3fn),
        "weight_global_scale": shared,
    }
    return described(tensors, shape, element)


def mxfp4_experts(rng: np.random.Generator, experts: int, shape: tuple[int, int]) -> tuple[dict, np.ndarray]:
    """Blocks and scales, and weights [experts, out, in]."""
    blocks = rng.integers(0, 256, (experts, shape[0], shape[1] // 32, 16)).astype(np.uint8)
    scales = rng.integers(118, 122, blocks.shape[:3]).astype(np.uint8)
    weights = np.zeros((experts, *shape), np.float32)
    stored, exponents = blocks.tolist(), scales.tolist()
    for e in range(experts):
        for n in range(shape[0]):
            for k in range(shape[1]):
                code = stored[e][n][k // 32][k % 32 // 2] >> 4 * (k % 2) & 15
                weights[e, n, k] = fp4_value(code) * 2.0 ** (exponents[e][n][k // 32] - 127)
    return {"blocks": blocks, "scales": scales}, weights
