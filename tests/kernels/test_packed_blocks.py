"""Codes in blocks: the numbers and about the bytes of a GGUF file, and the bits that their definition says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from jaxserve.kernels.block_codes import BLOCK_CODES
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.composed_weight import WithOffsets, mapped
from jaxserve.kernels.cpu import block_runs
from jaxserve.kernels.cpu.target import Target, find_target
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.packed_blocks import PackedBlocks, pack, pack_blocks, shape_of
from jaxserve.kernels.storage import Arithmetic
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.models.gguf.blocks import BLOCKS, Decoded
from tests.kernels.code_products import blocks_product, gated, rounded

WIDTH = find_target().width
DEPTH, NUM_OUT = 512, 2 * WIDTH + 11
FILE_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
QUICK = ("Q8_0", "Q5_1", "Q4_K", "Q6_K")  # every number of bits, both kinds of scales, with and without minima
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in BLOCK_CODES]
DEVICE, ROUNDED = Device(backend="cpu", kind="cpu"), Arithmetic(activations="int8", block=32)
multiply = jax.jit(PackedBlocks.multiply)


def random_blocks(kind: str, num_out: int = NUM_OUT) -> Decoded:
    """Any bytes of a file, with scales of about 0.01 and of both signs."""
    rng = np.random.default_rng(sum(map(ord, kind)))
    octets = rng.integers(0, 256, (num_out, DEPTH // BLOCKS[kind].block, FILE_BYTES[kind]), np.uint8)
    for start in (208,) if kind == "Q6_K" else (0, 2)[: 1 + BLOCKS[kind].minima]:
        scales = rng.uniform(0.002, 0.01, octets.shape[:-1]) * rng.choice((-1, 1), octets.shape[:-1])
        octets[..., start : start + 2] = scales.astype("<f2")[..., None].view(np.uint8)
    codes, scales, offsets = BLOCKS[kind].decode(octets)
    return Decoded(*(None if part is None else part.reshape(num_out, -1) for part in (codes, scales, offsets)))


def as_loaded(kind: str, given: Decoded, out_shape: tuple[int, ...], num_in: int = 1) -> CodedWeight | WithOffsets:
    """The weight as a model reads it, before it is packed: codes from 0 to 15 are in four signed bits."""
    storage = BLOCKS[kind].storage
    assert storage is not None
    shift = 8 if storage.zeros else 0
    scales = given.scales.reshape(*out_shape, -1)
    coded = CodedWeight(
        codes=jnp.asarray((given.codes.astype(np.int16) - shift).astype(np.int8).reshape(*out_shape, -1)),
        scales=jnp.asarray(scales),
        zeros=jnp.full(scales.shape, -shift, jnp.int16) if storage.zeros else None,
        num_in=num_in,
        storage=storage.of_codes,
        arithmetic=ROUNDED,
        dtype="float32",
    )
    if given.offsets is None:
        return coded
    offsets = DenseWeight(array=jnp.asarray(given.offsets.reshape(*out_shape, -1)), num_in=num_in)
    return WithOffsets(codes=coded, offsets=offsets, group=32)


def numbers_of(kind: str, given: Decoded) -> np.ndarray:
    found = given.codes.astype(np.float32) * np.repeat(given.scales, BLOCKS[kind].group, axis=1)
    return found if given.offsets is None else found - np.repeat(given.offsets, 32, axis=1)


def product(kind: str, given: Decoded, x: np.ndarray) -> np.ndarray:
    return blocks_product(x, given.codes, given.scales, given.offsets, BLOCKS[kind].group)


def make_x(rows: int) -> np.ndarray:
    """Numbers of many sizes, and rows and spans of zeros."""
    x = np.random.default_rng(1).standard_normal((max(rows, 4), DEPTH), np.float32)
    x[0], x[1, :32], x[2, 32:], x[3, 64:96] = 0, 1e6, np.float32(2.0**-120), 1e-6
    return x[:rows]


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_the_definition_in_every_batch(kind: str) -> None:
    given, x = random_blocks(kind), make_x(19)
    weight = as_loaded(kind, given, (NUM_OUT,))
    packed = pack(weight, WIDTH)
    crowd = np.asarray(multiply(packed, x))
    np.testing.assert_array_equal(crowd.view(np.uint32), product(kind, given, x).view(np.uint32))
    for first, last in ((0, 1), (4, 5), (0, 2), (3, 10), (0, 8), (5, 14)):
        np.testing.assert_array_equal(multiply(packed, x[first:last]), crowd[first:last])
    # Of the weights alone nothing is lost.
    codes, scales = rounded(x, 32)
    wide = codes * np.repeat(scales, 32, axis=1).astype(np.float64)
    numbers = numbers_of(kind, given).astype(np.float64)
    assert (np.abs(crowd - wide @ numbers.T) <= 3e-6 * (np.abs(wide) @ np.abs(numbers.T)) + 1e-30).all()


@pytest.mark.parametrize("kind", BLOCK_CODES)
def test_rows_of_a_table_are_those_of_the_file_at_its_bytes(kind: str) -> None:
    given = random_blocks(kind)
    weight = as_loaded(kind, given, (NUM_OUT,))
    packed, rows = pack(weight, WIDTH), np.asarray([0, NUM_OUT - 1, 5, 4 * WIDTH])
    numbers = numbers_of(kind, given)
    wanted = [numbers[0], numbers[-1], numbers[5], np.zeros(DEPTH)]
    for found in (packed, weight, as_loaded(kind, given, (NUM_OUT,), num_in=0)):
        np.testing.assert_array_equal(jax.jit(lambda table: table.take(rows))(found), wanted)
    of_file = packed.panels.shape[0] * WIDTH * DEPTH // BLOCKS[kind].block * FILE_BYTES[kind]
    assert of_file <= packed.panels.nbytes <= 1.06 * of_file
    shape = shape_of(weight, WIDTH)
    assert jax.tree.structure(shape) == jax.tree.structure(packed)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(shape)] == [(packed.panels.shape, np.uint8)]


def test_gate_and_up_and_rows_that_are_no_numbers() -> None:
    given = random_blocks("Q8_0", 2 * 37)
    packed = pack(as_loaded("Q8_0", given, (2, 37)), WIDTH)
    for rows in (1, 9):
        x = make_x(rows + 1)[1:]
        both = np.asarray(multiply(packed, x))
        np.testing.assert_array_equal(both.reshape(rows, -1), product("Q8_0", given, x))
        found = jax.jit(lambda weight, x: weight.multiply_gated(x, "gelu_tanh"))(packed, x)
        np.testing.assert_array_equal(found, gated(both[:, 0], both[:, 1], "gelu_tanh"))
    spoilt = make_x(9)
    spoilt[0, 4], spoilt[5, 500] = np.nan, -np.inf
    out, clean = np.asarray(multiply(packed, spoilt)), np.asarray(multiply(packed, make_x(9)))
    assert np.isnan(out[[0, 5]]).all()
    others = [row for row in range(9) if row not in (0, 5)]
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("kind", QUICK)
def test_the_implementation_takes_them_whole_and_checks_itself(kind: str) -> None:
    matmul, weight = make_matmul(DEVICE), as_loaded(kind, random_blocks(kind), (NUM_OUT,))
    assert isinstance(mapped(weight, matmul.convert, matmul.takes_whole), PackedBlocks)
    coded = weight.codes if isinstance(weight, WithOffsets) else weight
    use = MatmulUse(dtype="float32", num_devices=1, storage=coded.storage, arithmetic=ROUNDED)
    assert matmul.refuses(use) is None
    MATMUL.check(matmul, use, DEVICE)
    floats = dataclasses.replace(coded, arithmetic=Arithmetic())
    assert not matmul.takes_whole(floats)


@pytest.mark.parametrize("scale", [1e-3, 7 / 3])
def test_scales_that_the_code_does_not_hold_are_a_bug(scale: float) -> None:
    codes = np.zeros((WIDTH, 256), np.int8)
    for kind in ("Q8_0", "Q6_K"):
        code = BLOCK_CODES[kind]
        scales = np.full((WIDTH, 256 // code.group), scale, np.float32)
        scales[:, 1] = 1
        with pytest.raises(AssertionError, match="scales are no float16|no integers of eight bits"):
            pack_blocks(codes, scales, None, code, 2 ** (code.bits - 1), (WIDTH,), WIDTH)


PROCESSORS = {
    "avx512bw": Target(lanes=16, vectors=2, row_steps=(2, 1), dot_pairs=True),
    "avx2": Target(lanes=8, vectors=2, row_steps=(2, 1), dot_pairs=True),
    "avx-vnni": Target(lanes=8, vectors=2, row_steps=(2, 1), dot_int8=True),
    "neon": Target(lanes=4, vectors=4, row_steps=(2, 1)),
}


@pytest.mark.parametrize(
    ("processor", "kind"),
    [
        ("avx512bw", "Q5_K"),
        ("avx2", "Q5_K"),
        ("avx2", "Q6_K"),
        ("avx2", "Q8_0"),
        ("avx-vnni", "Q6_K"),
        ("neon", "Q4_1"),
    ],
)
def test_other_processors_have_the_same_bits(processor: str, kind: str) -> None:
    """LLVM makes their instructions for this one, too. The extremes of codes and rows are among the numbers."""
    target, code, rows = PROCESSORS[processor], BLOCK_CODES[kind], 3
    if find_target().lanes < target.lanes or (target.dot_int8 and not find_target().dot_int8):
        pytest.skip("this processor lacks the instructions")
    if target.dot_pairs and not find_target().dot_pairs:
        pytest.skip("this processor lacks the instructions")
    given = random_blocks(kind, target.width)
    if given.offsets is None:
        half = 2 ** (code.bits - 1)
        given.codes[:, 64:128] = np.random.default_rng(2).choice([-half, half - 1], (target.width, 64))
    packed = pack(as_loaded(kind, given, (target.width,)), target.width)
    product_of = block_runs.panel_product(target.row_steps, 1, code, target)

    @njit
    def run(x: int, scales: int, starts: int, sums: int, stride: int, stream: int, out: int) -> None:
        product_of(x, scales, starts, sums, stride, stream, 0, DEPTH // 32, out, 4 * target_width, stream, rows)

    target_width = target.width
    x = make_x(rows)
    x[0, ::2], x[0, 1::2] = 1, -1
    codes, scales = rounded(x, 32)
    groups = codes.reshape(rows, -1, code.group).sum(axis=2)
    spans = codes.reshape(rows, -1, 32).sum(axis=2).astype(np.float32) * scales
    # Rows of all four are equally far apart.
    parts = [codes.astype(np.int8), scales, (-packed.zero * groups).astype(np.int32), spans]
    record = np.concatenate([part.view(np.uint8).reshape(rows, -1) for part in parts], axis=1)
    begins = np.cumsum([0, *(part.nbytes // rows for part in parts)])
    out, stream = np.zeros((rows, target.width), np.float32), np.asarray(packed.panels)
    at = record.ctypes.data
    run(*(at + int(begin) for begin in begins[:4]), record.shape[1], stream.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, product(kind, given, x))
