"""Products by XLA with weights as they are loaded: runs everywhere, and is what all accelerators use.

Weights are [out, in], as checkpoints store them: a CPU then multiplies a few rows fastest, loading copies without a
transposition, and accelerators do not mind.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.matmul import Axes, Matmul, Weight

# Rows up to which a CPU takes float32 weights as the left operand. YNNPACK then streams over them once, where it reads
# a right operand of few rows in narrow blocks of columns. 1.5 times as fast at 16 rows, 1.2 at 64, slower at 512
# (docs/performance.md). A single row is a matrix-vector product, which XLA emits itself.
_MAX_COLUMNS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseWeight(Weight):
    """One array [*out, *in], multiplied by XLA.

    Attributes:
      num_in: how many axes a product sums over, the last ones; 0: a table that is only looked up.
      tied: rows are looked up in it beside products.
    """

    array: Float[Array, "..."]
    num_in: int = dataclasses.field(metadata={"static": True})
    tied: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def is_table(self) -> bool:
        """Whether rows are looked up in it."""
        return self.tied or self.num_in == 0

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`.

        float32 operands ask for the highest precision, since the default of TPUs and GPUs would round them to bfloat16
        or tf32, and "float32" must mean the same everywhere. bfloat16 operands are exact products already; asking for a
        float32 result is what makes XLA:CPU 6 times faster there (132 to 859 tokens/s at 16 rows).
        """
        assert self.num_in > 0, "a table that is only looked up"
        on_cpus, on_accelerators = (
            functools.partial(product, num_out=self.array.ndim - self.num_in)
            for product in (product_on_cpus, product_on_accelerators)
        )
        return jax.lax.platform_dependent(x, self.array, cpu=on_cpus, default=on_accelerators)

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        return self.array.at[rows].get(mode="fill", fill_value=0)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return (axes,)


def product_on_accelerators(x: Array, weight: Array, num_out: int) -> Array:
    """x [T, *in] times weight [*out, *in] as they are; the first `num_out` axes of the weight are not summed over."""
    return _dot(x, weight, tuple(range(1, x.ndim)), tuple(range(num_out, weight.ndim)))


def product_on_cpus(x: Array, weight: Array, num_out: int) -> Array:
    """The same for XLA:CPU."""
    num_rows = x.shape[0]
    out_shape = (num_rows, *weight.shape[:num_out])
    # Two axes each: XLA:CPU would copy a weight of more into another order.
    x, weight = x.reshape(num_rows, -1), weight.reshape(math.prod(out_shape[1:]), -1)
    if weight.dtype == jnp.float32 and 1 < num_rows <= _MAX_COLUMNS:
        # Without the barriers XLA would turn the two transpositions into the product below again.
        columns = jax.lax.optimization_barrier(x.T)
        return jax.lax.optimization_barrier(_dot(weight, columns, (1,), (0,))).T.reshape(out_shape)
    if weight.dtype != jnp.float32 and num_rows == 1:
        x = jnp.pad(x, ((0, 1), (0, 0)))  # a second row makes it a product of matrices, 9 times as fast
    return _dot(x, weight, (1,), (1,))[:num_rows].reshape(out_shape)


def _dot(x: Array, y: Array, x_axes: tuple[int, ...], y_axes: tuple[int, ...]) -> Array:
    precision = jax.lax.Precision.HIGHEST if y.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = ((x_axes, y_axes), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _as_it_is(weight: DenseWeight) -> DenseWeight:
    return weight


XLA_MATMUL = Matmul(name="xla", convert=_as_it_is, shapes=_as_it_is, refuses=lambda use: None)
