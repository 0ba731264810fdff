"""Products with adapters: all bodies against NumPy, token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.low_rank import (
    LowRank,
    TokenAdapters,
    TokenSlots,
    low_rank_product,
    multiply_all_slots,
    visit_used_slots,
)
from jaxserve.kernels.packed_low_rank import PackedLowRank
from jaxserve.kernels.packed_weight import PackedWeight, pack, packed_shape, panel_width

SLOTS, RANK, IN, WIDTH = 4, 3, 10, panel_width()
# Axes of the outputs, the axis that has parts, and their sizes: heads shorter than half a panel of a CPU, and as long;
# gate and up; outputs that are one part.
PROJECTIONS = {
    "short heads": ((2, 5, 6), 1, (3, 1, 1)),
    "heads": ((3, 5, WIDTH // 2), 1, (3, 1, 1)),
    "gate and up": ((2, WIDTH + 5), 0, (1, 1)),
    "down": ((2 * WIDTH + 5,), 0, (2 * WIDTH + 5,)),
}


def packed_product(x: jax.Array, weights: LowRank, slots: TokenSlots) -> jax.Array:
    """The product beside a packed weight of zeros."""
    parts = [up.shape[1:-1] for up in weights.up]
    out_shape = list(parts[0])
    out_shape[weights.axis] = sum(part[weights.axis] for part in parts)
    shape = packed_shape(jax.ShapeDtypeStruct((*out_shape, IN), weights.down.dtype), 1, WIDTH)
    weight = dataclasses.replace(shape, panels=jnp.zeros(shape.panels.shape, shape.panels.dtype))
    return weight.multiply_adapted(x, TokenAdapters(_packed(weight, weights), slots))


def _packed(weight: PackedWeight, weights: LowRank) -> PackedLowRank:
    """All slots, written one after the other, as an engine does."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), weights)
    arrays = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), weight.slots_for(one, SLOTS))
    assert isinstance(arrays, PackedLowRank)
    for slot in range(1, SLOTS):
        arrays = arrays.written(jnp.asarray(slot), jax.tree.map(lambda leaf: leaf[slot], weights))  # noqa: B023
    return arrays


BODIES = (visit_used_slots, multiply_all_slots, low_rank_product, packed_product)


def _weights(rng: np.random.Generator, projection: str = "short heads", dtype: str = "float32") -> LowRank:
    """Slot 0 is zero."""
    out_shape, axis, sizes = PROJECTIONS[projection]
    down = rng.standard_normal((SLOTS, len(sizes), RANK, IN)).astype(np.float32)
    shapes = [(*out_shape[:axis], size, *out_shape[axis + 1 :]) for size in sizes]
    up = [rng.standard_normal((SLOTS, *shape, RANK)).astype(np.float32) for shape in shapes]
    for array in (down, *up):
        array[0] = 0
    return LowRank(down=jnp.asarray(down, dtype), up=tuple(jnp.asarray(array, dtype) for array in up), axis=axis)


def _expected(x: np.ndarray, weights: LowRank, slots: np.ndarray) -> np.ndarray:
    rows = []
    for token, slot in zip(x.astype(np.float64), slots, strict=True):
        inner = np.asarray(weights.down, np.float64)[slot] @ token  # [P, r]
        parts = [np.asarray(up, np.float64)[slot] @ inner[part] for part, up in enumerate(weights.up)]
        rows.append(np.concatenate(parts, axis=weights.axis))
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "projection"),
    [
        *((body, projection) for body in (low_rank_product, packed_product) for projection in PROJECTIONS),
        *((body, projection) for body in BODIES[:2] for projection in ("short heads", "down")),
    ],
)
def test_each_token_has_its_own_adapter(body, projection: str) -> None:
    rng = np.random.default_rng(0)
    weights, run = _weights(rng, projection), jax.jit(body)
    # Rows of a few tokens, and pieces of prompts.
    for slots in ([2, 0, 1, 2, 3, 0, 3], [0] * 7, [3] * 7, [1, 0, 0, 0, 0, 0, 0], [2] * 19 + [0] * 3 + [1, 3] * 9):
        x = rng.standard_normal((len(slots), IN)).astype(np.float32)
        found = run(x, weights, TokenSlots.of(jnp.asarray(slots), SLOTS))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, _expected(x, weights, np.asarray(slots)), atol=1e-5)
        assert not np.asarray(found)[np.asarray(slots) == 0].any(), "a token without an adapter has exact zeros"


