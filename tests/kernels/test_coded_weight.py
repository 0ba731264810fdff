"""Products with codes against float64: every storage and arithmetic, XLA's forms and the TPU kernel's."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.kernels.coded_weight import CodedWeight, round_weight
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Matmul, MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.pallas.tpu_matmul import GroupedCodes, make_matmul
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage, round_to_codes, scales_for
from jaxserve.kernels.xla_matmul import XLA_MATMUL

pytestmark = pytest.mark.usefixtures("compiled_quickly")

V5E = Device(backend="tpu", kind="TPU v5 lite")
CPU = Device(backend="cpu", kind="cpu")
TPU = make_matmul(V5E, pltpu.InterpretParams())
SHAPES = {"qkv": ((2, 3, 32), (160,)), "out": ((40,), (5, 32)), "gate_up": ((2, 48), (160,))}
STORAGES = [
    Storage(code="int8"),
    Storage(code="float8_e4m3fn"),
    Storage(code="int8", group=32),
    Storage(code="int4", group=32, zeros=True),
    Storage(code="float8_e4m3fn", group=32),
]


def coded(shape: str, storage: Storage, dtype: str = "float32", arithmetic: Arithmetic = FLOAT) -> CodedWeight:
    rng = np.random.default_rng(1)
    out_shape, in_shape = SHAPES[shape]
    array = rng.standard_normal((*out_shape, *in_shape), np.float32)
    weight = round_weight(array, len(in_shape), dataclasses.replace(storage, zeros=False), dtype, arithmetic)
    if not storage.zeros:
        return weight
    zeros = jnp.asarray(rng.integers(-8, 9, weight.scales.shape), jnp.int16)
    return dataclasses.replace(weight, zeros=zeros, storage=storage)


def inputs(weight: CodedWeight, rows: int) -> jax.Array:
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.standard_normal((rows, *weight.in_shape), np.float32), weight.dtype)


def exact(weight: CodedWeight, x: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and what bounds its rounding: the sum of |x| |w|."""
    numbers, num_in = weight.numbers(), len(weight.in_shape)
    axes = (range(1, 1 + num_in), range(numbers.ndim - num_in, numbers.ndim))
    wide = np.asarray(x, np.float64)
    return np.tensordot(wide, numbers, axes), np.tensordot(np.abs(wide), np.abs(numbers), axes)


@pytest.mark.parametrize(
    ("shape", "storage"),
    [*(("out", storage) for storage in STORAGES), ("qkv", STORAGES[3]), ("gate_up", STORAGES[3])],
    ids=str,
)
def test_products_are_exact_but_for_float32_sums(shape: str, storage: Storage) -> None:
    for dtype, rows in (("float32", 9), ("bfloat16", 9), ("bfloat16", 1)):
        weight = coded(shape, storage, dtype)
        x = inputs(weight, rows)
        wanted, bound = exact(weight, x)
        out = jax.jit(lambda weight, x: weight.multiply(x))(weight, x)
        assert out.dtype == jnp.float32 and out.shape == wanted.shape
        assert (np.abs(out - wanted) <= 2e-6 * bound).all()


@pytest.mark.parametrize(
    ("shape", "storage", "dtype", "rows"),
    [
        ("qkv", STORAGES[3], "bfloat16", 9),
        ("out", STORAGES[4], "bfloat16", 33),
        ("gate_up", STORAGES[2], "float32", 1),
    ],
    ids=str,
)
def test_the_kernel_of_groups_for_tpus(shape: str, storage: Storage, dtype: str, rows: int) -> None:
    weight = coded(shape, storage, dtype)
    converted, x = TPU.convert(weight), inputs(weight, rows)
    assert isinstance(converted, GroupedCodes)
    shapes = TPU.shapes(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weight))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), converted
    )
    wanted, bound = exact(weight, x)
    out = np.asarray(converted.multiply(x))
    assert out.shape == wanted.shape and (np.abs(out - wanted) <= 2e-6 * bound).all()
    crowd = np.asarray(converted.multiply(jnp.concatenate([x[:1]] * 40)))
    np.testing.assert_array_equal(crowd[17], out[0])


def test_leaves_have_the_axes_that_devices_share() -> None:
    axes = {"qkv": ("kv_heads", "slots", "head_dim", "embed"), "out": ("embed", "heads", "head_dim")}
    axes["gate_up"] = ("gate_up", "mlp", "embed")
    for shape, named in axes.items():
        whole = coded(shape, STORAGES[0]).leaf_axes(named)
        num_in = len(SHAPES[shape][1])
        assert whole == (named, (*named[:-num_in], *(None,) * num_in))
        weight = coded(shape, STORAGES[3])
        assert weight.leaf_axes(named) == (named,) * 3
        outputs, inputs_of = ("mlp" if shape == "gate_up" else named[0]), ("heads" if shape == "out" else "embed")
        converted = TPU.convert(weight)
        assert set(converted.leaf_axes(named)) == {(inputs_of, None, outputs)}
        assert len(converted.leaf_axes(named)) == len(jax.tree.leaves(converted))


