"""Products of Hopper GPUs with codes: right in the interpreter, and compiled for an H200 without spilled registers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_builds import ENVIRONMENT, capture, kernels_of  # pyright: ignore[reportMissingImports]: of scripts/

from jaxserve.errors import ConfigError
from jaxserve.kernels.coded_weight import CodedWeight, round_weight
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.pallas.gpu_matmul import HopperCodes, make_matmul, num_parts, tile_rows
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.kernels.xla_matmul import DenseWeight
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler
from tests.kernels.gpu_interpreter import H200, INTERPRETER, watched

A100 = Device(backend="gpu", kind="NVIDIA A100", compute_capability=(8, 0))
INT8, INT4 = Storage(code="int8"), Storage(code="int4", group=128)
IN_INTEGERS = Arithmetic(activations="int8")
interpreted = make_matmul(H200, INTERPRETER)


def coded(
    out_shape: tuple[int, ...], in_shape: tuple[int, ...], storage: Storage, arithmetic: Arithmetic = FLOAT
) -> CodedWeight:
    rng = np.random.default_rng(1)
    array = rng.standard_normal((*out_shape, *in_shape), np.float32)
    plain = dataclasses.replace(storage, zeros=False)
    weight = round_weight(array, len(in_shape), plain, "bfloat16", arithmetic)
    if not storage.zeros:
        return weight
    zeros = jnp.asarray(rng.integers(-8, 9, weight.scales.shape), jnp.int16)
    return dataclasses.replace(weight, zeros=zeros, storage=storage)


def rows_for(weight: CodedWeight, count: int) -> jax.Array:
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((count, *weight.in_shape), np.float32), jnp.bfloat16)


def exact(weight: CodedWeight, x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and what bounds its rounding: the sum of |x| |w|."""
    flat, numbers = np.asarray(x, np.float64).reshape(len(x), -1), weight.numbers()
    matrix = numbers.reshape(-1, flat.shape[1])
    shape = (len(x), *weight.out_shape)
    return (flat @ matrix.T).reshape(shape), (np.abs(flat) @ np.abs(matrix).T).reshape(shape)


@pytest.mark.parametrize(
    ("out_shape", "in_shape", "storage", "rows"),
    [
        # Several runs in a slot; inputs that are no multiple of 64; two warpgroups; fewer rows than a group of 8.
        ((2, 64), (160,), Storage(code="int4", group=32, zeros=True), 9),
        # One run in a slot, more slots than the ring has; outputs that are no multiple of 64; two tiles of rows.
        pytest.param((2, 3, 16), (1024,), INT4, 130, marks=pytest.mark.slow),
        ((128,), (4, 128), INT8, 3),
        pytest.param((40,), (5, 32), Storage(code="float8_e4m3fn"), 1, marks=pytest.mark.slow),
        pytest.param((64,), (384,), Storage(code="int8", group=192), 16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_are_exact_but_for_float32_sums(out_shape, in_shape, storage, rows):
    weight = coded(out_shape, in_shape, storage)
    converted, x = interpreted.convert(weight), rows_for(weight, rows)
    assert isinstance(converted, HopperCodes) and converted.codes is weight.codes, "codes are not moved at load"
    shapes = interpreted.shapes(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weight))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), converted
    )
    wanted, bound = exact(weight, x)
    with watched() as watch:
        out = np.asarray(jax.jit(lambda weight, x: weight.multiply(x))(converted, x))
        assert not watch.found_races()
    assert out.dtype == np.float32 and out.shape == wanted.shape
    assert (np.abs(out - wanted) <= 2e-6 * bound).all()


