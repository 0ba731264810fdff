"""Sums of hidden states in a step: each row has those of its own pooled tokens, of which rows lie side by side."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.step import _pool

HIDDEN = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "pooled",
    [[(0, 4), (4, 6)], [(1, 2), (5, 6)], [(0, 6), (0, 0)], [(0, 0), (3, 3)], [(2, 3), (0, 0)]],
    ids=["all", "some", "one row", "none", "one token"],
)
def test_a_row_has_the_sum_of_its_own_tokens(pooled: list[tuple[int, int]]) -> None:
    found = _pool(jnp.asarray(HIDDEN, jnp.bfloat16), SimpleNamespace(pooled=jnp.asarray(pooled)))  # type: ignore[arg-type]
    whole = np.asarray(jnp.asarray(HIDDEN, jnp.bfloat16), np.float32)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [whole[first:end].sum(axis=0) for first, end in pooled], atol=1e-6)
