"""The calls of kernels that a program makes, with their integers."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jaxserve.lab.ledger import kernel_calls


def copy(x, lengths, name):
    def body(source, lengths, target):
        target[...] = source[...]

    return pl.pallas_call(body, out_shape=jax.typeof(x), name=name)(x, lengths)


def test_a_kernel_without_a_name_is_called_by_the_function_around_it():
    @jax.jit
    def copies_twice(x, lengths):
        doubled = 2 * lengths
        return copy(copy(x, doubled, None), doubled + 1, "the_second")

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    first, second = kernel_calls(lambda *given: copies_twice(*given), x, np.arange(3))
    assert (first.name, second.name) == ("copies_twice", "the_second")
    assert first.operands[0] is None and second.operands[0] is None
    assert [call.operands[1].tolist() for call in (first, second)] == [[0, 2, 4], [1, 3, 5]]
