"""Products of TPUs with codes whose scales belong to groups of inputs.

XLA would widen such a weight in memory, at eight bytes moved for each that is stored, or multiply group by group in a
loop. Here a block of outputs is read once as codes, and each group's product is scaled before it is added:

    out[t, n] = sum over groups g of  scale[g, n] * sum over k in g of x[t, k] * (code[k, n] - zero[g, n])

The scale comes after the product and not into the weight, for any number of rows: rounding scaled weights to the dtype
of activations would be another arithmetic. A block of rows and one of outputs have all their inputs at once, so sums
have the order of the groups, and the rows of a step that are blocked together change no bit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Axes, Matmul, MatmulUse, Weight
from jaxserve.kernels.padded_table import needs_padding, pad
from jaxserve.kernels.storage import array_bytes

NAME = "mosaic_tpu"

_ROWS, MAX_ROWS = 16, 256  # what rows are padded to, and the most of one block
_COLUMNS = 512  # outputs of a block
_LEAST_GROUP = 32
_VMEM_BYTES = 48 * 2**20  # of every TPU since v5e


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Codes [G, g, N] of G groups of g inputs, their scales [G, 1, N], and float32 zeros of that shape, or None."""

    codes: Array
    scales: Float[Array, "G 1 N"]
    zeros: Float[Array, "G 1 N"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCodes(Weight):
    """A weight [*out, *in] as matrices of groups.

    Attributes:
      parts: one, or, where there are two axes of outputs (gate and up), one for each index of the first: a device that
        has a part of the second could not flatten them.
      tail: sizes of the axes of outputs behind the first of a part, which are never cut.
      interpret: run by JAX's interpreter, on a CPU.
    """

    parts: tuple[Part, ...]
    tail: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    interpret: pltpu.InterpretParams | None = dataclasses.field(default=None, metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        num_rows = x.shape[0]
        groups, size, _ = self.parts[0].codes.shape
        by_group = jnp.swapaxes(x.reshape(num_rows, groups, size), 0, 1)
        block = min(MAX_ROWS, -(-num_rows // _ROWS) * _ROWS)
        by_group = jnp.pad(by_group, ((0, 0), (0, -num_rows % block), (0, 0)))
        outs = [_multiply(by_group, part, block, self.interpret)[:num_rows] for part in self.parts]
        outs = [out.reshape(num_rows, out.shape[1] // math.prod(self.tail), *self.tail) for out in outs]
        return jnp.stack(outs, axis=1) if len(outs) > 1 else outs[0]

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        raise AssertionError("tables have a scale for each row")

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        num_in = len(axes) - (2 if len(self.parts) > 1 else 1 + len(self.tail))
        inputs = axes[-num_in]
        outputs = axes[1] if len(self.parts) > 1 else axes[0]
        named: Axes = (inputs, None, outputs)
        return (named,) * len(jax.tree.leaves(self.parts))


def _multiply(
    x: Float[Array, "G T g"], part: Part, rows: int, interpret: pltpu.InterpretParams | None
) -> Float[Array, "T N"]:
    groups, num_rows, size = x.shape
    num_out = part.codes.shape[2]
    columns = min(_COLUMNS, num_out)
    zeros = () if part.zeros is None else (part.zeros,)
    by_column = pl.BlockSpec((groups, 1, columns), lambda t, n: (0, 0, n))
    return pl.pallas_call(
        functools.partial(_kernel, part.zeros is not None),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), jnp.float32),
        grid=(num_rows // rows, pl.cdiv(num_out, columns)),
        in_specs=[
            pl.BlockSpec((groups, rows, size), lambda t, n: (0, t, 0)),
            pl.BlockSpec((groups, size, columns), lambda t, n: (0, 0, n)),
            by_column,
            *(by_column for _ in zeros),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda t, n: (t, n)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_out * groups * size,
            transcendentals=0,
            bytes_accessed=x.size * x.dtype.itemsize
            + (num_rows // rows) * (array_bytes(part.codes.size, part.codes.dtype) + part.scales.size * 4)
            + num_rows * num_out * 4,
        ),
        interpret=False if interpret is None else interpret,
        name="grouped_codes",
    )(x, part.codes, part.scales, *zeros)


def _kernel(has_zeros: bool, x_ref: Any, codes_ref: Any, scales_ref: Any, *refs: Any) -> None:
    zeros_ref, out_ref = refs if has_zeros else (None, *refs)
    exact = x_ref.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT

    def group(at: Array, total: Array) -> Array:
        codes = codes_ref[at].astype(jnp.float32)
        if zeros_ref is not None:
            codes = codes - zeros_ref[at]
        product = jax.lax.dot_general(
            x_ref[at],
            codes.astype(x_ref.dtype),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return total + product * scales_ref[at]

    out_ref[...] = jax.lax.fori_loop(0, x_ref.shape[0], group, jnp.zeros(out_ref.shape, jnp.float32))


def _convert(weight: CodedWeight, interpret: pltpu.InterpretParams | None) -> GroupedCodes:
    """Transposed into groups."""
    out_shape, group = weight.out_shape, weight.storage.group
    assert group is not None
    num_out = math.prod(out_shape)

    def by_group(array: Array, size: int) -> Array:
        return jnp.transpose(array.reshape(num_out, -1, size), (1, 2, 0))

    codes, scales = by_group(weight.codes, group), by_group(weight.scales, 1)
    zeros = None if weight.zeros is None else by_group(weight.zeros, 1).astype(jnp.float32)
    is_split = len(out_shape) == 2
    pieces = out_shape[0] if is_split else 1

    def piece(array: Array, at: int) -> Array:
        size = num_out // pieces
        return array[:, :, at * size : (at + 1) * size]

    return GroupedCodes(
        parts=tuple(
            Part(
                codes=piece(codes, at),
                scales=piece(scales, at),
                zeros=None if zeros is None else piece(zeros, at),
            )
            for at in range(pieces)
        ),
        tail=() if is_split else out_shape[1:],
        interpret=interpret,
    )


def make_matmul(device: Device, interpret: pltpu.InterpretParams | None = None) -> Matmul:
    """Products for one kind of TPU: XLA's, but for codes in groups, and tables with rows of whole tiles.

    `interpret` runs the kernel on a CPU.
    """

    def refuses(use: MatmulUse) -> str | None:
        if device.backend != "tpu":
            return f"it runs on TPUs alone, and this is a {device.backend}"
        storage = use.storage
        if storage is not None and storage.group is not None and storage.group % _LEAST_GROUP:
            return (
                f"{storage.group} inputs share a scale on one device, but groups must be a multiple of {_LEAST_GROUP}; "
                "lower parallel.tensor, or set model.quantization to none"
            )
        return None

    def is_grouped(weight: Weight) -> bool:
        return (
            isinstance(weight, CodedWeight)
            and weight.storage.group is not None
            and weight.arithmetic.activations == "float"
        )

    convert = jax.jit(functools.partial(_convert, interpret=interpret))

    def change_of(weight: Weight) -> Callable[[Any], Weight] | None:
        if is_grouped(weight):
            return convert
        return pad if needs_padding(weight) else None

    def converted(weight: Weight) -> Weight:
        change = change_of(weight)
        return weight if change is None else change(weight)

    def shapes(weight: Weight) -> Weight:
        change = change_of(weight)
        return weight if change is None else jax.eval_shape(change, weight)

    return Matmul(
        name=NAME,
        convert=converted,
        shapes=shapes,
        refuses=refuses,
    )
