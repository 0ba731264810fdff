"""Products of every number of rows that `matmul` treats in a way of its own, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.layers import matmul


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-6)])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65])
def test_any_number_of_rows(rows: int, dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 4, 8)), dtype)
    weight = jnp.asarray(rng.standard_normal((3, 5, 4, 8)), dtype)
    out = jax.jit(matmul, static_argnums=2)(x, weight, 2)
    want = np.einsum("tnh,abnh->tab", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    assert out.shape == (rows, 3, 5) and out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=4 * tolerance)
