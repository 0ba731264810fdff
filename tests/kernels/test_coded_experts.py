"""Grouped products with codes: right however rows are split, of experts hit alone, the same bits in any crowd."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.errors import ConfigError
from jaxserve.kernels.coded_experts import CodedExperts, round_experts
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmul
from jaxserve.kernels.ops import GROUPED_MATMUL
from jaxserve.kernels.oracle import grouped_products
from jaxserve.kernels.packed_codes import pack
from jaxserve.kernels.ragged_grouped_matmul import make_grouped_matmul
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage, decode_float4, encode_float4
from tests.kernels.test_grouped_matmul import FLOAT32, SPLITS, WIDTH, multiply, product, rows
from tests.kernels.tpu_interpreter import V5E

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CPU, TPU, GPU = (Device(backend=backend, kind=backend) for backend in ("cpu", "tpu", "gpu"))
BY_ROW = Storage(code="int8")
FLOAT4 = Storage(code="float4_e2m1fn", group=32)
ZEROS = Storage(code="int4", group=32, zeros=True)
FLOAT8 = Storage(code="float8_e4m3fn")
BLOCKS = Arithmetic(activations="int8", block=128)
TOKENS = Arithmetic(activations="int8")
SHAPE = (2, WIDTH + 3, 160)
CROWD = (4, 0, 9, 1, 3, 5)


@functools.cache
def implementation(name: str) -> GroupedMatmul:
    if name == "ragged_tpu":
        return make_grouped_matmul(V5E, pltpu.InterpretParams())
    return GROUPED_MATMUL.make(name, CPU)


@functools.cache
def coded(storage: Storage, arithmetic: Arithmetic = FLOAT, shape: tuple[int, ...] = SHAPE) -> CodedExperts:
    rng = np.random.default_rng(3)
    array = rng.standard_normal((len(CROWD), *shape), np.float32)
    found = round_experts(array, dataclasses.replace(storage, zeros=False), "float32", arithmetic)
    if not storage.zeros:
        return found
    zeros = jnp.asarray(rng.integers(-8, 8, found.scales.shape), jnp.int16)
    return dataclasses.replace(found, zeros=zeros, storage=storage)


@functools.cache
def converted(name: str, storage: Storage, arithmetic: Arithmetic) -> ExpertWeight:
    return implementation(name).convert(coded(storage, arithmetic))


USES = [
    *(("xla", storage, FLOAT) for storage in (BY_ROW, FLOAT4, ZEROS, FLOAT8)),
    *(("xla", storage, arithmetic) for storage in (BY_ROW, ZEROS) for arithmetic in (TOKENS, BLOCKS)),
    # Machine code for a form of codes takes long to compile; tests/kernels/test_packed_codes.py has the others.
    *(
        ("numba_cpu", storage, arithmetic)
        for storage, arithmetic in ((FLOAT4, FLOAT), (ZEROS, FLOAT), (BY_ROW, BLOCKS))
    ),
    *(("ragged_tpu", storage, FLOAT) for storage in (FLOAT4, ZEROS, FLOAT8)),
    ("ragged_tpu", BY_ROW, TOKENS),
]
IDS = [
    f"{name}-{storage.code}{'-zeros' * storage.zeros}-{arith.activations}{arith.block}" for name, storage, arith in USES
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "storage", "arithmetic"), USES, ids=IDS)
def test_rows_meet_the_codes_of_their_own_expert(name: str, storage: Storage, arithmetic: Arithmetic) -> None:
    """Against float64. Rounded rows are within what 254 steps of the largest number explain."""
    weight, x = converted(name, storage, arithmetic), rows(24, SHAPE[-1])
    numbers = coded(storage, arithmetic).numbers()
    for split in ("more rows than a block", "all to the last", "some belong to nobody"):
        sizes = SPLITS[split]
        spoilt = x.at[sum(sizes) :].set(jnp.nan)
        out = product(weight, spoilt, sizes)
        exact = grouped_products(np.asarray(x), numbers, np.asarray(sizes))
        largest = np.abs(numbers).max()
        bound = 1e-6 * SHAPE[-1] * largest
        if arithmetic != FLOAT:
            bound += np.abs(np.asarray(x)).max() / 254 * np.abs(numbers).sum(-1).max()
        assert out.dtype == np.float32 and out.shape == exact.shape
        np.testing.assert_allclose(out, exact, atol=bound)
        assert (out[sum(sizes) :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "arithmetic"), [(BY_ROW, BLOCKS), (FLOAT4, FLOAT), (ZEROS, FLOAT)], ids=str)
def test_a_row_has_the_bits_of_the_dense_product_with_its_expert(storage: Storage, arithmetic: Arithmetic) -> None:
    """Alone and in any crowd, wherever in it the row comes."""
    weight, x = converted("numba_cpu", storage, arithmetic), rows(sum(CROWD), SHAPE[-1])
    crowd = product(weight, x, CROWD)
    of = coded(storage, arithmetic)
    expert_of = np.repeat(np.arange(len(CROWD)), CROWD)
    for row in range(0, sum(CROWD), 3):
        sizes = tuple(int(expert == expert_of[row]) for expert in range(len(CROWD)))
        alone = product(weight, x[row : row + 1], sizes)
        np.testing.assert_array_equal(alone[0], crowd[row])
    for expert in np.unique(expert_of):
        one = of.of(int(expert))
        if storage == FLOAT4:
            codes = decode_float4(np.asarray(one.codes))
            whole = dataclasses.replace(FLOAT4, code="int8")
            one = dataclasses.replace(one, codes=jnp.asarray(codes), storage=whole)
        dense = jax.jit(pack(one, WIDTH).multiply)(x[expert_of == expert])
        np.testing.assert_array_equal(crowd[expert_of == expert], dense)


@pytest.mark.parametrize("name", ["xla", pytest.param("numba_cpu", marks=pytest.mark.slow), "ragged_tpu"])
def test_experts_without_rows_are_not_read(name: str) -> None:
    """NaN in their scales would show."""
    sizes, x = SPLITS["some belong to nobody"], rows(24, SHAPE[-1])
    hit = (np.asarray(sizes) > 0)[:, None, None, None]
    given = coded(FLOAT4)
    spoilt = dataclasses.replace(given, scales=jnp.where(hit, given.scales, jnp.nan))
    out = product(implementation(name).convert(spoilt), x, sizes)
    np.testing.assert_array_equal(out, product(converted(name, FLOAT4, FLOAT), x, sizes))


@pytest.mark.parametrize("name", [pytest.param("numba_cpu", marks=pytest.mark.slow), "ragged_tpu"])
def test_a_row_that_is_not_finite_is_its_own_affair(name: str) -> None:
    arithmetic = BLOCKS if name == "numba_cpu" else TOKENS
    weight, x = converted(name, BY_ROW, arithmetic), rows(sum(CROWD), SHAPE[-1])
    out = product(weight, x.at[5, 7].set(jnp.inf), CROWD)
    clean = product(weight, x, CROWD)
    assert not np.isfinite(out[5]).any()
    np.testing.assert_array_equal(np.delete(out, 5, 0), np.delete(clean, 5, 0))


@pytest.mark.parametrize("name", ["xla", "numba_cpu", "ragged_tpu"])
@pytest.mark.parametrize("shape", [(2, 40, 64), (64, 96)], ids=["gate_up", "down"])
def test_shapes_promised_are_shapes_made(name: str, shape: tuple[int, ...]) -> None:
    given = coded(ZEROS, FLOAT, shape)
    promised = implementation(name).shapes(jax.eval_shape(lambda: given))
    made = implementation(name).convert(given)
    assert jax.tree.structure(promised) == jax.tree.structure(made)
    axes = ("experts", *(("gate_up",) if len(shape) == 3 else ()), "out", "in")
    of_leaves = made.leaf_axes(axes)
    for one, other, named in zip(jax.tree.leaves(promised), jax.tree.leaves(made), of_leaves, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert len(named) == other.ndim and named[0] == "experts"


def test_codes_of_float4_are_its_numbers() -> None:
    every = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(decode_float4(encode_float4(every)), 2 * every.astype(np.float32))


def test_each_backend_has_its_own() -> None:
    uses = [dataclasses.replace(FLOAT32, hidden_size=64, size=96, storage=FLOAT4)]
    assert [GROUPED_MATMUL.resolve(device=d, uses=uses).name for d in (CPU, TPU, GPU)] == [
        "numba_cpu",
        "ragged_tpu",
        "xla",
    ]


@pytest.mark.parametrize(
    ("name", "device", "storage", "reason"),
    [
        ("numba_cpu", CPU, Storage(code="int4", group=8), "groups must be a multiple of 16"),
        ("ragged_tpu", TPU, Storage(code="int4", group=16), "must be a multiple of 32; parallel.expert"),
        ("ragged_tpu", TPU, BY_ROW, "35 inputs of an expert share a scale"),
        (
            "mosaic_gpu",
            Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0)),
            FLOAT4,
            "these are float4_e2m1fn, a scale for each 32 inputs; kernels.grouped_matmul: xla runs it",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(name: str, device: Device, storage: Storage, reason: str) -> None:
    use = dataclasses.replace(FLOAT32, storage=storage, hidden_size=64, dtype="bfloat16")
    with pytest.raises(ConfigError, match=f"kernels.grouped_matmul names '{name}', which .*{reason}"):
        GROUPED_MATMUL.resolve(device=device, uses=[use], choice=name)


def test_a_step_is_compiled_once_for_any_split() -> None:
    weight, x = converted("xla", FLOAT4, FLOAT), rows(24, SHAPE[-1])
    before = multiply()._cache_size()
    for sizes in SPLITS.values():
        product(weight, x, sizes)
    assert multiply()._cache_size() - before <= 1
