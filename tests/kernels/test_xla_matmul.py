"""Products of every number of rows that `DenseWeight` treats in a way of its own, on every backend, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.xla_matmul import DenseWeight, product_on_accelerators, product_on_cpus


def multiply(x: jax.Array, array: jax.Array, num_out: int) -> jax.Array:
    return DenseWeight(array=array, num_in=array.ndim - num_out).multiply(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65])
def test_any_number_of_rows(rows: int, dtype: str) -> None:
    """Both ways are computed here, whichever of them this backend takes."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, 4, 8)), dtype)
    weight = jnp.asarray(rng.standard_normal((3, 5, 4, 8)), dtype)
    want = np.einsum("tnh,abnh->tab", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    for product in (multiply, product_on_accelerators, product_on_cpus):
        out = jax.jit(product, static_argnums=2)(x, weight, 2)
        assert out.shape == (rows, 3, 5) and out.dtype == jnp.float32
        np.testing.assert_allclose(out, want, rtol=2e-6, atol=8e-6, err_msg=product.__name__)


def test_each_backend_takes_its_own() -> None:
    x, weight = jnp.ones((2, 8)), DenseWeight(array=jnp.ones((3, 8)), num_in=1)
    barriers = {
        backend: jax.export.export(jax.jit(DenseWeight.multiply), platforms=[backend])(weight, x)
        .mlir_module()
        .count("optimization_barrier")
        for backend in ("cpu", "cuda", "tpu")
    }
    assert barriers.pop("cpu") > 0
    assert barriers == {"cuda": 0, "tpu": 0}


def test_rows_of_others_are_zeros() -> None:
    """A device looks up the rows of its share, and takes ids past it for those of others."""
    table = DenseWeight(array=jnp.arange(6.0).reshape(3, 2) + 1, num_in=0)
    assert table.take(jnp.array([2, 3, 0, 9])).tolist() == [[5, 6], [0, 0], [1, 2], [0, 0]]