@pytest.mark.slow
def test_rounded_activations_are_those_of_xla_and_what_is_not_finite_stays_in_its_row():
    weight = coded((2, 20), (5, 32), INT8, IN_INTEGERS)
    converted = interpreted.convert(weight)
    assert isinstance(converted, HopperCodes)
    x = rows_for(weight, 5).at[1, 2, 3].set(jnp.nan).at[3].set(0)
    wanted = np.asarray(weight.multiply(x))
    with watched() as watch:
        out = np.asarray(converted.multiply(x))
        assert not watch.found_races()
    assert np.isnan(out[1]).all() and not out[3].any()
    np.testing.assert_allclose(out[[0, 2, 4]], wanted[[0, 2, 4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("storage", "arithmetic", "activation", "size", "rows"),
    [
        (Storage(code="int4", group=32), FLOAT, "silu", 64, 9),
        pytest.param(INT8, FLOAT, "gelu_tanh", 128, 40, marks=pytest.mark.slow),
        pytest.param(INT8, IN_INTEGERS, "silu", 64, 9, marks=pytest.mark.slow),
        pytest.param(INT8, FLOAT, "gelu", 64, 9, marks=pytest.mark.slow),  # which the kernel does not know
        pytest.param(INT8, FLOAT, "silu", 40, 9, marks=pytest.mark.slow),  # columns that no program has alone
    ],
    ids=str,
)
def test_gate_and_up_meet_where_their_products_end(storage, arithmetic, activation, size, rows):
    weight = coded((2, size), (256,), storage, arithmetic)
    converted, x = interpreted.convert(weight), rows_for(weight, rows)
    gated = jax.jit(lambda weight, x: weight.multiply_gated(x, activation))
    with watched() as watch:
        out = gated(converted, x)
        assert not watch.found_races()
    wanted = np.asarray(gated(weight, x), np.float64)  # products in bfloat16, by XLA
    assert out.dtype == jnp.bfloat16 and out.shape == (rows, size)
    assert np.linalg.norm(np.asarray(out, np.float64) - wanted) <= 2e-3 * np.linalg.norm(wanted)


def test_a_row_that_is_not_finite_spoils_no_other():
    weight = coded((64,), (128,), INT4)
    converted, x = interpreted.convert(weight), rows_for(weight, 9)
    multiply = jax.jit(lambda weight, x: weight.multiply(x))
    with watched():
        clean, spoilt = multiply(converted, x), multiply(converted, x.at[4].set(jnp.inf))
    others = [row for row in range(9) if row != 4]
    np.testing.assert_array_equal(np.asarray(spoilt)[others], np.asarray(clean)[others])
    assert not np.isfinite(spoilt[4]).any()


def test_leaves_have_the_axes_that_devices_share():
    named = {
        ((2, 3, 32), (160,)): ("kv_heads", "slots", "head_dim", "embed"),
        ((40,), (5, 32)): ("embed", "heads", "head_dim"),
    }
    for (out_shape, in_shape), axes in named.items():
        num_in = len(in_shape)
        inputs, outputs = axes[-num_in:], axes[:-num_in]
        grouped = interpreted.convert(coded(out_shape, in_shape, Storage(code="int4", group=32, zeros=True)))
        assert grouped.leaf_axes(axes) == (axes, (*inputs, *outputs), (*inputs, *outputs))
        whole = interpreted.convert(coded(out_shape, in_shape, INT8))
        assert whole.leaf_axes(axes) == (axes, (*(None,) * num_in, *outputs))
        for weight, count in ((grouped, 3), (whole, 2)):
            leaves = jax.tree.leaves(weight)
            assert [leaf.ndim for leaf in leaves] == [len(axes)] * count


def test_rows_of_a_tied_table():
    table = round_weight(np.random.default_rng(0).standard_normal((7, 12), np.float32), 1, INT8, "bfloat16")
    converted, rows = interpreted.convert(table), jnp.asarray([6, 0, 7])
    assert isinstance(converted, HopperCodes)
    np.testing.assert_array_equal(converted.take(rows), table.take(rows))


def test_what_the_kernel_does_not_multiply_stays_as_it_is():
    only_looked_up = round_weight(np.ones((7, 64), np.float32), 0, INT8, "bfloat16")
    four_bits = coded((64,), (128,), INT4, IN_INTEGERS)
    blocks = coded((64,), (256,), INT8, Arithmetic(activations="int8", block=128))
    for weight in (only_looked_up, four_bits, blocks, DenseWeight(array=jnp.ones((8, 8)), num_in=1)):
        assert interpreted.convert(weight) is weight


@pytest.mark.parametrize(
    ("device", "use", "name", "reason"),
    [
        (H200, MatmulUse(dtype="bfloat16", num_devices=1, storage=INT4), "mosaic_gpu", ""),
        (H200, MatmulUse(dtype="float32", num_devices=1), "mosaic_gpu", ""),
        (A100, MatmulUse(dtype="bfloat16", num_devices=1, storage=INT4), "xla", "NVIDIA A100 has 8.0"),
        (H200, MatmulUse(dtype="float32", num_devices=1, storage=INT8), "xla", "activations are float32"),
        (
            H200,
            MatmulUse(dtype="bfloat16", num_devices=8, storage=dataclasses.replace(INT4, group=16)),
            "xla",
            "16 inputs share a scale on one device.*lower parallel.tensor",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_gpu_takes_its_kernel_where_it_can(device, use, name, reason):
    assert MATMUL.resolve(device=device, uses=[use]).name == name
    if reason:
        with pytest.raises(ConfigError, match=rf"names 'mosaic_gpu', which .*{reason}.*kernels.matmul: xla runs it"):
            MATMUL.resolve(device=device, uses=[use], choice="mosaic_gpu")


@pytest.mark.parametrize("storage", [INT4, INT8], ids=str)
def test_the_check_at_start_takes_the_kernel(storage):
    use = MatmulUse(dtype="bfloat16", num_devices=1, storage=storage)
    with watched():
        assert MATMUL.check(interpreted, use, H200) < 1e-5


def test_the_check_at_start_finds_a_wrong_scale():
    def wrong(weight):
        found = interpreted.convert(weight)
        assert isinstance(found, HopperCodes)
        return dataclasses.replace(found, scales=found.scales[::-1])

    use = MatmulUse(dtype="bfloat16", num_devices=1, storage=INT4)
    with watched(), pytest.raises(ConfigError, match="'mosaic_gpu' is wrong on NVIDIA H200"):
        MATMUL.check(dataclasses.replace(interpreted, convert=wrong), use, H200)


def test_tiles_and_parts():
    assert [tile_rows(n) for n in (1, 9, 33, 64, 128, 129, 520)] == [8, 16, 48, 64, 128, 80, 112]
    assert num_parts(64, 32) == 2 and num_parts(224, 32) == 1
    assert num_parts(1, 2) == 2, "no part without a step"


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("code", "run", "zeros", "in_integers", "rows", "gated"),
    [
        ("int4", 128, False, False, 64, False),
        pytest.param("int4", 32, True, False, 128, True, marks=pytest.mark.slow),
        pytest.param("int8", 64, False, False, 8, False, marks=pytest.mark.slow),
        pytest.param("int8", None, False, True, 520, True, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", None, False, False, 128, False, marks=pytest.mark.slow),
    ],
)
def test_it_compiles_for_an_h200_without_spills_or_a_copy_of_the_codes(
    code, run, zeros, in_integers, rows, gated, monkeypatch
):
    num_out, depth = 6144, 14336  # so large that a copy of the codes is more than what prompts need
    out_shape = (2, num_out // 2) if gated else (num_out,)
    there = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype)  # noqa: E731
    runs = 1 if run is None else depth // run
    weight = HopperCodes(
        codes=there(*out_shape, depth, dtype=Storage(code=code).dtype("gpu")),  # pyright: ignore[reportArgumentType]
        scales=there(runs, *out_shape),  # pyright: ignore[reportArgumentType]
        zeros=there(runs, *out_shape, dtype=jnp.bfloat16) if zeros else None,  # pyright: ignore[reportArgumentType]
        num_in=1,
        run=run,
        in_integers=in_integers,
        dtype="bfloat16",
        cut_over=(),
    )
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with capture() as printed:
        x = there(rows, depth, dtype=jnp.bfloat16)
        multiply = lambda weight, x: weight.multiply_gated(x, "silu") if gated else weight.multiply(x)  # noqa: E731
        compiled = compile_for_h200(multiply, weight, x)
    (kernel,) = kernels_of(printed[0])
    assert kernel["spill_bytes"] == 0 and not kernel.get("serialized"), kernel
    padded = -(-rows // tile_rows(rows)) * tile_rows(rows)
    bound = 3 * 4 * padded * num_out + 4 * padded * depth  # partial sums, and rows that are rounded or padded
    assert compiled.memory_analysis().temp_size_in_bytes < bound + 2**20 < num_out * depth
