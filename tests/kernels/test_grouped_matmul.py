"""Grouped products: right however rows are split over experts, of experts hit alone, the same bits in any crowd."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.kernels.cases import GroupedMatmulCase
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmulUse
from jaxserve.kernels.ops import GROUPED_MATMUL
from jaxserve.kernels.oracle import grouped_products
from jaxserve.kernels.packed_experts import PackedExperts
from jaxserve.kernels.packed_weight import pack
from jaxserve.kernels.ragged_grouped_matmul import InOutExperts
from jaxserve.kernels.xla_grouped_matmul import XLA_GROUPED_MATMUL, DenseExperts

CPU, TPU, GPU = (Device(backend=backend, kind=backend) for backend in ("cpu", "tpu", "gpu"))
NAMES = ("xla", "ragged_tpu", "numba_cpu")  # that run on a CPU
WIDTH = find_target().width
FLOAT32 = GroupedMatmulUse(dtype="float32", num_experts=6, hidden_size=65, size=35, num_devices=1)
# How 24 rows may be split over six experts: one compiled product serves all of them.
SPLITS = {
    "each token to all": (4, 4, 4, 4, 4, 4),
    "more rows than a block": (1, 17, 0, 2, 3, 1),
    "all to the first": (24, 0, 0, 0, 0, 0),
    "all to the last": (0, 0, 0, 0, 0, 24),
    "some belong to nobody": (0, 5, 0, 0, 9, 0),
    "one row": (0, 0, 0, 1, 0, 0),
    "no row": (0, 0, 0, 0, 0, 0),
}


@functools.cache
def multiply():
    return jax.jit(lambda weight, x, sizes: weight.multiply(x, sizes))


def experts(count: int, *shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, *shape), np.float32), dtype)


def rows(count: int, depth: int, dtype: str = "float32", seed: int = 1) -> jax.Array:
    return experts(count, depth, dtype=dtype, seed=seed)


@functools.cache
def convert(name: str, count: int, *shape: int, dtype: str = "float32") -> ExpertWeight:
    return GROUPED_MATMUL.make(name, CPU).convert(DenseExperts(array=experts(count, *shape, dtype=dtype)))


def product(weight: ExpertWeight, x: jax.Array, sizes: tuple[int, ...]) -> np.ndarray:
    return np.asarray(multiply()(weight, x, jnp.asarray(sizes, jnp.int32)))


def check(name: str, shape: tuple[int, ...], num_rows: int, sizes: tuple[int, ...], dtype: str) -> None:
    array, x = experts(len(sizes), *shape, dtype=dtype), rows(num_rows, shape[-1], dtype)
    out = product(convert(name, len(sizes), *shape, dtype=dtype), x, sizes)
    exact = grouped_products(np.asarray(x), np.asarray(array), np.asarray(sizes))
    assert out.dtype == np.float32 and out.shape == (num_rows, *shape[:-1])
    np.testing.assert_allclose(out, exact, atol=1e-6 * shape[-1])
    assert (out[sum(sizes) :] == 0).all()


# --- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in NAMES), ("numba_cpu", "bfloat16")])
@pytest.mark.parametrize("split", SPLITS)
def test_rows_meet_their_own_expert_however_they_are_split(split, name, dtype):
    check(name, (2, WIDTH + 3, 33), 24, SPLITS[split], dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("num_rows", "sizes"), [(1, (0, 1)), (1, (0, 0)), (5, (5,)), (100, (40, 60))])
def test_any_number_of_rows_and_experts(name, num_rows, sizes):
    """One expert, and numbers of rows that no block divides."""
    check(name, (37, 16), num_rows, sizes, "float32")


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_nobody_may_hold_anything(name):
    weight, x = convert(name, 6, 2, WIDTH + 3, 33), rows(24, 33)
    sizes = SPLITS["some belong to nobody"]
    spoilt = x.at[sum(sizes) :].set(jnp.nan)
    np.testing.assert_array_equal(product(weight, spoilt, sizes), product(weight, x, sizes))


@pytest.mark.parametrize("name", ["xla", "numba_cpu"])
def test_experts_without_rows_are_not_read(name):
    """NaN in them would show. The TPU's operation is a dense one on a CPU: tests/kernels/test_grouped_compile.py."""
    sizes = (0, 5, 0, 0, 9, 0)
    array = experts(6, 2, WIDTH + 3, 33)
    spoilt = jnp.where((jnp.asarray(sizes) > 0)[:, None, None, None], array, jnp.nan)
    weight = GROUPED_MATMUL.make(name, CPU).convert(DenseExperts(array=spoilt))
    out = product(weight, rows(24, 33), sizes)
    np.testing.assert_array_equal(out, product(convert(name, 6, 2, WIDTH + 3, 33), rows(24, 33), sizes))


