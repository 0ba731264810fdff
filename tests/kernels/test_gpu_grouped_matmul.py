"""The grouped product of Hopper GPUs: right in the interpreter for any split of rows, and compiled for an H200."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import GroupedMatmulUse
from jaxserve.kernels.ops import GROUPED_MATMUL
from jaxserve.kernels.oracle import grouped_products
from jaxserve.kernels.pallas.gpu_grouped_matmul import HopperExperts, cut_groups, make_grouped_matmul
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler
from tests.kernels.gpu_interpreter import H200, INTERPRETER, watched

A100 = Device(backend="gpu", kind="NVIDIA A100", compute_capability=(8, 0))
QWEN3 = GroupedMatmulUse(dtype="bfloat16", num_experts=128, hidden_size=2048, size=768, num_devices=1)
interpreted = make_grouped_matmul(H200, INTERPRETER)


def numbers(*shape: int, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), jnp.bfloat16)


@pytest.mark.parametrize(
    ("out_shape", "depth", "num_rows", "splits"),
    [
        # More steps over the depth than the ring has slots; both warpgroups; rows of nobody; a tile's end in another.
        ((2, 64), 320, 17, [(3, 0, 10), (9, 8, 0), (0, 0, 0)]),
        pytest.param((192,), 64, 70, [(70, 0), (20, 33), (0, 1)], marks=pytest.mark.slow),  # tiles of 32 and 64 columns
    ],
)
def test_rows_meet_their_own_expert_however_they_are_split(out_shape, depth, num_rows, splits):
    """What no row may read is NaN: experts that are not hit, and rows of nobody."""
    experts, x = numbers(len(splits[0]), *out_shape, depth, seed=0), numbers(num_rows, depth, seed=1)
    multiply = jax.jit(lambda weight, x, sizes: weight.multiply(x, sizes))
    with watched() as watch:
        for sizes in splits:
            hit = (jnp.asarray(sizes) > 0).reshape(-1, *(1,) * (experts.ndim - 1))
            weight = interpreted.convert(DenseExperts(array=jnp.where(hit, experts, jnp.nan)))
            spoilt = x.at[sum(sizes) :].set(jnp.nan)
            out = np.asarray(multiply(weight, spoilt, jnp.asarray(sizes, jnp.int32)))
            assert out.dtype == np.float32 and out.shape == (num_rows, *out_shape)
            np.testing.assert_allclose(
                out, grouped_products(np.asarray(x), np.asarray(experts), np.asarray(sizes)), atol=1e-4
            )
            assert not watch.found_races()


@pytest.mark.parametrize("size", [8, 32])
def test_tiles_hold_each_row_once(size):
    rng, cut = np.random.default_rng(0), jax.jit(cut_groups, static_argnums=(1, 2))
    for _ in range(30):
        num_rows = 50
        sizes = rng.multinomial(rng.integers(0, num_rows + 1), rng.dirichlet(np.full(6, 0.4))).astype(np.int32)
        tiles = jax.tree.map(np.asarray, cut(jnp.asarray(sizes), num_rows, size))
        assert tiles.count[0] == sum(math.ceil(n / size) for n in sizes) <= len(tiles.experts)
        assert tiles.owned.sum() == sizes.sum()
        assert (tiles.rows + size <= len(tiles.sources)).all() and not (tiles.rows % 8).any(), "whole groups of 8"
        owners = np.repeat(np.arange(6), sizes)
        for row, expert in enumerate(owners):
            tile, at = divmod(int(tiles.places[row]), size)
            assert tile < tiles.count[0] and tiles.experts[tile] == expert
            assert tiles.sources[tiles.rows[tile] + at] == row


@pytest.mark.parametrize(
    ("device", "change", "name"),
    [
        (H200, {}, "mosaic_gpu"),
        (A100, {}, "xla"),
        (H200, {"dtype": "float32"}, "xla"),
        (H200, {"hidden_size": 2880, "size": 360}, "xla"),
    ],
)
def test_a_gpu_takes_its_kernel_where_it_can(device, change, name):
    use = dataclasses.replace(QWEN3, **change)
    assert GROUPED_MATMUL.resolve(device=device, uses=[use]).name == name
    if name == "xla":
        with pytest.raises(ConfigError, match=r"names 'mosaic_gpu', which .* kernels.grouped_matmul: xla runs it"):
            GROUPED_MATMUL.resolve(device=device, uses=[use], choice="mosaic_gpu")


def test_columns_that_a_cut_leaves_are_refused_with_whole_experts_as_the_remedy():
    """gpt-oss on two devices."""
    use = dataclasses.replace(QWEN3, hidden_size=2880, size=1440, num_devices=2)
    reason = make_grouped_matmul(H200).refuses(use)
    assert reason is not None and "1440" in reason and "parallel.expert, 2 times as large, leaves experts" in reason


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((128, 2, 768, 2048), 4),  # no whole group of 8
        pytest.param((8, 4096, 14336), 4096, marks=pytest.mark.slow),
    ],
    ids=["qwen3", "mixtral"],
)
def test_it_compiles_for_an_h200_without_a_copy_of_an_expert(shape, rows):
    there = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    compiled = compile_for_h200(
        lambda weight, x, sizes: weight.multiply(x, sizes),
        HopperExperts(array=there(*shape)),  # pyright: ignore[reportArgumentType]
        there(rows, shape[-1]),
        there(shape[0], dtype=jnp.int32),
    )
    assert "mosaic_gpu" in compiled.as_text()
    # The rows, and the products of all tiles twice: as they are stored, and transposed.
    tiled = rows + shape[0] * 128 if rows > shape[0] * 8 else 8 * rows
    bound = 2 * (rows + 128) * shape[-1] + 2 * 4 * tiled * math.prod(shape[1:-1])
    assert compiled.memory_analysis().temp_size_in_bytes < bound + 2**20
