"""Tables that TPUs look rows up in: the numbers are those of the table, and no program copies it whole.

The TPU is not here; what it would do is in the program that XLA compiles for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.kernels.coded_weight import CodedWeight, round_weight
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.padded_table import PaddedTable
from jaxserve.kernels.pallas.tpu_matmul import make_matmul
from jaxserve.kernels.storage import Storage
from jaxserve.kernels.xla_matmul import DenseWeight
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.models.loading import one_device_mesh
from jaxserve.runtime.hlo import dims_of, parse_hlo

V6E = Device(backend="tpu", kind="TPU v6 lite")
MATMUL = make_matmul(V6E, pltpu.InterpretParams())
ROWS, WIDTH = 1000, 96
_LAYS_OUT = frozenset({"copy", "pad", "transpose"})  # a prefetch into fast memory is a copy-start


def dense(num_in: int, *, tied: bool = False, width: int = WIDTH) -> DenseWeight:
    array = np.random.default_rng(0).standard_normal((ROWS, width), np.float32)
    return DenseWeight(array=jnp.asarray(array, jnp.bfloat16), num_in=num_in, tied=tied)


def coded(width: int = WIDTH) -> CodedWeight:
    array = np.random.default_rng(0).standard_normal((ROWS, width), np.float32)
    return dataclasses.replace(round_weight(array, 1, Storage(code="int8"), "bfloat16"), tied=True)


TABLES = {"looked_up": lambda: dense(0), "tied": lambda: dense(1, tied=True), "tied_codes": coded}


def copies(text: str, rows: int) -> list[str]:
    """Instructions of a program that lay out anew an array with so many rows, or columns, of two axes."""
    return [
        i.text.strip()[:120]
        for instructions in parse_hlo(text).computations.values()
        for i in instructions
        if i.op in _LAYS_OUT and len(dims := dims_of(i.shape)) == 2 and rows in dims and min(dims) >= WIDTH
    ]


def compiled(weight: Any) -> str:
    """The program of a TPU that looks rows up, and multiplies where the weight can."""
    placed = NamedSharding(one_device_mesh(absent_devices("v6e:1")[0]), PartitionSpec())

    def step(weight: Any, ids: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        found = weight.take(ids)
        inner = weight.weight if isinstance(weight, PaddedTable) else weight
        return (found, weight.multiply(x)) if inner.num_in else (found,)

    args = (weight, jnp.zeros(16, jnp.int32), jnp.zeros((16, WIDTH), jnp.bfloat16))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed), args)
    return jax.jit(step).trace(*shapes).lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize("kind", TABLES)
def test_a_padded_table_has_the_numbers_of_the_table(kind: str) -> None:
    table = TABLES[kind]()
    padded = MATMUL.convert(table)
    assert isinstance(padded, PaddedTable) and jax.tree.leaves(padded)[0].shape == (ROWS, 128)
    assert jax.tree.map(jnp.shape, padded) == jax.tree.map(jnp.shape, MATMUL.shapes(table))
    ids = jnp.asarray([0, 7, ROWS - 1, ROWS])  # the last is past the table: zeros
    np.testing.assert_array_equal(padded.take(ids), table.take(ids))
    if table.num_in:
        x = jnp.asarray(np.random.default_rng(1).standard_normal((5, WIDTH)), jnp.bfloat16)
        np.testing.assert_allclose(padded.multiply(x), table.multiply(x), rtol=1e-5, atol=1e-4)


def test_only_tables_with_a_part_of_a_tile_change() -> None:
    for weight in (dense(1), dense(0, width=128), dense(1, tied=True, width=256), coded(128)):
        assert MATMUL.convert(weight) is weight and MATMUL.shapes(weight) is weight


@pytest.mark.parametrize("kind", TABLES)
def test_no_lookup_of_a_tpu_copies_its_table(kind: str) -> None:
    table = TABLES[kind]()
    assert not copies(compiled(MATMUL.convert(table)), ROWS)
    if table.num_in:  # as it is, its product wants it in columns and its lookup in rows
        assert copies(compiled(table), ROWS)
