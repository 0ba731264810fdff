"""Sums over the last axis whose order is written in the program, so that no compiler chooses it by the number of rows.

XLA:CPU cuts a reduction into pieces by the size of the whole array: the norm of a row alone and in a batch then
differs in its last bits, and with it all that follows. It never reorders additions of arrays.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_TERMS = 16  # columns that become one in a turn: three turns for a hidden size of 4096, five for a large vocabulary


def row_sum(x: Float[Array, "R D"]) -> Float[Array, " R"]:
    """Sums of the rows. On CPUs a row has the same bits in every batch; elsewhere the compiler orders the additions."""
    return jax.lax.platform_dependent(x, cpu=_ordered, default=lambda x: jnp.sum(x, axis=-1))


def _ordered(x: Float[Array, "R D"]) -> Float[Array, " R"]:
    """16 columns at equal distances become one, until one is left."""
    while (num_columns := x.shape[-1]) > 1:
        lanes = -(-num_columns // _TERMS)
        x = jnp.pad(x, ((0, 0), (0, -num_columns % lanes)))
        total = x[:, :lanes]
        for begin in range(lanes, x.shape[-1], lanes):
            total = total + x[:, begin : begin + lanes]
        x = jax.lax.optimization_barrier(total)  # in one fusion each turn would compute those before it again
    return x[:, 0]
