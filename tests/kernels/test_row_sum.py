"""Sums over rows: right, and the same for a row alone and in every batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.row_sum import row_sum


@pytest.mark.parametrize("num_columns", [1, 17, 256, 1000])
def test_a_row_has_the_same_sum_to_the_last_bit_in_batches_of_every_size(num_columns: int):
    x = np.random.default_rng(0).normal(size=(40, num_columns)).astype(np.float32)
    compiled = jax.jit(lambda x: row_sum(jnp.square(x)))  # with a neighbour that it may be fused with
    whole = np.asarray(compiled(x))
    np.testing.assert_allclose(whole, np.square(x.astype(np.float64)).sum(axis=1), rtol=1e-6)
    for num_rows in (1, 2, 3, 8, 16):
        assert np.array_equal(compiled(x[:num_rows]), whole[:num_rows]), num_rows
