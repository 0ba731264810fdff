"""Weights made of others, against float64: side by side, in an order, with offsets; by XLA and in panels."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.kernels.coded_experts import round_experts
from jaxserve.kernels.coded_weight import CodedWeight, round_weight
from jaxserve.kernels.composed_weight import (
    ExpertsWithOffsets,
    Reordered,
    SideBySide,
    WithOffsets,
    mapped,
    numbers_of,
)
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import GROUPED_MATMUL, MATMUL
from jaxserve.kernels.oracle import grouped_products
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.kernels.xla_matmul import DenseWeight

CPU = Device(backend="cpu", kind="cpu")
DEPTH, GROUP = 160, 32
BLOCKS = Arithmetic(activations="int8", block=128)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def codes(*out_shape: int, arithmetic: Arithmetic = FLOAT, code: str | None = None) -> CodedWeight:
    """Of eight bits for rows as they are and of four for rounded ones: two forms of machine code in place of four."""
    code = code or ("int8" if arithmetic == FLOAT else "int4")
    return round_weight(floats(*out_shape, DEPTH), 1, Storage(code=code, group=GROUP), "float32", arithmetic)


def with_offsets(arithmetic: Arithmetic = FLOAT) -> WithOffsets:
    offsets = DenseWeight(array=jnp.asarray(floats(3, 20, DEPTH // GROUP, seed=1)), num_in=1)
    return WithOffsets(codes=codes(3, 20, arithmetic=arithmetic), offsets=offsets, group=GROUP)


def reordered(arithmetic: Arithmetic = FLOAT) -> Reordered:
    order = np.random.default_rng(4).permutation(DEPTH).astype(np.int32)
    return Reordered(weight=codes(3, 20, arithmetic=arithmetic), order=jnp.asarray(order))


def side_by_side(arithmetic: Arithmetic = FLOAT) -> SideBySide:
    """Codes, floats, codes of eight bits with offsets."""
    middle = DenseWeight(array=jnp.asarray(floats(3, 5, DEPTH, seed=2)), num_in=1)
    last = dataclasses.replace(with_offsets(arithmetic), codes=codes(3, 20, code="int8", arithmetic=arithmetic))
    return SideBySide(parts=(codes(3, 7, arithmetic=arithmetic), middle, last), axis=1)


@pytest.mark.parametrize("name", ["xla", pytest.param("numba_cpu", marks=pytest.mark.slow)])
@pytest.mark.parametrize("arithmetic", [FLOAT, BLOCKS], ids=["float", "rounded"])
@pytest.mark.parametrize("make", [with_offsets, reordered, side_by_side])
def test_products_are_those_of_the_numbers(make: Any, arithmetic: Arithmetic, name: str) -> None:
    matmul, weight = MATMUL.make(name, CPU), make(arithmetic)
    x = floats(9, DEPTH, seed=5)
    exact = np.tensordot(x.astype(np.float64), numbers_of(weight), (1, 2))
    form = mapped(weight, matmul.convert)
    multiply = jax.jit(lambda weight, x: weight.multiply(x))
    out = np.asarray(multiply(form, x))
    bound = 1e-6 * DEPTH if arithmetic == FLOAT else np.abs(x).max() / 254 * np.abs(numbers_of(weight)).sum(-1).max()
    np.testing.assert_allclose(out, exact, atol=bound)
    if name == "numba_cpu":
        alone = np.concatenate([multiply(form, x[row : row + 1]) for row in range(9)])
        np.testing.assert_array_equal(alone, out)
    shapes = mapped(jax.eval_shape(lambda: weight), matmul.shapes)
    assert jax.tree.structure(shapes) == jax.tree.structure(form)
    axes = ("slots", "out", "in")
    assert len(weight.leaf_axes(axes)) == len(jax.tree.leaves(weight))
    for named, leaf in zip(form.leaf_axes(axes), jax.tree.leaves(form), strict=True):
        assert len(named) == leaf.ndim


@pytest.mark.parametrize("name", ["xla", pytest.param("numba_cpu", marks=pytest.mark.slow)])
def test_experts_with_offsets(name: str) -> None:
    storage = Storage(code="int8", group=GROUP)
    given = round_experts(floats(4, 2, 20, DEPTH), storage, "float32")
    offsets = DenseExperts(array=jnp.asarray(floats(4, 2, 20, DEPTH // GROUP, seed=1)))
    experts = ExpertsWithOffsets(codes=given, offsets=offsets, group=GROUP)
    x, sizes = floats(12, DEPTH, seed=5), np.array([3, 0, 7, 1], np.int32)
    form = mapped(experts, GROUPED_MATMUL.make(name, CPU).convert)
    out = np.asarray(jax.jit(lambda experts, x, sizes: experts.multiply(x, sizes))(form, x, sizes))
    np.testing.assert_allclose(out, grouped_products(x, numbers_of(experts), sizes), atol=1e-6 * DEPTH)
    assert (out[11:] == 0).all()


@pytest.mark.parametrize("name", ["xla", "numba_cpu"])
@pytest.mark.parametrize("make", [
    lambda: codes(20, code="int8"),
    lambda: codes(20, code="int4"),
    lambda: dataclasses.replace(codes(20, code="int8"), num_in=0),
    lambda: dataclasses.replace(codes(20, code="int8"), dtype="bfloat16"),
    lambda: WithOffsets(
        codes=codes(20, code="int4"),
        offsets=DenseWeight(array=jnp.asarray(floats(20, DEPTH // GROUP, seed=1)), num_in=1),
        group=GROUP,
    ),
], ids=["int8", "int4", "looked up alone", "bfloat16", "offsets"])  # fmt: skip
def test_rows_of_a_table_in_groups(make: Any, name: str) -> None:
    weight = make()
    found = mapped(weight, MATMUL.make(name, CPU).convert).take(jnp.asarray([6, 0, 19, 20]))
    wanted = numbers_of(weight)[[6, 0, 19]]
    np.testing.assert_allclose(found[:3], wanted, rtol=1e-6 if found.dtype == jnp.float32 else 2**-8, atol=1e-7)
    assert not np.asarray(found[3]).any(), "there is no such row"


def test_an_order_over_devices_takes_inputs_of_others() -> None:
    """Each device multiplies with the inputs whose groups it holds, wherever they come from."""
    weight = reordered()
    cut = dataclasses.replace(weight, cut_over=("model",))
    mesh = Mesh(np.array(jax.devices()[:5]), ("model",))
    named = cut.leaf_axes((None, None, "model"))
    specs = jax.tree.unflatten(jax.tree.structure(cut), [jax.P(*axes) for axes in named])

    def on_a_device(weight: Reordered, x: jax.Array) -> jax.Array:
        return jax.lax.psum(weight.multiply(x), "model")

    x = jnp.asarray(floats(9, DEPTH, seed=5))
    by_input = jax.P(None, "model")
    sharded = jax.shard_map(on_a_device, mesh=mesh, in_specs=(specs, by_input), out_specs=jax.P(), check_vma=False)
    np.testing.assert_allclose(jax.jit(sharded)(cut, x), weight.multiply(x), atol=1e-4)
