"""Products with codes: the bits that their definition says, for every number of rows, alone and in any crowd."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.kernels.cpu import code_call, grouped_codes, matmul_codes
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.packed_codes import BLOCK, PackedCodes, pack_codes, packed_codes_shape
from tests.kernels.code_products import Given, rounded

WIDTH = find_target().width
ROWS = (1, 2, 7, 8, 9, 16, 17, 64)  # and 513 beside them: every mix of the heights of blocks
DEPTHS = (128, 160, 768, 33)  # of blocks alone, with part of one, of several, and no multiple of four
GROUPS = (None, 32, 64, 128, 96, 256)
CODES = ("int8", "int4")  # that rounded rows can be multiplied with
BLOCKS = (BLOCK, None)  # rows are rounded, or multiplied as they are
multiply = jax.jit(PackedCodes.multiply)


def form_of(code: str, zeros: bool, block: int | None) -> str:
    """As the kernels name it: machine code of its own, which takes long to compile."""
    return f"{code}_by_{'float32' if block is None else 'int8'}{'_zeros' * zeros}"


QUICK = ("int8_by_int8", "int4_by_float32_zeros")  # every kind of rows, zeros and codes once, but floats of eight bits
FORMS = [
    pytest.param(*form, id=form_of(*form), marks=() if form_of(*form) in QUICK else pytest.mark.slow)
    for form in (*itertools.product(CODES, (False, True), BLOCKS), ("float8_e4m3fn", False, None))
]


def make_x(rows: int, depth: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, depth), np.float32)


def check(given: Given, x: np.ndarray) -> None:
    out = np.asarray(multiply(given.packed, x))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out.view(np.uint32), given.product(x).view(np.uint32))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("code", "zeros", "block"), FORMS)
def test_products_have_the_bits_of_the_definition(code, zeros, block, depth):
    for group in GROUPS if block else (None, 16, 128):
        given = Given(2 * WIDTH + 11, depth, WIDTH, group=group, zeros=zeros, block=block, code=code)
        for rows in (1, 9) if group in (None, 64) else (9,):
            check(given, make_x(rows, depth))


@pytest.mark.parametrize("module", [matmul_codes, grouped_codes], ids=lambda module: module.__name__.split(".")[-1])
def test_each_form_is_of_the_kinds_that_its_name_says(module, monkeypatch):
    """Without compiling them: of the caller and of the workers that it starts."""
    kernel, found = module.__name__.split(".")[-1], []
    monkeypatch.setattr(module, "_call", lambda frame, kinds, worker: found.append((kinds, worker)))
    monkeypatch.setattr(module, "_work", lambda state, kinds: found.append(kinds))
    kinds_of_codes = {"int8": code_call.BYTES, "int4": code_call.HALVES, "float8_e4m3fn": code_call.FLOAT8}
    for code, zeros, block in (form.values for form in FORMS):
        form = form_of(code, zeros, block)
        monkeypatch.setattr(module, f"_{form}_worker", lambda form=form: form)
        rows = code_call.FLOAT_ROWS if block is None else code_call.ROUNDED_ROWS
        kinds = (rows, code_call.INT16_ZEROS if zeros else None, kinds_of_codes[code])
        getattr(module, f"{kernel}_{form}")(0)
        getattr(module, f"_work_{form}").py_func(0)
        called, worked = found[-2:]
        assert called[1] == form
        for one in (called[0], worked):
            assert one == kinds and [type(kind) for kind in one] == [type(kind) for kind in kinds]


@pytest.mark.parametrize("depth", [128, 160, 768])
@pytest.mark.parametrize(("code", "zeros", "block"), FORMS)
def test_products_with_any_number_of_rows(code, zeros, block, depth):
    """513 rows have the bits of the definition and are close to float64, and fewer have the bits that they had in this
    crowd. More than one worker rounds them. Integers are exact, so that rounded rows lose nothing after their rounding.
    """
    given, x = Given(2 * WIDTH + 11, depth, WIDTH, group=32, zeros=zeros, code=code, block=block), make_x(513, depth)
    crowd = np.asarray(multiply(given.packed, x))
    np.testing.assert_array_equal(crowd.view(np.uint32), given.product(x).view(np.uint32))
    wide = x.astype(np.float64)
    if block is not None:
        codes, scales = rounded(x)
        wide = codes * np.repeat(scales, BLOCK, axis=1)[:, :depth].astype(np.float64)
    weight = given.weight()
    assert (np.abs(crowd - wide @ weight.T) <= 2e-6 * (np.abs(wide) @ np.abs(weight.T))).all()
    for rows in ROWS:
        np.testing.assert_array_equal(multiply(given.packed, x[:rows]), crowd[:rows])


@pytest.mark.slow
def test_codes_of_four_bits_have_half_the_bytes_and_the_bits_that_a_byte_each_gives():
    four = Given(2 * WIDTH + 11, 160, WIDTH, code="int4")
    eight = pack_codes(four.codes, four.scales, (len(four.codes),), (160,), None, WIDTH)
    assert four.packed.panels.nbytes * 2 == eight.panels.nbytes
    for rows in (1, 9):
        x = make_x(rows, 160)
        np.testing.assert_array_equal(multiply(four.packed, x), multiply(eight, x))


def test_rounding_costs_no_more_than_its_half_steps():
    """Of the weights alone nothing is lost: |error| <= half a step of each input times its weight."""
    given, x = Given(70, 768, WIDTH, group=64), make_x(9, 768)
    _, scales = rounded(x)
    limit = np.repeat(scales, BLOCK, axis=1)[:, :768] / 2 @ np.abs(given.weight()).T
    error = np.abs(np.asarray(multiply(given.packed, x)) - x.astype(np.float64) @ given.weight().T)
    assert (error <= limit * (1 + 1e-5)).all() and error.mean() < limit.mean() / 10


@pytest.mark.parametrize(("code", "zeros", "block"), FORMS)
def test_a_row_has_the_same_bits_wherever_it_stands(code, zeros, block):
    given = Given(3 * WIDTH + 5, 160, WIDTH, group=None, code=code, zeros=zeros, block=block)
    x = make_x(130, 160)
    crowd = np.asarray(multiply(given.packed, x))
    for first in (64, 114):
        np.testing.assert_array_equal(multiply(given.packed, x[first : first + 16]), crowd[first : first + 16])
    for row in (7, 8, 125, 129):
        np.testing.assert_array_equal(np.asarray(multiply(given.packed, x[row : row + 1]))[0], crowd[row])


def test_large_small_and_no_numbers_in_one_batch():
    """Each block has a scale of its own: 1e4 beside 1e-4 costs nothing; zeros, and what counts as zeros, give zeros."""
    given, x = Given(70, 384, WIDTH), make_x(9, 384)
    x[0] = 0
    x[1, :BLOCK], x[1, BLOCK:] = 1e4, 1e-4
    x[2, BLOCK : 2 * BLOCK] = 0
    x[3] = np.float32(2.0**-120) * np.sign(x[3])
    x[4] *= np.float32(2.0**-110)
    x[5] *= np.float32(1e30)
    out = np.asarray(multiply(given.packed, x))
    assert (out[[0, 3]] == 0).all() and np.isfinite(out).all()
    np.testing.assert_array_equal(out, given.product(x))


@pytest.mark.slow
def test_the_largest_sums_are_exact():
    """Codes of -128 times rows of -127, with zeros at the other end: no sum of 16 bits would hold even two of them."""
    depth = 256
    codes, scales = np.full((WIDTH, depth), -128, np.int8), np.ones((WIDTH, 2), np.float32)
    x = np.full((2, depth), -1, np.float32)
    x[1, ::2] = 1
    for zero in (None, 128):
        zeros = None if zero is None else np.full((WIDTH, 2), zero)
        out = multiply(pack_codes(codes, scales, (WIDTH,), (depth,), 128, WIDTH, zeros=zeros), x)
        np.testing.assert_allclose(out[0], (128 + (zero or 0)) * depth, rtol=1e-6)
        assert (np.asarray(out[1]) == 0).all()


@pytest.mark.parametrize("rows", [1, 9, 17])
@pytest.mark.parametrize("depth", [33, 160])
@pytest.mark.parametrize(("code", "zeros", "block"), [form for form in FORMS if form.id in QUICK])
def test_nan_and_infinity_stay_in_their_rows(code, zeros, block, rows, depth):
    given = Given(70, depth, WIDTH, zeros=zeros, code=code, block=block)
    x = make_x(rows + 2, depth)
    clean = np.asarray(multiply(given.packed, x))
    spoilt = x.copy()
    spoilt[0, 4], spoilt[rows, 32] = np.nan, -np.inf
    out = np.asarray(multiply(given.packed, spoilt))
    assert np.isnan(out[0]).all()
    assert (np.isnan(out[rows]) if block else ~np.isfinite(out[rows])).all()
    others = [r for r in range(rows + 2) if r not in (0, rows)]
    np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.slow
def test_every_float8_has_its_value():
    """Small ones without a leading one, too. A code that is no number makes an output none, whatever its row is."""
    codes = np.zeros((WIDTH + 1, 256), np.uint8)
    codes[0], codes[WIDTH, 7] = np.arange(256), 0x7F
    codes[0, [0x7F, 0xFF]] = 0
    scales = np.full((WIDTH + 1, 1), 3, np.float32)
    shapes = ((WIDTH + 1,), (256,), None, WIDTH)
    packed = pack_codes(codes.view(ml_dtypes.float8_e4m3fn), scales, *shapes, code="float8_e4m3fn", block=None)
    out = np.asarray(multiply(packed, np.eye(256, dtype=np.float32)))
    np.testing.assert_array_equal(out[:, 0], 3 * codes[0].view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    assert np.isnan(out[:, WIDTH]).all() and (out[:, 1:WIDTH] == 0).all()


@pytest.mark.parametrize(("code", "zeros"), [*itertools.product(CODES, (False, True)), ("float8_e4m3fn", False)])
@pytest.mark.parametrize("group", [None, 16])
def test_take_gives_the_rows_of_the_weight(code, group, zeros):
    block = BLOCK if code in CODES else None
    given = Given(2 * WIDTH + 3, 33, WIDTH, group=group, zeros=zeros, code=code, block=block)
    size = len(given.codes)
    taken = jax.jit(PackedCodes.take)(given.packed, np.asarray([0, size - 1, 5, 4 * WIDTH]))
    weight = given.weight().astype(np.float32)
    np.testing.assert_array_equal(taken, [weight[0], weight[-1], weight[5], np.zeros(33)])


def test_axes_of_several_sizes_and_rows_of_bfloat16():
    given = Given(30, 33, WIDTH)
    shaped = pack_codes(given.codes, given.scales, (2, 15), (3, 11), None, WIDTH)
    x = jnp.asarray(make_x(9, 33), jnp.bfloat16)
    out = multiply(shaped, x.reshape(9, 3, 11))
    assert out.shape == (9, 2, 15)
    np.testing.assert_array_equal(out.reshape(9, 30), multiply(given.packed, x.astype(jnp.float32)))


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("code", CODES)
def test_shapes_are_known_before_the_numbers(code, zeros):
    given = Given(70, 160, WIDTH, group=64, zeros=zeros, code=code)
    shape = packed_codes_shape((70,), (160,), 64, WIDTH, code=code, zeros=zeros)
    assert jax.tree.structure(shape) == jax.tree.structure(given.packed)
    leaves = jax.tree.leaves(given.packed)
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(shape)] == [(a.shape, a.dtype) for a in leaves]
    assert [len(axes) for axes in given.packed.leaf_axes(("out", "in"))] == [a.ndim for a in leaves]
    panels, scales = np.asarray(given.packed.panels), np.asarray(given.packed.scales)
    middle = {"int8": 128, "int4": 0x88}[code]
    assert (panels[2, :, 70 - 2 * WIDTH :] == middle).all() and (scales[2, :, 70 - 2 * WIDTH :] == 0).all()
