"""The count of compilations: sees each one, and nothing else."""

import jax
import jax.numpy as jnp

from jaxserve.runtime.compile_events import CompileCounter


def test_counts_compilations_after_its_creation() -> None:
    def double(x: jax.Array) -> jax.Array:
        return x * 2 + 1

    compiled = jax.jit(double)
    x, y = jnp.zeros(3), jnp.zeros(5)
    compiled(x).block_until_ready()
    counter = CompileCounter()
    compiled(x).block_until_ready()
    assert counter.count == 0
    compiled(y).block_until_ready()
    assert counter.count == 1