@pytest.mark.slow
@pytest.mark.parametrize("body", [low_rank_product, packed_product])
def test_bfloat16_is_rounded_no_more_than_its_own_numbers(body) -> None:
    rng, slots = np.random.default_rng(3), np.array([1, 3, 0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2])
    for projection in PROJECTIONS:
        weights = _weights(rng, projection, "bfloat16")
        x = jnp.asarray(rng.standard_normal((len(slots), IN)), jnp.bfloat16)
        found = jax.jit(body)(x, weights, TokenSlots.of(jnp.asarray(slots), SLOTS))
        exact = _expected(np.asarray(x), weights, slots)
        assert np.abs(found - exact).max() < 2e-2 * np.abs(exact).max()


@pytest.mark.slow
def test_bits_do_not_depend_on_the_slot_or_the_neighbours() -> None:
    rng = np.random.default_rng(1)
    for projection in PROJECTIONS:
        x, weights = rng.standard_normal((6, IN)).astype(np.float32), _weights(rng, projection)
        moved = jax.tree.map(lambda array: array[jnp.asarray([0, 3, 1, 2])], weights)  # the adapter of slot 3 to slot 1
        for body in BODIES:
            run = jax.jit(body)
            alone = run(x, weights, TokenSlots.of(jnp.asarray([0, 0, 3, 0, 0, 0]), SLOTS))[2]
            beside = run(x, weights, TokenSlots.of(jnp.asarray([1, 3, 3, 3, 0, 2]), SLOTS))[2]
            elsewhere = run(x, moved, TokenSlots.of(jnp.asarray([2, 2, 1, 3, 0, 1]), SLOTS))[2]
            np.testing.assert_array_equal(alone, beside)
            np.testing.assert_array_equal(alone, elsewhere)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_beside_adapters_has_the_bits_that_it_has_without(dtype: str) -> None:
    """Of packed weights: rows without an adapter, and rows with one of zeros, also where gate and up are multiplied."""
    rng, slots = np.random.default_rng(4), np.array([0, 1, 3, 0, 1, 2, 0, 0, 2, 0, 3])
    x = jnp.asarray(rng.standard_normal((len(slots), IN)), dtype)
    for projection, (out_shape, _, _) in PROJECTIONS.items():
        weight = pack(jnp.asarray(rng.standard_normal((*out_shape, IN)), dtype), 1, WIDTH)
        weights = _weights(rng, projection, dtype)
        weights = jax.tree.map(lambda leaf: leaf.at[1].set(0), weights)
        adapters = TokenAdapters(_packed(weight, weights), TokenSlots.of(jnp.asarray(slots), SLOTS))
        base = [weight.multiply(x)]
        found = [weight.multiply_adapted(x, adapters)]
        if projection == "gate and up":
            for activation in ("silu", "gelu"):
                base.append(weight.multiply_gated(x, activation))
                found.append(weight.multiply_gated_adapted(x, activation, adapters))
            both = found[0].astype(dtype)
            wanted = np.asarray(jax.nn.silu(both[:, 0]) * both[:, 1], np.float32)
            tolerance = 3e-5 if dtype == "float32" else 3e-2
            np.testing.assert_allclose(np.asarray(found[1], np.float32), wanted, rtol=tolerance, atol=tolerance)
        for with_adapters, without in zip(found, base, strict=True):
            same = np.asarray(with_adapters, np.float32) == np.asarray(without, np.float32)
            assert same[slots <= 1].all() and not same[slots > 1].all()


def test_numbers_of_another_token_that_are_not_finite_stay_with_it() -> None:
    rng = np.random.default_rng(2)
    x, weights = rng.standard_normal((3, IN)).astype(np.float32), _weights(rng)
    x[1] = np.nan
    for body in BODIES[:3]:
        found = np.asarray(jax.jit(body)(x, weights, TokenSlots.of(jnp.asarray([1, 2, 0]), SLOTS)))
        assert np.isfinite(found[[0, 2]]).all()
    found = np.asarray(jax.jit(packed_product)(x, weights, TokenSlots.of(jnp.asarray([1, 1, 0]), SLOTS)))
    assert np.isfinite(found[[0, 2]]).all() and np.isnan(found[1]).all()
