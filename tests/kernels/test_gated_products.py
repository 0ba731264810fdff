"""activation(gate) * up where the products end: the bits of the definition, alone and in any crowd."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.halves import FACTORS
from jaxserve.kernels.matmul import Weight
from jaxserve.kernels.packed_weight import pack
from tests.kernels.code_products import Given, gated

WIDTH = find_target().width
DEPTH = 160
# Features, of several panels, and of a part of one; and rows.
SIZES = ((2 * WIDTH + WIDTH // 2 + 3, 1), (2 * WIDTH + WIDTH // 2 + 3, 17), (WIDTH, 9), (5, 2), (WIDTH // 2, 1))
multiply = jax.jit(lambda weight, x: weight.multiply(x))
multiply_gated = jax.jit(lambda weight, x, activation: weight.multiply_gated(x, activation), static_argnums=2)


def make_dense(features: int, dtype: str) -> Weight:
    rng = np.random.default_rng(features)
    array = rng.standard_normal((2, features, DEPTH), np.float32) / np.float32(np.sqrt(DEPTH)) * 3
    return pack(jnp.asarray(array, dtype), 1, WIDTH)


def make_codes(features: int, code: str, block: int | None, *, zeros: bool) -> Weight:
    shape = (2, features)
    given = Given(2 * features, DEPTH, WIDTH, group=32, zeros=zeros, code=code, block=block, out_shape=shape)
    size = 3 / np.std(given.product(make_x(9)))
    return jax.tree.map(lambda leaf: leaf * np.float32(size) if leaf.dtype == np.float32 else leaf, given.packed)


def make_x(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, DEPTH), np.float32)


WEIGHTS: dict[str, Callable[[int], Weight]] = {
    "float32": lambda features: make_dense(features, "float32"),
    "bfloat16": lambda features: make_dense(features, "bfloat16"),
    "int4": lambda features: make_codes(features, "int4", None, zeros=True),
    "int8-a8": lambda features: make_codes(features, "int8", 128, zeros=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("activation", FACTORS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_bits_are_those_of_the_definition(name: str, activation: str) -> None:
    for features, rows in SIZES:
        weight, x = WEIGHTS[name](features), make_x(rows)
        both = np.asarray(multiply(weight, x))
        assert both.shape == (rows, 2, features)
        wanted = gated(both[:, 0], both[:, 1], activation)
        np.testing.assert_array_equal(multiply_gated(weight, x, activation), wanted)


@pytest.mark.parametrize("name", WEIGHTS)
def test_results_in_bfloat16_are_rounded_once(name: str) -> None:
    features, rows = SIZES[1]
    weight, x = WEIGHTS[name](features), jnp.asarray(make_x(rows), jnp.bfloat16)
    short, both = multiply_gated(weight, x, "silu"), np.asarray(multiply(weight, x))
    assert short.dtype == jnp.bfloat16 and short.shape == (rows, features)
    wanted = jnp.asarray(gated(both[:, 0], both[:, 1], "silu"), jnp.bfloat16)
    np.testing.assert_array_equal(short.view(jnp.uint16), wanted.view(jnp.uint16))


@pytest.mark.parametrize("activation", FACTORS)
def test_the_definition_is_the_activation(activation: str) -> None:
    """In float64, where 1 + tanh is off by 1e-16. The power of e multiplies what its argument is rounded by."""
    gate = np.concatenate([np.linspace(-120, 120, 4001), np.geomspace(1e-30, 1, 100), [0.0]]).astype(np.float32)
    x = gate.astype(np.float64)
    argument = x if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    exact = x / (1 + np.exp(-argument)) if activation == "silu" else x * (1 + np.tanh(argument / 2)) / 2
    found = gated(gate, np.ones_like(gate), activation)
    assert (np.abs(found - exact) <= 3e-7 * (1 + np.abs(argument)) * np.abs(exact) + 1e-14).all()
    np.testing.assert_allclose(ACTIVATIONS[activation](jnp.asarray(gate)), found, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_has_the_same_bits_alone_and_in_any_crowd(name: str) -> None:
    weight, x = WEIGHTS[name](3 * WIDTH + 5), make_x(513)
    crowd = np.asarray(multiply_gated(weight, x, "silu"))
    for first in (0, 64, 497):
        np.testing.assert_array_equal(multiply_gated(weight, x[first : first + 16], "silu"), crowd[first : first + 16])
    for row in (0, 7, 8, 511, 512):
        np.testing.assert_array_equal(multiply_gated(weight, x[row : row + 1], "silu")[0], crowd[row])


@pytest.mark.parametrize("name", ["float32", "int8-a8"])
def test_nan_stays_in_its_row_and_infinity_is_no_number(name: str) -> None:
    weight, x = WEIGHTS[name](WIDTH), make_x(9)
    spoilt = x.copy()
    spoilt[3, 5] = np.nan
    for dtype in (jnp.float32, jnp.bfloat16):
        clean, out = (np.asarray(multiply_gated(weight, jnp.asarray(a, dtype), "silu")) for a in (x, spoilt))
        assert np.isnan(out[3].astype(np.float32)).all()
        others = np.arange(9) != 3
        np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_are_made_of_the_parts(activation: str) -> None:
    weight, x = WEIGHTS["float32"](WIDTH + 3), make_x(9)
    both = multiply(weight, x)
    wanted = ACTIVATIONS[activation](both[:, 0]) * both[:, 1]
    np.testing.assert_allclose(multiply_gated(weight, x, activation), wanted, rtol=1e-6, atol=1e-6)


def test_large_products_end_as_they_should() -> None:
    """The power of e has a largest argument: beyond it silu is 0 or its argument."""
    array = jnp.asarray(np.full((2, WIDTH, 1), 1, np.float32))
    x = jnp.asarray([[-1e4], [-100], [100], [1e4], [0], [-87], [88]], jnp.float32)
    out = np.asarray(multiply_gated(pack(array, 1, WIDTH), x, "silu"))
    assert (np.abs(out[[0, 1]]) < 1e-30).all() and (out[4] == 0).all()
    np.testing.assert_array_equal(out[[2, 3, 6]], np.square(np.broadcast_to(x, out.shape)[[2, 3, 6]]))