CASES = [
    pytest.param(name, case, id=f"{name}-{case.name}", marks=pytest.mark.slow if name == "xla" else ())
    for name in ("xla", "numba_cpu")
    for case in GROUPED_MATMUL.cases.values()
    if case.tokens > 1
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_named_cases_are_right(name: str, case: GroupedMatmulCase):
    assert GROUPED_MATMUL.error(GROUPED_MATMUL.make(name, CPU), case) < 2e-6


# --- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_in_any_crowd(dtype):
    """Whoever else goes to its expert, and wherever among them it comes."""
    weight, x = convert("numba_cpu", 3, 5 * WIDTH - 3, 768, dtype=dtype), rows(40, 768, dtype)
    expert_of = np.random.default_rng(0).permutation(np.repeat([0, 2], [9, 31]))
    order = np.argsort(expert_of, kind="stable")
    crowd = product(weight, x[order], (9, 0, 31))
    for place, row in enumerate(order):
        sizes = np.zeros(3, int)
        sizes[expert_of[row]] = 1
        alone = product(weight, x[row : row + 1], tuple(sizes))
        np.testing.assert_array_equal(alone[0], crowd[place])
    few = product(weight, x[order][4:13], (5, 0, 4))
    np.testing.assert_array_equal(few, crowd[4:13])


def test_bits_are_those_of_the_dense_product_with_that_expert():
    """A model's dense and expert layers add up alike."""
    array, x = experts(2, 70, 33), rows(11, 33)
    out = product(convert("numba_cpu", 2, 70, 33), x, (0, 11))
    np.testing.assert_array_equal(out, jax.jit(pack(array[1], 1, WIDTH).multiply)(x))


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 40, 24), (24, 40)], ids=["gate_up", "down"])
def test_shapes_promised_are_shapes_made(name, shape):
    grouped = GROUPED_MATMUL.make(name, CPU)
    promised = grouped.shapes(DenseExperts(array=jax.ShapeDtypeStruct((6, *shape), jnp.bfloat16)))  # pyright: ignore
    made = convert(name, 6, *shape, dtype="bfloat16")
    assert jax.tree.structure(promised) == jax.tree.structure(made)
    for one, other in zip(jax.tree.leaves(promised), jax.tree.leaves(made), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_each_form_names_the_axes_of_its_arrays():
    gate_up, down = ("experts", "gate_up", "expert_mlp", "embed"), ("experts", "embed", "expert_mlp")
    assert convert("xla", 6, 2, 40, 24).leaf_axes(gate_up) == (gate_up,)
    tpu = convert("ragged_tpu", 6, 2, 40, 24), convert("ragged_tpu", 6, 24, 40)
    assert all(isinstance(weight, InOutExperts) for weight in tpu)
    assert tpu[0].leaf_axes(gate_up) == (("experts", "embed", "expert_mlp"),) * 2
    assert tpu[1].leaf_axes(down) == (("experts", "expert_mlp", "embed"),)
    packed = convert("numba_cpu", 6, 2, 40, 24)
    assert isinstance(packed, PackedExperts) and packed.leaf_axes(gate_up) == (("experts", None, None, None),)


# --- choice ---------------------------------------------------------------------------------------------------------


def test_each_backend_has_its_own():
    assert [GROUPED_MATMUL.resolve(device=d, uses=[FLOAT32]).name for d in (CPU, TPU, GPU)] == [
        "numba_cpu",
        "ragged_tpu",
        "xla",
    ]


@pytest.mark.parametrize(
    ("name", "device", "use", "reason"),
    [
        ("numba_cpu", TPU, FLOAT32, "it runs on CPUs alone, and this is a tpu"),
        ("ragged_tpu", CPU, FLOAT32, "it runs on TPUs alone, and this is a cpu"),
        ("numba_cpu", CPU, dataclasses.replace(FLOAT32, num_devices=2), "set parallel.tensor to 1"),
        (
            "numba_cpu",
            CPU,
            dataclasses.replace(FLOAT32, dtype="float16"),
            "float32 or bfloat16 alone",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(name, device, use, reason):
    with pytest.raises(ConfigError, match=f"kernels.grouped_matmul names '{name}', which .*{reason}"):
        GROUPED_MATMUL.resolve(device=device, uses=[use], choice=name)


def test_a_wrong_one_is_found_at_the_start():
    class Transposed(DenseExperts):
        def multiply(self, x, group_sizes):
            return super().multiply(x, group_sizes[::-1])

    wrong = dataclasses.replace(XLA_GROUPED_MATMUL, name="wrong", convert=lambda weight: Transposed(array=weight.array))
    jax.tree_util.register_dataclass(Transposed, ["array"], [])
    with pytest.raises(ConfigError, match=r"the grouped_matmul implementation 'wrong' is wrong on cpu"):
        GROUPED_MATMUL.check(wrong, FLOAT32, CPU)