@pytest.mark.parametrize("block", [None, 128])
@pytest.mark.parametrize("storage", [STORAGES[0], STORAGES[2], STORAGES[3]], ids=str)
def test_rounded_activations(storage: Storage, block: int | None) -> None:
    weight = coded("out", storage, arithmetic=Arithmetic(activations="int8", block=block))
    x = inputs(weight, 9)
    x = x.at[3].set(0).at[4, 0].multiply(1e4)
    out = np.asarray(weight.multiply(x), np.float64)
    flat = np.asarray(x, np.float64).reshape(9, -1)
    rounded = np.zeros_like(flat)
    size = flat.shape[1] if block is None else block
    for row, start in itertools.product(range(9), range(0, flat.shape[1], size)):
        part = np.float32(flat[row, start : start + size])
        largest = np.abs(part).max()
        if largest > 0:
            codes = np.rint(part * (np.float32(127) / largest))
            rounded[row, start : start + size] = codes * np.float64(largest) / 127
    wanted, bound = exact(weight, rounded.reshape(x.shape))
    assert (np.abs(out - wanted) <= 2e-6 * bound).all() and not out[3].any()
    alone = np.asarray(weight.multiply(x[4:5]))
    np.testing.assert_array_equal(alone[0], out[4].astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    for block in (None, 128):
        weight = coded("out", STORAGES[0], arithmetic=Arithmetic(activations="int8", block=block))
        x = inputs(weight, 3)
        out, clean = np.asarray(weight.multiply(x.at[1, 2, 3].set(bad))), np.asarray(weight.multiply(x))
        assert np.isnan(out[1]).all()
        np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


def test_rows_of_a_table() -> None:
    table = round_weight(np.random.default_rng(0).standard_normal((7, 12), np.float32), 0, STORAGES[0], "bfloat16")
    found = table.take(jnp.asarray([6, 0, 7]))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:2], table.numbers()[[6, 0]].astype(jnp.bfloat16))
    assert not np.asarray(found[2]).any()


def test_rounding_takes_the_nearest_code() -> None:
    matrix = np.array([[1e-38, -3e-39, 0.0], [127.0, 63.5, -128.0], [0.0, 0.0, 0.0]], np.float32)
    int8 = Storage(code="int8")
    scales = scales_for(np.abs(matrix).max(axis=1), int8)[:, None]
    np.testing.assert_array_equal(round_to_codes(matrix, scales, int8), [[127, -38, 0], [126, 63, -127], [0, 0, 0]])
    fp8 = Storage(code="float8_e4m3fn")
    assert round_to_codes(np.array([[1000.0, -1e9]], np.float32), np.ones((1, 1), np.float32), fp8).astype(
        np.float32
    ).tolist() == [[448, -448]]


@pytest.mark.parametrize("matmul", [XLA_MATMUL, TPU], ids=["xla", "mosaic_tpu"])
def test_the_check_at_start_takes_codes(matmul: Matmul) -> None:
    device = Device(backend="cpu", kind="cpu")
    for storage in STORAGES:
        assert MATMUL.check(matmul, MatmulUse(dtype="float32", num_devices=1, storage=storage), device) < 1e-5
    rounded = MatmulUse(dtype="float32", num_devices=1, storage=STORAGES[0], arithmetic=Arithmetic(activations="int8"))
    assert 1e-3 < MATMUL.check(matmul, rounded, device) < 2e-2


def test_small_groups_are_refused_by_name() -> None:
    use = MatmulUse(dtype="bfloat16", num_devices=8, storage=Storage(code="int4", group=16))
    with pytest.raises(ConfigError, match="16 inputs share a scale on one device.*lower parallel.tensor"):
        MATMUL.resolve(device=V5E, uses=[use], choice="mosaic_tpu")
    assert MATMUL.resolve(device=V5E, uses=[use]).name == "xla"


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_scales_of_rounded_rows_do_not_depend_on_devices(devices: int) -> None:
    """Blocks of 128 of 320 inputs, also where a device's 160, 80 or 40 end inside of one."""
    array = np.random.default_rng(1).standard_normal((24, 320), np.float32)
    one = round_weight(array, 1, Storage(code="int8", group=8), "float32", Arithmetic(activations="int8", block=128))
    cut = dataclasses.replace(one, cut_over=("model",))
    x = inputs(one, 5).at[3, 200].set(jnp.nan).at[4].set(0)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("model",))
    axes = cut.leaf_axes((None, "model"))
    specs = jax.tree.unflatten(jax.tree.structure(cut), [jax.P(*named) for named in axes])

    def on_a_device(weight: CodedWeight, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return weight.rounded(x).codes, jax.lax.psum(weight.multiply(x), "model")

    by_input = jax.P(None, "model")
    rounded = jax.jit(
        jax.shard_map(
            on_a_device, mesh=mesh, in_specs=(specs, by_input), out_specs=(by_input, jax.P()), check_vma=False
        )
    )
    codes, product = rounded(cut, x)
    np.testing.assert_array_equal(codes, one.rounded(x).codes)
    np.testing.assert_allclose(product, one.multiply(x), rtol=1e-5, atol=1e-5)
    assert np.isnan(np.asarray(product)[3]).all() and np.isfinite(np.asarray(product)[:3]).all()


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("xla", Storage(code="int8")),
        ("xla", Storage(code="int4", group=32)),
        pytest.param("numba_cpu", Storage(code="int8"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_rows_of_zeros_and_of_the_smallest_numbers(storage: Storage, name: str) -> None:
    """A scale of 0 and one near the smallest: no quotient of either is NaN. The code -128 is a number like others."""
    array = np.random.default_rng(1).standard_normal((4, 160), np.float32)
    array[0], array[1] = 0, array[1] * 1e-36
    weight = round_weight(array, 1, storage, "float32")
    if storage.code == "int8":
        weight = dataclasses.replace(weight, codes=weight.codes.at[2].set(-128))
    x = inputs(weight, 9)
    out = np.asarray(jax.jit(lambda weight, x: weight.multiply(x))(MATMUL.make(name, CPU).convert(weight), x))
    wanted, bound = exact(weight, x)
    assert (out[:, 0] == 0).all()
    assert (np.abs(out - wanted) <= 2e-6 * bound + 1e-37).all()
